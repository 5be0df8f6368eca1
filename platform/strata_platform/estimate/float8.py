"""What `training.float8` changes of a run's memory and time."""

from __future__ import annotations

from strata_platform.errors import Problem, SpecError
from strata_platform.estimate.gpus import GPUS, Gpu
from strata_platform.estimate.workload import Workload

# Products with a scale for each row, relative to those with one scale.
_ROWWISE = 0.9
# Bytes that the transposition of a weight moves for each.
_TRANSPOSED = 2


def require_float8(work: Workload, gpu: Gpu) -> None:
    """Raises SpecError if the GPU does not multiply in FP8."""
    if work.training.float8 != "none" and not gpu.float8:
        able = ", ".join(key for key, other in GPUS.items() if other.float8)
        reason = f"{work.training.float8!r}, but {gpu.name} does not multiply in FP8; set it to 'none', or take {able}"
        raise SpecError([Problem("training.float8", reason)], "estimate")


def saved_weights(work: Workload) -> float:
    """Bytes by which frozen weights in FP8 are smaller, over all layers."""
    if work.training.float8 != "tensorwise" or work.lora is None or work.fsdp is not None:
        return 0.0
    return float(work.shape.layers * _weights(work) * (work.weight_bytes - 1))


def kept_beside(work: Workload) -> float:
    """Bytes that a layer keeps more, or less if negative, because inputs of products are kept in FP8.

    Those of norms are kept by nothing else. Those of attention and gate are copies: attention keeps its own output, and
    the gate is not fused with the product after it.
    """
    if work.training.float8 == "none" or work.lora is not None:
        return 0.0
    shape, size = work.shape, work.compute_bytes
    gate = shape.intermediate * (1 if work.fused_gate else 1 - size)
    return float(work.tokens * (2 * shape.hidden * (1 - size) + shape.queries + gate))


def casts_beside(work: Workload) -> float:
    """Bytes of the widest gradient in FP8, cast both ways, and of a weight's cast."""
    if work.training.float8 == "none":
        return 0.0
    ways = 1 if work.lora else 2
    return float(ways * work.tokens * work.shape.intermediate + work.shape.hidden * work.shape.intermediate)


def products_rate(work: Workload, gpu: Gpu) -> float:
    """FLOP/s of the products of a layer."""
    if work.training.float8 == "none":
        return gpu.products
    rate = gpu.float8 * (_ROWWISE if work.training.float8 == "rowwise" else 1.0)
    share = _weights(work) / work.shape.layer_weights
    return 1 / (share / rate + (1 - share) / gpu.products)


def cast_traffic(work: Workload, again: float) -> float:
    """Bytes per layer and micro-batch of finding largest values and of casts.

    A tensor is read twice, and written once for each direction in which it is multiplied.
    """
    if work.training.float8 == "none":
        return 0.0
    shape, size = work.shape, work.compute_bytes
    # Queries, keys and values share an input; so do gate and up.
    inputs = 2 * shape.hidden + shape.queries + shape.intermediate
    outputs = 2 * shape.hidden + shape.queries + 2 * shape.keys + (1 + shape.gated) * shape.intermediate
    ways = 1 if work.lora else 2
    tokens = work.tokens * ((inputs * (1 + again) + outputs) * (2 * size + ways))
    if saved_weights(work):
        # The stored bytes are transposed once, for the gradient of the input.
        return float(tokens + _TRANSPOSED * _weights(work))
    return float(tokens + _weights(work) * ((2 * size + 1) * (1 + again) + size + 1))


def _weights(work: Workload) -> int:
    """Weights of a layer that are multiplied in FP8: not experts and routers."""
    return sum(a * b for a, b in work.shape.adapted_layers if a % 16 == 0 and b % 16 == 0)
