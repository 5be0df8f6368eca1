"""transformers' Llama with random weights, and the time of a peer's steps on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training import SHAPES, median_seconds, now
from tasks.runtime.models.build import materialize


def plain_llama(
    shape: str, device: torch.device, patch: Callable[[LlamaForCausalLM], object] | None = None
) -> LlamaForCausalLM:
    """A model of one of `SHAPES` in bf16, to be trained. `patch` gets it before it has memory."""
    settings = {name: value for name, value in SHAPES[shape].items() if name != "model_type"}
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(LlamaConfig(**settings, use_cache=False, attn_implementation="sdpa"))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    if patch is not None:
        patch(model)
    materialize(model, device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02) if parameter.ndim > 1 else parameter.data.fill_(1)
    return model.train()  # type: ignore[no-any-return]


def time_steps(
    step: Callable[[Tensor], None], rows: int, length: int, steps: int, untimed: int, device: torch.device
) -> dict[str, float]:
    """Tokens per second and GiB of `step` on random tokens, measured as `benchmarks.training` measures runs."""
    tokens = torch.randint(4096, (rows, length), device=device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ends: list[Any] = []
    for _ in range(steps):
        step(tokens)
        ends.append(now(on_gpu))
    seconds = median_seconds(ends, untimed)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return {"tokens/s/GPU": rows * length / seconds, "GiB": peak / 2**30}
