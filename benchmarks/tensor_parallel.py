"""Does every objective learn under tensor parallelism what it learns in one process? On two GPUs, in five minutes.

    PYTHONPATH=kernels:platform:. python -m benchmarks.tensor_parallel [--only dpo grpo] [--out out/tensor-parallel]

Six steps in fp32 of a model with two layers, once in one process and once under `tensor_parallel: 2`, all objectives at
once. Prints the largest difference of a step's loss, and of its gradient norm relative to the norm.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.runtime.helpers.pretrained_folder import save_pretrained

QUESTIONS = [
    {"prompt": f"What is {n} and {n}?", "chosen": f" It is {2 * n}.", "rejected": " Well, let me see." * (n % 3 + 1)}
    for n in range(48)
]
GENERATION = {"max_new_tokens": 16}
PAIRS = ("dpo", "orpo", "simpo", "cpo", "reward")
# Objectives over one answer, with what their sections have beside the type.
ANSWERS: dict[str, dict[str, Any]] = {
    "sft": {},
    "distill": {},
    "distill, on-policy": {"on_policy": 1, "weight": 1, "divergence": "reverse_kl", "generation": GENERATION},
}
REWARD = {"function": "benchmarks.tensor_parallel:letters"}
# With no signal, a gradient is rounding alone, and AdamW makes whole steps of it.
GRPO = {"beta": 0.05, "overlong": "rewarded", "group_size": 4, "generation": GENERATION, "rewards": [REWARD]}
NAMES = (*PAIRS, *ANSWERS, "kto", "grpo")


def letters(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """A reward: the share of letters."""
    return [sum(map(str.isalpha, text)) / (len(text) + 1) for text in completions]


def write_inputs(out: Path) -> None:
    """A pretrained model, a teacher, and files of rows."""
    save_pretrained(out / "model")
    teacher = AutoModelForCausalLM.from_pretrained(out / "model")
    with torch.no_grad():
        teacher.lm_head.weight *= 4.0
    shutil.copytree(out / "model", out / "teacher", ignore=shutil.ignore_patterns("made"))
    teacher.save_pretrained(out / "teacher")
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in QUESTIONS
        for side in ("chosen", "rejected")
    ]
    asked = [{"prompt": row["prompt"]} for row in QUESTIONS]
    for name, rows in (("pairs", QUESTIONS), ("labelled", labelled), ("asked", asked)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def spec_of(out: Path, name: str, processes: int) -> dict[str, Any]:
    """The run of an objective."""
    data: dict[str, Any] = {"source": f"{out}/pairs.jsonl", "validation_fraction": 0.1}
    objective: dict[str, Any] = {"type": name}
    if name in ANSWERS:
        data |= {"completion_column": "chosen", "packing": False}
        objective = {"type": name.partition(",")[0], **ANSWERS[name]}
        if name != "sft":
            objective["teacher"] = f"{out}/teacher"
    elif name == "kto":
        data |= {"source": f"{out}/labelled.jsonl", "packing": False}
    elif name == "grpo":
        data = {"source": f"{out}/asked.jsonl", "format": "prompt"}
        objective |= GRPO
    return {
        "name": f"{name.replace(', ', '-')}-{processes}",
        "output": f"{out}/runs",
        "model": {"name": f"{out}/model", "dtype": "float32"},
        "data": {"sequence_length": 96, **data},
        "objective": objective,
        "training": {"steps": 6, "micro_batch_size": 1, "gradient_accumulation_steps": 4},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 6},
        "evaluation": {"samples": 1, "max_new_tokens": 4},
        "tracking": {"log_every": 1, "report_to": []},
        "parallel": {"type": "fsdp", "tensor_parallel": 2} if processes > 1 else {"type": "single"},
        "topology": {"nproc_per_node": processes},
    }


def curve(out: Path, name: str, processes: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a run, which this trains."""
    spec = spec_of(out, name, processes)
    file = out / f"{spec['name']}.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    elastic = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(elastic if processes > 1 else ()), "-m", "tasks.runtime", str(file)]
    with (out / f"{spec['name']}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    metrics = out / "runs" / spec["name"] / "metrics.jsonl"
    points = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [(point["loss"], point["grad_norm"]) for point in points if "grad_norm" in point]


def row(curves: Mapping[int, list[tuple[float, float]]], name: str) -> str:
    """The largest differences between an objective's two curves."""
    one, two = curves[1], curves[2]
    assert len(one) == len(two) == 6, f"{name}: {len(one)} and {len(two)} steps"
    loss = max(abs(a - b) for (a, _), (b, _) in zip(one, two, strict=True))
    norm = max(abs(a - b) / a for (_, a), (_, b) in zip(one, two, strict=True))
    return f"| `{name}` | {one[0][0]:.4f} | {one[-1][0]:.4f} | {loss:.0e} | {norm:.0e} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--out", type=Path, default=Path("out/tensor-parallel"))
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if out.exists():
        parser.error(f"--out {out} exists, and runs in it would go on from there; remove it or name another folder")
    out.mkdir(parents=True)
    write_inputs(out)
    curves: dict[int, list[list[tuple[float, float]]]] = {}
    with ThreadPoolExecutor(len(arguments.only)) as pool:
        for processes in (1, 2):
            curves[processes] = list(pool.map(partial(curve, out, processes=processes), arguments.only))
    print("| objective | loss of step 1 | of step 6 | difference of losses | of norms, relative |")
    print("| --- | --- | --- | --- | --- |")
    for number, name in enumerate(arguments.only):
        print(row({processes: found[number] for processes, found in curves.items()}, name))


if __name__ == "__main__":
    main()
