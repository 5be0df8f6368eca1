"""Rules for `parallel.expert_parallel`; each names both fields and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction
from strata_platform.spec.sections.model import PRESETS

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Parallel, RunSpec, Topology

_FIELD = "parallel.expert_parallel"


def expert_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule, broken or not; none without expert parallelism."""
    ways = spec.parallel.expert_parallel
    if ways == 1:
        return
    yield from _shape(spec.parallel, spec.topology)
    yield Contradiction(
        spec.model.name in PRESETS,
        (_FIELD, "model.name"),
        f"{ways} splits the experts of a mixture, but model.name '{spec.model.name}' is a preset and has none; set "
        f"{_FIELD} to 1, or model.name to a mixture",
    )
    yield Contradiction(
        not spec.kernels.enabled or "experts" in spec.kernels.exclude,
        (_FIELD, "kernels.enabled", "kernels.exclude"),
        f"{ways} needs the fused operator 'experts', which skips the experts of other processes; set kernels.enabled "
        f"to 'auto' and take 'experts' out of kernels.exclude, or set {_FIELD} to 1",
    )
    yield Contradiction(
        spec.training.compile,
        (_FIELD, "training.compile"),
        f"{ways} asks the device how many tokens came to its experts, which breaks the graph of a layer; set "
        f"training.compile to false, or {_FIELD} to 1",
    )


def _shape(parallel: Parallel, topology: Topology) -> Iterator[Contradiction]:
    assert parallel.type == "fsdp", "no other strategy has the field"
    ways, replicas, processes = parallel.expert_parallel, parallel.replicas, topology.world_size
    yield Contradiction(
        parallel.tensor_parallel > 1,
        (_FIELD, "parallel.tensor_parallel"),
        f"{ways} exchanges tokens between processes that read different rows, but parallel.tensor_parallel "
        f"{parallel.tensor_parallel} gives several the same; set one of them to 1",
    )
    yield Contradiction(
        processes % replicas == 0 and processes // replicas % ways != 0,
        (_FIELD, "parallel.replicas", "topology.nproc_per_node", "topology.nnodes"),
        f"{ways} does not divide the {processes // replicas} processes of topology.nproc_per_node x topology.nnodes"
        + (f" in each of parallel.replicas {replicas}" if replicas > 1 else "")
        + "; set it to a divisor",
    )
