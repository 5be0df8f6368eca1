"""What `benchmarks.ops` measures: a row per operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import linear_cross_entropy, rms_norm, rope, swiglu

Shape = Mapping[str, int]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One operator.

    ours, torch: called with the inputs; the second is what eager PyTorch does, and in fp64 the truth.
    inputs: (shape, dtype, device) → tensors; those that require gradients are differentiated.
    shapes: what is measured.
    liger: the name of the peer's function in `liger_kernel.transformers.functional`, and how it is called.
    bytes: bytes per element of `elements` that forward and backward move at the least, bf16; zeros if bound by FLOPs.
    elements: the number that `bytes` counts by.
    flops: floating-point operations of forward and backward.
    products: the matrix products alone, for an operator that is built around them.
    """

    name: str
    ours: Function
    torch: Function
    inputs: Callable[[Shape, torch.dtype, torch.device], tuple[Tensor, ...]]
    shapes: tuple[Shape, ...]
    liger: tuple[str, Callable[[Function], Function]]
    bytes: tuple[int, int] = (0, 0)
    elements: Callable[[Shape], int] = lambda shape: 0
    flops: Callable[[Shape], int] = lambda shape: 0
    products: Callable[..., Any] | None = field(default=None)


def random(*sizes: int, dtype: torch.dtype, device: torch.device, trained: bool = True) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.float32).to(dtype).requires_grad_(trained)


def _rms_norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    x = random(shape["rows"], shape["features"], dtype=dtype, device=device)
    return x, random(shape["features"], dtype=dtype, device=device)


def _rms_norm_torch(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rope_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """As attention gives them: heads and positions transposed, cos and sin shared by the batch."""
    batch, positions, features = shape["batch"], shape["positions"], shape["features"]
    q, k = (
        random(batch, positions, shape[heads], features, dtype=dtype, device=device).detach().transpose(1, 2)
        for heads in ("heads", "kv_heads")
    )
    frequencies = 1e4 ** -(torch.arange(features // 2, device=device) / (features // 2))
    angle = torch.outer(torch.arange(positions, device=device), frequencies).repeat(1, 2)[None]
    return q.requires_grad_(), k.requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype)


def _rope_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]

    return rotate(q), rotate(k)


def _swiglu_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    gate, up = (random(shape["rows"], shape["features"], dtype=dtype, device=device) for _ in range(2))
    return gate, up


def _swiglu_torch(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _linear_cross_entropy_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rows, features, vocabulary = shape["rows"], shape["features"], shape["vocabulary"]
    x = random(rows, features, dtype=dtype, device=device)
    weight = (torch.randn(vocabulary, features, device=device) * features**-0.5).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocabulary, (rows,), device=device)


def _linear_cross_entropy_torch(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = functional.linear(x, weight)
    return functional.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), target)


def _products(x: Tensor, weight: Tensor, _: Tensor) -> None:
    """The three products of linear_cross_entropy, over all rows at once: logits, then dx and dW from them."""
    logits = x @ weight.t()
    logits @ weight
    logits.t() @ x


OPERATORS = (
    Operator(
        name="rms_norm",
        ours=rms_norm,
        torch=_rms_norm_torch,
        inputs=_rms_norm_inputs,
        shapes=(
            {"rows": 16384, "features": 4096},
            {"rows": 8192, "features": 8192},
            {"rows": 16384, "features": 2560},
            {"rows": 8192, "features": 16384},
            {"rows": 65536, "features": 128},
        ),
        liger=("liger_rms_norm", lambda f: lambda x, weight: f(x, weight, 1e-6, in_place=False)),
        bytes=(4, 6),
        elements=lambda shape: shape["rows"] * shape["features"],
    ),
    Operator(
        name="rope",
        ours=rope,
        torch=_rope_torch,
        inputs=_rope_inputs,
        shapes=(
            {"batch": 4, "positions": 4096, "heads": 32, "kv_heads": 8, "features": 128},
            {"batch": 1, "positions": 32768, "heads": 32, "kv_heads": 4, "features": 64},
        ),
        liger=("liger_rope", lambda f: f),
        bytes=(4, 4),
        elements=lambda s: s["batch"] * s["positions"] * (s["heads"] + s["kv_heads"]) * s["features"],
    ),
    Operator(
        name="swiglu",
        ours=swiglu,
        torch=_swiglu_torch,
        inputs=_swiglu_inputs,
        shapes=({"rows": 8192, "features": 14336}, {"rows": 16384, "features": 8192}),
        liger=("liger_swiglu", lambda f: f),
        bytes=(6, 10),
        elements=lambda shape: shape["rows"] * shape["features"],
    ),
    Operator(
        name="linear_cross_entropy",
        ours=linear_cross_entropy,
        torch=_linear_cross_entropy_torch,
        inputs=_linear_cross_entropy_inputs,
        shapes=(
            {"rows": 8192, "features": 4096, "vocabulary": 128256},
            {"rows": 16384, "features": 2048, "vocabulary": 32000},
            {"rows": 4096, "features": 3584, "vocabulary": 152064},
        ),
        liger=("liger_fused_linear_cross_entropy", lambda f: f),
        flops=lambda shape: 6 * shape["rows"] * shape["features"] * shape["vocabulary"],
        products=_products,
    ),
)
