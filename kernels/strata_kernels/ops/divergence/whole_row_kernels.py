"""Kernels of distances without a softmax: one program per row, which loops over its columns.

    cosine              loss = 1 - z·t / (|z| |t|)      dz = (cos z / |z| - t / |t|) / |z|     norms clamped to >= EPS
    tvd_probabilities   loss = Σ |p - q| / 2            dp = sign(p - q) / 2

Names: i_n row, o_ offsets, m_ masks, p_ pointers, b_ blocks; z student, t teacher.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(p_x, m_v):
    return tl.load(p_x, mask=m_v, other=0.0).to(tl.float32)


@triton.jit
def cosine_kernel(
    p_z, p_t, p_dz, p_target, p_scale, p_loss, stride_z, stride_t, stride_dz, stride_scale, ignore_index,
    V: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of a row, and its gradient unless p_dz is None; p_dz may be p_z."""
    i_n = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK)
    counted = tl.load(p_target + i_n) != ignore_index
    b_zz = tl.zeros([BLOCK], tl.float32)
    b_tt = tl.zeros([BLOCK], tl.float32)
    b_zt = tl.zeros([BLOCK], tl.float32)
    for i_v in range(0, V, BLOCK):
        b_z = _load(p_z + i_n * stride_z + i_v + o_v, i_v + o_v < V)
        b_t = _load(p_t + i_n * stride_t + i_v + o_v, i_v + o_v < V)
        b_zz += b_z * b_z
        b_tt += b_t * b_t
        b_zt += b_z * b_t
    z_norm = tl.sqrt(tl.sum(b_zz, 0))
    r_z = 1.0 / tl.maximum(z_norm, EPS)
    r_t = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_tt, 0)), EPS)
    cosine = tl.sum(b_zt, 0) * r_z * r_t
    tl.store(p_loss + i_n, tl.where(counted, 1.0 - cosine, 0.0))
    if p_dz is not None:
        scale = tl.where(counted, tl.load(p_scale + i_n * stride_scale), 0.0) * r_z
        # A norm clamped to EPS is constant.
        along = tl.where(z_norm > EPS, cosine * r_z, 0.0)
        for i_v in range(0, V, BLOCK):
            m_v = i_v + o_v < V
            b_z = _load(p_z + i_n * stride_z + i_v + o_v, m_v)
            b_t = _load(p_t + i_n * stride_t + i_v + o_v, m_v)
            b_dz = tl.where(counted, scale * (along * b_z - r_t * b_t), 0.0)
            tl.store(p_dz + i_n * stride_dz + i_v + o_v, b_dz.to(p_dz.dtype.element_ty), mask=m_v)


@triton.jit
def tvd_probabilities_kernel(
    p_z, p_t, p_dz, p_target, p_scale, p_loss, stride_z, stride_t, stride_dz, stride_scale, ignore_index,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of a row, and its gradient unless p_dz is None."""
    i_n = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK)
    # An ignored row is treated as one without columns.
    n_v = tl.where(tl.load(p_target + i_n) != ignore_index, V, 0)
    scale = 0.0
    if p_dz is not None:
        scale = 0.5 * tl.load(p_scale + i_n * stride_scale)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_v in range(0, V, BLOCK):
        m_v = i_v + o_v < n_v
        b_d = _load(p_z + i_n * stride_z + i_v + o_v, m_v) - _load(p_t + i_n * stride_t + i_v + o_v, m_v)
        b_sum += tl.abs(b_d)
        if p_dz is not None:
            b_dz = tl.where(b_d > 0.0, scale, tl.where(b_d < 0.0, -scale, 0.0))
            tl.store(p_dz + i_n * stride_dz + i_v + o_v, b_dz.to(p_dz.dtype.element_ty), mask=i_v + o_v < V)
    tl.store(p_loss + i_n, 0.5 * tl.sum(b_sum, 0))
