"""A program in the place of `python -m tasks.runtime`, which needs no torch and ends as its environment says.

What it leaves and tells is what the runtime does; `tests/test_notebook.py` runs the real one through the client.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from strata_platform import progress_line
from strata_platform.spec import load_spec

RANK = int(os.environ.get("RANK", "0"))
spec = load_spec(Path(sys.argv[1]))
folder = Path(spec.output) / spec.name
starts = folder / f"starts-{RANK}"


def report_progress(**values):
    assert progress_line.VARIABLE in os.environ
    print(progress_line.encode(values), flush=True)


def train(first, last, attempt):
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            point = {
                "step": step, "attempt": attempt, "time": time.time(), "loss": 10.0 / step, "learning_rate": 1e-3,
                "grad_norm": None, "tokens": 8 * step, "target_tokens": 4 * step, "tokens_per_second": 100.0,
                "step_seconds": 2.0, "memory_bytes": 1, "metrics": {"reward": 0.5}, "invented_later": 1,
            }  # fmt: skip
            file.write(json.dumps(point) + "\n")


def finish():
    (folder / "model").mkdir(exist_ok=True)
    for name in ("model/config.json", "report.html", "record.json"):
        (folder / name).write_text("{}")


folder.mkdir(parents=True, exist_ok=True)
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
    case "is killed once":
        if RANK == 0:
            train(2 * attempt + 1, 2 * attempt + 2, attempt)
        if attempt == 0 and spec.topology.world_size == RANK + 1:
            while not (folder / "metrics.jsonl").exists():
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
    case "exits once" if attempt == 0:
        print("error: it is not to be had now", file=sys.stderr)
        sys.exit(int(os.environ["STAND_IN_CODE"]))
    case "exits once":
        finish()
    case "is refused":
        print("a warning before", file=sys.stderr)
        print("error: data.source 'x' is no file\n  give another", file=sys.stderr)
        sys.exit(2)
    case "breaks":
        raise RuntimeError("it is broken")
