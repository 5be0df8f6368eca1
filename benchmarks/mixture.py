"""Tokens per second and memory of a cut mixture of experts, beside transformers' and PEFT's own code.

    PYTHONPATH=kernels:platform:. python -m benchmarks.mixture [--layers 4] [--rows 4] [--only lora]

The shape is Qwen3-30B-A3B's with fewer layers and random weights; rows are 4096 random tokens. All weights learn, or
LoRA of rank 16 on attention and experts does; AdamW in bf16. Each line is the median of five steps after two.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.training import SHAPES
from strata_kernels import patch_model

LENGTH, STEPS, UNTIMED = 4096, 7, 2


@dataclass(frozen=True)
class Run:
    """What learns, and what computes it: `left_out` of the kernels, or None for no kernels at all."""

    name: str
    lora: bool
    left_out: tuple[str, ...] | None


RUNS = (
    Run("all weights, kernels", False, ()),
    Run("all weights, kernels but experts", False, ("experts",)),
    Run("all weights, transformers", False, None),
    Run("lora, kernels", True, ()),
    Run("lora, kernels but experts", True, ("experts",)),
    Run("lora, transformers and PEFT", True, None),
)


@dataclass(frozen=True)
class Measured:
    """Of the timed steps, and the losses of the first and the last step."""

    tokens_per_second: float
    gib: float
    losses: tuple[float, float]


def build(run: Run, shape: dict[str, Any], device: torch.device) -> Any:
    """The model, in training mode; its experts are transformers' `grouped_mm` where no kernel computes them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape, use_cache=False)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    if run.lora:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        experts = ["gate_up_proj", "down_proj"]
        LoraModel(model, LoraConfig(r=16, lora_alpha=32, target_modules=names, target_parameters=experts), "default")
        model.to(device, torch.bfloat16)
    if run.left_out is not None:
        patch_model(model, exclude=run.left_out)
    return model.train()


def measure(run: Run, shape: dict[str, Any], rows: int, length: int, device: torch.device) -> Measured:
    """Train a few steps."""
    model = build(run, shape, device)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, 1e-4, fused=True)
    torch.manual_seed(1)
    batches = [torch.randint(shape["vocab_size"], (rows, length), device=device) for _ in "ab"]
    times, losses = [], []
    for step in range(STEPS):
        if step == UNTIMED and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin, tokens = time.perf_counter(), batches[step % 2]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Waits for the device.
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    median = sorted(times[UNTIMED:])[(STEPS - UNTIMED) // 2]
    return Measured(rows * length / median, peak, (losses[0], losses[-1]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    given = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.layers} layers, {given.rows} x {LENGTH}")
    for run in (each for each in RUNS if given.only in each.name):
        try:
            found = measure(run, {**SHAPES["30b-a3b"], "num_hidden_layers": given.layers}, given.rows, LENGTH, device)
            losses = " to ".join(f"{loss:.4f}" for loss in found.losses)
            print(
                f"{run.name:34}{found.tokens_per_second:10,.0f} tokens/s{found.gib:7.1f} GiB  loss {losses}", flush=True
            )
        except torch.OutOfMemoryError:
            print(f"{run.name:34}out of memory", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
