"""Does a bfloat16 run learn what fp32 training learns? Training and held-out loss of a real model on real text.

    PYTHONPATH=kernels:platform:. python -m benchmarks.precision --model FOLDER --text FILE [--steps 1000] [--lr 1e-5]
        [--only fp32_master tensorwise]

The reference is none of this project's code: transformers' own model with fp32 weights, `torch.autocast` to bfloat16,
`torch.optim.AdamW` and `clip_grad_norm_`, fed with the same rows in the same order. Beside it, the same spec is trained
by `python -m tasks.runtime` with each `optimizer.precision`, or with `training.float8`, where every linear layer but
the head multiplies in FP8, whether or not that is faster. Every exported model is then measured by transformers alone,
in fp32, on rows that none was trained on. All processes share the GPU, so this measures losses, not speed.

FILE is plain text. Prints a table, and writes every curve to `<out>/curves.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, collate, prepare, recipe_of
from tasks.runtime.data.loader import training_loader
from tasks.runtime.optim.lr_schedule import learning_rate_factor
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import data_folder
from tasks.runtime.run_folder.metrics_file import read_points

REFERENCE = "fp32 weights, plain PyTorch"
PRECISIONS = ("fp32_master", "stochastic_rounding", "nearest")
FLOAT8 = ("tensorwise", "rowwise")
# Characters of a document: whole rows of 1,024 tokens but for its last.
DOCUMENT = 100_000
# Rows of a step, all in one forward pass, and rows that are held out.
ROWS, HELD_OUT = 8, 64
# Steps at the end over which the training loss is averaged.
LAST = 100


def spec_of(arguments: argparse.Namespace, name: str) -> RunSpec:
    """The run of one precision or one form of FP8; the recipe of its data is the same for all."""
    float8 = name if name in FLOAT8 else "none"
    return RunSpec.model_validate(
        {
            "name": name.replace("_", "-"),
            "output": str(arguments.out),
            "seed": arguments.seed,
            "model": {"name": str(arguments.model), "dtype": "bfloat16"},
            "objective": {"type": "pretrain"},
            "data": {
                "source": str(arguments.out / "text.jsonl"),
                "sequence_length": arguments.length,
                "packing": False,
                "validation_fraction": 0.02,
            },
            "training": {"steps": arguments.steps, "micro_batch_size": ROWS, "float8": float8},
            "optimizer": {"lr": arguments.lr, "precision": name if float8 == "none" else PRECISIONS[0]},
            "schedule": {"type": "constant", "warmup_ratio": 0.05},
            "checkpoint": {"every": arguments.steps},
            "evaluation": {"samples": 0},
            "tracking": {"report_to": []},
            "faults": {"health_check": False},
            "kernels": {"warmup": False},
        }
    )


def write_documents(text: Path, file: Path) -> None:
    """Cut the text into documents of whole lines, one JSON object each."""
    lines, size = [], 0
    with file.open("w") as out:
        for line in text.read_text(errors="replace").splitlines(keepends=True):
            lines.append(line)
            size += len(line)
            if size >= DOCUMENT:
                out.write(json.dumps({"text": "".join(lines)}) + "\n")
                lines, size = [], 0


def train_reference(spec: RunSpec, data: PreparedData, folder: Path) -> list[float]:
    """Train in plain PyTorch with fp32 weights, and save the model; returns the loss of every step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(spec.seed)
    model = AutoModelForCausalLM.from_pretrained(spec.model.name, dtype=torch.float32).to(device).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": spec.optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec.peak_lr, betas=spec.optimizer.betas, eps=spec.optimizer.eps)
    factor = learning_rate_factor(spec.schedule, spec.training.steps)
    processes = Processes.from_environment()
    losses = []
    loader = training_loader(spec, data, processes, collate=collate, start=0, stop=spec.training.steps)
    for done, batch in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = spec.peak_lr * factor(done)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch["input_ids"].to(device), labels=batch["labels"].to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.save_pretrained(folder)
    return torch.stack(losses).tolist()


@torch.no_grad()
def measure(folder: Path, data: PreparedData) -> tuple[float, dict[str, torch.Tensor]]:
    """The held-out loss of a saved model, in fp32 by transformers, in nats per token; and its weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    total = tokens = 0.0
    for number in range(min(HELD_OUT, len(data.validation))):
        row = data.validation[number]
        targets = int((row["labels"][1:] != -100).sum())
        if targets:
            loss = model(input_ids=row["input_ids"][None].to(device), labels=row["labels"][None].to(device)).loss
            total, tokens = total + float(loss) * targets, tokens + targets
    return total / tokens, {name: weight.cpu() for name, weight in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/precision"))
    parser.add_argument("--only", choices=(*PRECISIONS, *FLOAT8), nargs="*", default=PRECISIONS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_documents(arguments.text, arguments.out / "text.jsonl")
    specs = {name: spec_of(arguments, name) for name in arguments.only}
    first = next(iter(specs.values()))
    recipe = recipe_of(first)
    data = PreparedData.load(prepare(recipe, data_folder(first.output, recipe), report=print).folder)

    runs = {}
    for name, spec in specs.items():
        file = arguments.out / f"{name}.json"
        file.write_text(spec.model_dump_json())
        program = "benchmarks.every_layer_in_float8" if name in FLOAT8 else "tasks.runtime"
        runs[name] = subprocess.Popen([sys.executable, "-m", program, str(file)])
    curves = {REFERENCE: train_reference(first, data, arguments.out / "reference")}
    folders = {REFERENCE: arguments.out / "reference"}
    for name, process in runs.items():
        if process.wait():
            raise SystemExit(f"{name}: the run ended with exit code {process.returncode}")
        run = arguments.out / specs[name].name
        curves[name] = [point.loss for point in read_points(run / "metrics.jsonl")]
        folders[name] = run / "model"

    (arguments.out / "curves.json").write_text(json.dumps(curves))
    start, untrained = measure(arguments.model, data)
    rows: dict[str, dict[str, Any]] = {}
    for name, folder in folders.items():
        held_out, weights = measure(folder, data)
        moved = sum(
            int((weights[key].bfloat16() != weight.bfloat16()).sum())
            for key, weight in untrained.items()
            if key in weights
        )
        size = sum(weight.numel() for key, weight in untrained.items() if key in weights)
        rows[name] = {
            "training": statistics.fmean(curves[name][-LAST:]),
            "held_out": held_out,
            "moved": moved / size,
        }
    print(
        f"\nheld-out loss before training: {start:.4f} nats per token; {arguments.steps} steps, lr {arguments.lr:g}\n"
    )
    print(
        f"| weights | training loss, last {LAST} steps | against fp32 | held-out | against fp32 | bf16 weights moved |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    best = rows[REFERENCE]
    for name, row in rows.items():
        off = [f"{row[key] / best[key] - 1:+.2%}" for key in ("training", "held_out")]
        print(f"| {name} | {row['training']:.4f} | {off[0]} | {row['held_out']:.4f} | {off[1]} | {row['moved']:.1%} |")


if __name__ == "__main__":
    main()
