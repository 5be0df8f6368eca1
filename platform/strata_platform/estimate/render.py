"""Renders an estimate, as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strata_platform.estimate.prices import Price
from strata_platform.estimate.run_estimate import Estimate
from strata_platform.spec import RunSpec

_GIB = 2**30


def to_dict(found: Estimate, best: Estimate | None, tokens: float | None, price: Price | None) -> dict[str, Any]:
    """The estimate as a JSON object: bytes, seconds, the currency of the price."""
    data: dict[str, Any] = {
        "gpu": found.gpu.name,
        "gpus": found.spec.topology.world_size,
        "parameters": found.shape.parameters,
        "memory": {**found.memory.parts(), "peak": found.memory.peak, "available": found.gpu.memory},
        "fits": found.fits,
        "step_seconds": found.time.step,
        "tokens_per_second_per_gpu": found.tokens_per_second,
        "mfu": found.mfu,
        "layout": layout(found.spec),
        "not_counted": list(found.uncounted),
    }
    if tokens is not None:
        data |= {"tokens": tokens, "hours": hours(found, tokens)}
        if price is not None:
            data |= {"cost": cost(found, tokens, price), "price": price.amount, "currency": price.currency}
    data["cheapest"] = None if best is None else to_dict(best, None, tokens, price) | {"cheapest": None}
    return data


def lines(found: Estimate, best: Estimate | None, tokens: float | None, price: Price | None) -> Iterator[str]:
    """The estimate as lines of text."""
    gpus = found.spec.topology.world_size
    adapted = "LoRA on nf4 weights" if found.workload.quantized else "LoRA"
    trained = adapted if found.workload.lora else "all weights trained"
    size = f"{found.shape.parameters / 1e9:.2f} B parameters"
    yield f"{found.spec.model.name}: {size}, {trained}, on {gpus} x {found.gpu.name}"
    yield f"layout: {describe_layout(found.spec)}"
    if not found.gpu.measured:
        yield f"rates of {found.gpu.name} are scaled from measurements on an H200 by data sheets"
    for feature in found.uncounted:
        yield f"not counted: {feature}"
    yield ""
    yield "peak memory of each GPU, GiB"
    for name, part in found.memory.parts().items():
        if part:
            yield f"  {name:<12}{part / _GIB:8.1f}"
    left = (found.gpu.memory - found.memory.peak) / _GIB
    fit = f"fits, {left:.1f} to spare" if found.fits else f"does not fit: {max(-left, 0):.1f} too much"
    if not found.fits and left >= 0:
        fit = f"does not fit safely: {left:.1f} to spare"
    yield f"  {'peak':<12}{found.memory.peak / _GIB:8.1f} of {found.gpu.memory / _GIB:.1f}: {fit}"
    yield ""
    rate = f"{found.tokens_per_second:,.0f} tokens/s on each GPU"
    yield f"speed: {rate}, {found.time.step:.2f} s a step, MFU {found.mfu:.0%}"
    yield from _length(found, tokens, price)
    yield ""
    yield from _advice(found, best)


def _length(found: Estimate, tokens: float | None, price: Price | None) -> Iterator[str]:
    if tokens is None:
        each = hours(found, 1e9)
        yield f"length: {each:,.1f} hours for a billion tokens; give --tokens to know this run's"
        return
    money = "" if price is None else f", {_money(cost(found, tokens, price), price)} at {price} per GPU and hour"
    yield f"length: {hours(found, tokens):,.1f} hours for {tokens:,.0f} tokens{money}"


def _advice(found: Estimate, best: Estimate | None) -> Iterator[str]:
    if best is None:
        yield "no layout of this run fits these GPUs; try a shorter data.sequence_length or an adapter"
        return
    if layout(best.spec) == layout(found.spec):
        yield "this is the cheapest layout that fits"
        return
    yield f"cheapest layout that fits: {describe_layout(best.spec)}"
    why = f"{best.tokens_per_second:,.0f} tokens/s on each GPU, {best.memory.peak / _GIB:.1f} GiB"
    if found.fits:
        saved = 1 - found.tokens_per_second / best.tokens_per_second
        why += f": {saved:.0%} less GPU time" if saved >= 0.005 else ": as much GPU time on fewer GPUs"
    yield f"  {why}"
    yield "  " + ", ".join(f"{path}: {value}" for path, value in layout(best.spec).items())


_KEPT = {
    "none": "activations kept",
    "full": "activations recomputed",
    "selective": "activations of some layers recomputed",
    "per_op": "activations recomputed, products and attention kept",
}


def layout(spec: RunSpec) -> dict[str, Any]:
    """The spec's fields that make up the layout."""
    degrees = {
        f"parallel.{name}": getattr(spec.parallel, name)
        for name in ("tensor_parallel", "context_parallel")
        if spec.parallel.type == "fsdp"
    }
    return {
        "topology.nnodes": spec.topology.nnodes,
        "topology.nproc_per_node": spec.topology.nproc_per_node,
        "parallel.type": spec.parallel.type,
        **degrees,
        "training.micro_batch_size": spec.training.micro_batch_size,
        "training.gradient_accumulation_steps": spec.training.gradient_accumulation_steps,
        "training.gradient_checkpointing": spec.training.gradient_checkpointing,
    }


def describe_layout(spec: RunSpec) -> str:
    """The layout as one line of text."""
    training, gpus = spec.training, spec.topology.world_size
    micro_batches = training.gradient_accumulation_steps
    parts = [f"{gpus} GPU{'s' * (gpus > 1)}" + (f", {spec.parallel.type}" if gpus > 1 else "")]
    for name, ways in (
        ("tensor parallel", spec.parallel.tensor_parallel),
        ("context parallel", spec.parallel.context_parallel),
    ):
        if ways > 1:
            parts.append(f"{name} {ways}")
    parts.append(f"{training.micro_batch_size} x {spec.data.sequence_length} tokens per micro-batch")
    if micro_batches > 1:
        parts.append(f"{micro_batches} micro-batches per step")
    parts.append(_KEPT[training.gradient_checkpointing])
    return ", ".join(parts)


def hours(found: Estimate, tokens: float) -> float:
    """Hours from the first step to the last."""
    return tokens / (found.tokens_per_second * found.spec.topology.world_size) / 3600


def cost(found: Estimate, tokens: float, price: Price) -> float:
    """Cost of all GPUs, in the currency of `price`."""
    return hours(found, tokens) * found.spec.topology.world_size * price.amount


def _money(amount: float, price: Price) -> str:
    return f"{amount:,.0f} {price.currency}".rstrip()
