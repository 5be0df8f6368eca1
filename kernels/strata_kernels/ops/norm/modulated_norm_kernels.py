"""Kernels of the modulated norms; formulas and axes: see `modulated_norm`.

In backward, each program loops over some rows of one modulation and accumulates their A and T in fp32. If each row has
its own modulation, ds and dt are stored row by row, and the two accumulators are those of dw and db.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(p_x, o_r, stride, o_d, m):
    return tl.load(p_x + o_r[:, None] * stride + o_d[None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def _vector(p_x, o_d, D: tl.constexpr):
    return tl.load(p_x + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["n_rows", "n_shared"])
def modulated_norm_fwd_kernel(
    p_x, p_y, p_stats, p_weight, p_bias, p_scale, p_shift,
    n_rows, n_shared, stride_x, stride_scale, stride_shift, eps, offset,
    D: tl.constexpr, CENTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of ROWS rows, and p_stats [1 + CENTER, N]: rstd and mean. n_shared: rows per modulation."""
    i_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = i_r < n_rows
    o_m = (i_r // n_shared).to(tl.int64)
    o_r = i_r.to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m = m_r[:, None] & (o_d < D)[None, :]
    b_y = _load(p_x, o_r, stride_x, o_d, m)
    if CENTER:
        b_mean = tl.sum(b_y, 1) / D
        tl.store(p_stats + n_rows + o_r, b_mean, mask=m_r)
        b_y = tl.where(m, b_y - b_mean[:, None], 0.0)
    b_rstd = tl.rsqrt(tl.sum(b_y * b_y, 1) / D + eps)
    tl.store(p_stats + o_r, b_rstd, mask=m_r)
    b_y *= b_rstd[:, None]
    if p_weight is not None:
        b_y *= _vector(p_weight, o_d, D) + offset
    if p_bias is not None:
        b_y += _vector(p_bias, o_d, D)
    b_y *= 1.0 + _load(p_scale, o_m, stride_scale, o_d, m)
    if p_shift is not None:
        b_y += _load(p_shift, o_m, stride_shift, o_d, m)
    tl.store(p_y + o_r[:, None] * D + o_d[None, :], b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["n_rows", "n_shared", "n_programs"])
def modulated_norm_bwd_kernel(
    p_x, p_dy, p_dx, p_stats, p_weight, p_bias, p_scale, p_dscale, p_dshift, p_sums,
    n_rows, n_shared, n_programs, stride_x, stride_dy, stride_scale, offset,
    D: tl.constexpr, CENTER: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of some tiles of ROWS rows of one modulation, and their A and T in p_sums [2, M, n_programs, D].

    EACH: each row has its own modulation. Then M is 1, n_shared is the number of all rows, p_dscale and p_dshift are
    written, and p_sums holds the terms of dw and db instead of A and T.
    """
    i_m = tl.program_id(0) // n_programs
    i_first = tl.cast(i_m, tl.int64) * n_shared
    o_d = tl.arange(0, BLOCK)
    m_d = (o_d < D)[None, :]
    b_a = tl.zeros([ROWS, BLOCK], tl.float32)
    b_t = tl.zeros([ROWS, BLOCK], tl.float32)
    b_w = tl.full([1, BLOCK], 1.0, tl.float32)
    if p_weight is not None:
        b_w = _vector(p_weight, o_d, D) + offset
    if not EACH:
        b_s = 1.0 + _vector(p_scale + tl.cast(i_m, tl.int64) * stride_scale, o_d, D)
    for i_t in range(tl.program_id(0) % n_programs, tl.cdiv(n_shared, ROWS), n_programs):
        i_r = i_t * ROWS + tl.arange(0, ROWS)
        m_r = i_r < n_shared
        o_r = i_first + i_r
        m = m_r[:, None] & m_d
        b_rstd = tl.load(p_stats + o_r, mask=m_r, other=0.0)[:, None]
        b_x = _load(p_x, o_r, stride_x, o_d, m)
        b_dy = _load(p_dy, o_r, stride_dy, o_d, m)
        if CENTER:
            b_x -= tl.load(p_stats + n_rows + o_r, mask=m_r, other=0.0)[:, None]
        b_x = tl.where(m, b_x * b_rstd, 0.0)
        o_to = o_r[:, None] * D + o_d[None, :]
        if EACH:
            b_s = 1.0 + _load(p_scale, o_r, stride_scale, o_d, m)
            b_n = b_x * b_w
            if p_bias is not None:
                b_n += _vector(p_bias, o_d, D)
            tl.store(p_dscale + o_to, (b_dy * b_n).to(p_dscale.dtype.element_ty), mask=m)
            if p_dshift is not None:
                tl.store(p_dshift + o_to, b_dy.to(p_dshift.dtype.element_ty), mask=m)
            b_dy *= b_s
            b_g = b_dy * b_w
        else:
            b_g = b_dy * b_s * b_w
        b_a += b_dy * b_x
        b_t += b_dy
        b_dx = b_g - b_x * (tl.sum(b_g * b_x, 1) / D)[:, None]
        if CENTER:
            b_dx -= (tl.sum(b_g, 1) / D)[:, None]
        tl.store(p_dx + o_to, (b_dx * b_rstd).to(p_dx.dtype.element_ty), mask=m)
    p_own = p_sums + tl.program_id(0).to(tl.int64) * D + o_d
    tl.store(p_own, tl.sum(b_a, 0), mask=o_d < D)
    tl.store(p_own + tl.num_programs(0).to(tl.int64) * D, tl.sum(b_t, 0), mask=o_d < D)
