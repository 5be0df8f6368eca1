"""RMSNorm of every head of queries and keys, then rotary position embedding: one read and one write.

    rstd = 1 / sqrt(mean(x²) + eps)         x̂ = x · rstd         n = x̂ · (offset + w)         y = rotate(n)
    dn   = rotate⁻¹(dy)                     g = dn · (offset + w)
    dx   = rstd · (g - x̂ · mean(g · x̂))                          dw = Σ_rows dn · x̂

Sources: Henry et al., "Query-Key Normalization for Transformers", 2020 (arXiv:2010.04245); those of `rms_norm` and
`rope`.

Axes: B batch, S positions, H query heads, K key heads, D features; a row is one head at one position. Tiles hold ROWS
rows as pairs of features, found by the strides of q as in `rope`. rstd is computed again in the backward pass: x is
read there anyway. Programs of the backward pass are persistent, some for q, the others for k; each sums dw in registers
and leaves one fp32 row of it, and a second kernel adds the rows in a fixed order, so results repeat bit for bit. Bytes
moved per element at the least: forward 2·itemsize, backward 3·itemsize.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._angles import (
    ANGLES,
    Angles,
    Layout,
    as_bhsd,
    check_heads,
    dense_features,
    from_bhsd,
    heads_adjacent,
    laid_out_like,
    read_angles,
    rotate_reference,
    strides,
    tiles,
)
from ._launch import DTYPES, describe, has_dtype, launch, multiprocessors, takes_kernel
from ._norm import gradient_like, is_transformed, norm_backward, norm_reference
from ._register import register
from ._rotary import choose, find_rows, load_angles, load_pairs, point_at_rows, rotate, store_pairs
from .rms_norm import Cast


@triton.jit
def _rstd(b_x1, b_x2, m, eps, D: tl.constexpr):
    """rstd as a column, 0 for rows that do not exist."""
    return tl.where(m, tl.rsqrt(tl.sum(b_x1 * b_x1 + b_x2 * b_x2, 1) / D + eps)[:, None], 0.0)


@triton.jit
def _normalize(b_x, b_rstd, b_scale, DTYPE: tl.constexpr, CAST: tl.constexpr):
    """x̂ · (offset + w), x̂ rounded where the cast mode says so."""
    if CAST == "none":
        b_rstd = b_rstd.to(DTYPE).to(tl.float32)
    b_xhat = b_x * b_rstd
    if CAST != "gemma":
        b_xhat = b_xhat.to(DTYPE).to(tl.float32)
    return b_xhat * b_scale


@triton.jit(do_not_specialize=["n_b", "n_s", "heads_adjacent", "n_angles"])
def qk_norm_rope_fwd_kernel(
    p_q, p_k, p_wq, p_wk, p_cos, p_sin, p_pos, p_yq, p_yk, n_b, n_s, heads_adjacent, eps, offset, n_angles,
    stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_yqb, stride_yqs, stride_yqh, stride_ykb, stride_yks, stride_ykh,
    H: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORM: tl.constexpr,
    TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr,
    CAST: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """ROWS rows of q and k in one batch row; batch rows alternate, so that they share angles in L2."""
    i_b = (tl.program_id(0) % n_b).to(tl.int64)
    o_s, o_h, m = find_rows(
        (tl.program_id(0) // n_b) * ROWS + tl.arange(0, ROWS), n_s, heads_adjacent, H + K
    )  # fmt: skip
    o_p = tl.zeros([ROWS, 1], tl.int32)
    p_x = point_at_rows(
        p_q + i_b * stride_qb, p_k + i_b * stride_kb, o_s, o_h, stride_qs, stride_qh, stride_ks, stride_kh, H, VEC
    )  # fmt: skip
    b_x1, b_x2 = load_pairs(p_x, o_p, m, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
    # One weight per row of the tile, so that it is loaded in the layout of the tile.
    b_w1, b_w2 = load_pairs(choose(o_h < H, p_wq, p_wk, VEC), o_p, m, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
    b_cos, b_sin = load_angles(
        p_cos, p_sin, p_pos, i_b, o_s, o_p, m, n_angles, stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
        ROWS, W, PAIRS, FORM, TIME, HEIGHT, WIDTH, WOVEN,
    )  # fmt: skip
    b_rstd = _rstd(b_x1, b_x2, m, eps, 2 * (PAIRS + REST))
    b_n1 = _normalize(b_x1, b_rstd, b_w1 + offset, p_q.dtype.element_ty, CAST)
    b_n2 = _normalize(b_x2, b_rstd, b_w2 + offset, p_q.dtype.element_ty, CAST)
    # Rounded before the rotation, as the model's norm does.
    b_n1 = b_n1.to(p_yq.dtype.element_ty).to(tl.float32)
    b_n2 = b_n2.to(p_yq.dtype.element_ty).to(tl.float32)
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
    """Every n_p-th tile of one tensor from the i_p-th on, and row i_p of p_dw."""
    D: tl.constexpr = 2 * (PAIRS + REST)
    o_p = tl.zeros([ROWS, 1], tl.int32)
    b_w1, b_w2 = load_pairs(p_w + o_p, o_p, o_p == 0, ROWS, W, PAIRS, REST, VEC, INTERLEAVED)
    b_w1 += offset
    b_w2 += offset
    # The sums stay elementwise until the end: one reduction in all instead of one per tile.
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
    """dq in the first n_programs_q programs, dk in the others, and every program's row of p_dw."""
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
    """dw of q (axis 1 of the grid: 0) or k (1): the sum of its programs' rows, rounded once."""
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


@dataclass(frozen=True)
class Tile:
    """Pairs in a tile, warps, pipeline stages, programs per multiprocessor (None: one for every tile)."""

    pairs: int
    warps: int
    stages: int = 1
    occupancy: int | None = None


_FORWARD = Tile(pairs=512, warps=2)
_BACKWARD = Tile(pairs=1024, warps=4, stages=3, occupancy=3)


def _cut(tile: Tile, features: int) -> dict[str, int]:
    """The rows and columns of a tile; heads wider than it make it larger."""
    width = triton.next_power_of_2(features // 2)
    return {"ROWS": max(1, tile.pairs // width), "W": width, "num_warps": tile.warps}


def _output_dtype(x: Tensor, weight: Tensor, cast: str) -> torch.dtype:
    """As `rms_norm` has it."""
    return x.dtype if cast == "gemma" else torch.promote_types(x.dtype, weight.dtype)


def _fake(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str, *_: Any
) -> tuple[Tensor, Tensor]:
    y_q = torch.empty_like(q, dtype=_output_dtype(q, q_weight, cast))
    return y_q, torch.empty_like(k, dtype=_output_dtype(k, k_weight, cast))


def _triton(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str,
    angles: Angles,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y_q, y_k = _fake(q, k, q_weight, k_weight, eps, offset, cast)
    q, k = dense_features(q), dense_features(k)
    n_b, n_qh, n_s, features = q.shape
    n_kh = k.shape[1]
    q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
    tensors, sizes, constexprs = angles.for_kernel(q, k, y_q, y_k, q_weight, k_weight)
    cut = _cut(_FORWARD, features)
    n_tiles = tiles((n_qh + n_kh) * n_s, 1, cut["ROWS"])
    launch(
        qk_norm_rope_fwd_kernel, (n_b * n_tiles,),
        q, k, q_weight, k_weight, *tensors, y_q, y_k, n_b, n_s, heads_adjacent(q), eps, offset, *sizes,
        *strides(q, k, y_q, y_k),
        H=n_qh, K=n_kh, **constexprs, CAST=cast, **cut,
    )  # fmt: skip
    return y_q, y_k


def _reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str, angles: Angles
) -> tuple[Tensor, Tensor]:
    """In plain PyTorch, differentiable."""

    def one(x: Tensor, weight: Tensor) -> Tensor:
        n, _, _ = norm_reference(x, None, weight, None, eps, offset, cast, center=False)
        return rotate_reference(n, angles, inverse=False)

    return one(q, q_weight), one(k, k_weight)


def _backward_fake(
    d_yq: Tensor, d_yk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    eps: float, offset: float, weight_grad: bool, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_wq, d_wk = (gradient_like(weight, weight_grad, q) for weight in (q_weight, k_weight))
    return torch.empty_like(q), torch.empty_like(k), d_wq, d_wk


def _backward_triton(
    d_yq: Tensor, d_yk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    eps: float, offset: float, weight_grad: bool, angles: Angles,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_q, d_k, d_wq, d_wk = _backward_fake(d_yq, d_yk, q, k, q_weight, k_weight, eps, offset, weight_grad)
    d_yq, d_yk, q, k = (dense_features(x) for x in (d_yq, d_yk, q, k))
    n_b, n_qh, n_s, features = q.shape
    n_kh = k.shape[1]
    tensors, sizes, constexprs = angles.for_kernel(q, k, d_yq, d_yk, d_q, d_k)
    cut = _cut(_BACKWARD, features)
    tiles_q, tiles_k = (n_b * tiles(heads * n_s, 1, cut["ROWS"]) for heads in (n_qh, n_kh))
    assert _BACKWARD.occupancy is not None
    programs = min(tiles_q + tiles_k, _BACKWARD.occupancy * multiprocessors(q.device))
    programs_q = _share(programs, tiles_q, tiles_k)
    partial = q.new_empty((programs if weight_grad else 0, features), dtype=torch.float32)
    launch(
        qk_norm_rope_bwd_kernel, (programs,),
        d_yq, d_yk, q, k, q_weight.contiguous(), k_weight.contiguous(), *tensors, d_q, d_k, partial,
        n_b, n_s, heads_adjacent(q), tiles_q, tiles_k, programs_q, eps, offset, *sizes,
        *strides(d_yq, d_yk, q, k, d_q, d_k),
        H=n_qh, K=n_kh, **constexprs, WEIGHT_GRAD=weight_grad,
        **cut, STAGES=_BACKWARD.stages,
    )  # fmt: skip
    if weight_grad:
        launch(
            qk_norm_rope_dw_kernel, (triton.cdiv(features, 8), 2),
            partial, d_wq, d_wk, programs_q, programs - programs_q, D=features, ROWS=128, BLOCK=8, num_warps=4,
        )  # fmt: skip
    return d_q, d_k, d_wq, d_wk


def _share(programs: int, tiles_q: int, tiles_k: int) -> int:
    """How many of the programs are for q: by its part of the tiles, and none left out that has any."""
    if 0 in (tiles_q, tiles_k):
        return programs if tiles_q else 0
    return min(max(round(programs * tiles_q / (tiles_q + tiles_k)), 1), programs - 1)


def _backward_reference(
    d_yq: Tensor, d_yk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    eps: float, offset: float, weight_grad: bool, angles: Angles,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def one(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        _, _, stats = norm_reference(x, None, weight, None, eps, offset, "gemma", center=False)
        dn = rotate_reference(dy.to(stats.dtype), angles, inverse=True)
        dw = gradient_like(weight, weight_grad, x)
        dx = norm_backward(dn, None, x, weight, stats, offset, False, dw if weight_grad else None, None)
        return laid_out_like(x, dx), dw

    (d_q, d_wq), (d_k, d_wk) = one(d_yq, q, q_weight), one(d_yk, k, k_weight)
    return d_q, d_k, d_wq, d_wk


def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str,
    *angles: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rotation = Angles(*angles)
    if takes_kernel(q):
        return _triton(q, k, q_weight, k_weight, eps, offset, cast, rotation)
    y_q, y_k = _reference(q, k, q_weight, k_weight, eps, offset, cast, rotation)
    return laid_out_like(q, y_q), laid_out_like(k, y_k)


def _backward(
    d_yq: Tensor, d_yk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    eps: float, offset: float, weight_grad: bool, *angles: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (d_yq, d_yk, q, k, q_weight, k_weight, eps, offset)
    rotation = Angles(*angles)
    if takes_kernel(q):
        return _backward_triton(*inputs, weight_grad, rotation)
    return _backward_reference(*inputs, weight_grad, rotation)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps, ctx.offset, _, cos, sin, positions = inputs[:10]
    ctx.rotation = inputs[10:]
    ctx.save_for_backward(*tensors, cos, sin, positions)


@once_differentiable
def _autograd(ctx: Any, d_yq: Tensor, d_yk: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, cos, sin, positions = ctx.saved_tensors
    weight_grad = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    d_q, d_k, d_wq, d_wk = _qk_norm_rope_bwd(
        d_yq, d_yk, *tensors, ctx.eps, ctx.offset, weight_grad, cos, sin, positions, *ctx.rotation
    )
    d_weights = (d_wq, d_wk) if weight_grad else (None, None)
    return d_q, d_k, *d_weights, *[None] * (3 + len(Angles._fields))


_qk_norm_rope_bwd = register(
    "qk_norm_rope_bwd(Tensor d_yq, Tensor d_yk, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps,"
    f" float offset, bool weight_grad, {ANGLES}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_qk_norm_rope = register(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, float offset, str cast,"
    f" {ANGLES}) -> (Tensor, Tensor)",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_autograd,
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "llama",
    layout: Layout = "bhsd",
    rotary_dim: int | None = None,
    interleaved: bool = False,
    positions: Tensor | None = None,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin)`, fused: Qwen3's and Gemma 3's attention.

    What the norm gives is rounded as there; the rotation is in fp32 and rounded once. Nothing but the arguments is kept
    for the backward pass. Neither q nor k is written to, nor copied where the features of a head are adjacent. The
    results keep the memory layout. Under `torch.func` all is plain PyTorch.

    Args:
        q: [B, H, S, D] ("bhsd"), [B, S, H, D] ("bshd") or packed [T, H, D] ("thd"), bf16 | fp16 | fp32 | fp64, D even.
        k: the same with its own number of heads and the dtype of q.
        q_weight, k_weight: [D], of any of these dtypes.
        eps: added to the mean square.
        offset: added to the weights, in fp32 (Gemma: 1).
        cast: where the norm rounds, as in `rms_norm`: "llama" (Qwen3), "gemma" (Gemma 3, Qwen3-Next) or "none".
        cos, sin, layout, rotary_dim, interleaved, positions, mrope_section, mrope_interleaved: as in `rope`.

    Returns:
        q and k normalized and rotated, in the shape of each and the dtype that `rms_norm` gives.

    Raises:
        ValueError: what `rope` raises it for, a weight of another shape or device, an unknown cast.

    Example:
        >>> q, k, weight = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64), torch.ones(64)
        >>> angle = torch.outer(torch.arange(5.0), 1e4 ** -(torch.arange(32.0) / 32)).repeat(1, 2)
        >>> q, k = qk_norm_rope(q, k, weight, weight, angle.cos(), angle.sin())
    """
    check_heads(q, k, layout)
    for name, weight in {"q_weight": q_weight, "k_weight": k_weight}.items():
        if weight.shape != q.shape[-1:] or not has_dtype(weight):
            raise ValueError(f"{name} must be {DTYPES} of shape [{q.shape[-1]}], got {describe(weight)}")
        if weight.device != q.device:
            raise ValueError(f"{name} is on {weight.device} and q on {q.device}: move one of them")
    if cast not in get_args(Cast):
        raise ValueError(f"cast must be one of {', '.join(get_args(Cast))}, got {cast!r}")
    q, k = as_bhsd(layout, q, k)
    angles = read_angles(
        q, cos, sin, positions=positions, rotary_dim=rotary_dim, interleaved=interleaved,
        mrope_section=mrope_section, mrope_interleaved=mrope_interleaved,
    )  # fmt: skip
    inputs = (q, k, q_weight, k_weight, eps, offset, cast)
    if is_transformed():
        y_q, y_k = _reference(*inputs, angles)
    else:
        y_q, y_k = _qk_norm_rope(*inputs, *angles)
    y_q, y_k = from_bhsd(layout, y_q, y_k)
    return y_q, y_k
