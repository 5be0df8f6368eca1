"""Cross entropy of rows of logits, which it overwrites by their gradients: the middle of `linear_cross_entropy`.

Axes: N rows, V vocabulary entries. One program takes one row, whose logits it reads twice and writes once; 6 bytes per
logit in bf16, 4 of them where the second reading comes out of L2. The formulas stand in `linear_cross_entropy`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import launch, takes_kernel

# Rows of the buffer start at multiples of this many elements: the matrix products and the kernel then move 16 bytes.
_ALIGNMENT = 64

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(b_u):
    """tanh to 2e-7 relative: an odd polynomial near zero, where the exponential form would cancel."""
    b_w = b_u * b_u
    b_small = -0.00599296 * b_w + 0.02092415
    b_small = b_small * b_w - 0.05383514
    b_small = b_small * b_w + 0.13332663
    b_small = b_small * b_w - 0.33333328
    b_small = b_u + b_u * b_w * b_small
    b_e = tl.exp(-2.0 * tl.abs(b_u))
    b_large = (1.0 - b_e) / (1.0 + b_e)
    return tl.where(b_w < 0.4, b_small, tl.where(b_u < 0.0, -b_large, b_large))


@triton.jit
def _cap(b_z, SOFTCAP: tl.constexpr):
    b_z = b_z.to(tl.float32)
    if SOFTCAP > 0.0:
        b_z = SOFTCAP * _tanh(b_z / SOFTCAP)
    return b_z


@triton.jit
def _gradient(
    b_z, o_v, target, lse, scale,
    V: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    b_dz = tl.exp2((b_z - lse) * _LOG2E) * (1.0 + 2.0 * Z_LOSS * lse)
    b_dz -= tl.where(o_v == target, 1.0 - SMOOTHING, 0.0)
    b_dz = (b_dz - SMOOTHING / V) * scale
    if SOFTCAP > 0.0:
        b_z = b_z / SOFTCAP
        b_dz *= 1.0 - b_z * b_z
    return b_dz


@triton.jit
def cross_entropy_kernel(
    p_z, p_target, p_scale, p_loss, stride_z, stride_scale, ignore_index,
    V: tl.constexpr, V_PADDED: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and dz in place of its logits.

    The row's last block stays in registers between the two walks, and the second walk goes backwards, so that it meets
    first what the first one left in L2.
    """
    i_n = tl.program_id(0).to(tl.int64)
    p_z += i_n * stride_z
    target = tl.load(p_target + i_n)
    TAIL: tl.constexpr = (V - 1) // BLOCK * BLOCK
    o_b = tl.arange(0, BLOCK)
    o_t = TAIL + o_b
    # The buffer's padding may be read: a mask at its end, a multiple of 16 bytes, keeps the loads vectorized.
    m_t = o_t < V_PADDED
    if target == ignore_index:
        if GRADIENT:
            b_zero = tl.zeros([BLOCK], p_z.dtype.element_ty)
            for i_v in range(0, TAIL, BLOCK):
                tl.store(p_z + i_v + o_b, b_zero)
            tl.store(p_z + o_t, b_zero, mask=m_t)
        tl.store(p_loss + i_n, 0.0)
        return

    # A target outside the vocabulary is the caller's bug; there is no way to raise from here, so the row turns to NaN.
    valid = (target >= 0) & (target < V)
    poison = tl.where(valid, 0.0, float("nan"))
    z_target = _cap(tl.load(p_z + target, mask=valid, other=0.0), SOFTCAP)

    # Finite, so that a block of nothing but -inf (a masked part of the vocabulary) does not subtract infinities.
    z_max = -1e30
    z_exp = 0.0
    z_sum = 0.0
    for i_v in tl.range(0, TAIL, BLOCK, num_stages=STAGES):
        b_z = _cap(tl.load(p_z + i_v + o_b), SOFTCAP)
        m_new = tl.maximum(z_max, tl.max(b_z, 0))
        z_exp = z_exp * tl.exp2((z_max - m_new) * _LOG2E) + tl.sum(tl.exp2((b_z - m_new) * _LOG2E), 0)
        z_max = m_new
        if SMOOTHING > 0.0:
            z_sum += tl.sum(b_z, 0)
    b_tail = tl.where(o_t < V, tl.load(p_z + o_t, mask=m_t, other=0.0), 0.0)
    b_z = tl.where(o_t < V, _cap(b_tail, SOFTCAP), -float("inf"))
    m_new = tl.maximum(z_max, tl.max(b_z, 0))
    z_exp = z_exp * tl.exp2((z_max - m_new) * _LOG2E) + tl.sum(tl.exp2((b_z - m_new) * _LOG2E), 0)
    if SMOOTHING > 0.0:
        z_sum += tl.sum(tl.where(o_t < V, b_z, 0.0), 0)

    lse = m_new + tl.log2(z_exp) * _LN2
    loss = lse - (1.0 - SMOOTHING) * z_target - SMOOTHING / V * z_sum + Z_LOSS * lse * lse
    tl.store(p_loss + i_n, loss + poison)

    if GRADIENT:
        scale = tl.load(p_scale + i_n * stride_scale) + poison
        b_z = _cap(b_tail, SOFTCAP)
        b_dz = _gradient(b_z, o_t, target, lse, scale, V, SMOOTHING, Z_LOSS, SOFTCAP)
        tl.store(p_z + o_t, b_dz.to(p_z.dtype.element_ty), mask=m_t)
        for i_v in tl.range(BLOCK, TAIL + BLOCK, BLOCK, num_stages=STAGES):
            o_v = TAIL - i_v + o_b
            b_z = _cap(tl.load(p_z + o_v), SOFTCAP)
            b_dz = _gradient(b_z, o_v, target, lse, scale, V, SMOOTHING, Z_LOSS, SOFTCAP)
            tl.store(p_z + o_v, b_dz.to(p_z.dtype.element_ty))


def _tile(vocabulary: int) -> tuple[int, int, int]:
    """(BLOCK, warps, stages) for a row.

    A thread holds 32 elements of a block. On an H200, 2048 rows of 128256 bf16 logits took 0.374 ms with 8192 elements,
    8 warps and 4 stages, against 0.385 with 4096, 0.406 with 16384 and 0.377 with 32768 elements unpipelined.
    """
    block = min(max(triton.next_power_of_2(vocabulary), 256), 8192)
    return block, max(block // 1024, 1), 4


@dataclass(frozen=True)
class Options:
    """What shapes the loss of a row; a softcap of 0.0 is none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


def padded(vocabulary: int) -> int:
    """Elements from one row of a buffer of logits to the next."""
    return -(-vocabulary // _ALIGNMENT) * _ALIGNMENT


def cross_entropy_rows(
    z: Tensor, target: Tensor, scale: Tensor, loss: Tensor, options: Options, gradient: bool
) -> None:
    """Fill `loss` with the losses of the rows and, if asked, overwrite `z` by scale · dloss/dz.

    Args:
        z: [N, V], the leading columns of a buffer with `padded(V)` of them; bf16 | fp16 | fp32 (fp64 in plain PyTorch).
        target: [N], int64, contiguous.
        scale: [N], of loss's dtype; expanded scalars too. Not read without `gradient`.
        loss: [N], fp32 (fp64 for fp64).
        options: what shapes the loss.
        gradient: whether z is overwritten; it is left in no particular state otherwise.
    """
    run = _kernel if takes_kernel(z) else _reference
    run(z, target, scale, loss, options, gradient)


def _kernel(z: Tensor, target: Tensor, scale: Tensor, loss: Tensor, options: Options, gradient: bool) -> None:
    vocabulary = z.shape[1]
    block, warps, stages = _tile(vocabulary)
    launch(
        cross_entropy_kernel, (z.shape[0],),
        z, target, scale, loss, z.stride(0), scale.stride(0), options.ignore_index,
        V=vocabulary, V_PADDED=padded(vocabulary),
        SMOOTHING=options.label_smoothing, Z_LOSS=options.z_loss, SOFTCAP=options.softcap,
        GRADIENT=gradient, BLOCK=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip


def _reference(z: Tensor, target: Tensor, scale: Tensor, loss: Tensor, options: Options, gradient: bool) -> None:
    valid = target != options.ignore_index
    index = target.where(valid, 0)[:, None]
    smoothing, softcap = options.label_smoothing, options.softcap
    wide = z.to(loss.dtype)
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    log_p = torch.log_softmax(wide, -1)
    lse = wide.gather(1, index) - log_p.gather(1, index)
    row = -(1 - smoothing) * log_p.gather(1, index)
    if smoothing:
        row -= smoothing * log_p.mean(-1, keepdim=True)
    loss.copy_((row + options.z_loss * lse.square()).where(valid[:, None], 0)[:, 0])
    if gradient:
        dz = log_p.exp_().mul_(1 + 2 * options.z_loss * lse).scatter_add_(1, index, torch.full_like(lse, smoothing - 1))
        dz.sub_(smoothing / z.shape[1]).mul_(scale.where(valid, 0)[:, None])
        if softcap:
            dz.mul_(1 - (wide / softcap).square_())
        z.copy_(dz)
