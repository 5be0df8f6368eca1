"""Rules for settings that an optimizer contradicts; part of `contradictions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Adapter, Parallel, RunSpec
    from strata_platform.spec.sections.training import Optimizer, Schedule


def optimizer_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule about the optimizer, broken or not."""
    yield from _muon(spec.optimizer, spec.adapter, spec.parallel)
    yield from _in_backward(spec)
    yield from _adamw_8bit(spec.optimizer, spec.parallel)
    yield from _paged(spec.optimizer, spec.parallel)
    yield from _precision(spec.optimizer, spec.parallel)
    yield from _groups(spec.optimizer)
    yield from _loraplus(spec.adapter, spec.peak_lr)
    yield from _library(spec.optimizer, spec.parallel)
    yield from _schedule_free(spec.optimizer, spec.schedule)


def _library(optimizer: Optimizer, parallel: Parallel) -> Iterator[Contradiction]:
    kind = optimizer.type
    if kind not in ("adafactor", "lion", "schedule_free"):
        return
    yield Contradiction(
        parallel.type == "deepspeed",
        ("optimizer.type", "parallel.type"),
        f"'{kind}' steps the weights itself, but parallel.type 'deepspeed' steps flat buffers of its own; set "
        f"parallel.type to '{'ddp' if kind == 'adafactor' else 'fsdp'}', or optimizer.type to 'adamw'",
    )
    yield Contradiction(
        kind == "adafactor" and parallel.type == "fsdp",
        ("optimizer.type", "parallel.type"),
        "'adafactor' sums rows and columns of whole matrices, but parallel.type 'fsdp' shards them; set parallel.type "
        "to 'ddp', or optimizer.type to 'adamw_8bit'",
    )
    yield Contradiction(
        optimizer.paged,
        ("optimizer.paged", "optimizer.type"),
        f"applies to AdamW's moments, but optimizer.type is '{kind}'; set optimizer.type to 'adamw', or "
        "optimizer.paged to false",
    )
    unused = {"adafactor": ("betas", "eps"), "lion": ("eps",)}.get(kind, ())
    for name in unused:
        yield Contradiction(
            getattr(optimizer, name) != type(optimizer).model_fields[name].default,
            (f"optimizer.{name}", "optimizer.type"),
            f"set, but optimizer.type '{kind}' does not use it; leave optimizer.{name} out",
        )


def _schedule_free(optimizer: Optimizer, schedule: Schedule) -> Iterator[Contradiction]:
    if optimizer.type != "schedule_free":
        return
    yield Contradiction(
        schedule.type != "constant",
        ("schedule.type", "optimizer.type"),
        f"'{schedule.type}' decays the learning rate, but optimizer.type 'schedule_free' averages weights in place of "
        "that; set schedule.type to 'constant', with a warm-up if you want one",
    )
    yield Contradiction(
        optimizer.betas[0] == 0,
        ("optimizer.betas", "optimizer.type"),
        "begins with 0, but optimizer.type 'schedule_free' weighs the averaged weights by it; set it above 0",
    )


def _loraplus(adapter: Adapter, peak: float) -> Iterator[Contradiction]:
    ratio = adapter.loraplus_lr_ratio if adapter.type == "lora" else None
    yield Contradiction(
        ratio is not None and ratio * peak > 1,
        ("adapter.loraplus_lr_ratio", "optimizer.lr"),
        f"{ratio} x optimizer.lr {peak:g} is above 1, the largest learning rate; lower one of them",
    )


def _groups(optimizer: Optimizer) -> Iterator[Contradiction]:
    for number, group in enumerate(optimizer.groups):
        yield Contradiction(
            group.lr is None and group.weight_decay is None,
            (f"optimizer.groups[{number}]",),
            f"'{group.match}' has neither lr nor weight_decay, so it changes nothing; set one of them",
        )


def _muon(optimizer: Optimizer, adapter: Adapter, parallel: Parallel) -> Iterator[Contradiction]:
    yield Contradiction(
        optimizer.momentum is not None and optimizer.type != "muon",
        ("optimizer.momentum", "optimizer.type"),
        f"set, but optimizer.type '{optimizer.type}' uses optimizer.betas instead; set optimizer.type to 'muon', or "
        "leave optimizer.momentum out",
    )
    if optimizer.type != "muon":
        return
    yield Contradiction(
        adapter.type != "none",
        ("optimizer.type", "adapter.type"),
        f"'muon' orthogonalizes updates of whole weight matrices, but adapter.type '{adapter.type}' trains low-rank "
        "factors only; set optimizer.type to 'adamw'",
    )
    yield Contradiction(
        parallel.type not in ("single", "ddp", "fsdp"),
        ("optimizer.type", "parallel.type"),
        f"'muon' needs whole matrices, but parallel.type '{parallel.type}' shards them as flat buffers; set "
        "parallel.type to 'fsdp', or optimizer.type to 'adamw'",
    )
    if parallel.type == "fsdp":
        yield Contradiction(
            parallel.cpu_offload,
            ("optimizer.type", "parallel.cpu_offload"),
            "'muon' multiplies sharded matrices on GPUs, but parallel.cpu_offload keeps them in host memory; set "
            "parallel.cpu_offload to false, or optimizer.type to 'adamw'",
        )
        yield Contradiction(
            optimizer.in_backward,
            ("optimizer.in_backward", "optimizer.type"),
            "applies updates between the collectives of the backward pass, but optimizer.type 'muon' runs collectives "
            "of its own under parallel.type 'fsdp'; set optimizer.in_backward to false, or optimizer.type to 'adamw'",
        )


def _in_backward(spec: RunSpec) -> Iterator[Contradiction]:
    optimizer, faults, training, parallel = spec.optimizer, spec.faults, spec.training, spec.parallel
    if not optimizer.in_backward:
        return
    yield Contradiction(
        faults.nonfinite == "skip",
        ("faults.nonfinite", "optimizer.in_backward"),
        "'skip' discards a step whose gradients are not finite, but optimizer.in_backward applies updates before all "
        "gradients are known; set faults.nonfinite to 'rollback' or 'stop', or optimizer.in_backward to false",
    )
    yield Contradiction(
        faults.spike != "ignore",
        ("faults.spike", "optimizer.in_backward"),
        f"'{faults.spike}' discards a step whose loss spikes, but optimizer.in_backward applies updates before all "
        "ranks know the loss; set faults.spike to 'ignore', or optimizer.in_backward to false",
    )
    yield Contradiction(
        optimizer.max_grad_norm > 0 and parallel.type == "fsdp",
        ("optimizer.in_backward", "optimizer.max_grad_norm"),
        f"applies updates before all gradients are known, but optimizer.max_grad_norm {optimizer.max_grad_norm} clips "
        "by norms of whole gradients, which parallel.type 'fsdp' shards; set optimizer.max_grad_norm to 0, or "
        "optimizer.in_backward to false",
    )
    yield Contradiction(
        training.gradient_accumulation_steps > 1,
        ("optimizer.in_backward", "training.gradient_accumulation_steps"),
        "applies updates in every backward pass, but training.gradient_accumulation_steps sums the gradients of "
        f"{training.gradient_accumulation_steps} of them for one step; set training.gradient_accumulation_steps to 1, "
        "or optimizer.in_backward to false",
    )
    yield Contradiction(
        parallel.type not in ("single", "fsdp"),
        ("optimizer.in_backward", "parallel.type"),
        f"applies updates as soon as a process has its own gradients, but parallel.type '{parallel.type}' averages "
        "them over the processes later; set parallel.type to 'fsdp', or optimizer.in_backward to false",
    )
    yield Contradiction(
        parallel.type == "fsdp" and parallel.cpu_offload,
        ("optimizer.in_backward", "parallel.cpu_offload"),
        "applies updates while parallel.cpu_offload still copies gradients to host memory; set one of the two to false",
    )


def _adamw_8bit(optimizer: Optimizer, parallel: Parallel) -> Iterator[Contradiction]:
    if optimizer.type != "adamw_8bit":
        return
    yield Contradiction(
        parallel.type not in ("single", "ddp", "fsdp"),
        ("optimizer.type", "parallel.type"),
        "'adamw_8bit' scales moments by blocks of matrix rows, but parallel.type "
        f"'{parallel.type}' shards matrices as flat buffers; set parallel.type to 'fsdp', or optimizer.type to 'adamw'",
    )
    if parallel.type == "fsdp":
        yield Contradiction(
            parallel.tensor_parallel > 1,
            ("parallel.tensor_parallel", "optimizer.type"),
            f"{parallel.tensor_parallel} shards the rows of matrices, but optimizer.type 'adamw_8bit' scales moments "
            "by blocks of whole rows; set parallel.tensor_parallel to 1, or optimizer.type to 'adamw'",
        )
        yield Contradiction(
            parallel.cpu_offload,
            ("optimizer.type", "parallel.cpu_offload"),
            "'adamw_8bit' saves GPU memory, but parallel.cpu_offload keeps moments in host memory, where 8-bit steps "
            "are slow; set parallel.cpu_offload to false, or optimizer.type to 'adamw'",
        )


def _paged(optimizer: Optimizer, parallel: Parallel) -> Iterator[Contradiction]:
    if not optimizer.paged:
        return
    yield Contradiction(
        optimizer.type == "muon",
        ("optimizer.paged", "optimizer.type"),
        "applies to AdamW's moments, but optimizer.type 'muon' multiplies matrices with its moments on the GPU; set "
        "optimizer.type to 'adamw', or optimizer.paged to false",
    )
    yield Contradiction(
        parallel.type == "deepspeed",
        ("optimizer.paged", "parallel.type"),
        "lets the driver move moments to host memory, but parallel.type 'deepspeed' allocates them itself; set "
        "parallel.offload_optimizer to 'cpu', which keeps them in host memory, and optimizer.paged to false",
    )
    yield Contradiction(
        parallel.type == "fsdp" and parallel.cpu_offload,
        ("optimizer.paged", "parallel.cpu_offload"),
        "lets the driver move moments to host memory, but parallel.cpu_offload keeps them there already; set one of "
        "the two to false",
    )


def _precision(optimizer: Optimizer, parallel: Parallel) -> Iterator[Contradiction]:
    yield Contradiction(
        optimizer.precision != "fp32_master" and parallel.type == "deepspeed",
        ("optimizer.precision", "parallel.type"),
        f"'{optimizer.precision}' saves the memory of fp32 master weights, but parallel.type 'deepspeed' always keeps "
        "them; set optimizer.precision to 'fp32_master', or parallel.type to 'fsdp'",
    )
    yield Contradiction(
        optimizer.precision == "stochastic_rounding" and parallel.type == "fsdp" and parallel.cpu_offload,
        ("optimizer.precision", "parallel.cpu_offload"),
        "'stochastic_rounding' saves GPU memory that parallel.cpu_offload does not use, and random bits are slow "
        "on CPUs; set optimizer.precision to 'fp32_master', or parallel.cpu_offload to false",
    )
