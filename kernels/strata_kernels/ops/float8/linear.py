"""A linear layer whose three products are in FP8, and one whose weight comes in FP8.

    y  = x8 · w8ᵀ              x8, w8 in E4M3
    dx = d8 · w8               d8 = fp8(dy), in E5M2 with one scale for the tensor, in E4M3 with one for each row
    dw = d8ᵀ · x8

Each factor is cast along the dimension that its product sums. The weight stays what it is, bf16 or fp32: it is cast
anew for each product, and its gradient has its dtype. Of the input the backward pass keeps x8ᵀ, one byte for each
element, of which nothing is kept if the weight is frozen. Layers that read one input, as the projections of queries,
keys and values do, share its cast.

Rowwise products of dx and dw sum in fp32 like those with one scale; only the forward pass uses the fast accumulators.

Source: torchao's recipes `tensorwise` and `rowwise` (`torchao.float8.convert_to_float8_training`), whose results these
are; Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433).
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
    """The last input that a thread cast, and its cast: the next layer may read it, too."""

    key: tuple[Any, ...] | None = None
    found: Cast | None = None

    def drop(self, _: Any) -> None:
        self.key = self.found = None


class _Threads(threading.local):
    """An object for each thread: an input may die in another, such as that of the backward pass."""

    def __init__(self) -> None:
        self.last = _Last()


_threads = _Threads()


def cast_input(x: Tensor, scaling: Scaling, columns: bool) -> Cast:
    """The cast of the input, [..., K], as a matrix; that of the layer before if it read the same."""
    if is_observed():
        # Compilers share it themselves, and a recomputation must do what the first pass did.
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
    """The three products as one node."""

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
    """The products with a weight that comes in FP8, and has one scale; that of its gradient where `keeps`."""

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
    """`torch.nn.functional.linear(x, weight, bias)` with its products, and those of the gradients, in FP8.

    Args:
        x: [..., K], bf16 | fp16 | fp32.
        weight: [N, K], in a dtype of these; N and K divisible by 16. Frozen, its gradient is not computed, and nothing
            of x is kept.
        bias: [N], or None; added outside of FP8.
        scaling: "tensorwise", one scale for each tensor, or "rowwise", one for each row of a factor.

    Returns:
        [..., N], in the dtype of x. With "rowwise", a GPU rounds products to bf16 first, also those of gradients.

    Raises:
        ValueError: the sizes of the weight are not divisible by 16, or `scaling` is unknown.

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
    """`torch.nn.functional.linear(x, weight.to(x.dtype) * inverse, bias)`, in FP8, of a weight that comes in FP8.

    Bits of the result and of both gradients are those of `float8_linear` with one scale.

    Args:
        x: [..., K].
        weight: [N, K], float8_e4m3fn; N and K divisible by 16. Of one that requires a gradient, `grad_dtype`
            has to be that of x or a wider one: PyTorch would round the gradient to FP8.
        inverse: [1], fp32: the factor that undoes the weight's scale. `quantize_weight` gives both.
        bias: [N], or None.

    Returns:
        [..., N], in the dtype of x.

    Raises:
        ValueError: the sizes of the weight are not divisible by 16.
    """
    require_matrix(weight, "weight")
    y: Tensor = _StoredLinear.apply(x, weight, inverse, weight.requires_grad and torch.is_grad_enabled())
    return y if bias is None else y + bias.to(y.dtype)


def quantize_weight(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A weight as `float8_stored_linear` takes it: FP8 values, and the factor that undoes their scale.

    Args:
        weight: [N, K]; or some of its rows, whose number 16 need not divide, with the `amax` of all of it.
        amax: int32, the bits of the largest magnitude as fp32, or of those of parts; None to find it.

    Returns:
        [N, K], float8_e4m3fn, and [1], fp32.

    Raises:
        ValueError: the sizes of the weight are not divisible by 16.
    """
    if amax is None:
        require_matrix(weight, "weight")
    found = cast(weight.detach(), "tensorwise", rows=True, columns=False, amax=amax)
    return found.rows, found.row_inverse
