"""Does FP8 change what a model learns? Loss curves in bf16 and with `training.float8`, side by side on one GPU.

    PYTHONPATH=kernels:platform:. python -m benchmarks.float8_curves [--steps 500] [--scaling tensorwise]

The shape of Llama 3.2 1B from random weights, 2 rows of 2048 tokens of Python's sources a step, AdamW. Every linear
layer but the head multiplies in FP8, whether or not that is faster. Two bf16 runs with other seeds, which decide the
weights and the order of the rows, show the noise. Each run is a process of its own; their speed means nothing.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.float8_by_name import keep_exact
from benchmarks.training import SHAPES, Run, train_and_compare, write_documents
from strata_platform.runs import MetricPoint
from tasks.runtime.run_folder.metrics_file import read_points

ROWS, LENGTH, LEARNING_RATE = 2, 2048, 3e-4
# A curve is told by the mean losses of so many parts.
PARTS = 10
# In which runs start, so that what there is of a run that was ended early can be compared.
RUNS = ("bf16 0", "float8 0", "bf16 1", "float8 1")


@dataclass(frozen=True)
class Curve(Run):
    """A run of so many steps."""

    number: int = 0

    @property
    def steps(self) -> tuple[int, int]:
        """All are trained, and those after the first four timed."""
        return self.number, 4


def curve(name: str, scaling: str, steps: int, documents: Path, shape: str) -> Curve:
    """The run of this name."""
    kind, _, seed = name.partition(" ")
    fields: dict[str, Any] = {
        "seed": int(seed),
        "data.source": str(documents),
        "data.sequence_length": LENGTH,
        "objective.type": "pretrain",
        "optimizer.lr": LEARNING_RATE,
        "training.micro_batch_size": ROWS,
        "training.float8": scaling if kind == "float8" else "none",
        "tracking.log_every": 10,
    }
    return Curve(shape, 1, fields, steps)


def metrics_of(run: Curve, out: Path) -> Path:
    """The file with the losses of a run."""
    return out / run.spec(out, out).name / "metrics.jsonl"


def train(run: Curve, out: Path) -> None:
    """Train in this process."""
    keep_exact()
    train_and_compare(run, out)


def parts(points: Sequence[MetricPoint], steps: int) -> list[float]:
    """The mean losses of tenths of `steps`, as far as there are points."""
    size = max(steps // PARTS, 1)
    losses = [point.loss for point in points]
    return [statistics.fmean(losses[at : at + size]) for at in range(0, len(losses) - size + 1, size)]


def table(curves: Mapping[str, list[float]], steps: int) -> list[str]:
    """Lines of a table: the curves, then how far FP8 is from bf16 with the same seed, and the seeds from each other."""
    size = max(steps // PARTS, 1)
    rows = {name: [f"{loss:.4f}" for loss in losses] for name, losses in curves.items()}
    for name, losses in curves.items():
        kind, seed = name.split()
        other = f"bf16 {seed}" if kind == "float8" else "bf16 0"
        if name != other:
            apart = [mine - theirs for mine, theirs in zip(losses, curves[other], strict=False)]
            rows[f"{name} - {other}"] = [f"{difference:+.4f}" for difference in apart]
    ends = [str(size * (part + 1)) for part in range(PARTS)]
    lines = [f"| mean loss of {size} steps, up to step | " + " | ".join(ends) + " |", "| --- |" + " --- |" * PARTS]
    return lines + [
        f"| {name} | " + " | ".join(cells + [""] * (PARTS - len(cells))) + " |" for name, cells in rows.items()
    ]


def wait_for(processes: Mapping[str, subprocess.Popen[bytes]], seconds: float | None) -> None:
    """Wait for all, and end those that are left after so many seconds. Raises SystemExit if one failed."""
    end = None if seconds is None else time.monotonic() + seconds
    try:
        for process in processes.values():
            process.wait(None if end is None else max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds:.0f} s", flush=True)
    finally:
        failed = [name for name, process in processes.items() if process.poll()]
        for process in processes.values():
            process.kill()
            process.wait()
    if failed:
        raise SystemExit(f"error: {', '.join(failed)} failed; the reason is above")


def main() -> None:
    """Train all beside each other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--scaling", choices=("tensorwise", "rowwise"), default="tensorwise")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--seconds", type=float, help="end all runs after so many seconds, and compare what there is")
    parser.add_argument("--runs", type=int, default=len(RUNS), choices=(3, 4), help="with 3, FP8 has one seed")
    parser.add_argument("--out", type=Path, default=Path("out/float8-curves"))
    parser.add_argument("--train", choices=RUNS, help=argparse.SUPPRESS)
    told = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)
    told.out.mkdir(parents=True, exist_ok=True)
    documents = told.out.absolute() / "documents.jsonl"
    if told.train:
        return train(curve(told.train, told.scaling, told.steps, documents, told.shape), told.out)
    write_documents(documents, 600)
    names = RUNS[: told.runs]
    common = ["--scaling", told.scaling, "--steps", str(told.steps), "--shape", told.shape, "--out", str(told.out)]
    program = [sys.executable, "-m", "benchmarks.float8_curves", *common]
    wait_for({name: subprocess.Popen([*program, "--train", name]) for name in names}, told.seconds)
    runs = {name: curve(name, told.scaling, told.steps, documents, told.shape) for name in names}
    curves = {name: parts(read_points(metrics_of(run, told.out)), told.steps) for name, run in runs.items()}
    print("\n".join(table(curves, told.steps)), flush=True)
    return None


if __name__ == "__main__":
    main()
