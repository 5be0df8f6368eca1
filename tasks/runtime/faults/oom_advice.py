"""Advice after running out of GPU memory: changes to the spec, and how much memory each of them saves."""

from __future__ import annotations

from strata_platform.estimate.config_shapes import from_config
from strata_platform.estimate.gpus import USABLE
from strata_platform.estimate.memory import Memory, memory_of
from strata_platform.estimate.remedies import remedies
from strata_platform.estimate.shapes import ModelShape
from strata_platform.estimate.workload import Workload
from strata_platform.spec import RunSpec
from tasks.runtime.models.config import load_config
from tasks.runtime.run_folder.folder import RunFolder, changed_fixed_fields

GIB = float(1 << 30)


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
    for remedy in remedies(spec):
        changed = remedy.applied_to(spec)
        if changed is None:
            continue
        after = memory_of(Workload.of(changed, shape)).peak
        if after < now.peak - 0.05 * GIB:
            lines.append(
                f"  {remedy.described(spec)}: about {after / GIB:.1f} GiB, {(now.peak - after) / GIB:.1f} less, "
                f"{'fits' if after < USABLE * capacity else 'does not fit alone'}; {remedy.price}"
                f"{'; choose another name' if has_progress and changed_fixed_fields(spec, changed, 0) else ''}"
            )
    if len(lines) == 1:
        lines.append("  more processes with parallel.type 'fsdp', or a smaller model.name")
    return "\n".join(lines)


def _parts(memory: Memory) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.parts().items() if size > 0.05 * GIB)
