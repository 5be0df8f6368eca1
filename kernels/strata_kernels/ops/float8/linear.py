"""A linear layer with three FP8 products, and one whose weight is stored in FP8.

    y  = x8 · w8ᵀ              x8, w8 in E4M3
    dx = d8 · w8               d8 = fp8(dy): tensorwise in E5M2, rowwise in E4M3
    dw = d8ᵀ · x8

Each operand is cast for the reduction dimension of its product. The weight stays bf16 or fp32: it is cast for each
product, and its gradient has its dtype. x8ᵀ is saved for backward, one byte per element; nothing if the weight is
frozen. Layers with the same input, e.g. projections of queries, keys and values, share its cast.

Products for dx and dw accumulate in fp32; only the forward pass uses the fast accumulators.

Source: torchao's recipes `tensorwise` and `rowwise` (`torchao.float8.convert_to_float8_training`), with equal results;
Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433).
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .._operator import is_observed
from .cast import Cast, cast, require_matrix, transpose
from .largest import largest_of
from .product import product

Scaling = Literal["tensorwise", "rowwise"]


class _Last:
    """The last input that a thread cast, and its cast, for the next layer with the same input."""

    key: tuple[Any, ...] | None = None
    found: Cast | None = None

    def drop(self, _: Any) -> None:
        self.key = self.found = None


class _Threads(threading.local):
    """Thread-local state: an input may be freed in another thread, e.g. that of backward."""

    def __init__(self) -> None:
        self.last = _Last()


_threads = _Threads()


def cast_input(x: Tensor, scaling: Scaling, columns: bool) -> Cast:
    """The cast of the input [..., K] as a matrix; reuses the previous layer's cast of the same tensor."""
    if is_observed():
        # Compilers eliminate common casts themselves, and a recomputation must repeat the first pass exactly.
        return cast(x.reshape(-1, x.shape[-1]), scaling, rows=True, columns=columns)
    last = _threads.last
    if last.key is not None and last.key[0]() is x and last.key[1:] == (x._version, scaling, columns):
        assert last.found is not None
        return last.found
    amax = largest_of(x)
    found = cast(x.reshape(-1, x.shape[-1]), scaling, rows=True, columns=columns, amax=amax)
    last.key, last.found = (weakref.ref(x, last.drop), x._version, scaling, columns), found
    return found


class _Linear(torch.autograd.Function):
    """The three products as one autograd node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling, keeps: bool) -> Tensor:
        inputs = cast_input(x, scaling, keeps)
        weights = cast(weight, scaling, rows=True, columns=False)
        ctx.scaling, ctx.shape, ctx.dtype = scaling, x.shape, x.dtype
        kept = (inputs.transposed, inputs.column_inverse) if keeps else (None, None)
        ctx.save_for_backward(weight, weights.amax, *kept)
        y = product(inputs.rows, weights.rows, inputs.row_inverse, weights.row_inverse, x.dtype, fast=True)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, amax, xt, x_inverse = ctx.saved_tensors
        scaling = ctx.scaling
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        d = cast(
            dy.reshape(-1, dy.shape[-1]), scaling,
            rows=needs_x, columns=needs_weight, e5m2=scaling == "tensorwise", amax=largest_of(dy),
        )  # fmt: skip
        dx = dw = None
        if needs_x:
            weights = cast(weight, scaling, rows=False, columns=True, amax=amax)
            dx = product(d.rows, weights.transposed, d.row_inverse, weights.column_inverse, ctx.dtype).view(ctx.shape)
        if needs_weight:
            dw = product(d.transposed, xt, d.column_inverse, x_inverse, weight.dtype)
        return dx, dw, None, None


class _StoredLinear(torch.autograd.Function):
    """The products with a weight stored in FP8 with one scale; keeps: whether to save x8ᵀ for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inverse: Tensor, keeps: bool) -> Tensor:
        inputs = cast_input(x, "tensorwise", keeps)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        kept = (inputs.transposed, inputs.column_inverse) if keeps else (None, None)
        ctx.save_for_backward(weight, inverse, *kept)
        y = product(inputs.rows, weight, inputs.row_inverse, inverse, x.dtype, fast=True)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, inverse, xt, x_inverse = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        if not needs_x and not needs_weight:
            return None, None, None, None
        d = cast(
            dy.reshape(-1, dy.shape[-1]), "tensorwise",
            rows=needs_x, columns=needs_weight, e5m2=True, amax=largest_of(dy),
        )  # fmt: skip
        dx = dw = None
        if needs_x:
            dx = product(d.rows, transpose(weight), d.row_inverse, inverse, ctx.dtype).view(ctx.shape)
        if needs_weight:
            dw = product(d.transposed, xt, d.column_inverse, x_inverse, ctx.dtype)
        return dx, dw, None, None


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: Scaling = "tensorwise") -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` with matrix products in FP8, forward and backward.

    Args:
        x: [..., K], bf16 | fp16 | fp32.
        weight: [N, K], any of these dtypes; N and K divisible by 16. If it is frozen, nothing of x is saved.
        bias: [N], or None; not cast to FP8.
        scaling: "tensorwise", one scale per tensor, or "rowwise", one per row of an operand.

    Returns:
        [..., N] in the dtype of x. With "rowwise", a GPU first rounds all products to bf16.

    Raises:
        ValueError: a size of the weight that is not divisible by 16, or an unknown `scaling`.

    Example:
        >>> x, w = torch.ones(2, 16), torch.ones(16, 16)
        >>> float8_linear(x, w)[0, 0]
        tensor(16.)
    """
    if scaling not in get_args(Scaling):
        raise ValueError(f"scaling must be one of {', '.join(get_args(Scaling))}, got {scaling!r}")
    require_matrix(weight, "weight")
    y: Tensor = _Linear.apply(x, weight, scaling, weight.requires_grad and torch.is_grad_enabled())
    return y if bias is None else y + bias.to(y.dtype)


def float8_stored_linear(x: Tensor, weight: Tensor, inverse: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear(x, weight.to(x.dtype) * inverse, bias)` in FP8, for a weight stored in FP8.

    Result and gradients are bitwise equal to `float8_linear` with "tensorwise".

    Args:
        x: [..., K], bf16 | fp16 | fp32.
        weight: [N, K], float8_e4m3fn; N and K divisible by 16. If it requires a gradient, its `grad_dtype` must be x's
            dtype or wider, or PyTorch would round the gradient to FP8.
        inverse: [1], fp32: inverse of the weight's scale, from `quantize_weight`.
        bias: [N], or None.

    Returns:
        [..., N] in the dtype of x.

    Raises:
        ValueError: a size of the weight that is not divisible by 16.
    """
    require_matrix(weight, "weight")
    y: Tensor = _StoredLinear.apply(x, weight, inverse, weight.requires_grad and torch.is_grad_enabled())
    return y if bias is None else y + bias.to(y.dtype)


def quantize_weight(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(FP8 values, inverse scale) of a weight, for `float8_stored_linear`.

    Args:
        weight: [N, K]; or a shard of its rows, of any number, with the `amax` of the complete weight.
        amax: int32, bits of max |weight| as fp32, or of partial maxima; None to compute it.

    Returns:
        [N, K], float8_e4m3fn, and [1], fp32.

    Raises:
        ValueError: a size of the weight that is not divisible by 16.
    """
    if amax is None:
        require_matrix(weight, "weight")
    found = cast(weight.detach(), "tensorwise", rows=True, columns=False, amax=amax)
    return found.rows, found.row_inverse
