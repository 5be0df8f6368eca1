"""Rules of objectives whose model writes answers in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.objectives import Grpo, generates
from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import RunSpec


def generation_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule, broken or not; none where the model writes nothing."""
    if not generates(spec.objective):
        return
    field = "objective.type" if isinstance(spec.objective, Grpo) else "objective.on_policy"
    yield Contradiction(
        spec.data.packing,
        ("data.packing", field),
        "true, but rows are not packed where the model writes answers, because their lengths are not known; leave "
        "data.packing out",
    )
    yield Contradiction(
        spec.data.streaming,
        ("data.streaming", field),
        "begins before all rows are prepared, but rows are checked and get numbers first where the model writes "
        "answers; set data.streaming to false",
    )
    kind, stage = spec.parallel.type, getattr(spec.parallel, "stage", 3)
    yield Contradiction(
        spec.is_quantized and kind in ("fsdp", "deepspeed") and stage == 3,
        ("parallel.type", "adapter.quantization", field),
        f"'{kind}' shards packed weights, whose scales a copy for generation would lack; set parallel.type to 'ddp', "
        "where packed weights are whole, or adapter.quantization to 'none'",
    )
    yield Contradiction(
        spec.parallel.expert_parallel > 1,
        ("parallel.expert_parallel", field),
        f"{spec.parallel.expert_parallel} was not tested with generation, for which every process needs all experts; "
        "set parallel.expert_parallel to 1",
    )
