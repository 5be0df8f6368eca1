"""Grouped matrix products of experts: rows times their expert's weight, and the gradients of the weights.

For a row of expert e, of a slot of token t with router weight w:

    h  = x_t · Ugᵀ + b           a  = gate(h)          y  = a · Dᵀ + b'         out_t = Σ w · y over the slots of t
    da = do_t · D                dw = <da, a> + <do_t, b'>
    dh = w · da · gate'(h)       dx_t = Σ dh · Ug over the slots of t
    dUg = Σ dhᵀ · x_t            dD = Σ do_tᵀ · (w · a)         over the rows of e

With an adapter s · B · A of a weight W [N, K] (LoRA, arXiv:2106.09685), in a product x · Wᵀ with the gradient dy:

    u  = s · x · Aᵀ              y  = x · Wᵀ + u · Bᵀ
    du = s · dy · B              dx = dy · W + du · A          dA = Σ duᵀ · x            dB = Σ dyᵀ · u

u and du have r features; the second term of y and dx is added to the fp32 accumulator, before rounding. u is recomputed
in backward. For `down`, du = s · do_t · B and u = s · (w · a) · Aᵀ.

Only x and h are saved for backward. dw is computed from a, which is recomputed from h, so y is not saved; the products
gather rows of x and do themselves, so no gathered copies exist (derivation: SonicMoE, arXiv:2512.14080).

Axes: BM rows of one expert, BN features of the result, BK features of the reduction; for a weight gradient BM and BN
features, BK rows. A program computes one tile, selected by `_tile`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(pid, n_m, n_n, GROUP: tl.constexpr):
    """(row, column) of tile `pid` of n_m x n_n tiles: column-major within groups of GROUP tile rows.

    So concurrent programs share rows and columns of the operands in L2.
    """
    first = pid // (GROUP * n_n) * GROUP
    n_rows = tl.minimum(n_m - first, GROUP)
    within = pid - first * n_n
    return first + within % n_rows, within // n_rows


@triton.jit
def _add_product(b_sum, b_a, b_b, PRECISION: tl.constexpr):
    """b_sum + a · b."""
    if PRECISION == "ieee" and b_a.dtype == tl.float32:
        # A sum of partial sums is more accurate than one long sum; the last option keeps Triton from merging them.
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
    """A tile of y [S, width] = scale · a · wᵀ + b + u · vᵀ, with w [width, size] of the row's expert.

    GATHER: a has rows of tokens, else rows of slots like y. u: [S, rank]; v: [width, rank] of each expert.
    """
    i_m, i_n = _tile(tl.program_id(0), n_tiles, n_columns, GROUP)
    i_e = tl.load(p_tiles + 2 * i_m).to(tl.int64)
    if i_e < 0:
        return
    row = tl.load(p_tiles + 2 * i_m + 1)
    o_m = row + tl.arange(0, BM)
    m_m = o_m < tl.load(p_starts + i_e + 1)
    # Rows beyond the expert's last load the tile's first row, and are not stored.
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
    """A tile of dw [E, size_l, size_r] = Σ lᵀ · r over the rows of an expert; 0 for an expert without rows.

    GATHER: the operand with rows of tokens, "l", "r" or none; the other has rows of slots, sorted by expert.
    """
    pid = tl.program_id(0)
    i_e = pid // (n_l * n_r)
    i_l, i_r = _tile(pid - i_e * n_l * n_r, n_l, n_r, GROUP)
    start, end = tl.load(p_starts + i_e), tl.load(p_starts + i_e + 1)
    o_l, o_r, o_k = i_l * BM + tl.arange(0, BM), i_r * BN + tl.arange(0, BN), tl.arange(0, BK)
    p_l += (o_l % size_l)[None, :]
    p_r += (o_r % size_r)[None, :]
    b_dw = tl.zeros((BM, BN), tl.float32)
    # Slot indices are loaded one iteration ahead of their rows. Rows beyond the expert's last are multiplied by 0.
    # The mask excludes experts without rows: for an empty batch, p_rows is a null pointer.
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
