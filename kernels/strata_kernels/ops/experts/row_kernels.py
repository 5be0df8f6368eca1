"""Kernels of experts other than products: gate, sums over the slots of a token, gradients of biases.

    gate(h) = f(s · min(g, L)) / s · (max(-L, min(u, L)) + c)      g, u: halves of h, or interleaved
    gate(h) = f(h)                                                  without a gate

f is an activation of `activation_kernels.py`, s is alpha, L the limit and c the offset of `experts`. The derivative of
a clamped value is 0. All sums are in fp32 and in a fixed order of slots, rows or features.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..activation.activation_kernels import activate


@triton.jit
def _gate_and_up(p_h, o_r, o_n, m, inner, GATE: tl.constexpr):
    """g and u, fp32 [R, BN], of rows o_r [R, 1] and features o_n [1, BN]; without a gate, h for both."""
    if GATE == "none":
        b_g = tl.load(p_h + o_r * inner + o_n, mask=m, other=0.0).to(tl.float32)
        b_u = b_g
    elif GATE == "interleaved":
        # Two strided loads, the second from cache, instead of a shuffle between lanes.
        b_g = tl.load(p_h + o_r * (2 * inner) + 2 * o_n, mask=m, other=0.0).to(tl.float32)
        b_u = tl.load(p_h + o_r * (2 * inner) + 2 * o_n + 1, mask=m, other=0.0).to(tl.float32)
    else:
        tl.static_assert(GATE == "halves")
        b_g = tl.load(p_h + o_r * (2 * inner) + o_n, mask=m, other=0.0).to(tl.float32)
        b_u = tl.load(p_h + o_r * (2 * inner) + inner + o_n, mask=m, other=0.0).to(tl.float32)
    return b_g, b_u


@triton.jit
def _gated(b_g, b_u, alpha, limit, offset, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, CLAMPED: tl.constexpr):
    """(f(s · g) / s, its derivative by g, u + c), with g and u clamped."""
    # Comparisons instead of minimum and maximum, to propagate NaN.
    b_x = tl.where(b_g > limit, limit, b_g) if CLAMPED else b_g
    b_f, b_df = activate(b_x * alpha, ACTIVATION, PRECISE)
    b_f = b_f / alpha
    if CLAMPED:
        b_df = tl.where(b_g > limit, 0.0, b_df)
        b_u = tl.where(b_u > limit, limit, tl.where(b_u < -limit, -limit, b_u))
    return b_f, b_df, b_u + offset


@triton.jit
def gate_kernel(
    p_h, p_a, p_starts, n_experts, inner, alpha, limit, offset,
    GATE: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, CLAMPED: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """BN features of R rows of a = gate(h)."""
    o_r = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    o_n = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    m = (o_r < tl.load(p_starts + n_experts)) & (o_n < inner)
    b_g, b_u = _gate_and_up(p_h, o_r, o_n, m, inner, GATE)
    b_f, _, b_v = _gated(b_g, b_u, alpha, limit, offset, ACTIVATION, PRECISE, CLAMPED)
    b_a = b_f if GATE == "none" else b_f * b_v
    tl.store(p_a + o_r * inner + o_n, b_a.to(p_a.dtype.element_ty), mask=m)


@triton.jit
def gate_bwd_kernel(
    p_da, p_h, p_router, p_do, p_b, p_index, p_dh, p_dw, p_rows, p_starts, n_experts, inner, width, stride_do,
    stride_be, alpha, limit, offset,
    TOP_K: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, CLAMPED: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """R rows of dh and of w · a, which overwrites da, and dw of their slots."""
    o_r = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    m_r = o_r < tl.load(p_starts + n_experts)
    o_s = tl.load(p_rows + o_r, mask=m_r, other=0)
    b_w = tl.load(p_router + o_s, mask=m_r, other=0.0).to(tl.float32)
    b_dw = tl.zeros((R, BN), tl.float32)
    dtype = p_dh.dtype.element_ty
    for n in range(0, inner, BN):
        o_n = (n + tl.arange(0, BN))[None, :]
        m = m_r & (o_n < inner)
        b_da = tl.load(p_da + o_r * inner + o_n, mask=m, other=0.0).to(tl.float32)
        b_g, b_u = _gate_and_up(p_h, o_r, o_n, m, inner, GATE)
        b_f, b_df, b_v = _gated(b_g, b_u, alpha, limit, offset, ACTIVATION, PRECISE, CLAMPED)
        b_a = b_f if GATE == "none" else b_f * b_v
        # The forward pass computed y from a rounded to the dtype of x.
        b_dw += tl.where(m, b_da * b_a.to(dtype).to(tl.float32), 0.0)
        tl.store(p_da + o_r * inner + o_n, (b_a * b_w).to(dtype), mask=m)
        b_da *= b_w
        if GATE == "none":
            tl.store(p_dh + o_r * inner + o_n, (b_da * b_df).to(dtype), mask=m)
        else:
            b_dg, b_du = b_da * b_v * b_df, b_da * b_f
            if CLAMPED:
                b_du = tl.where((b_u > limit) | (b_u < -limit), 0.0, b_du)
            if GATE == "interleaved":
                p_dg, p_du = p_dh + o_r * (2 * inner) + 2 * o_n, p_dh + o_r * (2 * inner) + 2 * o_n + 1
            else:
                p_dg, p_du = p_dh + o_r * (2 * inner) + o_n, p_dh + o_r * (2 * inner) + inner + o_n
            tl.store(p_dg, b_dg.to(dtype), mask=m)
            tl.store(p_du, b_du.to(dtype), mask=m)
    if p_b is not None:
        i_e = tl.load(p_index + o_s, mask=m_r, other=0).to(tl.int64)
        o_t = (o_s // TOP_K).to(tl.int64)
        for n in range(0, width, BN):
            o_n = (n + tl.arange(0, BN))[None, :]
            m = m_r & (o_n < width)
            b_do = tl.load(p_do + o_t * stride_do + o_n, mask=m, other=0.0).to(tl.float32)
            b_dw += b_do * tl.load(p_b + i_e * stride_be + o_n, mask=m, other=0.0).to(tl.float32)
    tl.store(p_dw + o_s, tl.sum(b_dw, 1)[:, None].to(p_dw.dtype.element_ty), mask=m_r)


@triton.jit
def token_sum_kernel(p_y, p_router, p_positions, p_out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK features of out_t = Σ w · y over the slots of token t; w is 1 if p_router is None."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_out = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(p_positions + i_t * TOP_K + j).to(tl.int64)
        m = o_d < tl.where(row < 0, 0, width)
        b_y = tl.load(p_y + row * width + o_d, mask=m, other=0.0).to(tl.float32)
        if p_router is not None:
            b_y *= tl.load(p_router + i_t * TOP_K + j).to(tl.float32)
        b_out += b_y
    tl.store(p_out + i_t * width + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < width)


@triton.jit
def bias_bwd_kernel(p_dy, p_router, p_rows, p_starts, p_db, size, stride_dy, TOP_K: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr):  # fmt: skip
    """BN features of db [E, size] = Σ dy over the rows of an expert; with p_router, of dy · w of the rows' tokens."""
    i_e = tl.program_id(0)
    o_n, o_k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    start, end = tl.load(p_starts + i_e), tl.load(p_starts + i_e + 1)
    b_db = tl.zeros((BN,), tl.float32)
    for k in range(start, end, BK):
        m_k = k + o_k < end
        o_r = (k + o_k).to(tl.int64)
        if p_router is not None:
            o_s = tl.load(p_rows + o_r, mask=m_k, other=0)
            b_w = tl.load(p_router + o_s, mask=m_k, other=0.0).to(tl.float32)
            o_r = (o_s // TOP_K).to(tl.int64)
        m = m_k[:, None] & (o_n < size)[None, :]
        b_dy = tl.load(p_dy + o_r[:, None] * stride_dy + o_n[None, :], mask=m, other=0.0).to(tl.float32)
        if p_router is not None:
            b_dy *= b_w[:, None]
        b_db += tl.sum(b_dy, 0)
    tl.store(p_db + i_e.to(tl.int64) * size + o_n, b_db.to(p_db.dtype.element_ty), mask=o_n < size)
