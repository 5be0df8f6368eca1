"""What cannot be beside an optimizer; part of `contradictions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import RunSpec


def _muon(spec: RunSpec) -> Iterator[Contradiction]:
    yield Contradiction(
        spec.optimizer.momentum is not None and spec.optimizer.type != "muon",
        ("optimizer.momentum", "optimizer.type"),
        f"set, but optimizer.type '{spec.optimizer.type}' has two moments, whose rates are optimizer.betas; set "
        "optimizer.type to 'muon', or leave optimizer.momentum out",
    )
    if spec.optimizer.type != "muon":
        return
    yield Contradiction(
        spec.adapter.type != "none",
        ("optimizer.type", "adapter.type"),
        f"'muon' orthogonalizes the steps of whole weight matrices, and under adapter.type '{spec.adapter.type}' "
        "only factors of changes to them learn; set optimizer.type to 'adamw'",
    )
    yield Contradiction(
        spec.parallel.type not in ("single", "ddp", "fsdp"),
        ("optimizer.type", "parallel.type"),
        f"'muon' needs whole matrices, which parallel.type '{spec.parallel.type}' cuts into flat parts; set "
        "parallel.type to 'fsdp', or optimizer.type to 'adamw'",
    )
    if spec.parallel.type == "fsdp":
        yield Contradiction(
            spec.parallel.cpu_offload,
            ("optimizer.type", "parallel.cpu_offload"),
            "'muon' multiplies matrices that are split over GPUs, and parallel.cpu_offload has them in host "
            "memory; set parallel.cpu_offload to false, or optimizer.type to 'adamw'",
        )
        yield Contradiction(
            spec.optimizer.in_backward,
            ("optimizer.in_backward", "optimizer.type"),
            "takes steps between the backward pass's messages, and optimizer.type 'muon' sends its own under "
            "parallel.type 'fsdp'; set optimizer.in_backward to false, or optimizer.type to 'adamw'",
        )


def _in_backward(spec: RunSpec) -> Iterator[Contradiction]:
    if not spec.optimizer.in_backward:
        return
    yield Contradiction(
        spec.faults.nonfinite == "skip",
        ("faults.nonfinite", "optimizer.in_backward"),
        "'skip' does not take a step whose gradients are not finite, and optimizer.in_backward takes it before all of "
        "them are known; set faults.nonfinite to 'rollback' or 'stop', or optimizer.in_backward to false",
    )
    yield Contradiction(
        spec.faults.spike != "ignore",
        ("faults.spike", "optimizer.in_backward"),
        f"'{spec.faults.spike}' does not take a step whose loss is a spike, and optimizer.in_backward takes it before "
        "the loss is known to all; set faults.spike to 'ignore', or optimizer.in_backward to false",
    )
    yield Contradiction(
        spec.optimizer.max_grad_norm > 0,
        ("optimizer.in_backward", "optimizer.max_grad_norm"),
        f"takes steps before all gradients are known, and optimizer.max_grad_norm {spec.optimizer.max_grad_norm} "
        "clips by the norm of all; set optimizer.max_grad_norm to 0, or optimizer.in_backward to false",
    )
    yield Contradiction(
        spec.training.gradient_accumulation_steps > 1,
        ("optimizer.in_backward", "training.gradient_accumulation_steps"),
        "takes a step in every backward pass, and training.gradient_accumulation_steps "
        f"{spec.training.gradient_accumulation_steps} makes several of them one step; set "
        "training.gradient_accumulation_steps to 1, or optimizer.in_backward to false",
    )
    yield Contradiction(
        spec.parallel.type not in ("single", "fsdp"),
        ("optimizer.in_backward", "parallel.type"),
        f"takes steps when a process has its gradients, and parallel.type '{spec.parallel.type}' averages them "
        "over the processes after that; set parallel.type to 'fsdp', or optimizer.in_backward to false",
    )
    yield Contradiction(
        spec.parallel.type == "fsdp" and spec.parallel.cpu_offload,
        ("optimizer.in_backward", "parallel.cpu_offload"),
        "takes steps while gradients travel to the host memory that parallel.cpu_offload wants them in; set one of "
        "the two to false",
    )


def _eight_bits(spec: RunSpec) -> Iterator[Contradiction]:
    if spec.optimizer.type != "adamw_8bit":
        return
    yield Contradiction(
        spec.parallel.type not in ("single", "ddp", "fsdp"),
        ("optimizer.type", "parallel.type"),
        "'adamw_8bit' has scales for rows of matrices, which parallel.type "
        f"'{spec.parallel.type}' cuts into flat parts; set parallel.type to 'fsdp', or optimizer.type to 'adamw'",
    )
    yield Contradiction(
        spec.tensor_parallel > 1,
        ("parallel.tensor_parallel", "optimizer.type"),
        f"{spec.tensor_parallel} cuts rows of matrices, which have scales of their own under optimizer.type "
        "'adamw_8bit'; set parallel.tensor_parallel to 1, or optimizer.type to 'adamw'",
    )
    yield Contradiction(
        spec.parallel.type == "fsdp" and spec.parallel.cpu_offload,
        ("optimizer.type", "parallel.cpu_offload"),
        "'adamw_8bit' saves memory of GPUs, and parallel.cpu_offload has moments in host memory, where its steps are "
        "slow; set parallel.cpu_offload to false, or optimizer.type to 'adamw'",
    )


def _paged(spec: RunSpec) -> Iterator[Contradiction]:
    if not spec.optimizer.paged:
        return
    yield Contradiction(
        spec.optimizer.type == "muon",
        ("optimizer.paged", "optimizer.type"),
        "is for AdamW's moments, and optimizer.type 'muon' has that of a matrix where its products are computed; set "
        "optimizer.type to 'adamw', or optimizer.paged to false",
    )
    yield Contradiction(
        spec.parallel.type == "deepspeed",
        ("optimizer.paged", "parallel.type"),
        "moves moments to the host where a GPU's memory lacks, and parallel.type 'deepspeed' has them in memory of its "
        "own; set parallel.offload_optimizer to 'cpu', which keeps them on the host, and optimizer.paged to false",
    )
    yield Contradiction(
        spec.parallel.type == "fsdp" and spec.parallel.cpu_offload,
        ("optimizer.paged", "parallel.cpu_offload"),
        "moves moments to the host where a GPU's memory lacks, and parallel.cpu_offload has them there already; set "
        "one of the two to false",
    )


def _precision(spec: RunSpec) -> Iterator[Contradiction]:
    yield Contradiction(
        spec.optimizer.precision != "fp32_master" and spec.parallel.type == "deepspeed",
        ("optimizer.precision", "parallel.type"),
        f"'{spec.optimizer.precision}' saves the memory of fp32 master weights, and the engine of parallel.type "
        "'deepspeed' always keeps them; set optimizer.precision to 'fp32_master', or parallel.type to 'fsdp'",
    )
    yield Contradiction(
        spec.optimizer.precision == "stochastic_rounding"
        and spec.parallel.type == "fsdp"
        and spec.parallel.cpu_offload,
        ("optimizer.precision", "parallel.cpu_offload"),
        "'stochastic_rounding' saves GPU memory that parallel.cpu_offload does not use, and random bits are slow "
        "on CPUs; set optimizer.precision to 'fp32_master', or parallel.cpu_offload to false",
    )


optimizer_rules = (_muon, _in_backward, _eight_bits, _paged, _precision)
