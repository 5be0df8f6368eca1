"""A gated activation whose inputs still lack the products of their adapters.

    g = g₀ + h_g · B_g        u = u₀ + h_u · B_u        dy = dy₀ + e · A
    y = f(g) · u              dg = dy · u · f'(g)       du = dy · f(g)

g₀, u₀ and dy₀ are products with frozen weights. Adding the adapters' products to them in memory first would read and
write each once more; here a tile adds them on the way. f and f' are those of `activation_kernels.py`.

Axes: T rows, F features, R rank; tiles of BT x BN. In 16 bits 6 bytes are moved for an element of y, backward 10.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..activation.activation_kernels import activate


@triton.jit
def _low_rank(p_h, p_b, o_t, o_n, n_rows, n_cols, stride_h, stride_br, stride_bn, rank, R: tl.constexpr):
    """The factors of a tile of h · b: [BT, R] and [R, BN]."""
    o_r = tl.arange(0, R)
    m_r = o_r < rank
    b_h = tl.load(p_h + o_t[:, None] * stride_h + o_r[None, :], mask=(o_t < n_rows)[:, None] & m_r[None, :], other=0.0)
    o_b = o_r[:, None] * stride_br + o_n[None, :] * stride_bn
    return b_h, tl.load(p_b + o_b, mask=m_r[:, None] & (o_n < n_cols)[None, :], other=0.0)


@triton.jit
def _tile(n_rows, n_cols, BT: tl.constexpr, BN: tl.constexpr):
    """Rows, columns and mask of this program's tile. Programs next to each other share rows."""
    o_t = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    return o_t, o_n, (o_t < n_rows)[:, None] & (o_n < n_cols)[None, :]


@triton.jit
def _note_largest(p_amax, b_x, PARTS: tl.constexpr):
    b_bits = b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    part = (tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)) % PARTS
    tl.atomic_max(p_amax + part, tl.max(tl.max(b_bits, axis=1), axis=0))


@triton.jit(do_not_specialize=["n_rows", "rank_g", "rank_u"])
def adapted_gate_fwd_kernel(
    p_g, p_u, p_y, p_amax, p_hg, p_hu, p_bg, p_bu, n_rows, n_cols,
    stride_hg, stride_hu, stride_bgr, stride_bgn, stride_bur, stride_bun, rank_g, rank_u, scale_g, scale_u,
    ACTIVATION: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of y; p_amax is None where nobody needs y's largest magnitude."""
    o_t, o_n, m = _tile(n_rows, n_cols, BT, BN)
    o_y = o_t[:, None] * n_cols + o_n[None, :]
    # All loads are under way before the first product waits for one.
    b_g, b_u = tl.load(p_g + o_y, mask=m, other=0.0), tl.load(p_u + o_y, mask=m, other=0.0)
    b_hg, b_bg = _low_rank(p_hg, p_bg, o_t, o_n, n_rows, n_cols, stride_hg, stride_bgr, stride_bgn, rank_g, R)
    b_hu, b_bu = _low_rank(p_hu, p_bu, o_t, o_n, n_rows, n_cols, stride_hu, stride_bur, stride_bun, rank_u, R)
    b_f, _ = activate(b_g.to(tl.float32) + scale_g * tl.dot(b_hg, b_bg), ACTIVATION, False)
    b_y = (b_f * (b_u.to(tl.float32) + scale_u * tl.dot(b_hu, b_bu))).to(p_y.dtype.element_ty)
    tl.store(p_y + o_y, b_y, mask=m)
    if p_amax is not None:
        _note_largest(p_amax, b_y, PARTS)


@triton.jit(do_not_specialize=["n_rows", "rank_g", "rank_u", "rank_d"])
def adapted_gate_bwd_kernel(
    p_dy, p_g, p_u, p_dg, p_du, p_dg_amax, p_du_amax, p_hg, p_hu, p_e, p_bg, p_bu, p_a, n_rows, n_cols,
    stride_hg, stride_hu, stride_e, stride_bgr, stride_bgn, stride_bur, stride_bun, stride_ar, stride_an,
    rank_g, rank_u, rank_d, scale_g, scale_u,
    ACTIVATION: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of dg and of du; e has its scale already."""
    o_t, o_n, m = _tile(n_rows, n_cols, BT, BN)
    o_y = o_t[:, None] * n_cols + o_n[None, :]
    # All loads are under way before the first product waits for one.
    b_dy, b_g = tl.load(p_dy + o_y, mask=m, other=0.0), tl.load(p_g + o_y, mask=m, other=0.0)
    b_u = tl.load(p_u + o_y, mask=m, other=0.0)
    b_e, b_a = _low_rank(p_e, p_a, o_t, o_n, n_rows, n_cols, stride_e, stride_ar, stride_an, rank_d, R)
    b_hg, b_bg = _low_rank(p_hg, p_bg, o_t, o_n, n_rows, n_cols, stride_hg, stride_bgr, stride_bgn, rank_g, R)
    b_hu, b_bu = _low_rank(p_hu, p_bu, o_t, o_n, n_rows, n_cols, stride_hu, stride_bur, stride_bun, rank_u, R)
    b_dy = b_dy.to(tl.float32) + tl.dot(b_e, b_a)
    b_f, b_df = activate(b_g.to(tl.float32) + scale_g * tl.dot(b_hg, b_bg), ACTIVATION, False)
    b_du = (b_dy * b_f).to(p_du.dtype.element_ty)
    tl.store(p_du + o_y, b_du, mask=m)
    if p_du_amax is not None:
        _note_largest(p_du_amax, b_du, PARTS)
    b_dy *= b_u.to(tl.float32) + scale_u * tl.dot(b_hu, b_bu)
    b_dg = (b_dy * b_df).to(p_dg.dtype.element_ty)
    tl.store(p_dg + o_y, b_dg, mask=m)
    if p_dg_amax is not None:
        _note_largest(p_dg_amax, b_dg, PARTS)
