"""Rotary position embedding of queries and keys.

    y1 = x1 · cos - x2 · sin        y2 = x2 · cos + x1 · sin        for every pair (x1, x2) of features

The gradient is the rotation by the opposite angle: the same kernel with sin negated.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864); M-RoPE:
Wang et al., "Qwen2-VL", 2024 (arXiv:2409.12191).

Axes: B batch, S positions, H query heads, K key heads, D features; `rotary/__init__.py` defines the pairs. A program
rotates consecutive chunks of VEC pairs, across row boundaries, so no lane is idle for any D and number of heads. The
strides of q decide whether consecutive rows are the heads of a position or the positions of a head. Minimum traffic per
element: 2·itemsize in each direction.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch, takes_kernel
from .._operator import Operator, is_transformed, operator
from .cos_sin import SCHEMA, CosSin, load_angles, read_cos_sin, rotate, rotate_reference
from .heads import (
    Layout,
    as_bhsd,
    check_heads,
    copy_to_layout_of,
    count_tiles,
    dense_features,
    empty_heads_like,
    find_rows,
    from_bhsd,
    heads_adjacent,
    load_pairs,
    point_at_rows,
    store_pairs,
    strides,
)


@triton.jit(do_not_specialize=["n_b", "n_s", "heads_adjacent", "n_angles"])
def rope_kernel(
    p_q, p_k, p_cos, p_sin, p_pos, p_yq, p_yk, n_b, n_s, heads_adjacent, n_angles,
    stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_yqb, stride_yqs, stride_yqh, stride_ykb, stride_yks, stride_ykh,
    H: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    FORM: tl.constexpr, TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr,
    INVERSE: tl.constexpr, CHUNKS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """CHUNKS chunks of rows of q and k of one batch element; batch elements alternate to share angles in L2."""
    PER_ROW: tl.constexpr = (PAIRS + REST) // VEC
    i_b = (tl.program_id(0) % n_b).to(tl.int64)
    o_c = (tl.program_id(0) // n_b) * CHUNKS + tl.arange(0, CHUNKS)
    o_p = ((o_c % PER_ROW) * VEC)[:, None]
    o_s, o_h, m = find_rows(o_c // PER_ROW, n_s, heads_adjacent, H + K)
    p_x = point_at_rows(
        p_q + i_b * stride_qb, p_k + i_b * stride_kb, o_s, o_h, stride_qs, stride_qh, stride_ks, stride_kh, H, VEC
    )  # fmt: skip
    b_x1, b_x2 = load_pairs(p_x, o_p, m, CHUNKS, VEC, PAIRS, REST, VEC, INTERLEAVED)
    b_cos, b_sin = load_angles(
        p_cos, p_sin, p_pos, i_b, o_s, o_p, m, n_angles, stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
        CHUNKS, VEC, PAIRS, FORM, TIME, HEIGHT, WIDTH, WOVEN,
    )  # fmt: skip
    b_y1, b_y2 = rotate(b_x1, b_x2, b_cos, b_sin, o_p, VEC, PAIRS, REST, INVERSE)
    p_y = point_at_rows(
        p_yq + i_b * stride_yqb, p_yk + i_b * stride_ykb, o_s, o_h, stride_yqs, stride_yqh, stride_yks, stride_ykh,
        H, VEC,
    )  # fmt: skip
    store_pairs(p_y, b_y1, b_y2, o_p, m, CHUNKS, VEC, PAIRS, REST, VEC, INTERLEAVED)


@dataclass(frozen=True)
class Launch:
    """Launch parameters: pairs and warps per program."""

    pairs: int
    warps: int


_LAUNCH = Launch(pairs=1024, warps=4)


def rope_triton(q: Tensor, k: Tensor, inverse: bool, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
    """q: [B, H, S, D] and k: [B, K, S, D], rotated by the kernel; `rotate_reference` is the same in plain PyTorch."""
    y_q, y_k = empty_heads_like(q), empty_heads_like(k)
    q, k = dense_features(q), dense_features(k)
    n_b, n_qh, n_s, features = q.shape
    n_kh = k.shape[1]
    tensors, sizes, constexprs = cos_sin.for_kernel(q, k, y_q, y_k)
    chunks = _LAUNCH.pairs // constexprs["VEC"]
    n_tiles = count_tiles((n_qh + n_kh) * n_s, features // 2 // constexprs["VEC"], chunks)
    launch(
        rope_kernel, (n_b * n_tiles,),
        q, k, *tensors, y_q, y_k, n_b, n_s, heads_adjacent(q), *sizes, *strides(q, k, y_q, y_k),
        H=n_qh, K=n_kh, **constexprs, INVERSE=inverse, CHUNKS=chunks, num_warps=_LAUNCH.warps,
    )  # fmt: skip
    return y_q, y_k


@operator(f"rope(Tensor q, Tensor k, bool inverse, {SCHEMA}) -> (Tensor, Tensor)")
class _Rope(Operator):
    """q and k, rotated. With `inverse` negated, it is its own backward operator."""

    recomputed = 2
    keeps_inputs = False

    @staticmethod
    def forward(q: Tensor, k: Tensor, inverse: bool, *fields: Any) -> tuple[Tensor, Tensor]:
        cos_sin = CosSin(*fields)
        if takes_kernel(q):
            return rope_triton(q, k, inverse, cos_sin)
        y_q, y_k = (copy_to_layout_of(x, rotate_reference(x, cos_sin, inverse)) for x in (q, k))
        return y_q, y_k

    @staticmethod
    def fake(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return empty_heads_like(q), empty_heads_like(k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, _, ctx.inverse, cos, sin, positions, *ctx.settings = inputs
        ctx.save_for_backward(cos, sin, positions)

    @staticmethod
    def backward(ctx: Any, d_yq: Tensor, d_yk: Tensor) -> tuple[Tensor | None, ...]:
        d_q, d_k = _Rope.apply(d_yq, d_yk, not ctx.inverse, *ctx.saved_tensors, *ctx.settings)
        return d_q, d_k, None, *[None] * len(CosSin._fields)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    layout: Layout = "bhsd",
    rotary_dim: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    positions: Tensor | None = None,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """`(q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin)`; on a GPU one kernel, in fp32, rounded once.

    q and k, e.g. views of one projection, are not copied if their feature stride is 1; the results then have their
    memory layout, otherwise they are contiguous. Under `torch.func` transforms, the operator runs in plain PyTorch.

    Args:
        q: [B, H, S, D] ("bhsd"), [B, S, H, D] ("bshd") or packed [T, H, D] ("thd"), bf16 | fp16 | fp32 | fp64, D even.
        k: like q, except for the number of heads, which may be 0.
        cos, sin: [S, R] or [B, S, R] (or [1, S, R]; for "thd" S is T), any floating dtype, without gradient. Each
            angle is stored twice, as in `transformers`: `cat((angle, angle), -1)`, or with `interleaved`
            `repeat_interleave(angle, 2, -1)`; or once per pair, [..., R / 2], with `rotary_dim` = R; or complex, `cos`
            = exp(i·angle) of [..., R / 2] without `sin` (Llama 4, DeepSeek).
        layout: order of the axes of q and k.
        rotary_dim: R; default: the width of cos. Features from R on are copied.
        interleaved: a pair is features (2p, 2p + 1) instead of (p, p + R / 2) (GPT-J, Cohere, GLM, Llama 4).
        inverse: rotate by the opposite angle.
        positions: [S] or [B, S] (for "thd" [T]), int32 | int64, e.g. of packed sequences: indices into cos and sin,
            which are then tables [rows, R]. An index outside the table gives NaN.
        mrope_section: numbers of pairs rotated by the position in time, height and width; cos and sin are then
            [3, S, R] or [3, B, S, R] (Qwen2-VL). None if the model's rotary module has merged the sections.
        mrope_interleaved: the sections alternate, t h w t h w … t t t (Qwen3-VL), instead of being consecutive.

    Returns:
        q and k, rotated: same shapes and dtypes.

    Raises:
        ValueError: a wrong shape, dtype or device; an unknown layout; cos or sin requires a gradient.

    Example:
        >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
        >>> angle = torch.outer(torch.arange(5.0), 1e4 ** -(torch.arange(32.0) / 32)).repeat(1, 2)
        >>> q, k = rope(q, k, angle.cos(), angle.sin())
    """
    check_heads(q, k, layout)
    q, k = as_bhsd(layout, q, k)
    cos_sin = read_cos_sin(
        q, cos, sin, positions=positions, rotary_dim=rotary_dim, interleaved=interleaved,
        mrope_section=mrope_section, mrope_interleaved=mrope_interleaved,
    )  # fmt: skip
    if is_transformed():
        y_q, y_k = (rotate_reference(x, cos_sin, inverse) for x in (q, k))
    else:
        y_q, y_k = _Rope.apply(q, k, inverse, *cos_sin)
    y_q, y_k = from_bhsd(layout, y_q, y_k)
    return y_q, y_k
