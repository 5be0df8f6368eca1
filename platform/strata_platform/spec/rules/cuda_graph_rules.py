"""What of a spec has no CUDA graphs: `training.cuda_graphs: true` refuses it, and `auto` trains without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import RunSpec


class CudaGraphRule(NamedTuple):
    """A setting that a CUDA graph cannot repeat."""

    broken: bool
    field: str
    reason: str
    """Follows the name of the field."""


def cuda_graph_rules(spec: RunSpec) -> Iterator[CudaGraphRule]:
    """Every rule, broken or not. What depends on the model and the machine, the runtime knows."""
    training, objective, parallel = spec.training, spec.objective, spec.parallel
    yield CudaGraphRule(
        objective.type not in ("pretrain", "sft"),
        "objective.type",
        f"is '{objective.type}'; graphs are for 'pretrain' and 'sft'",
    )
    yield CudaGraphRule(
        parallel.type != "single", "parallel.type", f"is '{parallel.type}'; graphs are for 'single', one process"
    )
    yield CudaGraphRule(
        training.compile and training.gradient_checkpointing != "none",
        "training.gradient_checkpointing",
        f"'{training.gradient_checkpointing}' was not tested in graphs together with training.compile",
    )
    yield CudaGraphRule(
        training.activation_offloading,
        "training.activation_offloading",
        "copies to host memory, which the allocator gives to others while a graph still writes to it",
    )
    dropout = spec.adapter.type == "lora" and spec.adapter.lora_dropout > 0
    yield CudaGraphRule(
        dropout and training.gradient_checkpointing != "none",
        "adapter.lora_dropout",
        "draws random numbers, which a graph cannot repeat when training.gradient_checkpointing recomputes a layer",
    )
    yield CudaGraphRule(
        training.compile and (dropout or training.float8 != "none"),
        "training.compile",
        "was not tested in graphs together with adapter.lora_dropout or training.float8",
    )
    yield CudaGraphRule(
        spec.is_quantized, "adapter.quantization", "unpacks weights in another library, outside of graphs"
    )
    yield CudaGraphRule(
        spec.optimizer.in_backward, "optimizer.in_backward", "steps in the backward pass, at a rate that changes"
    )


def cuda_graph_contradictions(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule as one of a spec with `training.cuda_graphs: true`."""
    for rule in cuda_graph_rules(spec):
        yield Contradiction(
            spec.training.cuda_graphs is True and rule.broken,
            ("training.cuda_graphs", rule.field),
            f"is true, but {rule.field} {rule.reason}; set training.cuda_graphs to auto",
        )
