"""Loss and gradients do not depend on how the rows of a step are distributed over micro-batches and processes."""

from __future__ import annotations

from typing import Any

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.parallel import GROUPS
from tasks.runtime.data.row_order import ShuffledRows
from tasks.runtime.verification.exact import error, scale
from tasks.runtime.verification.finding import Measured
from tasks.runtime.verification.observe import Step, first_step
from tasks.runtime.verification.subject import Subject
from tasks.runtime.verification.uneven import UnevenData, targets
from tasks.runtime.verification.worker import Request, wait

# In fp32 the order of additions changes results by about 1e-6; wrong weights of rows change them by about 1e-1.
LIMIT = 1e-4
_PROCESSES = 2


def batching(subject: Subject) -> Measured:
    """Compare one forward pass with many, and with two processes, on rows with very uneven numbers of targets."""
    rows = subject.rows // _PROCESSES * _PROCESSES
    data = UnevenData.load(subject.data.folder)
    micro = max(1, rows // 4)
    request = _request(subject, micro, rows // _PROCESSES // micro)
    # The processes start while this one computes.
    processes = subject.start(request.write(subject.new_file(".json")), _PROCESSES)
    try:
        whole = first_step(_spec(subject, rows, 1), data)
        ways = {f"{rows} micro-batches of 1 row": first_step(_spec(subject, 1, rows), data)}
    except BaseException:
        processes.kill()
        raise
    wait(processes)
    strategy = _strategy(subject)["parallel"]["type"]
    ways[f"{_PROCESSES} processes under {strategy}"] = request.found(0)
    worst, where = 0.0, ""
    for way, step in ways.items():
        for name, found in _differences(step, whole).items():
            if not found <= worst:
                worst, where = found, f"; worst: {name}, {way}"
    order = ShuffledRows(len(data.train), subject.spec.seed)
    counts = [targets(data.train[order[index]]) for index in range(rows)]
    detail = (
        f"relative difference of loss and gradients from one micro-batch of {rows} rows, in float32, with "
        f"{min(counts)} to {max(counts)} targets a row, over {' and '.join(ways)}{where}"
    )
    return Measured(worst, LIMIT, detail)


def _differences(step: Step, whole: Step) -> dict[str, float]:
    floor = scale(whole.gradients.values()) * 1e-3
    found = {"the loss": abs(step.loss - whole.loss) / abs(whole.loss)}
    for name, gradient in whole.gradients.items():
        here = step.gradients.get(name)
        unit = max(scale([gradient]), floor)
        if here is None:
            found[name] = float("inf")
        elif unit:
            found[name] = error(here, gradient) / unit
    return found


def _spec(subject: Subject, micro_batch: int, accumulated: int, **changes: Any) -> RunSpec:
    return subject.variant(
        model={"dtype": "float32"},
        training={
            "micro_batch_size": micro_batch,
            "gradient_accumulation_steps": accumulated,
            "compile": False,
            "cuda_graphs": False,
        },
        optimizer={"in_backward": False},
        **changes,
    )


def _request(subject: Subject, micro_batch: int, accumulated: int) -> Request:
    spec = _spec(subject, micro_batch, accumulated, **_strategy(subject))
    out = str(subject.new_file(".step."))
    return Request("first_step", spec.model_dump_json(), str(subject.data.folder), out, uneven=True)


def _strategy(subject: Subject) -> dict[str, Any]:
    """The run's strategy on two processes, `ddp` for a run of one; without parallelism that needs more processes."""
    asked = subject.asked.parallel.model_dump()
    if asked["type"] == "single":
        asked = {"type": "ddp"}
    if asked["type"] == "fsdp":
        asked |= {"replicas": 1, **dict.fromkeys(GROUPS, 1), "compute_dtype": "model"}
    return {"parallel": asked, "topology": {"nproc_per_node": _PROCESSES}}
