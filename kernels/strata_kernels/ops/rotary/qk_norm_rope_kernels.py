"""The kernels of `qk_norm_rope`; formulas: see `qk_norm_rope.py`.

Axes: B batch, S positions, H query heads, K key heads, D features; a row is one head at one position. A tile has ROWS
rows of W pairs of features; W is D / 2 rounded up to a power of two.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .cos_sin import load_angles, rotate
from .heads import choose, find_rows, load_pairs, point_at_rows, store_pairs


@triton.jit
def _rstd(b_x1, b_x2, m, eps, D: tl.constexpr):
    """rstd [ROWS, 1]; 0 for rows beyond the last."""
    return tl.where(m, tl.rsqrt(tl.sum(b_x1 * b_x1 + b_x2 * b_x2, 1) / D + eps)[:, None], 0.0)


@triton.jit
def _rounded(b_x, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """b_x rounded to DTYPE, as fp32.

    IN_PAIRS: a no-op PTX move between the casts; without it, the compiler rounds elements one by one, 8x slower.
    """
    b_x = b_x.to(DTYPE)
    if IN_PAIRS and b_x.dtype.primitive_bitwidth == 16:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=True, pack=2)
    return b_x.to(tl.float32)


@triton.jit
def _normalize(
    b_x, b_rstd, b_scale, DTYPE: tl.constexpr, OUTPUT: tl.constexpr, CAST: tl.constexpr, IN_PAIRS: tl.constexpr
):  # fmt: skip
    """x̂ · (offset + w), rounded to OUTPUT; x̂ is rounded to DTYPE if CAST requires it."""
    if CAST == "none":
        b_rstd = b_rstd.to(DTYPE).to(tl.float32)
    b_xhat = b_x * b_rstd
    if CAST != "gemma":
        b_xhat = _rounded(b_xhat, DTYPE, IN_PAIRS)
    return _rounded(b_xhat * b_scale, OUTPUT, IN_PAIRS)


@triton.jit(do_not_specialize=["n_b", "n_s", "heads_adjacent", "n_angles"])
def qk_norm_rope_fwd_kernel(
    p_q, p_k, p_wq, p_wk, p_cos, p_sin, p_pos, p_yq, p_yk, n_b, n_s, heads_adjacent, eps, offset, n_angles,
    stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_yqb, stride_yqs, stride_yqh, stride_ykb, stride_yks, stride_ykh,
    H: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORM: tl.constexpr,
    TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr,
    CAST: tl.constexpr, IN_PAIRS: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """ROWS rows of q and k of one batch element; programs alternate over the batch to share angles in L2."""
    i_b = (tl.program_id(0) % n_b).to(tl.int64)
    o_s, o_h, m = find_rows(
        (tl.program_id(0) // n_b) * ROWS + tl.arange(0, ROWS), n_s, heads_adjacent, H + K
    )  # fmt: skip
    o_p = tl.zeros([ROWS, 1], tl.int32)
    p_x = point_at_rows(
        p_q + i_b * stride_qb, p_k + i_b * stride_kb, o_s, o_h, stride_qs, stride_qh, stride_ks, stride_kh, H, VEC
    )  # fmt: skip
    b_x1, b_x2 = load_pairs(p_x, o_p, m, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
    # One copy of the weight per row, in the register layout of the tile.
    b_w1, b_w2 = load_pairs(choose(o_h < H, p_wq, p_wk, VEC), o_p, m, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
    b_cos, b_sin = load_angles(
        p_cos, p_sin, p_pos, i_b, o_s, o_p, m, n_angles, stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
        ROWS, W, PAIRS, FORM, TIME, HEIGHT, WIDTH, WOVEN,
    )  # fmt: skip
    b_rstd = _rstd(b_x1, b_x2, m, eps, 2 * (PAIRS + REST))
    if offset is not None:
        b_w1 += offset
        b_w2 += offset
    b_n1 = _normalize(b_x1, b_rstd, b_w1, p_q.dtype.element_ty, p_yq.dtype.element_ty, CAST, IN_PAIRS)
    b_n2 = _normalize(b_x2, b_rstd, b_w2, p_q.dtype.element_ty, p_yq.dtype.element_ty, CAST, IN_PAIRS)
    b_y1, b_y2 = rotate(b_n1, b_n2, b_cos, b_sin, o_p, W, PAIRS, REST, False)
    p_y = point_at_rows(
        p_yq + i_b * stride_yqb, p_yk + i_b * stride_ykb, o_s, o_h, stride_yqs, stride_yqh, stride_yks, stride_ykh,
        H, VEC,
    )  # fmt: skip
    store_pairs(p_y, b_y1, b_y2, o_p, m, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)


@triton.jit
def _backward_rows(
    p_dy, p_x, p_w, p_dx, p_dw, p_cos, p_sin, p_pos, i_p, n_p, n_b, n_s, heads_adjacent, n_tiles, eps, offset, n_angles,
    stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
    stride_dyb, stride_dys, stride_dyh, stride_xb, stride_xs, stride_xh, stride_dxb, stride_dxs, stride_dxh,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORM: tl.constexpr,
    TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every n_p-th tile of one tensor starting at i_p, and row i_p of p_dw."""
    D: tl.constexpr = 2 * (PAIRS + REST)
    o_p = tl.zeros([ROWS, 1], tl.int32)
    b_w1, b_w2 = load_pairs(p_w + o_p, o_p, o_p == 0, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
    if offset is not None:
        b_w1 += offset
        b_w2 += offset
    # Accumulate [ROWS, W] and reduce over ROWS once after the loop, not once per tile.
    b_dw1 = tl.zeros([ROWS, W], tl.float32)
    b_dw2 = tl.zeros([ROWS, W], tl.float32)
    for i in tl.range(i_p, n_tiles, n_p, num_stages=STAGES):
        i_b = (i % n_b).to(tl.int64)
        o_s, o_h, m = find_rows((i // n_b) * ROWS + tl.arange(0, ROWS), n_s, heads_adjacent, HEADS)
        p_row = p_x + i_b * stride_xb + o_s * stride_xs + o_h * stride_xh
        b_x1, b_x2 = load_pairs(p_row, o_p, m, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
        p_row = p_dy + i_b * stride_dyb + o_s * stride_dys + o_h * stride_dyh
        b_dy1, b_dy2 = load_pairs(p_row, o_p, m, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
        b_cos, b_sin = load_angles(
            p_cos, p_sin, p_pos, i_b, o_s, o_p, m, n_angles, stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
            ROWS, W, PAIRS, FORM, TIME, HEIGHT, WIDTH, WOVEN,
        )  # fmt: skip
        b_dn1, b_dn2 = rotate(b_dy1, b_dy2, b_cos, b_sin, o_p, W, PAIRS, REST, True)
        b_g1 = b_dn1 * b_w1
        b_g2 = b_dn2 * b_w2
        b_rstd = _rstd(b_x1, b_x2, m, eps, D)
        b_mean = (tl.sum(b_g1 * b_x1 + b_g2 * b_x2, 1) / D)[:, None] * b_rstd * b_rstd
        b_dx1 = (b_g1 - b_x1 * b_mean) * b_rstd
        b_dx2 = (b_g2 - b_x2 * b_mean) * b_rstd
        p_row = p_dx + i_b * stride_dxb + o_s * stride_dxs + o_h * stride_dxh
        store_pairs(p_row, b_dx1, b_dx2, o_p, m, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
        if WEIGHT_GRAD:
            b_dw1 += b_dn1 * (b_x1 * b_rstd)
            b_dw2 += b_dn2 * (b_x2 * b_rstd)
    if WEIGHT_GRAD:
        o_p = tl.zeros([1, 1], tl.int32)
        b_dw1 = tl.sum(b_dw1, 0)[None, :]
        b_dw2 = tl.sum(b_dw2, 0)[None, :]
        store_pairs(p_dw + i_p * D + o_p, b_dw1, b_dw2, o_p, o_p == 0, 1, W, PAIRS, REST, VEC, INTERLEAVED)


@triton.jit(do_not_specialize=["n_b", "n_s", "heads_adjacent", "n_tiles_q", "n_tiles_k", "n_programs_q", "n_angles"])
def qk_norm_rope_bwd_kernel(
    p_dyq, p_dyk, p_q, p_k, p_wq, p_wk, p_cos, p_sin, p_pos, p_dq, p_dk, p_dw,
    n_b, n_s, heads_adjacent, n_tiles_q, n_tiles_k, n_programs_q, eps, offset, n_angles,
    stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
    stride_dyqb, stride_dyqs, stride_dyqh, stride_dykb, stride_dyks, stride_dykh,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_dqb, stride_dqs, stride_dqh, stride_dkb, stride_dks, stride_dkh,
    H: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORM: tl.constexpr,
    TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq (first n_programs_q programs), dk (other programs), and each program's row of p_dw."""
    i_p = tl.program_id(0)
    if i_p < n_programs_q:
        _backward_rows(
            p_dyq, p_q, p_wq, p_dq, p_dw, p_cos, p_sin, p_pos,
            i_p, n_programs_q, n_b, n_s, heads_adjacent, n_tiles_q, eps, offset, n_angles,
            stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
            stride_dyqb, stride_dyqs, stride_dyqh, stride_qb, stride_qs, stride_qh, stride_dqb, stride_dqs, stride_dqh,
            H, PAIRS, REST, VEC, INTERLEAVED, FORM, TIME, HEIGHT, WIDTH, WOVEN, WEIGHT_GRAD,
            ROWS, W, STAGES,
        )  # fmt: skip
    else:
        _backward_rows(
            p_dyk, p_k, p_wk, p_dk, p_dw + n_programs_q * 2 * (PAIRS + REST), p_cos, p_sin, p_pos,
            i_p - n_programs_q, tl.num_programs(0) - n_programs_q, n_b, n_s, heads_adjacent, n_tiles_k,
            eps, offset, n_angles,
            stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
            stride_dykb, stride_dyks, stride_dykh, stride_kb, stride_ks, stride_kh, stride_dkb, stride_dks, stride_dkh,
            K, PAIRS, REST, VEC, INTERLEAVED, FORM, TIME, HEIGHT, WIDTH, WOVEN, WEIGHT_GRAD,
            ROWS, W, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_programs_q", "n_programs_k"])
def qk_norm_rope_dw_kernel(
    p_x, p_dwq, p_dwk, n_programs_q, n_programs_k, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """dw of q (program_id(1) == 0) or k (1): the sum of its programs' rows, rounded once."""
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    n_rows = n_programs_q
    if tl.program_id(1) == 1:
        n_rows = n_programs_k
        p_x += n_programs_q * D
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for i_r in range(0, n_rows, ROWS):
        o_r = i_r + tl.arange(0, ROWS)
        m = (o_r < n_rows)[:, None] & m_d[None, :]
        b_sum += tl.load(p_x + o_r[:, None] * D + o_d[None, :], mask=m, other=0.0)
    b_dw = tl.sum(b_sum, 0)
    if tl.program_id(1) == 1:
        tl.store(p_dwk + o_d, b_dw.to(p_dwk.dtype.element_ty), mask=m_d)
    else:
        tl.store(p_dwq + o_d, b_dw.to(p_dwq.dtype.element_ty), mask=m_d)
