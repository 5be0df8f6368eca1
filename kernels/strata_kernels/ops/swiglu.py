"""The gated activation of Llama-type feed-forward layers.

    y = g · s · u,  s = 1 / (1 + exp(-g))       dg = dy · u · s · (1 + g · (1 - s))       du = dy · g · s

Source: Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202).

Elementwise: R rows of D features each, one row of R·D where all is contiguous. Only gate and up are kept for the
backward pass; s is computed again. Bytes moved per element at the least: forward 3·itemsize, backward 5·itemsize.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ._launch import DTYPES, describe, has_dtype, launch, takes_kernel
from ._register import register


@triton.jit
def _sigmoid(b_x, PRECISE: tl.constexpr):
    """1 / (1 + exp(-x)) of an fp32 block; PRECISE for results that are not rounded to 16 bits afterwards."""
    if PRECISE:
        # exp(-x) as 2^n · 2^f with |f| <= 1/2: the hardware's 2^f is good to one unit in the last place there, and the
        # part of x · log2(e) that fp32 drops is kept in the remainder r. At ±128 the sigmoid is 0 or 1 already.
        b_x = tl.minimum(tl.maximum(b_x, -128.0), 128.0)
        b_n = tl.floor(b_x * -1.4426950408889634 + 0.5)
        b_r = tl.fma(b_n, -0.693145751953125, -b_x)
        b_r = tl.fma(b_n, -1.42860682030941723212e-6, b_r)
        b_exp = tl.exp2(b_r * 1.4426950408889634) * tl.exp2(b_n)
        b_s = tl.div_rn(tl.full(b_x.shape, 1.0, tl.float32), 1.0 + b_exp)
    else:
        b_s = tl.sigmoid(b_x)
    return b_s


@triton.jit(do_not_specialize=["n_rows"])
def swiglu_fwd_kernel(
    p_g, p_u, p_y, n_rows, n_cols, stride_g, stride_u, BLOCK: tl.constexpr, PRECISE: tl.constexpr
):  # fmt: skip
    """y in BLOCK features of one row."""
    n_blocks = tl.cdiv(n_cols, BLOCK)
    i_r = (tl.program_id(0) // n_blocks).to(tl.int64)
    o_d = (tl.program_id(0) % n_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o_d < n_cols
    b_g = tl.load(p_g + i_r * stride_g + o_d, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(p_u + i_r * stride_u + o_d, mask=m, other=0.0).to(tl.float32)
    b_y = b_g * _sigmoid(b_g, PRECISE) * b_u
    tl.store(p_y + i_r * n_cols + o_d, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["n_rows"])
def swiglu_bwd_kernel(
    p_dy, p_g, p_u, p_dg, p_du, n_rows, n_cols, stride_dy, stride_g, stride_u,
    BLOCK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """dg and du in BLOCK features of one row."""
    n_blocks = tl.cdiv(n_cols, BLOCK)
    i_r = (tl.program_id(0) // n_blocks).to(tl.int64)
    o_d = (tl.program_id(0) % n_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o_d < n_cols
    b_dy = tl.load(p_dy + i_r * stride_dy + o_d, mask=m, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + i_r * stride_g + o_d, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(p_u + i_r * stride_u + o_d, mask=m, other=0.0).to(tl.float32)
    b_s = _sigmoid(b_g, PRECISE)
    b_dg = b_dy * b_u * (b_s * (1.0 + b_g * (1.0 - b_s)))
    b_du = b_dy * (b_g * b_s)
    tl.store(p_dg + i_r * n_cols + o_d, b_dg.to(p_dg.dtype.element_ty), mask=m)
    tl.store(p_du + i_r * n_cols + o_d, b_du.to(p_du.dtype.element_ty), mask=m)


@dataclass(frozen=True)
class Launch:
    """Elements per program, warps."""

    block: int
    warps: int


_FORWARD = Launch(block=2048, warps=4)
_BACKWARD = Launch(block=1024, warps=4)


def _rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors as [R, D] with adjacent features, as [1, R·D] where all of them are contiguous."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    rows = [x.reshape(-1, x.shape[-1]) for x in tensors]
    return [x if x.stride(1) == 1 else x.contiguous() for x in rows]


def _forward_fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _forward_triton(gate: Tensor, up: Tensor) -> Tensor:
    y = _forward_fake(gate, up)
    if y.numel() == 0:
        return y
    g, u = _rows(gate, up)
    n_rows, n_cols = g.shape
    launch(
        swiglu_fwd_kernel, (n_rows * triton.cdiv(n_cols, _FORWARD.block),),
        g, u, y, n_rows, n_cols, g.stride(0), u.stride(0),
        BLOCK=_FORWARD.block, PRECISE=gate.dtype == torch.float32, num_warps=_FORWARD.warps,
    )  # fmt: skip
    return y


def _forward_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.silu(gate) * up).contiguous()


def _backward_fake(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _backward_triton(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_up = _backward_fake(dy, gate, up)
    if gate.numel() == 0:
        return d_gate, d_up
    d, g, u = _rows(dy, gate, up)
    n_rows, n_cols = g.shape
    launch(
        swiglu_bwd_kernel, (n_rows * triton.cdiv(n_cols, _BACKWARD.block),),
        d, g, u, d_gate, d_up, n_rows, n_cols, d.stride(0), g.stride(0), u.stride(0),
        BLOCK=_BACKWARD.block, PRECISE=gate.dtype == torch.float32, num_warps=_BACKWARD.warps,
    )  # fmt: skip
    return d_gate, d_up


def _backward_reference(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    d_gate: Tensor = torch.ops.aten.silu_backward(dy * up, gate)
    return d_gate.contiguous(), (dy * functional.silu(gate)).contiguous()


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    return (_forward_triton if takes_kernel(gate) else _forward_reference)(gate, up)


def _backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return (_backward_triton if takes_kernel(gate) else _backward_reference)(dy, gate, up)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable
def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _swiglu_bwd(dy, *ctx.saved_tensors)
    return gradients


_swiglu_bwd = register("swiglu_bwd(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)", _backward, _backward_fake)
_swiglu = register(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`torch.nn.functional.silu(gate) * up`; on a GPU fused, computed in fp32 and rounded once.

    Args:
        gate: [..., D], bf16 | fp16 | fp32 | fp64, of any strides: halves of one projection are read in place.
        up: the same shape, dtype and device.

    Returns:
        [..., D], contiguous, in the dtype of gate.

    Raises:
        ValueError: gate and up differ in shape, dtype or device, or have another dtype.

    Example:
        >>> swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or not has_dtype(gate) or gate.dim() == 0:
        shapes = f"{describe(gate)} and {describe(up)}"
        raise ValueError(f"gate and up must have one shape [..., D] and one dtype of {DTYPES}, got {shapes}")
    if gate.device != up.device:
        raise ValueError(f"gate is on {gate.device} and up on {up.device}: move one of them")
    y: Tensor = _swiglu(gate, up)
    return y
