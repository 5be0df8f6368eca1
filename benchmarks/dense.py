"""Full fine-tuning of Llama 3.1 8B on one GPU, beside torch.compile and Liger on transformers' model, in one process.

    PYTHONPATH=kernels:platform:. python -m benchmarks.dense [--only "ours; compile"] [--profile ours] [--shape 8b]

Rows of 4096 tokens, random weights in bf16, clipping at 1, AdamW. Ours are runs of `benchmarks.training` on documents
of about 100,000 words. The peers step by PyTorch's fused AdamW, which drops updates smaller than bf16's rounding; ours
keep those bits, 2 bytes for each weight, but in runs called `nearest`. `compile` compiles each layer, and the head with
its loss. Each line has tokens per second, what PyTorch's allocator handed out, and the GPU's clock and power meanwhile;
the first the chip's limits now.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.kinds import kinds_of
from benchmarks.measure import limits
from benchmarks.plain_llama import plain_llama, time_steps
from benchmarks.training import SHAPES, Run, train_and_compare, write_documents

LENGTH = 4096
# Steps, and how many of the first are not timed: without recomputation, and with. In the first four the runtime finds
# out whether graphs would pay.
STEPS, RECOMPUTED_STEPS = (9, 4), (6, 2)


@dataclass(frozen=True)
class Dense(Run):
    """A run of ours."""

    @property
    def steps(self) -> tuple[int, int]:
        """As for the peers."""
        return STEPS if self.fields["training.gradient_checkpointing"] == "none" else RECOMPUTED_STEPS


@dataclass(frozen=True)
class Peer:
    """A run of transformers' model."""

    library: str
    rows: int
    recompute: bool = False


def _ours(rows: int = 2, recompute: str = "none", **more: Any) -> Dense:
    fields = {"training.micro_batch_size": rows, "training.gradient_checkpointing": recompute, "tracking.log_every": 10}
    return Dense("8b", 1, {**fields, **{path.replace("__", "."): value for path, value in more.items()}})


_IN_BACKWARD = {"optimizer__in_backward": True}
RUNS: dict[str, Dense | Peer] = {
    "ours": _ours(),
    "ours, nearest": _ours(optimizer__precision="nearest"),
    "ours, in_backward": _ours(**_IN_BACKWARD),
    "ours, in_backward, no clipping": _ours(**_IN_BACKWARD, optimizer__max_grad_norm=0),
    "compile": Peer("compile", 2),
    "Liger": Peer("liger", 2),
    "transformers": Peer("plain", 2),
    "ours, full": _ours(4, "full"),
    "ours, attention": _ours(4, "attention"),
    "ours, full, in_backward": _ours(4, "full", **_IN_BACKWARD),
    "ours, attention, in_backward": _ours(4, "attention", **_IN_BACKWARD),
    "ours, attention, in_backward, offloading": _ours(
        4, "attention", **_IN_BACKWARD, training__activation_offloading=True
    ),
    "ours, attention, in_backward, offloading, but the last 5": _ours(
        4,
        "attention",
        **_IN_BACKWARD,
        training__activation_offloading=True,
        training__gradient_checkpointing_except_last=5,
    ),
    "ours, full, but the last 7": _ours(4, "full", training__gradient_checkpointing_except_last=7),
    "ours, per_op, in_backward": _ours(4, "per_op", **_IN_BACKWARD),
    "compile, recomputed": Peer("compile", 4, recompute=True),
    "Liger, recomputed": Peer("liger", 4, recompute=True),
}


def train_peer(peer: Peer, shape: str) -> dict[str, float]:
    """Tokens per second and GiB of transformers' model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    liger = peer.library == "liger"
    patch = importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama if liger else None
    model = plain_llama(shape, device, patch and (lambda model: patch(model=model)))
    if peer.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss_of = _loss
    if peer.library == "compile" and device.type == "cuda":
        for layer in model.model.layers:
            layer.compile()
        loss_of = torch.compile(_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(tokens: Tensor) -> None:
        if liger:
            loss = model(input_ids=tokens, labels=tokens).loss
        else:
            loss = loss_of(model.model(input_ids=tokens).last_hidden_state, model.lm_head.weight, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(step, peer.rows, LENGTH, *(RECOMPUTED_STEPS if peer.recompute else STEPS), device)


def _loss(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """As transformers computes it."""
    logits = functional.linear(hidden, head).float()
    labels = functional.pad(tokens, (0, 1), value=-100)[..., 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@contextmanager
def watched(found: dict[str, float]) -> Iterator[None]:
    """Add the GPU's median clock (MHz), power (W) and temperature (°C) inside the block to `found`."""
    if not torch.cuda.is_available():
        yield
        return
    with tempfile.TemporaryFile("w+") as out:
        fields = "clocks.sm,power.draw,temperature.gpu,utilization.gpu"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", "250", "-i", "0"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()
        out.seek(0)
        whole = [line.split(",") for line in out if line.count(",") == 3 and "N/A" not in line]
    rows = [[float(value) for value in line] for line in whole]
    busy = [row for row in rows if row[3] > 95] or rows
    for name, values in zip(("MHz", "W", "°C"), zip(*busy, strict=True), strict=False):
        found[name] = statistics.median(values)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with semicolons between them")
    parser.add_argument("--profile", default="", help="runs of ours of which a step is taken apart")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--out", type=Path, default=Path("out/dense"))
    told = parser.parse_args()
    names = [name.strip() for name in told.only.split(";") if name.strip()] or [*RUNS]
    if unknown := {*names} - {*RUNS}:
        parser.error(f"--only has {', '.join(sorted(unknown))}; there are {'; '.join(RUNS)}")
    profiled = {name.strip() for name in told.profile.split(";") if name.strip()}
    if unknown := profiled - {name for name in names if isinstance(RUNS[name], Dense)}:
        parser.error(
            f"--profile has {', '.join(sorted(unknown))}, which is no run of ours among those that are measured"
        )
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)
    told.out.mkdir(parents=True, exist_ok=True)
    documents = told.out.absolute() / "documents.jsonl"
    if not documents.exists():
        write_documents(documents, 100_000)
    texts = {"data.source": str(documents), "objective.type": "pretrain"}
    if torch.cuda.is_available():
        copy, product = limits(torch.device("cuda"))
        print(f"{torch.cuda.get_device_name()}: copy {copy:,.0f} GB/s, bf16 product {product:,.0f} TFLOP/s", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        torch._dynamo.reset()
        begin, meanwhile, profiler, run = time.perf_counter(), dict[str, float](), None, RUNS[name]
        with watched(meanwhile):
            if isinstance(run, Peer):
                found[name] = train_peer(run, told.shape)
            else:
                run = replace(run, shape=told.shape, fields={**run.fields, **texts})
                if name in profiled:
                    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                found[name] = train_and_compare(run, told.out, profiler=profiler)
        found[name] |= meanwhile
        numbers = {key: value for key, value in found[name].items() if isinstance(value, float)}
        line = "; ".join(f"{key} {value:,.1f}" for key, value in numbers.items() if "estimated" not in key)
        print(f"{name}: {line}; took {time.perf_counter() - begin:.0f} s", flush=True)
        if profiler is not None:
            sums, longest = kinds_of(profiler)
            print("  ms of a step: " + "; ".join(f"{kind} {ms:.1f}" for kind, ms in sums.items()), flush=True)
            print("  of the others: " + "; ".join(f"{kernel[:60]} {ms:.1f}" for kernel, ms in longest), flush=True)
    (told.out / "dense.json").write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
