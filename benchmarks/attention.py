"""Causal attention of rows with one sequence and of packed rows: cuDNN, FlashAttention 2 and FlashAttention 4.

    PYTHONPATH=kernels:platform:. python -m benchmarks.attention

Forward and backward pass in bf16, 8192 tokens, on one GPU. FlashAttention 4 is measured where `flash-attn-4` is
installed, as the runtime calls it. "Same bits" compares two backward passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from tasks.runtime.models.attention.flash_attention_4 import flash_attention_4, installed_version

TOKENS, REPEATS, WARM_SECONDS = 8192, 30, 0.5
# Query heads, key heads, features of a head.
HEADS = {"Llama 3.1 8B": (32, 8, 128), "Llama 3.2 1B": (32, 8, 64), "Qwen3 0.6B": (16, 8, 128)}
# Lengths of the sequences of all rows; one length for each row is a row with one sequence.
LENGTHS = {
    "2 rows of 4096": [4096] * 2,
    "3 sequences": [2100, 1996, 4096],
    "12 sequences of about 700": [700] * 11 + [492],
    "28 sequences of about 300": [300] * 27 + [92],
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def on_rows(backend: SDPBackend) -> Attention:
    """PyTorch's attention of rows of 4096 tokens."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (-1, 4096)).transpose(1, 2) for x in (query, key, value))
        with sdpa_kernel(backend):
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)

    return attend


def flash_4_on_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The runtime's, of rows of 4096 tokens."""
    return flash_attention_4(*(x.unflatten(0, (-1, 4096)) for x in (query, key, value))).flatten(0, 1)


def candidates(lengths: list[int], device: torch.device) -> dict[str, Attention]:
    """By name."""
    if len({*lengths}) == 1:
        found: dict[str, Attention] = {
            "cuDNN": on_rows(SDPBackend.CUDNN_ATTENTION),
            "FlashAttention 2": on_rows(SDPBackend.FLASH_ATTENTION),
        }
        four: Attention = flash_4_on_rows
    else:
        ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        both = torch.stack([ends, ends])
        longest = max(lengths), max(lengths)
        found = {
            "FlashAttention 2": lambda q, k, v: varlen_attn(q, k, v, *both.unbind(), *longest, window_size=(-1, 0))
        }
        four = lambda q, k, v: flash_attention_4(q, k, v, both, longest)  # noqa: E731
    return {**found, "FlashAttention 4": four} if installed_version() else found


def milliseconds(call: Callable[[], object]) -> float:
    """Of a call, on a GPU that is as warm as in training."""
    begin = time.monotonic()
    while time.monotonic() - begin < WARM_SECONDS:
        call()
        torch.cuda.synchronize()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    ends[0].record()
    for _ in range(REPEATS):
        call()
    ends[1].record()
    torch.cuda.synchronize()
    return ends[0].elapsed_time(ends[1]) / REPEATS


def measured(attend: Attention, inputs: list[Tensor], grad: Tensor) -> str:
    """Cells of a line of the table."""

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs), inputs, grad)

    begin = time.monotonic()
    first = backward()
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    same = all(torch.equal(x, y) for x, y in zip(first, backward(), strict=True))
    with torch.no_grad():
        forward = milliseconds(lambda: attend(*inputs))
    return f"{seconds:.1f} | {forward:.2f} | {milliseconds(backward):.2f} | {'yes' if same else 'no'}"


def main() -> None:
    """Measure and print."""
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, flash-attn-4 {installed_version()}\n")
    print("| heads | lengths | | first call, s | forward, ms | forward and backward, ms | same bits |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model, (heads, shared, size) in HEADS.items():
        for name, lengths in LENGTHS.items():
            torch.manual_seed(0)
            shapes = [(TOKENS, count, size) for count in (heads, shared, shared, heads)]
            *inputs, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
            inputs = [x.requires_grad_() for x in inputs]
            for kind, attend in candidates(lengths, device).items():
                print(f"| {model} | {name} | {kind} | {measured(attend, inputs, grad)} |", flush=True)


if __name__ == "__main__":
    main()
