"""A gated activation that adds the low-rank products of LoRA adapters to its inputs.

    g = g₀ + h_g · B_g        u = u₀ + h_u · B_u        dy = dy₀ + e · A
    y = f(g) · u              dg = dy · u · f'(g)       du = dy · f(g)

    dB_g = dgᵀ · h_g          dB_u = duᵀ · h_u          dA = eᵀ · y

g₀, u₀ and dy₀ are products with frozen weights. Adding the adapters' products in separate kernels would read and write
each of them once more. The backward kernel loops over rows and also accumulates the gradients of the adapters' factors,
so dg and du are not read again, and y, which it recomputes, is not saved. f and f' are those of
`activation_kernels.py`.

Axes: T rows, F features, R rank; tiles of BT x BN. In 16 bits, 6 bytes per element of y are moved forward, 10 backward.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..activation.activation_kernels import activate


@triton.jit
def _reduced(p_h, o_t, n_rows, stride_h, rank, R: tl.constexpr):
    """Load rows of h: [BT, R]."""
    o_r = tl.arange(0, R)
    return tl.load(p_h + o_t[:, None] * stride_h + o_r[None, :], mask=(o_t < n_rows)[:, None] & (o_r < rank), other=0.0)


@triton.jit
def _factor(p_b, o_n, n_cols, stride_br, stride_bn, rank, R: tl.constexpr):
    """Load columns of b: [R, BN]."""
    o_r = tl.arange(0, R)
    o_b = o_r[:, None] * stride_br + o_n[None, :] * stride_bn
    return tl.load(p_b + o_b, mask=(o_r < rank)[:, None] & (o_n < n_cols)[None, :], other=0.0)


@triton.jit
def _tile(n_rows, n_cols, BT: tl.constexpr, BN: tl.constexpr):
    """(rows, columns, mask) of this program's tile. Consecutive programs share rows."""
    o_t = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    return o_t, o_n, (o_t < n_rows)[:, None] & (o_n < n_cols)[None, :]


@triton.jit
def _largest(b_x):
    """The bits of max |x| as int32, which sort like the magnitudes."""
    b_bits = b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(b_bits, axis=1), axis=0)


@triton.jit
def _note_largest(p_amax, largest, PARTS: tl.constexpr):
    part = (tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)) % PARTS
    tl.atomic_max(p_amax + part, largest)


@triton.jit(do_not_specialize=["n_rows", "rank_g", "rank_u"])
def adapted_gate_fwd_kernel(
    p_g, p_u, p_y, p_amax, p_hg, p_hu, p_bg, p_bu, n_rows, n_cols,
    stride_hg, stride_hu, stride_bgr, stride_bgn, stride_bur, stride_bun, rank_g, rank_u, scale_g, scale_u,
    ACTIVATION: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of y, and max |y| unless p_amax is None."""
    o_t, o_n, m = _tile(n_rows, n_cols, BT, BN)
    o_y = o_t[:, None] * n_cols + o_n[None, :]
    # Issue all loads before the first product.
    b_g, b_u = tl.load(p_g + o_y, mask=m, other=0.0), tl.load(p_u + o_y, mask=m, other=0.0)
    b_hg, b_hu = _reduced(p_hg, o_t, n_rows, stride_hg, rank_g, R), _reduced(p_hu, o_t, n_rows, stride_hu, rank_u, R)
    b_bg = _factor(p_bg, o_n, n_cols, stride_bgr, stride_bgn, rank_g, R)
    b_bu = _factor(p_bu, o_n, n_cols, stride_bur, stride_bun, rank_u, R)
    b_f, _ = activate(b_g.to(tl.float32) + scale_g * tl.dot(b_hg, b_bg), ACTIVATION, False)
    b_y = (b_f * (b_u.to(tl.float32) + scale_u * tl.dot(b_hu, b_bu))).to(p_y.dtype.element_ty)
    tl.store(p_y + o_y, b_y, mask=m)
    if p_amax is not None:
        _note_largest(p_amax, _largest(b_y), PARTS)


@triton.jit(do_not_specialize=["n_rows", "rank_g", "rank_u", "rank_d", "share"])
def adapted_gate_bwd_kernel(
    p_dy, p_g, p_u, p_dg, p_du, p_sums, p_dg_amax, p_du_amax, p_hg, p_hu, p_e, p_bg, p_bu, p_a, n_rows, n_cols,
    stride_hg, stride_hu, stride_e, stride_bgr, stride_bgn, stride_bur, stride_bun, stride_ar, stride_an,
    rank_g, rank_u, rank_d, scale_g, scale_u, share,
    ACTIVATION: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BN columns of `share` rows of dg and du, and these rows' terms of dB_g, dB_u and dA. e is already scaled."""
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < n_cols
    b_bg = tl.trans(_factor(p_bg, o_n, n_cols, stride_bgr, stride_bgn, rank_g, R))
    b_bu = tl.trans(_factor(p_bu, o_n, n_cols, stride_bur, stride_bun, rank_u, R))
    b_a = tl.trans(_factor(p_a, o_n, n_cols, stride_ar, stride_an, rank_d, R))
    s_bg, s_bu = tl.zeros([BN, R], tl.float32), tl.zeros([BN, R], tl.float32)
    s_a = tl.zeros([BN, R], tl.float32)
    largest_g, largest_u = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for i_t in range(0, share, BT):
        # Tiles are transposed, [BN, BT], so that results of products are operands of the next ones without a layout
        # conversion.
        o_t = (i_s * share + i_t).to(tl.int64) + tl.arange(0, BT)
        m = m_n[:, None] & (o_t < n_rows)[None, :]
        o_y = o_n[:, None] + o_t[None, :] * n_cols
        # Issue all loads before the first product.
        b_dy, b_g = tl.load(p_dy + o_y, mask=m, other=0.0), tl.load(p_g + o_y, mask=m, other=0.0)
        b_u = tl.load(p_u + o_y, mask=m, other=0.0)
        b_hg = _reduced(p_hg, o_t, n_rows, stride_hg, rank_g, R)
        b_hu = _reduced(p_hu, o_t, n_rows, stride_hu, rank_u, R)
        b_e = _reduced(p_e, o_t, n_rows, stride_e, rank_d, R)
        b_dy = b_dy.to(tl.float32) + tl.dot(b_a, tl.trans(b_e))
        b_u = b_u.to(tl.float32) + scale_u * tl.dot(b_bu, tl.trans(b_hu))
        b_f, b_df = activate(b_g.to(tl.float32) + scale_g * tl.dot(b_bg, tl.trans(b_hg)), ACTIVATION, False)
        # y rounded as in forward. For rows beyond the last, all operands are 0.
        s_a += tl.dot((b_f * b_u).to(p_du.dtype.element_ty), b_e)
        b_du = (b_dy * b_f).to(p_du.dtype.element_ty)
        s_bu += tl.dot(b_du, b_hu)
        tl.store(p_du + o_y, b_du, mask=m)
        b_dg = (b_dy * b_u * b_df).to(p_dg.dtype.element_ty)
        s_bg += tl.dot(b_dg, b_hg)
        tl.store(p_dg + o_y, b_dg, mask=m)
        if p_dg_amax is not None:
            largest_g, largest_u = tl.maximum(largest_g, _largest(b_dg)), tl.maximum(largest_u, _largest(b_du))
    if p_dg_amax is not None:
        _note_largest(p_dg_amax, largest_g, PARTS)
        _note_largest(p_du_amax, largest_u, PARTS)
    o_sums = (i_s * 3 * R + tl.arange(0, R)).to(tl.int64)[None, :] * n_cols + o_n[:, None]
    tl.store(p_sums + o_sums, scale_g * s_bg, mask=m_n[:, None])
    tl.store(p_sums + o_sums + R * n_cols, scale_u * s_bu, mask=m_n[:, None])
    tl.store(p_sums + o_sums + 2 * R * n_cols, s_a, mask=m_n[:, None])
