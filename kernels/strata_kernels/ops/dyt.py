"""Dynamic tanh, a replacement for a norm that computes no statistics.

    y  = w · tanh(a x) + b           t = tanh(a x)          s = 1 - t²          a = alpha
    dx = a s w dy        da = Σ_rows Σ_d x s w dy        dw = Σ_rows t dy        db = Σ_rows dy

Source: Zhu et al. (arXiv:2503.10622). Axes: N rows, D features. The backward kernel reads x and dy once: each program
loops over some rows of a block of features and accumulates in fp32; one reduction then adds the partial sums in a fixed
order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import DTYPES, accumulator, as_rows, describe, has_dtype, launch, multiprocessors, takes_kernel
from ._operator import Operator, is_transformed, operator, refuse_double_backward
from .cross_entropy.row_kernel import _tanh

_FORWARD_BLOCK, _FORWARD_WARPS = 2048, 4
_BACKWARD_BLOCK, _BACKWARD_WARPS = 1024, 4
# Programs per multiprocessor; each loops over rows.
_OCCUPANCY = 8


@triton.jit
def dyt_fwd_kernel(p_x, p_y, p_alpha, p_weight, p_bias, stride_x, D: tl.constexpr, BLOCK: tl.constexpr):
    """y of one block of one row."""
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    b_x = tl.load(p_x + i_n * stride_x + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_w = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = b_w * _tanh(b_x * tl.load(p_alpha).to(tl.float32))
    if p_bias is not None:
        b_y += tl.load(p_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_y + i_n * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["n_rows"])
def dyt_bwd_kernel(
    p_x, p_dy, p_dx, p_alpha, p_weight, p_sums, n_rows, stride_x, stride_dy, D: tl.constexpr, BLOCK: tl.constexpr
):
    """dx of a block of every n-th row, n the number of programs, and p_sums [3, n, D]: terms of da, dw and db."""
    i_p = tl.program_id(0)
    n_p = tl.num_programs(0)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    alpha = tl.load(p_alpha).to(tl.float32)
    b_w = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_dalpha = tl.zeros([BLOCK], tl.float32)
    b_dw = tl.zeros([BLOCK], tl.float32)
    b_db = tl.zeros([BLOCK], tl.float32)
    for i in range(i_p, n_rows, n_p):
        i_n = tl.cast(i, tl.int64)
        b_x = tl.load(p_x + i_n * stride_x + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy + i_n * stride_dy + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_t = _tanh(b_x * alpha)
        # For large |x| in a form without the cancellation of 1 - tanh².
        b_e = tl.exp(-2.0 * tl.abs(b_x * alpha))
        b_r = 1.0 / (1.0 + b_e)
        b_slope = tl.where(b_t * b_t < 0.5, 1.0 - b_t * b_t, 4.0 * b_e * b_r * b_r) * b_w * b_dy
        b_dalpha += b_slope * b_x
        b_dw += b_t * b_dy
        b_db += b_dy
        tl.store(p_dx + i_n * D + o_d, (b_slope * alpha).to(p_dx.dtype.element_ty), mask=m_d)
    o_p = i_p.to(tl.int64) * D + o_d
    tl.store(p_sums + o_p, b_dalpha, mask=m_d)
    tl.store(p_sums + n_p.to(tl.int64) * D + o_p, b_dw, mask=m_d)
    tl.store(p_sums + 2 * n_p.to(tl.int64) * D + o_p, b_db, mask=m_d)


def dyt_reference(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`dyt` in plain PyTorch."""
    wide = accumulator(x.dtype)
    y = weight.to(wide) * torch.tanh(alpha.to(wide) * x.to(wide))
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


@operator("dyt_bwd(Tensor dy, Tensor x, Tensor alpha, Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)")
class _Backward(Operator):
    """dx, da, dw and db."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, alpha: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        width = x.shape[-1]
        if takes_kernel(x):
            dx, rows, incoming = x.new_empty(x.shape), as_rows(x), as_rows(dy)
            programs = max(min(rows.shape[0], _OCCUPANCY * multiprocessors(x.device)), 1)
            sums = x.new_zeros(3, programs, width, dtype=torch.float32)
            block = min(triton.next_power_of_2(width), _BACKWARD_BLOCK)
            launch(
                dyt_bwd_kernel, (programs if rows.shape[0] else 0, triton.cdiv(width, block)),
                rows, incoming, dx, alpha, weight.contiguous(), sums, rows.shape[0], rows.stride(0), incoming.stride(0),
                D=width, BLOCK=block, num_warps=_BACKWARD_WARPS,
            )  # fmt: skip
            terms, dw, db = sums.sum(1, dtype=torch.float64)
            dalpha = terms.sum()
        else:
            wide = accumulator(x.dtype)
            t, slope = torch.tanh(alpha.to(wide) * x.to(wide)), weight.to(wide) * dy.to(wide)
            slope = slope * (1 - t.square())
            dx = (slope * alpha.to(wide)).to(x.dtype).contiguous()
            axes = list(range(x.dim() - 1))
            dalpha, dw, db = ((slope * x.to(wide)).sum(), (t * dy).sum(axes), dy.to(wide).sum(axes))
        return dx, dalpha.to(alpha.dtype).reshape(alpha.shape), dw.to(weight.dtype), db.to(weight.dtype)

    @staticmethod
    def fake(dy: Tensor, x: Tensor, alpha: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        width = weight.shape
        return x.new_empty(x.shape), alpha.new_empty(alpha.shape), weight.new_empty(width), weight.new_empty(width)


@operator("dyt(Tensor x, Tensor alpha, Tensor weight, Tensor? bias) -> Tensor")
class _Dyt(Operator):
    """w · tanh(a x) + b."""

    @staticmethod
    def forward(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not takes_kernel(x):
            return dyt_reference(x, alpha, weight, bias).contiguous()
        y, rows, width = x.new_empty(x.shape), as_rows(x), x.shape[-1]
        block = min(triton.next_power_of_2(width), _FORWARD_BLOCK)
        launch(
            dyt_fwd_kernel, (rows.shape[0], triton.cdiv(width, block)),
            rows, y, alpha, weight.contiguous(), None if bias is None else bias.contiguous(), rows.stride(0),
            D=width, BLOCK=block, num_warps=_FORWARD_WARPS,
        )  # fmt: skip
        return y

    @staticmethod
    def fake(x: Tensor, *_: Any) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.has_bias = inputs[3] is not None

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("dyt")
        dx, dalpha, dw, db = _Backward.apply(dy, *ctx.saved_tensors)
        return dx, dalpha, dw, db if ctx.has_bias else None


def dyt(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Dynamic tanh with a learned scale: a replacement for a norm layer.

    Equivalent to::

        y = weight * torch.tanh(alpha * x) + bias

    computed in fp32 and rounded once. Double backward is not supported. Under `torch.func`, it is plain PyTorch.

    Args:
        x: [..., D], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        alpha: one element, any of these dtypes.
        weight, bias: [D], same dtype, any of these; bias may be None.

    Returns:
        Same shape and dtype as x.

    Raises:
        ValueError: a wrong shape or dtype.

    Example:
        >>> dyt(torch.randn(2, 8), torch.tensor([0.5]), torch.ones(8), torch.zeros(8)).shape
        torch.Size([2, 8])
    """
    if x.dim() == 0 or x.shape[-1] == 0 or weight.shape != x.shape[-1:] or alpha.numel() != 1:
        raise ValueError(
            f"x {describe(x)}, alpha {describe(alpha)} and weight {describe(weight)} must be [..., D], one element "
            "and [D]"
        )
    if bias is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
        raise ValueError(f"bias {describe(bias)} must have the shape and dtype of weight {describe(weight)}")
    if not all(map(has_dtype, (x, alpha, weight))):
        raise ValueError(f"x, alpha and weight must be {DTYPES}, not {x.dtype}, {alpha.dtype}, {weight.dtype}")
    if is_transformed():
        return dyt_reference(x, alpha, weight, bias)
    found: Tensor = _Dyt.apply(x, alpha, weight, bias)
    return found
