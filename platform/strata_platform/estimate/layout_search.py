"""Alternative layouts of a run: the same rows per step on other GPUs, strategies and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from strata_platform.errors import SpecError
from strata_platform.estimate.gpus import USABLE, Gpu
from strata_platform.estimate.run_estimate import Estimate, estimate
from strata_platform.estimate.shapes import ModelShape
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Parallel
from strata_platform.spec.sections.parallel import GROUPS

# GPUs of one node, and GPU counts to try.
_NODE = 8
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


def layouts(spec: RunSpec, shape: ModelShape, gpu: Gpu, most: int = _COUNTS[-1]) -> Iterator[Estimate]:
    """Layouts of `spec` on at most `most` GPUs, its own first; all have the same rows per step, hence the same loss."""
    if spec.topology.world_size <= most:
        yield estimate(spec, shape, gpu)
    rows = spec.rows_per_step
    for count, micro_batch, recompute in product(_COUNTS, _MICRO_BATCHES, ("none", "full")):
        if count > most:
            continue
        for parallel in _strategies(spec.parallel, count):
            # Processes of a tensor- and context-parallel group read the same rows: one data-parallel rank.
            dp_size, rest = divmod(count, parallel.get("tensor_parallel", 1) * parallel.get("context_parallel", 1))
            if rest or rows % (dp_size * micro_batch):
                continue
            training = {
                "micro_batch_size": micro_batch,
                "gradient_accumulation_steps": rows // (dp_size * micro_batch),
                "gradient_checkpointing": recompute,
                "gradient_checkpointing_every": None,
            }
            topology = {"nnodes": max(count // _NODE, 1), "nproc_per_node": min(count, _NODE)}
            other = _changed(spec, training, topology, parallel)
            if other is not None:
                yield estimate(other, shape, gpu)


def _strategies(parallel: Parallel, count: int) -> Iterator[Mapping[str, Any]]:
    """Strategies for `count` processes: ddp and fsdp, and `parallel` without tensor, context and expert parallelism."""
    if count == 1:
        yield {"type": "single"}
        return
    for strategy in ("ddp", "fsdp"):
        own = parallel.type == strategy
        yield parallel.model_dump(mode="json") if own else {"type": strategy}
    if parallel.tensor_parallel * parallel.context_parallel * parallel.expert_parallel > 1:
        yield parallel.model_dump(mode="json") | dict.fromkeys(GROUPS, 1)


def _changed(
    spec: RunSpec, training: Mapping[str, object], topology: Mapping[str, int], parallel: Mapping[str, object]
) -> RunSpec | None:
    """The spec with another layout; None if it rejects the combination."""
    values = spec.model_dump(mode="json")
    values["training"] |= training
    values["topology"] |= topology
    values["parallel"] = dict(parallel)
    if values["resources"]["gpu"]:
        values["resources"]["gpu"] = topology["nproc_per_node"]
    try:
        return RunSpec.model_validate(values)
    except SpecError:
        return None


def cheapest(spec: RunSpec, shape: ModelShape, gpu: Gpu, most: int = _COUNTS[-1]) -> Estimate | None:
    """The layout that fits and takes the least GPU time; among equals the one with the fewest GPUs. None if none fits.

    Layouts within 2 % of the best are equals: the estimate is no more precise.
    """
    fitting = [found for found in layouts(spec, shape, gpu, most) if found.fits]
    if not fitting:
        return None
    # The estimate does not know how slow steps are whose optimizer state exceeds the GPU: prefer those that fit it.
    fitting = [found for found in fitting if found.memory.peak + found.paged <= USABLE * gpu.memory] or fitting
    best = max(found.tokens_per_second for found in fitting)
    good = [found for found in fitting if found.tokens_per_second >= 0.98 * best]
    return min(good, key=lambda found: (found.spec.topology.world_size, -found.tokens_per_second))
