"""Rules of `training.float8`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import RunSpec


def float8_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule, broken or not."""
    scaling, adapter = spec.training.float8, spec.adapter
    if scaling == "none":
        return
    yield Contradiction(
        spec.parallel.type == "deepspeed",
        ("training.float8", "parallel.type"),
        f"'{scaling}' was not tested with parallel.type 'deepspeed'; set parallel.type to 'fsdp', which shards as "
        "much, or training.float8 to 'none'",
    )
    yield Contradiction(
        spec.parallel.tensor_parallel > 1,
        ("training.float8", "parallel.tensor_parallel"),
        f"'{scaling}' multiplies with whole weights, but parallel.tensor_parallel shards them; set "
        "parallel.tensor_parallel to 1, or training.float8 to 'none'",
    )
    yield Contradiction(
        adapter.type == "lora" and adapter.quantization != "none",
        ("training.float8", "adapter.quantization"),
        f"'{scaling}' and adapter.quantization both say how frozen weights are kept; set adapter.quantization to "
        "'none', or training.float8 to 'none'",
    )
    yield Contradiction(
        adapter.type == "lora" and adapter.use_dora,
        ("training.float8", "adapter.use_dora"),
        f"'{scaling}' stores no norms of weight vectors, which adapter.use_dora starts from; set adapter.use_dora to "
        "false, or training.float8 to 'none'",
    )
