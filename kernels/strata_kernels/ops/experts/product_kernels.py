"""The grouped products of experts: of rows with the weight of their expert, and of rows with rows for its gradient.

For a row r of expert e, whose slot belongs to token t and has the router's weight w:

    h  = x_t · Ugᵀ + b           a  = gate(h)          y  = a · Dᵀ + b'         out_t = Σ w · y over the slots of t
    da = do_t · D                dw = <da, a> + <do_t, b'>
    dh = w · da · gate'(h)       dx_t = Σ dh · Ug over the slots of t
    dUg = Σ dhᵀ · x_t            dD = Σ do_tᵀ · (w · a)         over the rows of e

With an adapter s · B · A beside a weight W [N, K] (LoRA, arXiv:2106.09685), in a product x · Wᵀ with the gradient dy:

    u  = s · x · Aᵀ              y  = x · Wᵀ + u · Bᵀ
    du = s · dy · B              dx = dy · W + du · A          dA = Σ duᵀ · x            dB = Σ dyᵀ · u

u and du have r features; the second term of y and of dx is added before the sum is rounded, in the tile's registers.
u is computed again in the backward pass. Behind the gate, du = s · do_t · B and u = s · (w · a) · Aᵀ.

Only x and h are kept for the backward pass. dw follows from a, which is computed again from h, so y is not kept; rows
of x and of do are gathered by the products that read them, so no copy of them is made either (the derivation is that of
SonicMoE, arXiv:2512.14080).

Axes: BM rows of one expert, BN features of a result, BK features that are summed at a time; in a weight's gradient BM
and BN features, BK rows. A program takes one tile; which one, `_tile` says.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(pid, n_m, n_n, GROUP: tl.constexpr):
    """Row and column of tile `pid` of n_m x n_n: down the rows of GROUP rows, then on to their next column.

    Programs that run at once share rows and columns, in about equal parts, and find them in the second-level cache.
    """
    first = pid // (GROUP * n_n) * GROUP
    n_rows = tl.minimum(n_m - first, GROUP)
    within = pid - first * n_n
    return first + within % n_rows, within // n_rows


@triton.jit
def _add_product(b_sum, b_a, b_b, PRECISION: tl.constexpr):
    """b_sum + a · b."""
    if PRECISION == "ieee" and b_a.dtype == tl.float32:
        # A sum of short sums: in one long one, fp32 loses digits. The last option keeps Triton from joining the two.
        b_sum += tl.dot(b_a, b_b, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        b_sum = tl.dot(b_a, b_b, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit(do_not_specialize=["n_tiles"])
def rows_kernel(
    p_a, p_w, p_b, p_u, p_v, p_y, p_rows, p_starts, p_tiles, size, width, rank, n_tiles, n_columns, stride_a,
    stride_we, stride_wn, stride_wk, stride_be, stride_ve, stride_vn, stride_vr, scale,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """A tile of y [S, width] = scale · a · wᵀ + b + u · vᵀ, each row with the weight [width, size] of its expert.

    GATHER: rows of a are those of the tokens; else those of y. u: [S, rank]; v: [width, rank] of each expert.
    """
    i_m, i_n = _tile(tl.program_id(0), n_tiles, n_columns, GROUP)
    i_e = tl.load(p_tiles + 2 * i_m).to(tl.int64)
    if i_e < 0:
        return
    row = tl.load(p_tiles + 2 * i_m + 1)
    o_m = row + tl.arange(0, BM)
    m_m = o_m < tl.load(p_starts + i_e + 1)
    # Behind the last row of an expert its first one here is read once more, and not stored.
    o_a = tl.where(m_m, o_m, row)
    if GATHER:
        o_a = tl.load(p_rows + o_a) // TOP_K
    o_k, o_n = tl.arange(0, BK), i_n * BN + tl.arange(0, BN)
    p_a += o_a.to(tl.int64)[:, None] * stride_a + o_k[None, :]
    p_w += i_e * stride_we + o_k[:, None] * stride_wk + (o_n % width)[None, :] * stride_wn
    b_y = tl.zeros((BM, BN), tl.float32)
    for k in range(0, size, BK):
        if EVEN:
            b_a, b_w = tl.load(p_a), tl.load(p_w)
        else:
            b_a = tl.load(p_a, mask=(o_k < size - k)[None, :], other=0.0)
            b_w = tl.load(p_w, mask=(o_k < size - k)[:, None], other=0.0)
        b_y = _add_product(b_y, b_a, b_w, PRECISION)
        p_a += BK
        p_w += BK * stride_wk
    b_y *= scale
    if p_u is not None:
        o_u = tl.where(m_m, o_m, row).to(tl.int64)
        for k in range(0, rank, BR):
            o_r = k + tl.arange(0, BR)
            b_u = tl.load(p_u + o_u[:, None] * rank + o_r[None, :], mask=(o_r < rank)[None, :], other=0.0)
            p_v_tile = p_v + i_e * stride_ve + o_r[:, None] * stride_vr + (o_n % width)[None, :] * stride_vn
            b_y = _add_product(b_y, b_u, tl.load(p_v_tile, mask=(o_r < rank)[:, None], other=0.0), PRECISION)
    if p_b is not None:
        b_y += tl.load(p_b + i_e * stride_be + o_n, mask=o_n < width, other=0.0).to(tl.float32)[None, :]
    p_y += o_m.to(tl.int64)[:, None] * width + o_n[None, :]
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m_m[:, None] & (o_n < width)[None, :])


@triton.jit
def weight_bwd_kernel(
    p_l, p_r, p_dw, p_rows, p_starts, size_l, size_r, n_l, n_r, stride_l, stride_r, stride_we, stride_wl, stride_wr,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of dw [E, size_l, size_r] = Σ lᵀ · r over the rows of an expert; 0 for an expert without any.

    Rows of the one that GATHER names, "l" or "r", are those of the tokens; others are sorted already.
    """
    pid = tl.program_id(0)
    i_e = pid // (n_l * n_r)
    i_l, i_r = _tile(pid - i_e * n_l * n_r, n_l, n_r, GROUP)
    start, end = tl.load(p_starts + i_e), tl.load(p_starts + i_e + 1)
    o_l, o_r, o_k = i_l * BM + tl.arange(0, BM), i_r * BN + tl.arange(0, BN), tl.arange(0, BK)
    p_l += (o_l % size_l)[None, :]
    p_r += (o_r % size_r)[None, :]
    b_dw = tl.zeros((BM, BN), tl.float32)
    # Slots are read one round ahead of the rows that they name. Behind the last row of the expert it is taken times 0.
    # Without a row there is no slot to read: of an empty batch, p_rows is a null pointer.
    b_slot = tl.load(p_rows + tl.minimum(start + o_k, end - 1), mask=o_k < tl.minimum(end - start, 1) * BK, other=0)
    for k in range(start, end, BK):
        m_k = k + o_k < end
        o_token = (b_slot // TOP_K).to(tl.int64)
        b_slot = tl.load(p_rows + tl.minimum(k + BK + o_k, end - 1))
        o_sorted = (k + o_k).to(tl.int64)
        if GATHER == "l":
            b_l = tl.load(p_l + o_token[:, None] * stride_l)
        else:
            b_l = tl.load(p_l + o_sorted[:, None] * stride_l, mask=m_k[:, None], other=0.0)
        if GATHER == "r":
            b_r = tl.load(p_r + o_token[:, None] * stride_r)
        else:
            b_r = tl.load(p_r + o_sorted[:, None] * stride_r, mask=m_k[:, None], other=0.0)
        b_dw = _add_product(b_dw, tl.trans(b_l), b_r, PRECISION)
    p_dw += i_e.to(tl.int64) * stride_we + o_l.to(tl.int64)[:, None] * stride_wl + o_r[None, :] * stride_wr
    tl.store(p_dw, b_dw.to(p_dw.dtype.element_ty), mask=(o_l < size_l)[:, None] & (o_r < size_r)[None, :])
