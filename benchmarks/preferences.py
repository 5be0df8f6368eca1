"""How many steps until an objective ranks held-out answers by a known rule? On a CPU, in minutes.

    PYTHONPATH=kernels:platform:. python -m benchmarks.preferences [--steps 100] [--every 25] [--only dpo,kto]

Of two names, the answer is the one that the prompt names first. The model is the preset `tiny-llama` with two narrow
layers, from scratch. Prints, after every so many steps, the share of held-out pairs whose good answer has the larger
reward. `kto` learns from single answers, and evaluation counts those on their side of its estimate: that share stands
behind the share of pairs, whose rewards are the log-ratios to the model before training.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.checkpoint.state import load_model
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.models.build import build_saved_model, materialize
from tasks.runtime.models.config import PRESETS
from tasks.runtime.models.trained_weights import build_initial_model
from tasks.runtime.objectives import build_objective
from tasks.runtime.objectives.dpo import Dpo
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_evaluations
from tasks.runtime.training.session import session
from tasks.runtime.training.train import train

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.5}, "orpo": {"beta": 1.0}, "simpo": {}, "cpo": {"beta": 0.5}, "kto": {"beta": 0.5}, "reward": {},
}  # fmt: skip
NAMES = [first + second for first in "bcdfgklmnprst" for second in "aeiou"]
NEW = 120
"""Pairs that no run learns from."""


def write_rule(folder: Path) -> None:
    """Write `pairs.jsonl`, `answers.jsonl` with the same answers one by one, and `new.jsonl` with other pairs."""
    draw = random.Random(0)  # noqa: S311
    pairs: list[dict[str, str]] = []
    for _ in range(600 + NEW):
        first, second = draw.sample(NAMES, 2)
        pairs.append({"prompt": f"{first} or {second}?", "chosen": f" {first}", "rejected": f" {second}"})
    answers = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs[:-NEW]
        for side in ("chosen", "rejected")
    ]
    files: dict[str, Sequence[Any]] = {"pairs": pairs[:-NEW], "answers": answers, "new": pairs[-NEW:]}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_of(folder: Path, name: str, steps: int, every: int, rows: int, rate: float) -> RunSpec:
    """The run of an objective on the files of `write_rule`."""
    source = folder / ("answers.jsonl" if name == "kto" else "pairs.jsonl")
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(folder),
            "data": {"source": str(source), "sequence_length": 64, "validation_fraction": 0.15},
            "objective": {"type": name, **OBJECTIVES[name]},
            "training": {"steps": steps, "micro_batch_size": rows},
            "optimizer": {"lr": rate, "weight_decay": 0},
            "checkpoint": {"every": every, "keep_last": steps // every + 1},
            "evaluation": {"every": every},
            "tracking": {"report_to": []},
        }
    )


@torch.no_grad()
def accuracy_of_pairs(spec: RunSpec, step: int) -> float:
    """Share of the pairs of `new.jsonl` whose good answer has grown more from the first model to that of a step."""
    folder = Path(spec.output)
    tokenizer = data_folder(spec.output, DataRecipe.from_spec(spec, fingerprint(spec))) / "tokenizer"
    pairs = RunSpec.model_validate(
        {
            "data": {"source": str(folder / "new.jsonl"), "sequence_length": 64, "validation_fraction": 0},
            "objective": {"type": "dpo"},
            "model": {"tokenizer": str(tokenizer)},
            "kernels": {"enabled": False},
        }
    )
    recipe = DataRecipe.from_spec(pairs, fingerprint(pairs))
    rows = prepare(recipe, data_folder(spec.output, recipe), report=lambda line: None).train
    batch, objective = collate([rows[index] for index in range(len(rows))]), build_objective(pairs, fused=False)
    assert isinstance(objective, Dpo)
    saved = RunFolder.of(spec).checkpoints / f"checkpoint-{step}"
    trained = build_saved_model(saved)
    materialize(trained, torch.device("cpu"))
    load_model(Index(saved), trained)
    batch["reference"] = objective.log_probs(build_initial_model(spec), batch)
    share = objective.micro_batch_loss(trained.eval(), batch, objective.count(batch))
    return float(share.metrics["reward_accuracy"])


def curve(spec: RunSpec) -> dict[int, str]:
    """Train, and return the accuracy by step, as it is printed."""
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    with session(spec) as run:
        train(run, prepare(recipe, data_folder(spec.output, recipe), report=lambda line: None))
    found = {}
    for point in read_evaluations(RunFolder.of(spec).metrics):
        found[point.step] = f"{point.metrics['reward_accuracy']:.2f}"
        if spec.objective.type == "kto":
            found[point.step] = f"{accuracy_of_pairs(spec, point.step):.2f} ({found[point.step]})"
    return found


def main() -> None:
    """Train each objective and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=25, help="steps between two rows of the table")
    parser.add_argument("--rows", type=int, default=16, help="rows of 64 tokens in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--only", default=",".join(OBJECTIVES))
    given = parser.parse_args()
    PRESETS["tiny-llama"] |= {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
    names = given.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        write_rule(Path(folder))
        specs = {name: spec_of(Path(folder), name, given.steps, given.every, given.rows, given.lr) for name in names}
        curves = {name: curve(spec) for name, spec in specs.items()}
    print(f"| steps | {' | '.join(f'`{name}`' for name in names)} |")
    print(f"| --- |{' --- |' * len(names)}")
    for step in curves[names[0]]:
        print(f"| {step} | {' | '.join(curves[name][step] for name in names)} |")


if __name__ == "__main__":
    main()
