"""Changes of a spec that lower its memory, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strata_platform.errors import SpecError
from strata_platform.estimate.run_estimate import Estimate, estimate
from strata_platform.spec import RunSpec

_GIB = 2**30
# A change that saves less is not worth a line.
_WORTH = 0.05 * _GIB


@dataclass(frozen=True)
class Remedy:
    """New values of fields, by section, and what else they change."""

    fields: dict[str, dict[str, Any]]
    price: str

    def applied_to(self, spec: RunSpec) -> RunSpec | None:
        """The changed spec; None if it is invalid, or equal to the current one."""
        values = spec.model_dump()
        for section, fields in self.fields.items():
            other = "type" in fields and fields["type"] != values[section]["type"]
            values[section] = fields if other else {**values[section], **fields}
        try:
            changed = RunSpec.model_validate(values)
        except SpecError:
            return None
        return None if changed == spec else changed

    def described(self, spec: RunSpec) -> str:
        """`training.micro_batch_size 8 -> 4, ...`: the fields of `spec` that change."""
        values = spec.model_dump()
        return ", ".join(
            f"{section}.{field} {_yaml(values[section].get(field))} -> {_yaml(value)}"
            for section, fields in self.fields.items()
            for field, value in fields.items()
            if values[section].get(field) != value
        )


def remedies(spec: RunSpec) -> Iterator[Remedy]:
    """Changes of `spec` that take less memory in many cases: those with the same losses first, the cheapest first."""
    training = spec.training
    rows, passes = training.micro_batch_size, training.gradient_accumulation_steps
    processes, nodes = spec.topology.nproc_per_node, spec.topology.nnodes
    yield Remedy({"kernels": {"enabled": True, "exclude": ()}}, "faster, too")
    if rows > 1:
        for fewer in dict.fromkeys((_largest_divisor(rows, rows - 1), 1)):
            yield Remedy({"training": _spread(rows * passes, fewer)}, "the same rows in a step")
    if training.sums_in_float32:
        rounded = {"training": {"gradient_accumulation_dtype": "bfloat16"}}
        yield Remedy(rounded, "gradients of many micro-batches lose bits")
    yield Remedy({"training": {"gradient_checkpointing": "full"}}, "the same losses, about a quarter slower")
    if not training.compile:
        away: dict[str, dict[str, Any]] = {
            "training": {"gradient_checkpointing": "full", "activation_offloading": True}
        }
        yield Remedy(away, "the same losses; what recomputed layers keep is in host memory between the passes")
    rounding = "the same losses but for noise; weights are rounded at random in place of exact master weights"
    yield Remedy({"optimizer": {"precision": "stochastic_rounding"}}, rounding)
    eight = "nearly the same losses; moments of matrices have eight bits"
    yield Remedy({"optimizer": {"type": "adamw_8bit"}}, eight)
    paged = "the same bits; optimizer state that does not fit moves to host memory, and steps are slower"
    yield Remedy({"optimizer": {"paged": True}}, paged)
    if spec.parallel.type == "ddp":
        yield Remedy({"parallel": {"type": "fsdp"}}, "the same losses but for rounding, more traffic")
    if spec.parallel.type == "fsdp":
        offload = "the same losses; weights, gradients and optimizer state are in host memory, and steps are slower"
        yield Remedy({"parallel": {"cpu_offload": True}}, offload)
    for more in (2, 4, 8):
        if more > processes and (rows * passes * processes) % more == 0 and nodes == 1:
            share = rows * passes * processes // more
            shape: dict[str, dict[str, Any]] = {
                "topology": {"nproc_per_node": more},
                "parallel": {"type": "fsdp"},
                "training": _spread(share, _largest_divisor(share, rows)),
            }
            if spec.resources.gpu:
                shape["resources"] = {"gpu": more}
            yield Remedy(shape, "more GPUs, the same rows in a step")
    yield Remedy({"model": {"dtype": "bfloat16"}}, "less exact weights")
    yield Remedy({"adapter": {"type": "lora"}}, "trains an adapter in place of the weights")
    four = "trains an adapter beside weights of four bits; needs the extra bitsandbytes"
    yield Remedy({"adapter": {"type": "lora", "quantization": "nf4"}}, four)
    yield Remedy({"data": {"sequence_length": spec.data.sequence_length // 2}}, "other rows")


@dataclass(frozen=True)
class Proposal:
    """A remedy, and the estimate of the run with it."""

    remedy: Remedy
    estimate: Estimate

    @property
    def slower_by_unknown(self) -> bool:
        """Whether the run moves data between GPU and host, the time of which is not estimated."""
        return self.estimate.moves_to_host or self.estimate.spec.optimizer.paged


def proposals(found: Estimate, most: int) -> list[Proposal]:
    """Remedies that lower the peak of `found`, each by itself, on at most `most` GPUs."""
    offers = []
    for remedy in remedies(found.spec):
        changed = remedy.applied_to(found.spec)
        if changed is None or changed.topology.world_size > most:
            continue
        try:
            after = estimate(changed, found.shape, found.gpu)
        except SpecError:
            # A shape that does not divide by the degrees of parallelism.
            continue
        if after.memory.peak < found.memory.peak - _WORTH:
            offers.append(Proposal(remedy, after))
    return offers


def combined(found: Estimate, most: int) -> Estimate | None:
    """The run with remedies on top of each other, in their order, until it fits; None if it does not with all."""
    now = found
    for remedy in remedies(found.spec):
        changed = remedy.applied_to(now.spec)
        if changed is None or changed.topology.world_size > most:
            continue
        try:
            after = estimate(changed, found.shape, found.gpu)
        except SpecError:
            continue
        if after.memory.peak < now.memory.peak - _WORTH:
            now = after
            if now.fits:
                return now
    return None


def changed_fields(before: RunSpec, after: RunSpec) -> dict[str, Any]:
    """`section.field` → value in `after`, of the fields that differ."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    return {
        f"{section}.{field}": value
        for section, fields in new.items()
        if isinstance(fields, dict)
        for field, value in fields.items()
        if old[section].get(field) != value and (field in old[section] or field == "type" or value)
    }


def _spread(rows: int, at_once: int) -> dict[str, Any]:
    """The same `rows` per process and step, with `at_once` of them in a forward pass."""
    return {"micro_batch_size": at_once, "gradient_accumulation_steps": rows // at_once}


def _largest_divisor(rows: int, most: int) -> int:
    return next(number for number in range(min(rows, most), 0, -1) if rows % number == 0)


def _yaml(value: Any) -> str:
    plain = isinstance(value, bool) or value is None
    return str(value).lower() if plain else "[]" if value == () else str(value)
