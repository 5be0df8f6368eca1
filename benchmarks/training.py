"""Tokens per second and peak memory of training, beside what `strata estimate` says of the same spec.

    PYTHONPATH=kernels:platform:. python -m benchmarks.training [--only 1b] [--words 600] [--out out/training]
    PYTHONPATH=kernels:platform:. torchrun --nproc-per-node 2 -m benchmarks.training

Rows are packed with the built-in documents, of 35 tokens; with --words, with documents of about so many words of
Python's own sources, all of which are learned. With 100000 nearly every row is one document.

Runs with tensor_parallel and context_parallel are left out unless --only names them: PyTorch 2.11 ends in a
segmentation fault where others were before in the same process.

Trains each run of RUNS that has as many processes as there are, a few steps of the runtime's own loop from random
weights on its own data, and adds a line to a table in --out. Peak memory is what PyTorch's allocator handed out while
training; weights are made on the GPU and nothing is saved, which is all that differs from `python -m tasks.runtime`.
"""

from __future__ import annotations

import argparse
import csv
import gc
import hashlib
import json
import os
import random
import statistics
import sysconfig
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from strata_platform.estimate import GPUS, estimate, shape_of
from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, fingerprint, prepare
from tasks.runtime.extensions.callback_runner import CallbackRunner
from tasks.runtime.metrics.recorder import Recorder
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.adapters.quantization import quantize_linear_layers
from tasks.runtime.models.build import build_model_on_meta, materialize, set_special_tokens
from tasks.runtime.models.float8 import keep_slow_layers, quantize_frozen_weight, saves_frozen_weights
from tasks.runtime.objectives.training_step import build_training_step
from tasks.runtime.run_folder.folder import data_folder
from tasks.runtime.training.frameworks import load_framework
from tasks.runtime.training.session import Session, session
from tasks.runtime.training.train import build_job

# By the length of rows: steps to train, and how many of the first are left out of the speed. They compile, and capture
# CUDA graphs. Of the longest rows a step takes minutes, beside which that is little.
STEPS = {0: (12, 8), 32768: (3, 1), 262144: (1, 0)}
# Of a model that trains with CUDA graphs, which are captured for one shape of a batch after the other.
GRAPH_STEPS = (60, 40)

_WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_COMMON = {"model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    # Llama 3.2 1B.
    "1b": {
        **_COMMON,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    # Qwen3 0.6B.
    "0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    # Qwen3 30B-A3B.
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    # Llama 3.1 8B, and a quarter of its layers: quick to make.
    "8b": {**_COMMON, **_WIDE, "num_hidden_layers": 32},
    "8b-quarter": {**_COMMON, **_WIDE, "num_hidden_layers": 8},
    # Llama 3.1 70B.
    "70b": {
        **_COMMON,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
    },
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def with_fields(spec: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` with these values, by paths such as `optimizer.lr`."""
    for path, value in fields.items():
        section, _, name = path.rpartition(".")
        (spec.setdefault(section, {}) if section else spec)[name] = value
    return spec


@dataclass(frozen=True)
class Run:
    """A shape, how many processes train it, and the fields of its spec."""

    shape: str
    processes: int = 1
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[int, int]:
        """Steps to train, and how many of the first are not timed."""
        if self.shape == "0.6b":
            return GRAPH_STEPS
        length = self.fields.get("data.sequence_length", 0)
        return STEPS[max(shortest for shortest in STEPS if shortest <= length)]

    def spec(self, output: Path, model: Path) -> RunSpec:
        """Of a few steps on packed rows."""
        base: dict[str, Any] = {
            # A folder of its own: the runtime refuses another spec under the same name.
            "name": "measured-" + hashlib.sha256(repr(self).encode()).hexdigest()[:8],
            "output": str(output),
            "model": {"name": str(model), "dtype": "bfloat16"},
            "data": {"sequence_length": 4096},
            "training": {"steps": self.steps[0]},
            "checkpoint": {"every": 1000},
            # As by default: the host waits for the GPU only where it logs.
            "tracking": {"log_every": 10, "report_to": []},
            "runtime": {"framework": "torch"},
            # A process of its own for each run; the first steps compile as well.
            "kernels": {"warmup": False},
            # It would take what the process keeps of the run before for another program's memory.
            "faults": {"health_check": False},
            "topology": {"nproc_per_node": self.processes},
        }
        return RunSpec.model_validate(with_fields(base, self.fields))

    def label(self) -> str:
        """For people: what differs from the defaults."""
        fields = {path: value for path, value in self.fields.items() if path not in _DOCUMENTS}
        told = [f"{path.rpartition('.')[2]} {value}" for path, value in fields.items()]
        return ", ".join([self.shape, f"{self.processes} GPU", *told])


def _run(shape: str, rows: int, recompute: str = "none", processes: int = 1, **more: Any) -> Run:
    fields = {"training.micro_batch_size": rows, "training.gradient_checkpointing": recompute}
    return Run(shape, processes, {**fields, **{path.replace("__", "."): value for path, value in more.items()}})


# In the labels of runs that are to be alone in a process.
_ALONE = "_parallel"
# What --words changes of a run.
_DOCUMENTS = ("data.source", "objective.type")
_NF4 = {"adapter__type": "lora", "adapter__quantization": "nf4"}
_GRAPHS: tuple[dict[str, Any], ...] = (
    {},
    {"training__cuda_graphs": False},
    {"training__compile": True, "training__cuda_graphs": True},
    {"training__compile": True, "training__cuda_graphs": False},
    {"adapter__type": "lora"},
    {"adapter__type": "lora", "training__cuda_graphs": False},
    {"adapter__type": "lora", "adapter__lora_dropout": 0.05},
    {"training__gradient_accumulation_steps": 32},
    {"training__gradient_accumulation_steps": 32, "training__gradient_accumulation_dtype": "bfloat16"},
)
_IN_BACKWARD = {"optimizer__in_backward": True, "optimizer__max_grad_norm": 0}
_OFFLOADED = {"training__activation_offloading": True, **_IN_BACKWARD}
_STOCHASTIC = {"optimizer__precision": "stochastic_rounding"}
_EXPERTS = {"adapter__type": "lora", "adapter__target_parameters": ["gate_up_proj", "down_proj"]}
_WHOLE = {
    "parallel__reduce_dtype": "bfloat16",
    "parallel__reshard_after_forward": False,
    "optimizer__max_grad_norm": 0,
}

RUNS = (
    *(_run("0.6b", 2, data__sequence_length=2048, **more) for more in _GRAPHS),
    _run("1b", 4),
    _run("1b", 8, recompute="full"),
    _run("1b", 4, training__gradient_accumulation_steps=2),
    _run("1b", 4, adapter__type="lora"),
    _run("1b", 8, recompute="full", adapter__type="lora"),
    _run("1b", 4, recompute="full", kernels__enabled=False),
    _run("8b-quarter", 2),
    _run("8b-quarter", 4, recompute="full"),
    _run("8b-quarter", 2, adapter__type="lora"),
    _run("8b-quarter", 4, recompute="full", adapter__type="lora"),
    _run("8b", 2),
    _run("8b", 2, optimizer__precision="stochastic_rounding"),
    _run("8b", 2, optimizer__precision="nearest"),
    _run("8b", 2, training__float8="tensorwise"),
    _run("8b", 2, training__float8="rowwise"),
    _run("8b", 2, training__float8="tensorwise", adapter__type="lora"),
    _run("70b", 1, recompute="full", training__float8="tensorwise", adapter__type="lora"),
    _run("8b", 2, adapter__type="lora"),
    _run("8b", 2, recompute="full"),
    _run("8b", 2, recompute="full", adapter__type="lora"),
    _run("8b", 1, recompute="full", data__sequence_length=32768),
    *(
        _run("8b", 1, recompute="full", data__sequence_length=length, **_OFFLOADED)
        for length in (32768, 131072, 262144)
    ),
    *(
        _run(
            "30b-a3b",
            1,
            recompute="full",
            training__gradient_checkpointing_except_last=kept,
            optimizer__type="adamw_8bit",
            **_STOCHASTIC,
            **_IN_BACKWARD,
        )
        for kept in (0, 24, 47)
    ),
    _run("30b-a3b", 1, recompute="full", **_EXPERTS),
    _run("8b-quarter", 2, **_NF4),
    _run("8b-quarter", 4, recompute="full", **_NF4),
    _run("8b", 2, recompute="full", **_NF4),
    _run("1b", 4, processes=2, parallel__type="ddp"),
    _run("1b", 4, processes=2, parallel__type="fsdp"),
    _run("8b-quarter", 2, processes=2, parallel__type="fsdp"),
    _run("8b-quarter", 4, recompute="full", processes=2, parallel__type="fsdp"),
    _run("8b-quarter", 2, processes=2, parallel__type="ddp", adapter__type="lora"),
    _run("8b-quarter", 2, processes=2, parallel__type="fsdp", **_NF4),
    _run("8b-quarter", 2, processes=2, parallel__type="fsdp", parallel__tensor_parallel=2),
    _run("8b-quarter", 2, recompute="full", processes=2, parallel__type="fsdp", parallel__context_parallel=2),
    _run("8b", 4, processes=2, parallel__type="fsdp", **_WHOLE),
    _run("1b", 4, processes=4, parallel__type="ddp"),
    _run("1b", 4, processes=4, parallel__type="fsdp"),
    _run("8b-quarter", 4, recompute="full", processes=4, parallel__type="fsdp"),
    _run("8b", 4, recompute="full", processes=4, parallel__type="fsdp"),
    _run("8b", 4, processes=4, parallel__type="fsdp", **_WHOLE),
    _run("8b", 2, recompute="full", processes=4, parallel__type="fsdp", adapter__type="lora"),
)


class _Nowhere:
    """In place of the writer of checkpoints: these models are not worth keeping."""

    def save(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Save nothing."""

    def wait(self) -> None:
        """Have nothing to wait for."""

    def take_saved(self) -> list[tuple[int, Path]]:
        """Have saved nothing."""
        return []


def _randomize(weight: torch.Tensor) -> torch.Tensor:
    return weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)


def _make_in_fp8(model: PreTrainedModel, device: torch.device) -> None:
    """Random weights for a meta model, each in FP8 before the next is made: in bf16 70 billion do not fit on a GPU."""
    torch.manual_seed(0)
    for module in model.modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            made = _randomize(torch.empty(empty.shape, dtype=empty.dtype, device=device))
            setattr(module, name, nn.Parameter(made, requires_grad=empty.requires_grad))
        quantize_frozen_weight(module, device)
    model.tie_weights()


def measure(run: Session, data: PreparedData, untimed: int, *, profiler: Any = None) -> dict[str, float]:
    """Tokens per second and process, and peak GiB, of one process.

    profiler: of the last step but one; the last two are not timed then.
    """
    device = run.processes.device
    # Without one the program can be tried; of a CPU's memory nothing is known.
    gpu = device.type == "cuda"
    model = build_model_on_meta(run.spec.model)
    # Under fsdp the others get their parts of the main process's weights.
    whole = run.processes.is_main or run.spec.parallel.type == "ddp"
    in_fp8 = saves_frozen_weights(run.spec)
    if whole and not in_fp8:
        materialize(model, device)
        torch.manual_seed(run.spec.seed)
        for parameter in model.parameters():
            _randomize(parameter.data)
    # The strategy moves them: packed weights are packed when they move, under fsdp when they are handed out.
    with quantize_linear_layers(model, run.spec):
        add_adapter(model, run.spec.adapter, run.spec.seed)
    set_special_tokens(model, data.tokenizer())
    step = build_training_step(model, run.spec, device)
    if whole and in_fp8:
        keep_slow_layers(model, run.spec, run.processes, torch.bfloat16, {})
        _make_in_fp8(model, device)
    recorder = Recorder(run.spec, run.folder, run.processes, 0)
    if profiler is not None and run.spec.training.steps - 2 <= untimed:
        raise ValueError(f"training.steps {run.spec.training.steps} leaves no step to time beside the profiled one")
    ends: list[Any] = []
    with closing(recorder):
        job = build_job(
            run, data, step, "random", recorder, CallbackRunner(()), steps=run.spec.training.steps, resume_from=None
        )
        job.writer.close()
        job.writer = _Nowhere()  # type: ignore[assignment]
        end_step = job.end_step

        def end_and_note(*arguments: Any) -> None:
            end_step(*arguments)
            # Without waiting for the GPU, as in a run.
            ends.append(now(gpu))
            # Not of the last, at whose end a run looks at all weights.
            left = run.spec.training.steps - len(ends)
            if profiler is not None and left in (1, 2):
                if gpu:
                    torch.cuda.synchronize(device)
                (profiler.stop if left == 1 else profiler.start)()

        job.end_step = end_and_note  # type: ignore[method-assign]
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        begin = now(gpu)
        with closing(job.watchdog):
            load_framework(run.spec.runtime.framework)(job)
    if profiler is not None:
        del ends[-2:]
    seconds = median_seconds([begin, *ends], untimed + 1)
    tokens = run.spec.rows_per_step * run.spec.data.sequence_length / run.spec.topology.world_size
    peak = torch.tensor(float(torch.cuda.max_memory_allocated(device) if gpu else 0), device=device)
    if run.processes.world_size > 1:
        torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    return {
        "tokens/s/GPU": tokens / seconds,
        "GiB": float(peak) / 2**30,
        "reserved GiB": (torch.cuda.max_memory_reserved(device) if gpu else 0) / 2**30,
    }


def now(gpu: bool) -> Any:
    """The time, on a GPU that at which it gets here."""
    if not gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def median_seconds(ends: list[Any], untimed: int) -> float:
    """The median time of a step, from what `now` has given at the end of each; the first `untimed` are left out."""
    steps = list(zip(ends[untimed - 1 :], ends[untimed:], strict=False))
    if not hasattr(ends[0], "elapsed_time"):
        return statistics.median(end - begin for begin, end in steps)
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in steps) / 1e3


def write_documents(file: Path, words: int) -> None:
    """Rows of JSON with texts of half to one and a half times so many words, from Python's standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = [word for source in sources for word in source.read_text(encoding="utf-8", errors="ignore").split()]
    lengths, begin = random.Random(0), 0  # noqa: S311
    # Each process writes the same, and reads a whole one.
    part = file.with_suffix(f".{os.getpid()}")
    with part.open("w", encoding="utf-8") as rows:
        while begin < len(text):
            end = begin + lengths.randint(words // 2, words * 3 // 2)
            rows.write(json.dumps({"text": " ".join(text[begin:end])}) + "\n")
            begin = end
    part.replace(file)


def train_and_compare(run: Run, folder: Path, *, profiler: Any = None) -> dict[str, Any]:
    """A line of the table."""
    model = folder / run.shape
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(
        json.dumps({**SHAPES[run.shape], "architectures": [ARCHITECTURES[SHAPES[run.shape]["model_type"]]]})
    )
    base = run.spec(folder, model)
    # The tokenizer of the built-in data, of 4096 tokens: any will do.
    small = base.model_copy(update={"model": base.model.model_copy(update={"name": "tiny-llama"})})
    recipe = DataRecipe.from_spec(small, fingerprint(small))
    with session(base) as started:
        data = started.processes.on_main(
            lambda: prepare(recipe, data_folder(base.output, recipe), report=lambda _: None)
        )
        measured = measure(started, data, run.steps[1], profiler=profiler)
    guess = estimate(base, shape_of(base.model.name), GPUS["h200"])
    return {
        "run": run.label(),
        **measured,
        "estimated tokens/s/GPU": guess.tokens_per_second,
        "estimated GiB": guess.memory.peak / 2**30,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose label has this")
    parser.add_argument("--words", type=int, help="of a document, about; the built-in ones where it is not given")
    parser.add_argument("--out", type=Path, default=Path("out/training"))
    told = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows: list[dict[str, Any]] = []
    documents: dict[str, Any] = {}
    if told.words:
        told.out.mkdir(parents=True, exist_ok=True)
        file = told.out.absolute() / f"documents-{told.words}.jsonl"
        write_documents(file, told.words)
        documents = dict(zip(_DOCUMENTS, (str(file), "pretrain"), strict=True))
    for run in RUNS:
        label = run.label()
        if run.processes != processes or told.only not in label or (_ALONE in label and _ALONE not in told.only):
            continue
        measured = train_and_compare(replace(run, fields={**run.fields, **documents}), told.out)
        rows.append({**measured, "words": str(told.words or "built-in")})
        gc.collect()
        if os.environ.get("RANK", "0") == "0":
            print("; ".join(f"{k}: {v:.1f}" if isinstance(v, float) else v for k, v in rows[-1].items()), flush=True)
            name = f"training-{processes}-{told.words}.csv" if told.words else f"training-{processes}.csv"
            with (told.out / name).open("w", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]))
                table.writeheader()
                table.writerows(rows)


if __name__ == "__main__":
    main()
