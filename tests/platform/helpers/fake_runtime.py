"""A program in place of `python -m tasks.runtime` that needs no torch and ends as the variable STAND_IN says.

It writes the files and the progress lines of the runtime; `tests/test_notebook.py` runs the real one.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from strata_platform import progress_line
from strata_platform.run_layout import RunLayout
from strata_platform.runs import EvaluationPoint
from strata_platform.spec import load_spec
from strata_platform.testing import metric_point

RANK = int(os.environ.get("RANK", "0"))
spec = load_spec(Path(sys.argv[1]))
layout = RunLayout(Path(spec.output) / spec.name)
starts = layout.root / f"starts-{RANK}"


def report_progress(**values):
    assert progress_line.VARIABLE in os.environ
    print(progress_line.encode(values), flush=True)


def train(first, last, attempt):
    with layout.metrics.open("a") as file:
        for step in range(first, last + 1):
            own = {"attempt": attempt, "time": time.time(), "grad_norm": None, "metrics": {"reward": 0.5}}
            file.write(json.dumps({**metric_point(step, 10.0 / step, **own).to_dict(), "invented_later": 1}) + "\n")


def finish():
    layout.model.mkdir(exist_ok=True)
    for path in (layout.model / "config.json", layout.report, layout.record):
        path.write_text("{}")


layout.root.mkdir(parents=True, exist_ok=True)
attempt = starts.stat().st_size if starts.exists() else 0
with starts.open("a") as file:
    file.write(".")
print(f"rank {RANK}, start {attempt + 1}", flush=True)
match os.environ["STAND_IN"]:
    case "finishes":
        if RANK == 0:
            report_progress(stage="training", steps=3, attempt=attempt)
            train(1, 3, attempt)
            report_progress(stage="exporting")
            finish()
        print("0 %\r50 %\r100 %", file=sys.stderr)
        print("no end of line", end="")
    case "stops early":
        report_progress(stage="training", steps=10, attempt=attempt)
        train(1, 3, attempt)
        point = EvaluationPoint(3, attempt, time.time(), 1.25, {"reward_accuracy": 0.5})
        with layout.metrics.open("a") as file:
            file.write(json.dumps(point.to_dict()) + "\n")
        report_progress(evaluation=point.to_dict())
        report_progress(stopped_early=3)
        finish()
    case "is killed once":
        if RANK == 0:
            train(2 * attempt + 1, 2 * attempt + 2, attempt)
        if attempt == 0 and spec.topology.world_size == RANK + 1:
            while not layout.metrics.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 0:
            signal.pause()
        finish()
    case "goes on" | "goes on in spite of SIGTERM" as how:
        if how != "goes on":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report_progress(stage="training", steps=10, attempt=attempt)
        train(attempt + 1, attempt + 1, attempt)
        print("it trains", flush=True)
        signal.pause()
        signal.pause()
    case "prints a text":
        print('@strata {"stage": "boom"}', flush=True)
        finish()
    case "hangs":
        sys.exit(75)
    case "exits once":
        # Rank 0 alone: a process that torchrun stops may not have counted its start yet.
        exited = layout.root / "exited"
        if RANK == 0 and not exited.exists():
            exited.touch()
            print("error: it is not to be had now", file=sys.stderr)
            sys.exit(int(os.environ["STAND_IN_CODE"]))
        if not exited.exists():
            signal.pause()
        finish()
    case "is refused":
        print("a warning before", file=sys.stderr)
        print("error: data.source 'x' is no file\n  give another", file=sys.stderr)
        sys.exit(2)
    case "breaks":
        raise RuntimeError("it is broken")
