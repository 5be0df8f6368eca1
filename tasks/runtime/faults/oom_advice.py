"""Advice after running out of GPU memory: changes to the spec, and how much memory each of them saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strata_platform.errors import SpecError
from strata_platform.estimate.gpus import USABLE
from strata_platform.estimate.memory import Memory, memory_of
from strata_platform.estimate.shapes import ModelShape, from_config
from strata_platform.estimate.workload import Workload
from strata_platform.spec import RunSpec
from tasks.runtime.models.build import load_config
from tasks.runtime.run_folder.folder import RunFolder, changed_fixed_fields

GIB = float(1 << 30)


@dataclass(frozen=True)
class _Change:
    """New values of fields, by section, and their price."""

    fields: dict[str, dict[str, Any]]
    price: str


def advice_for(spec: RunSpec, folder: RunFolder, capacity: float) -> str:
    """`advise` for the spec's model and the run's folder. It becomes part of an error message, so it never raises."""
    try:
        shape = from_config(load_config(spec.model).to_dict())
        return advise(spec, shape, capacity, has_progress=folder.has_progress)
    except Exception as error:
        return f"There is no advice for this model: {error}"


def advise(spec: RunSpec, shape: ModelShape, capacity: float, *, has_progress: bool = True) -> str:
    """The estimated memory of a process next to the GPU's `capacity` in bytes, and changes that lower it.

    If the run `has_progress`, changes that its folder does not allow are marked.
    """
    now = memory_of(Workload.of(spec, shape))
    lines = [
        f"The GPU has {capacity / GIB:.1f} GiB, and by the model's shapes a process needs about {now.peak / GIB:.1f} "
        f"at its peak ({_parts(now)}). What helps:"
    ]
    for change in _changes(spec):
        changed = _apply(spec, change)
        if changed is None:
            continue
        after = memory_of(Workload.of(changed, shape)).peak
        if after < now.peak - 0.05 * GIB:
            lines.append(
                f"  {_describe(spec, change)}: about {after / GIB:.1f} GiB, {(now.peak - after) / GIB:.1f} less, "
                f"{'fits' if after < USABLE * capacity else 'does not fit alone'}; {change.price}"
                f"{'; choose another name' if has_progress and changed_fixed_fields(spec, changed) else ''}"
            )
    if len(lines) == 1:
        lines.append("  more processes with parallel.type 'fsdp', or a smaller model.name")
    return "\n".join(lines)


def _parts(memory: Memory) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts().items() if size > 0.05 * GIB)


def _changes(spec: RunSpec) -> Iterator[_Change]:
    """Possible changes, the cheapest first."""
    training = spec.training
    rows, passes = training.micro_batch_size, training.gradient_accumulation_steps
    processes, nodes = spec.topology.nproc_per_node, spec.topology.nnodes
    yield _Change({"kernels": {"enabled": True, "exclude": ()}}, "faster, too")
    if rows > 1:
        for fewer in dict.fromkeys((_largest_divisor(rows, rows - 1), 1)):
            yield _Change({"training": _spread(rows * passes, fewer)}, "the same rows in a step")
    yield _Change({"training": {"gradient_checkpointing": "full"}}, "the same losses, about a quarter slower")
    rounding = "the same losses but for noise; weights are rounded at random in place of exact master weights"
    yield _Change({"optimizer": {"precision": "stochastic_rounding"}}, rounding)
    paged = "the same bits; optimizer state that does not fit moves to host memory, and steps are slower"
    yield _Change({"optimizer": {"paged": True}}, paged)
    if spec.parallel.type == "ddp":
        yield _Change({"parallel": {"type": "fsdp"}}, "the same losses but for rounding, more traffic")
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
            yield _Change(shape, "more GPUs, the same rows in a step")
    yield _Change({"model": {"dtype": "bfloat16"}}, "less exact weights")
    yield _Change({"adapter": {"type": "lora"}}, "trains an adapter in place of the weights")
    yield _Change({"data": {"sequence_length": spec.data.sequence_length // 2}}, "other rows")


def _spread(rows: int, at_once: int) -> dict[str, Any]:
    """The same `rows` per process and step, with `at_once` of them in a forward pass."""
    return {"micro_batch_size": at_once, "gradient_accumulation_steps": rows // at_once}


def _largest_divisor(rows: int, most: int) -> int:
    return next(number for number in range(min(rows, most), 0, -1) if rows % number == 0)


def _apply(spec: RunSpec, change: _Change) -> RunSpec | None:
    """The changed spec; None if it is invalid, or equal to the current one."""
    values = spec.model_dump()
    for section, fields in change.fields.items():
        other = "type" in fields and fields["type"] != values[section]["type"]
        values[section] = fields if other else {**values[section], **fields}
    try:
        changed = RunSpec.model_validate(values)
    except SpecError:
        return None
    return None if changed == spec else changed


def _describe(spec: RunSpec, change: _Change) -> str:
    values = spec.model_dump()
    changed = []
    for section, fields in change.fields.items():
        for field, value in fields.items():
            old = values[section].get(field)
            if old != value:
                changed.append(f"{section}.{field} {_yaml(old)} -> {_yaml(value)}")
    return ", ".join(changed)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value)
