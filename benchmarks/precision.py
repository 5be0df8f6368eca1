"""Does a run in bfloat16 or FP8 learn what fp32 training learns? Losses of a real model on real text.

    PYTHONPATH=kernels:platform:. python -m benchmarks.precision --model FOLDER --text FILE [--steps 1000] [--lr 1e-5]
        [--only fp32_master tensorwise torchao-tensorwise]

The reference is none of this project's code: transformers' own model with fp32 weights, `torch.autocast` to bfloat16,
`torch.optim.AdamW` and `clip_grad_norm_`, fed with the same rows in the same order. Beside it train

- runs of `python -m tasks.runtime`: each `optimizer.precision`, and `training.float8`, where every linear layer but the
  head multiplies in FP8, whether or not that is faster, but for the layers that the row names,
- the reference's loop with bf16 weights, of which the optimizer has fp32 copies, as `fp32_master` has: alone, and with
  the same layers in torchao's FP8. What torchao's rows lose beside `plain-bf16`, FP8 costs; what ours lose beside
  `fp32_master` should be no more.

Every exported model is then measured by transformers alone, in fp32, on rows that none was trained on. Some processes
share the GPU, so this measures losses, not speed.

FILE is plain text. Prints a table, and writes every curve to `<out>/curves.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, collate, prepare, recipe_of
from tasks.runtime.data.loader import training_loader
from tasks.runtime.models.build import build_model_on_meta
from tasks.runtime.models.float8 import _slow_layers, float8_layers, use_float8
from tasks.runtime.optim.lr_schedule import learning_rate_factor
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import data_folder
from tasks.runtime.run_folder.metrics_file import read_points


@dataclass(frozen=True)
class Ours:
    """A run of the runtime. Layers whose paths end with a name in `exact` do not multiply in FP8."""

    precision: str = "fp32_master"
    float8: str = "none"
    exact: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plain:
    """transformers' model in a plain PyTorch loop, with weights in `dtype` and the layers of a recipe of torchao's."""

    dtype: torch.dtype = torch.bfloat16
    recipe: str = ""


REFERENCE, WHERE_FASTER = "plain-fp32", "tensorwise-where-faster"
# What torchao's `_auto_filter_for_recipe` leaves exact in SmolLM2-135M: up to 1024 outputs of up to 4096 inputs.
SMALL = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
# Neighbors are compared, and run at the same time.
ROWS: dict[str, Ours | Plain] = {
    REFERENCE: Plain(torch.float32),
    "fp32_master": Ours(),
    "plain-bf16": Plain(),
    "tensorwise": Ours(float8="tensorwise"),
    "torchao-tensorwise": Plain(recipe="tensorwise"),
    "rowwise": Ours(float8="rowwise"),
    "torchao-rowwise_with_gw_hp": Plain(recipe="rowwise_with_gw_hp"),
    "tensorwise-large-layers": Ours(float8="tensorwise", exact=SMALL),
    "torchao-tensorwise-fp32": Plain(torch.float32, "tensorwise"),
    WHERE_FASTER: Ours(float8="tensorwise"),
    "torchao-rowwise": Plain(recipe="rowwise"),
    "stochastic_rounding": Ours("stochastic_rounding"),
    "nearest": Ours("nearest"),
}
DEFAULT = ("fp32_master", "stochastic_rounding", "nearest")
# Characters of a document: whole rows of 1,024 tokens but for its last.
DOCUMENT = 100_000
# Rows of a step, all in one forward pass, and rows that are held out.
ROWS_OF_STEP, HELD_OUT = 8, 64
# Steps at the end over which the training loss is averaged.
LAST = 100
# Processes beside each other, for the memory of one GPU.
AT_ONCE = 6


def spec_of(arguments: argparse.Namespace, name: str) -> RunSpec:
    """The run of a row; plain ones read its data, seed and schedule. The recipe of the data is the same for all."""
    row = ROWS[name]
    ours = row if isinstance(row, Ours) else Ours()
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
            "training": {"steps": arguments.steps, "micro_batch_size": ROWS_OF_STEP, "float8": ours.float8},
            "optimizer": {"lr": arguments.lr, "precision": ours.precision},
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


def device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def layers_not_faster(spec: RunSpec) -> tuple[str, ...]:
    """The layers that the runtime keeps exact on this GPU; measure it before other processes use the GPU."""
    model, tokens = build_model_on_meta(spec.model), spec.training.micro_batch_size * spec.data.sequence_length
    use_float8(model, spec.training)
    return tuple(_slow_layers(float8_layers(model), "tensorwise", tokens, torch.bfloat16, device()))


def plain_model(name: str, row: Plain) -> PreTrainedModel:
    """transformers' model, in which torchao replaces every linear layer but the head if the row has a recipe."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=row.dtype).to(device()).train()
    if row.recipe:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=replace(Float8LinearConfig.from_recipe_name(row.recipe), emulate=device().type == "cpu"),
            module_filter_fn=lambda _, path: path != "lm_head",
        )
    return model


def train_plain(row: Plain, spec: RunSpec, data: PreparedData, folder: Path) -> list[float]:
    """Train in plain PyTorch, and save the model; returns the loss of every step."""
    torch.manual_seed(spec.seed)
    model = plain_model(spec.model.name, row)
    weights = list(model.parameters())
    # Those that are fp32 are their own copies.
    copies = [weight.detach().float() for weight in weights]
    groups = [
        {"params": [p for p in copies if p.ndim > 1], "weight_decay": spec.optimizer.weight_decay},
        {"params": [p for p in copies if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec.peak_lr, betas=spec.optimizer.betas, eps=spec.optimizer.eps)
    steps = spec.training.steps
    assert steps is not None
    factor = learning_rate_factor(spec.schedule, steps)
    losses = []
    loader = training_loader(spec, data, Processes.from_environment(), collate=collate, start=0, stop=steps)
    for done, batch in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = spec.peak_lr * factor(done)
        with torch.autocast(device().type, torch.bfloat16, enabled=row.dtype is torch.float32):
            loss = model(input_ids=batch["input_ids"].to(device()), labels=batch["labels"].to(device())).loss
        loss.backward()
        for weight, copy in zip(weights, copies, strict=True):
            assert weight.grad is not None
            copy.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(copies, spec.optimizer.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(weights, copies, strict=True):
                weight.copy_(copy)
        losses.append(loss.detach())
    model.save_pretrained(folder)
    return torch.stack(losses).tolist()


def train_ours(row: Ours, spec: RunSpec) -> list[float]:
    """Train by the runtime; returns the loss of every step."""
    file = Path(spec.output) / f"{spec.name}.json"
    file.write_text(spec.model_dump_json())
    subprocess.run([sys.executable, "-m", "benchmarks.float8_by_name", str(file), *row.exact], check=True)
    return [point.loss for point in read_points(Path(spec.output) / spec.name / "metrics.jsonl")]


def train(row: Ours | Plain, spec: RunSpec, data: Path) -> tuple[list[float], Path]:
    """The loss of every step, and the folder of the model."""
    folder = Path(spec.output) / spec.name / "model"
    if isinstance(row, Ours):
        return train_ours(row, spec), folder
    return train_plain(row, spec, PreparedData.load(data), folder), folder


@torch.no_grad()
def measure(folder: Path, data: PreparedData) -> tuple[float, dict[str, torch.Tensor]]:
    """The held-out loss of a saved model, in fp32 by transformers, in nats per token; and its weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device()).eval()
    total = tokens = 0.0
    for number in range(min(HELD_OUT, len(data.validation))):
        row = data.validation[number]
        targets = int((row["labels"][1:] != -100).sum())
        if targets:
            loss = model(input_ids=row["input_ids"][None].to(device()), labels=row["labels"][None].to(device())).loss
            total, tokens = total + float(loss) * targets, tokens + targets
    return total / tokens, {name: weight.cpu() for name, weight in model.state_dict().items()}


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/precision"))
    parser.add_argument("--only", choices=ROWS, nargs="*", default=DEFAULT)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tasks.runtime.models.float8").setLevel(logging.INFO)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_documents(arguments.text, arguments.out / "text.jsonl")
    rows = {name: row for name, row in ROWS.items() if name in {REFERENCE, *arguments.only}}
    specs = {name: spec_of(arguments, name) for name in rows}
    recipe = recipe_of(specs[REFERENCE])
    data = PreparedData.load(prepare(recipe, data_folder(str(arguments.out), recipe), report=print).folder)
    if WHERE_FASTER in rows:
        rows[WHERE_FASTER] = Ours(float8="tensorwise", exact=layers_not_faster(specs[WHERE_FASTER]))

    with ProcessPoolExecutor(AT_ONCE, mp_context=get_context("spawn")) as pool:
        runs = {name: pool.submit(train, row, specs[name], data.folder) for name, row in rows.items()}
        trained = {name: run.result() for name, run in runs.items()}

    curves = {name: losses for name, (losses, _) in trained.items()}
    (arguments.out / "curves.json").write_text(json.dumps(curves))
    start, untrained = measure(arguments.model, data)
    found: dict[str, dict[str, Any]] = {}
    for name, (losses, folder) in trained.items():
        held_out, weights = measure(folder, data)
        moved = sum(
            int((weights[key].bfloat16() != weight.bfloat16()).sum())
            for key, weight in untrained.items()
            if key in weights
        )
        size = sum(weight.numel() for key, weight in untrained.items() if key in weights)
        found[name] = {"training": statistics.fmean(losses[-LAST:]), "held_out": held_out, "moved": moved / size}
    print(
        f"\nheld-out loss before training: {start:.4f} nats per token; {arguments.steps} steps, lr {arguments.lr:g}\n"
    )
    print(f"| run | training loss, last {LAST} steps | against fp32 | held-out | against fp32 | bf16 weights moved |")
    print("| --- | --- | --- | --- | --- | --- |")
    best = found[REFERENCE]
    for name, row in found.items():
        off = [f"{row[key] / best[key] - 1:+.2%}" for key in ("training", "held_out")]
        print(f"| {name} | {row['training']:.4f} | {off[0]} | {row['held_out']:.4f} | {off[1]} | {row['moved']:.1%} |")


if __name__ == "__main__":
    main()
