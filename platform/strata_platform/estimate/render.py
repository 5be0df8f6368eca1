"""Renders an estimate, as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_platform.estimate.host_estimate import HostEstimate
from strata_platform.estimate.prices import Price
from strata_platform.estimate.remedies import Proposal, changed_fields
from strata_platform.estimate.run_estimate import Estimate
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.parallel import GROUPS

_GIB = 2**30


@dataclass(frozen=True)
class Advice:
    """What to change in a run.

    Attributes:
        best: the cheapest layout that fits; None if none does.
        proposals: remedies of a run that does not fit, each by itself.
        together: the run with several remedies, with which it fits; None if they are not enough, or not needed.
    """

    best: Estimate | None
    proposals: Sequence[Proposal] = ()
    together: Estimate | None = None


def to_dict(found: Estimate, advice: Advice, tokens: float | None, price: Price | None) -> dict[str, Any]:
    """The estimate as a JSON object: bytes, seconds, the currency of the price."""
    data: dict[str, Any] = {
        "gpu": found.gpu.name,
        "gpus": found.spec.topology.world_size,
        "parameters": found.shape.parameters,
        "active_parameters": found.shape.active_parameters,
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
    best = advice.best
    data["cheapest"] = None if best is None else to_dict(best, Advice(None), tokens, price)
    data["remedies"] = [
        {
            "changes": changed_fields(found.spec, offer.estimate.spec),
            "saved": found.memory.peak - offer.estimate.memory.peak,
            "peak": offer.estimate.memory.peak,
            "fits": offer.estimate.fits,
            "tokens_per_second_per_gpu": None if offer.slower_by_unknown else offer.estimate.tokens_per_second,
            "price": offer.remedy.price,
        }
        for offer in advice.proposals
    ]
    together = advice.together
    data["remedies_together"] = None if together is None else changed_fields(found.spec, together.spec)
    return data


def host_to_dict(found: HostEstimate) -> dict[str, Any]:
    """The estimate of a run on CPUs as a JSON object: bytes."""
    return {
        "gpu": None,
        "gpus": 0,
        "parameters": found.shape.parameters,
        "active_parameters": found.shape.active_parameters,
        "memory": {**found.memory.parts(), "peak": found.memory.peak, "available": found.available},
        "fits": found.fits,
        "layout": layout(found.spec),
    }


def host_lines(found: HostEstimate) -> Iterator[str]:
    """The estimate of a run on CPUs as lines of text."""
    yield f"{found.spec.model.name}: {_size(found)}, {_trained(found.spec.adapter)}, on CPUs: resources.gpu is 0"
    yield ""
    yield "peak memory of each process, GiB"
    yield from _parts({("process" if name == "buffers" else name): size for name, size in found.memory.parts().items()})
    processes = found.spec.topology.nproc_per_node
    total = f"  {'peak':<12}{found.memory.peak / _GIB:8.1f}"
    if processes > 1:
        total += f" x {processes} processes = {found.peak / _GIB:.1f}"
    fit = "is enough" if found.fits else f"is {(found.peak - found.available) / _GIB:.1f} too little"
    yield f"{total}; resources.memory {found.spec.resources.memory} {fit}"
    yield ""
    yield "How fast CPUs are is not estimated, nor length and cost. --gpu h200 estimates the run on a GPU."


def lines(found: Estimate, advice: Advice, tokens: float | None, price: Price | None) -> Iterator[str]:
    """The estimate as lines of text."""
    gpus = found.spec.topology.world_size
    size, trained = _size(found), _trained(found.spec.adapter)
    yield f"{found.spec.model.name}: {size}, {trained}, on {gpus} x {found.gpu.name}"
    yield f"layout: {describe_layout(found.spec)}"
    if not found.gpu.measured:
        yield f"rates of {found.gpu.name} are scaled from measurements on an H200 by data sheets"
    for feature in found.uncounted:
        yield f"not counted: {feature}"
    yield ""
    yield "peak memory of each GPU, GiB"
    yield from _parts(found.memory.parts())
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
    yield from _advice(found, advice.best)
    yield from _remedies(found, advice)


def _size(found: Estimate | HostEstimate) -> str:
    shape = found.shape
    active = f", {shape.active_parameters / 1e9:.2f} B active" if shape.experts else ""
    billions = shape.parameters / 1e9
    return f"{billions:.2f} B parameters{active}" if billions >= 0.1 else f"{billions * 1e3:.1f} M parameters{active}"


def _trained(adapter: Adapter) -> str:
    if adapter.type == "none":
        return "all weights trained"
    return "LoRA" if adapter.quantization == "none" else "LoRA on nf4 weights"


def _parts(parts: Mapping[str, float]) -> Iterator[str]:
    for name, part in parts.items():
        if part:
            yield f"  {name:<12}{part / _GIB:8.1f}"


def _remedies(found: Estimate, advice: Advice) -> Iterator[str]:
    if not advice.proposals:
        return
    yield ""
    yield "what saves memory, each by itself"
    yield f"  {'GiB saved':>9}  {'peak':>6}  {'fits':<4}  {'tokens/s':>8}"
    for offer in advice.proposals:
        after = offer.estimate
        saved, peak = (found.memory.peak - after.memory.peak) / _GIB, after.memory.peak / _GIB
        rate = "slower" if offer.slower_by_unknown else f"{after.tokens_per_second:,.0f}"
        yield (
            f"  {saved:9.1f}  {peak:6.1f}  {'yes' if after.fits else 'no':<4}  {rate:>8}  "
            f"{offer.remedy.described(found.spec)}: {offer.remedy.price}"
        )
    if advice.together is not None:
        fields = ", ".join(
            f"{path}: {value}" for path, value in changed_fields(found.spec, advice.together.spec).items()
        )
        yield f"together these fit, with {advice.together.memory.peak / _GIB:.1f} GiB: {fields}"


def _length(found: Estimate, tokens: float | None, price: Price | None) -> Iterator[str]:
    if tokens is None:
        each = hours(found, 1e9)
        yield f"time: {each:,.1f} hours per billion tokens; give --tokens for the time of this run"
        return
    money = "" if price is None else f", {_money(cost(found, tokens, price), price)} at {price} per GPU and hour"
    yield f"time: {hours(found, tokens):,.1f} hours for {tokens:,.0f} tokens{money}"


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
    "attention": "activations recomputed, attention kept",
    "selective": "activations of some layers recomputed",
    "per_op": "activations recomputed, products and attention kept",
}


def layout(spec: RunSpec) -> dict[str, Any]:
    """The spec's fields that make up the layout."""
    degrees = {f"parallel.{name}": getattr(spec.parallel, name) for name in GROUPS if spec.parallel.type == "fsdp"}
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
    for name in GROUPS:
        ways = getattr(spec.parallel, name)
        if ways > 1:
            parts.append(f"{name.replace('_', ' ')} {ways}")
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
