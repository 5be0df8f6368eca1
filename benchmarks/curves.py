"""Do the kernels change what a model learns? The same spec, with and without them, step by step.

    python -m benchmarks.curves [--steps 200] [--out out/curves]

Trains the spec three times: with the kernels, without, and without but with another attention implementation. The third
differs from the second in rounding alone, so their distance is the noise that the first is measured against.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from tasks.runtime.run_folder.metrics_file import read_points

VARIANTS = {
    "kernels": {},
    "plain": {"kernels": {"enabled": False}},
    "plain, eager attention": {"kernels": {"enabled": False}, "model": {"dtype": "bfloat16", "attention": "eager"}},
}


def train(variant: str, steps: int, out: Path) -> list[float]:
    """Train one variant in a process of its own; returns the loss of every step."""
    name = variant.replace(", ", "-").replace(" ", "-")
    spec = {
        "name": name,
        "output": str(out),
        "model": {"dtype": "bfloat16"},
        "training": {"steps": steps, "micro_batch_size": 32},
        "evaluation": {"samples": 1},
        **VARIANTS[variant],
    }
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.json"
    file.write_text(json.dumps(spec))
    subprocess.run([sys.executable, "-m", "tasks.runtime", str(file)], check=True)
    return [point.loss for point in read_points(out / name / "metrics.jsonl")]


def distance(one: list[float], other: list[float]) -> tuple[float, float]:
    """Mean and largest absolute difference of two curves, nats."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return statistics.fmean(differences), max(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/curves"))
    arguments = parser.parse_args()
    curves = {variant: train(variant, arguments.steps, arguments.out) for variant in VARIANTS}
    plain = curves.pop("plain")
    print("| against plain | mean difference | largest | loss at the end |")
    print("| --- | --- | --- | --- |")
    print(f"| plain | 0 | 0 | {statistics.fmean(plain[-20:]):.4f} |")
    for variant, curve in curves.items():
        mean, largest = distance(curve, plain)
        print(f"| {variant} | {mean:.5f} | {largest:.5f} | {statistics.fmean(curve[-20:]):.4f} |")
    (arguments.out / "curves.json").write_text(json.dumps({"plain": plain, **curves}))


if __name__ == "__main__":
    main()
