"""Frameworks, strategies and adapters on the GPUs that are there: losses, resumes, tokens per second and memory.

    PYTHONPATH=kernels:platform:. python -m benchmarks.matrix [--processes 2] [--only fsdp] [--minutes 9]

Trains a Llama of 0.1 billion parameters on real text, in bfloat16, STEPS steps of ROWS rows: by the plain loop in one
process, then by each combination of framework, strategy and adapter that the spec accepts, and by options of strategies
and optimizers. Each run is then trained again from its first checkpoint, in fresh processes. Losses are compared with
those of one process; a resume is exact when losses and gradient norms have the same bits. All have
`training.deterministic` but two, which tell what that costs. Experts are spread in a mixture of 32, `name=mixture`. The
table is printed, and kept in out/matrix.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from strata_platform.errors import SpecError
from strata_platform.spec import DataRecipe, RunSpec, load_spec
from strata_platform.spec.run_spec import Runtime
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tests.runtime.helpers.train_only import train_spec

# Steps to train, those of them that are saved, and how many of the first are left out of the speed.
STEPS, SAVED, UNTIMED = 8, 4, 2
# Rows of a step, by all processes, and of a micro-batch; tokens of a row.
ROWS, MICRO_BATCH, LENGTH = 16, 4, 2048
# Cells that are trained before they are resumed, in fresh processes; their checkpoints have a gigabyte each.
TOGETHER = 16
FRAMEWORKS: tuple[str, ...] = get_args(Runtime.model_fields["framework"].annotation)
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"head_dim": 64, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4}


@dataclass(frozen=True)
class Cell:
    """A line of the table: a framework, and the fields in which its spec differs."""

    framework: str
    strategy: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.framework, self.strategy, *self.told()])

    def told(self) -> list[str]:
        """The fields, for people."""
        return [f"{path.partition('.')[2]}={value}" for path, value in self.fields.items()]

    def alike(self) -> Cell:
        """What trains the same in one process."""
        # The engine's optimizer has exact weights, of those that learn.
        learns = self.strategy == "deepspeed" and "adapter.type" not in self.fields
        exact = {"model.dtype": "float32"} if learns else {}
        same = {path: value for path, value in self.fields.items() if path.partition(".")[0] in _OF_THE_MODEL}
        for path in ("optimizer.in_backward", "optimizer.paged"):
            same.pop(path, None)
        return Cell("torch", "single", {**same, **exact})

    def processes(self, several: int) -> int:
        """How many train it."""
        return 1 if self.strategy == "single" else several

    def is_shared(self) -> bool:
        """Whether several processes compute the same rows."""
        return any(path in _SHARED for path in self.fields)

    def is_alone(self) -> bool:
        """Whether nothing may have trained in its processes before.

        DeepSpeed's engine leaves memory behind, and where rows are shared PyTorch 2.11 ends in a segmentation fault.
        """
        return self.strategy == "deepspeed" or self.is_shared()

    def spec(self, output: Path, several: int) -> RunSpec:
        """Raises SpecError when the combination is refused."""
        processes = self.processes(several)
        values: dict[str, Any] = {
            "name": re.sub("[^a-z0-9]+", "-", str(self).lower())[:53].rstrip("-"),
            "output": str(output),
            "model": {"name": "model", "dtype": "bfloat16"},
            "optimizer": {"lr": 3e-4},
            "data": {"sequence_length": LENGTH},
            "training": {
                "steps": STEPS,
                "micro_batch_size": MICRO_BATCH,
                "gradient_accumulation_steps": ROWS // MICRO_BATCH // (1 if self.is_shared() else processes),
                "deterministic": True,
            },
            "checkpoint": {"every": SAVED, "keep_last": 2},
            "evaluation": {"samples": 0},
            "faults": {"health_check": False},
            # The first steps compile what is missing, and are not timed.
            "kernels": {"warmup": False},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": self.framework},
            "parallel": {"type": self.strategy},
            "topology": {"nproc_per_node": processes},
        }
        for path, value in self.fields.items():
            section, _, name = path.partition(".")
            values.setdefault(section, {})[name] = value
        values["model"]["name"] = str(output / values["model"]["name"])
        return RunSpec.model_validate(values)


# Sections that change what is computed, not where.
_OF_THE_MODEL = ("model", "adapter", "optimizer")
_SHARED = ("parallel.tensor_parallel", "parallel.context_parallel")
_LORA = {"adapter.type": "lora"}


def _cells(several: int) -> Iterator[Cell]:
    for strategy, framework, adapter in itertools.product(
        ("single", "ddp", "fsdp", "deepspeed"), FRAMEWORKS, ({}, _LORA)
    ):
        yield Cell(framework, strategy, dict(adapter))
    for framework in ("hf", "torch"):
        yield Cell(framework, "deepspeed", {"parallel.stage": 3})
    everywhere = {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"}
    yield Cell("torch", "deepspeed", {"parallel.stage": 3, **everywhere})
    for framework in ("hf", "torch"):
        yield Cell(framework, "fsdp", {"parallel.cpu_offload": True})
    yield Cell("torch", "fsdp", {"parallel.reshard_after_forward": False})
    yield Cell("torch", "fsdp", {"model.dtype": "float32", "parallel.compute_dtype": "bfloat16"})
    for recomputed in ("per_op", "selective", "full"):
        yield Cell("torch", "fsdp", {"training.gradient_checkpointing": recomputed})
    for strategy in ("ddp", "fsdp"):
        yield Cell("torch", strategy, {"training.compile": True})
    for strategy in ("single", "ddp", "fsdp"):
        yield Cell("torch", strategy, {"optimizer.type": "adamw_8bit"})
    yield Cell("torch", "single", {"optimizer.paged": True})
    yield Cell("torch", "fsdp", {"optimizer.type": "adamw_8bit", "optimizer.paged": True})
    yield Cell("torch", "fsdp", {"optimizer.type": "muon"})
    one_pass = {"training.micro_batch_size": ROWS // several, "training.gradient_accumulation_steps": 1}
    yield Cell("torch", "fsdp", {"optimizer.in_backward": True, "optimizer.max_grad_norm": 0, **one_pass})
    for strategy in ("single", "ddp", "fsdp", "deepspeed"):
        yield Cell("torch", strategy, {**_LORA, "adapter.quantization": "nf4"})
    yield Cell("hf", "fsdp", {**_LORA, "adapter.use_dora": True})
    for strategy in ("single", "fsdp"):
        yield Cell("torch", strategy, {"training.deterministic": False})
    if several > 2:
        yield Cell("torch", "fsdp", {"parallel.replicas": several // 2})
    mixture = {"model.name": "mixture"}
    yield Cell("torch", "fsdp", mixture)
    for framework in FRAMEWORKS:
        yield Cell(framework, "fsdp", {**mixture, "parallel.expert_parallel": several})
    for path, framework in itertools.product(_SHARED, FRAMEWORKS):
        yield Cell(framework, "fsdp", {path: several})
    yield Cell("torch", "fsdp", {"parallel.tensor_parallel": several, "parallel.cpu_offload": True})
    yield Cell("torch", "fsdp", {"parallel.tensor_parallel": several, "training.compile": True})


def cells_of(output: Path, several: int, only: str) -> dict[str, tuple[Cell, RunSpec]]:
    """What the spec accepts, by name; first what others are compared with."""
    found: dict[str, tuple[Cell, RunSpec]] = {}
    wanted = [cell for cell in _cells(several) if only in str(cell)]
    for cell in [*(cell.alike() for cell in wanted), *wanted]:
        try:
            found.setdefault(str(cell), (cell, cell.spec(output, several)))
        except SpecError as refused:
            print(f"refused: {cell}: {refused}", file=sys.stderr)
    return found


def write_models(output: Path) -> None:
    """A Llama and a mixture of random weights, and the tokenizer of the built-in data."""
    spec = RunSpec.model_validate({"name": "data", "output": str(output), "data": {"sequence_length": LENGTH}})
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    tokenizer = prepare(recipe, data_folder(spec.output, recipe), report=print).tokenizer()
    for folder in ("model", "mixture"):
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model: PreTrainedModel = (
                LlamaForCausalLM(LlamaConfig(**SHAPE))
                if folder == "model"
                else Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS))
            )
        model.bfloat16().save_pretrained(output / folder)
        tokenizer.save_pretrained(output / folder)


def train_all(arguments: Sequence[str]) -> None:
    """In the processes of a launch: train each `SPEC[@STEP]`; with a step, go on from there."""
    configure_logging()
    for argument in arguments:
        file, _, step = argument.partition("@")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        train_spec(load_spec(file), int(step) if step else None)


def launch(specs: Sequence[RunSpec], end: float, *, again: bool = False) -> list[str]:
    """Train specs of as many processes in one launch, and what is left after a failure in another; what failed."""
    failed: list[str] = []
    left = list(specs)
    while left and time.monotonic() < end:
        processes = left[0].topology.nproc_per_node
        command = [sys.executable, "-m"]
        if processes > 1:
            command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        files = [f"{spec.output}/{spec.name}.json" for spec in left]
        command += ["benchmarks.matrix", "--train", *(f"{file}@{SAVED}" if again else file for file in files)]
        try:
            ended = subprocess.run(
                command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=end - time.monotonic()
            )
        except subprocess.TimeoutExpired:
            break
        if ended.returncode == 0:
            return failed
        left = list(itertools.dropwhile(lambda spec: _is_done(spec, again=again), left))
        # A launch may also fail when all of its runs are done.
        name = left.pop(0).name if left else f"the end of {specs[-1].name}"
        print(f"failed: {name}, exit {ended.returncode}\n{ended.stdout[-3000:]}", file=sys.stderr, flush=True)
        failed.append(name)
    return failed + [f"{spec.name} (no time)" for spec in left if not _is_done(spec, again=again)]


def _is_done(spec: RunSpec, *, again: bool) -> bool:
    return RunFolder.of(spec).record.exists() and (not again or len(_attempts(spec)) > 1)


def _attempts(spec: RunSpec) -> dict[int, list[dict[str, Any]]]:
    """Steps by attempt."""
    file = RunFolder.of(spec).metrics
    steps = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.exists() else ()
    return {attempt: list(group) for attempt, group in itertools.groupby(steps, lambda step: step["attempt"])}


def row_of(cell: Cell, spec: RunSpec, reference: RunSpec) -> dict[str, Any] | None:
    """A line of the table; None when it did not train."""
    attempts, plain = _attempts(spec), _attempts(reference)
    if len(attempts.get(0, ())) < STEPS or len(plain.get(0, ())) < STEPS:
        return None
    first, again = attempts[0], attempts.get(1, [])
    losses = zip((step["loss"] for step in first), (step["loss"] for step in plain[0]), strict=True)
    same, resumed = ([(step["loss"], step["grad_norm"]) for step in steps] for steps in (first[SAVED:], again))
    return {
        "framework": cell.framework,
        "strategy": cell.strategy,
        "fields": " ".join(cell.told()),
        "processes": spec.topology.world_size,
        "loss difference": max(abs(one - other) / other for one, other in losses),
        "resumed": "no" if len(resumed) < len(same) else "exactly" if resumed == same else "with other bits",
        "tokens/s": statistics.median(step["tokens_per_second"] for step in first[UNTIMED:]),
        "GiB": max(step["memory_bytes"] for step in first) / 2**30,
    }


def measure(output: Path, several: int, only: str, end: float) -> list[str]:
    """Train all cells; returns what failed."""
    cells = cells_of(output, several, only)
    for _, spec in cells.values():
        (output / f"{spec.name}.json").write_text(spec.model_dump_json(), encoding="utf-8")
    together = [spec for cell, spec in cells.values() if not cell.is_alone()]
    by_processes = [
        [spec for spec in together if spec.topology.world_size == processes]
        for processes in dict.fromkeys((1, several))
    ]
    groups = [[specs[first : first + TOGETHER]] for specs in by_processes for first in range(0, len(specs), TOGETHER)]
    alone = [[spec] for cell, spec in cells.values() if cell.is_alone()]
    failed: list[str] = []
    for launches in (*groups, alone):
        failed += launch_twice(launches, end)
        write_table([row_of(cell, spec, cells[str(cell.alike())][1]) for cell, spec in cells.values()], output)
    return failed


def launch_twice(launches: Sequence[Sequence[RunSpec]], end: float) -> list[str]:
    """Train, one launch after another, and again from the first checkpoints; what failed."""
    failed = [name for group in launches for name in launch(group, end)]
    again = [[spec for spec in group if _is_done(spec, again=False)] for group in launches]
    # Their speeds are not looked at, so they go side by side.
    with ThreadPoolExecutor() as pool:
        for found in pool.map(lambda group: launch(group, end, again=True), again):
            failed += [f"{name}, again" for name in found]
    for spec in itertools.chain(*launches):
        # Gigabytes, of which nothing is read any more.
        shutil.rmtree(RunFolder.of(spec).checkpoints, ignore_errors=True)
    return failed


def write_table(found: Sequence[dict[str, Any] | None], output: Path) -> None:
    """matrix.csv, and matrix.md with the same."""
    rows = [row for row in found if row]
    if not rows:
        return
    with (output / "matrix.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    lines = ["| framework | strategy | | loss difference | resumed | tokens/s | GiB |", "| --- " * 7 + "|"]
    for row in rows:
        told = row["fields"].replace(" ", ", ")
        numbers = f"{row['loss difference']:.0e} | {row['resumed']} | {row['tokens/s']:,.0f} | {row['GiB']:.1f}"
        lines.append(f"| {row['framework']} | {row['strategy']} | {told} | {numbers} |")
    (output / "matrix.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """0 when every cell trained and was resumed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="of the strategies of several")
    parser.add_argument("--only", default="", help="cells whose name has this, such as 'torch fsdp'")
    parser.add_argument("--minutes", type=float, default=30, help="after which nothing more is started")
    parser.add_argument("--out", type=Path, default=Path("out/matrix"))
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.train:
        train_all(told.train)
        return 0
    end = time.monotonic() + told.minutes * 60
    shutil.rmtree(told.out, ignore_errors=True)
    told.out.mkdir(parents=True)
    write_models(told.out)
    failed = measure(told.out.absolute(), told.processes, told.only, end)
    table = told.out / "matrix.md"
    print(table.read_text(encoding="utf-8") if table.exists() else "nothing trained")
    print(f"{len(failed)} failed", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
