"""RMSNorm of each head of queries and keys, then rotary position embedding, in one kernel.

    rstd = 1 / sqrt(mean(x²) + eps)         x̂ = x · rstd         n = x̂ · (offset + w)         y = rotate(n)
    dn   = rotate⁻¹(dy)                     g = dn · (offset + w)
    dx   = rstd · (g - x̂ · mean(g · x̂))                          dw = Σ_rows dn · x̂

Sources: Henry et al., "Query-Key Normalization for Transformers", 2020 (arXiv:2010.04245); those of `rms_norm` and
`rope`.

A row is one head at one position; rows are ordered as in `rope`. The forward pass saves only its inputs; the backward
pass recomputes rstd from x, which it reads anyway. The programs of the backward kernel are persistent, some for q, the
others for k. Each accumulates dw in registers and stores one fp32 row of partial sums. A second kernel adds the rows in
a fixed order, so results are bitwise reproducible. Minimum traffic per element: forward 2·itemsize, backward
3·itemsize.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import triton
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype, launch, multiprocessors, takes_kernel
from .._operator import Operator, is_transformed, operator, plain_gradients
from ..norm.norm_launch import norm_backward
from ..norm.norm_reference import gradient_like, norm_reference
from ..norm.rms_norm import Cast
from .cos_sin import SCHEMA, CosSin, read_cos_sin, rotate_reference
from .heads import (
    Layout,
    as_bhsd,
    check_heads,
    copy_to_layout_of,
    count_tiles,
    dense_features,
    empty_heads_like,
    from_bhsd,
    heads_adjacent,
    strides,
)
from .qk_norm_rope_kernels import qk_norm_rope_bwd_kernel, qk_norm_rope_dw_kernel, qk_norm_rope_fwd_kernel


@dataclass(frozen=True)
class Tile:
    """Pairs per tile, warps, pipeline stages, programs per multiprocessor (None: one program per tile)."""

    pairs: int
    warps: int
    stages: int = 1
    occupancy: int | None = None


_FORWARD = Tile(pairs=512, warps=2)
_BACKWARD = Tile(pairs=1024, warps=4, stages=3, occupancy=3)


def _tile_shape(tile: Tile, features: int) -> dict[str, int]:
    """ROWS and W of a tile, which has at least one row, so more than `tile.pairs` pairs for wide heads."""
    width = triton.next_power_of_2(features // 2)
    return {"ROWS": max(1, tile.pairs // width), "W": width, "num_warps": tile.warps}


def _empty_output(x: Tensor, weight: Tensor, cast: str) -> Tensor:
    """An uninitialized result for x, in the dtype that `rms_norm` returns."""
    return empty_heads_like(x, x.dtype if cast == "gemma" else torch.promote_types(x.dtype, weight.dtype))


def _empty_gradients(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_wq, d_wk = (gradient_like(weight, weight_grad, q) for weight in (q_weight, k_weight))
    return empty_heads_like(q), empty_heads_like(k), d_wq, d_wk


def qk_norm_rope_triton(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str, cos_sin: CosSin
) -> tuple[Tensor, Tensor]:
    """q: [B, H, S, D] and k: [B, K, S, D], normalized and rotated by the kernel."""
    y_q, y_k = _empty_output(q, q_weight, cast), _empty_output(k, k_weight, cast)
    q, k = dense_features(q), dense_features(k)
    n_b, n_qh, n_s, features = q.shape
    n_kh = k.shape[1]
    q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
    tensors, sizes, constexprs = cos_sin.for_kernel(q, k, y_q, y_k, q_weight, k_weight)
    shape = _tile_shape(_FORWARD, features)
    n_tiles = count_tiles((n_qh + n_kh) * n_s, 1, shape["ROWS"])
    launch(
        qk_norm_rope_fwd_kernel, (n_b * n_tiles,),
        q, k, q_weight, k_weight, *tensors, y_q, y_k, n_b, n_s, heads_adjacent(q), eps, offset or None, *sizes,
        *strides(q, k, y_q, y_k),
        H=n_qh, K=n_kh, **constexprs, CAST=cast, IN_PAIRS=not q.is_cpu, **shape,
    )  # fmt: skip
    return y_q, y_k


def qk_norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str, cos_sin: CosSin
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope_triton` in plain PyTorch, differentiable."""

    def one(x: Tensor, weight: Tensor) -> Tensor:
        n, _, _ = norm_reference(x, None, weight, None, eps, offset, cast, center=False)
        return rotate_reference(n, cos_sin, inverse=False)

    return one(q, q_weight), one(k, k_weight)


def qk_norm_rope_bwd_triton(
    d_yq: Tensor, d_yk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    eps: float, offset: float, weight_grad: bool, cos_sin: CosSin,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and both weights by the kernels; those of the weights are empty unless weight_grad."""
    d_q, d_k, d_wq, d_wk = _empty_gradients(q, k, q_weight, k_weight, weight_grad)
    d_yq, d_yk, q, k = (dense_features(x) for x in (d_yq, d_yk, q, k))
    n_b, n_qh, n_s, features = q.shape
    n_kh = k.shape[1]
    tensors, sizes, constexprs = cos_sin.for_kernel(q, k, d_yq, d_yk, d_q, d_k)
    shape = _tile_shape(_BACKWARD, features)
    tiles_q, tiles_k = (n_b * count_tiles(heads * n_s, 1, shape["ROWS"]) for heads in (n_qh, n_kh))
    assert _BACKWARD.occupancy is not None
    programs = min(tiles_q + tiles_k, _BACKWARD.occupancy * multiprocessors(q.device))
    programs_q = _programs_of_q(programs, tiles_q, tiles_k)
    partial_dw = q.new_empty((programs if weight_grad else 0, features), dtype=torch.float32)
    launch(
        qk_norm_rope_bwd_kernel, (programs,),
        d_yq, d_yk, q, k, q_weight.contiguous(), k_weight.contiguous(), *tensors, d_q, d_k, partial_dw,
        n_b, n_s, heads_adjacent(q), tiles_q, tiles_k, programs_q, eps, offset or None, *sizes,
        *strides(d_yq, d_yk, q, k, d_q, d_k),
        H=n_qh, K=n_kh, **constexprs, WEIGHT_GRAD=weight_grad, **shape, STAGES=_BACKWARD.stages,
    )  # fmt: skip
    if weight_grad:
        launch(
            qk_norm_rope_dw_kernel, (triton.cdiv(features, 8), 2),
            partial_dw, d_wq, d_wk, programs_q, programs - programs_q, D=features, ROWS=128, BLOCK=8, num_warps=4,
        )  # fmt: skip
    return d_q, d_k, d_wq, d_wk


def _programs_of_q(programs: int, tiles_q: int, tiles_k: int) -> int:
    """The number of programs for q, in proportion to its tiles; q and k get at least one each if they have tiles."""
    if 0 in (tiles_q, tiles_k):
        return programs if tiles_q else 0
    return min(max(round(programs * tiles_q / (tiles_q + tiles_k)), 1), programs - 1)


def qk_norm_rope_bwd_reference(
    d_yq: Tensor, d_yk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    eps: float, offset: float, weight_grad: bool, cos_sin: CosSin,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`qk_norm_rope_bwd_triton` in plain PyTorch."""

    def one(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        _, _, stats = norm_reference(x, None, weight, None, eps, offset, "gemma", center=False)
        dn = rotate_reference(dy.to(stats.dtype), cos_sin, inverse=True)
        dw = gradient_like(weight, weight_grad, x)
        dx = norm_backward(dn, None, x, weight, stats, offset, False, dw if weight_grad else None, None)
        return copy_to_layout_of(x, dx), dw

    (d_q, d_wq), (d_k, d_wk) = one(d_yq, q, q_weight), one(d_yk, k, k_weight)
    return d_q, d_k, d_wq, d_wk


@operator(
    "qk_norm_rope_bwd(Tensor d_yq, Tensor d_yk, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps,"
    f" float offset, bool weight_grad, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)"
)
class _QKNormRopeBackward(Operator):
    """The gradients of q, k and both weights."""

    @staticmethod
    def forward(
        d_yq: Tensor, d_yk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
        eps: float, offset: float, weight_grad: bool, *fields: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        run = qk_norm_rope_bwd_triton if takes_kernel(q) else qk_norm_rope_bwd_reference
        return run(d_yq, d_yk, q, k, q_weight, k_weight, eps, offset, weight_grad, CosSin(*fields))

    @staticmethod
    def fake(
        d_yq: Tensor, d_yk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
        eps: float, offset: float, weight_grad: bool, *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        return _empty_gradients(q, k, q_weight, k_weight, weight_grad)


@operator(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, float offset, str cast,"
    f" {SCHEMA}) -> (Tensor, Tensor)"
)
class _QKNormRope(Operator):
    """q and k normalized and rotated."""

    recomputed = 2

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str, *fields: Any
    ) -> tuple[Tensor, Tensor]:
        inputs = (q, k, q_weight, k_weight, eps, offset, cast, CosSin(*fields))
        if takes_kernel(q):
            return qk_norm_rope_triton(*inputs)
        y_q, y_k = qk_norm_rope_reference(*inputs)
        return copy_to_layout_of(q, y_q), copy_to_layout_of(k, y_k)

    @staticmethod
    def fake(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str, *_: Any
    ) -> tuple[Tensor, Tensor]:
        return _empty_output(q, q_weight, cast), _empty_output(k, k_weight, cast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.eps, ctx.offset, ctx.cast, cos, sin, positions = inputs[:10]
        ctx.settings = inputs[10:]
        ctx.save_for_backward(*tensors, cos, sin, positions)

    @staticmethod
    def backward(ctx: Any, d_yq: Tensor, d_yk: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, cos, sin, positions = ctx.saved_tensors
        cos_sin = CosSin(cos, sin, positions, *ctx.settings)
        no_gradients = [None] * (3 + len(CosSin._fields))
        if torch.is_grad_enabled():
            plain = partial(qk_norm_rope_reference, eps=ctx.eps, offset=ctx.offset, cast=ctx.cast, cos_sin=cos_sin)
            return *plain_gradients(plain, tensors, (d_yq, d_yk)), *no_gradients
        weight_grad = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        d_q, d_k, d_wq, d_wk = _QKNormRopeBackward.apply(
            d_yq, d_yk, *tensors, ctx.eps, ctx.offset, weight_grad, *cos_sin
        )
        return d_q, d_k, *((d_wq, d_wk) if weight_grad else (None, None)), *no_gradients


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
    """`rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin)`, as in Qwen3 and Gemma 3.

    One kernel. The norm is rounded as in `rms_norm`; the rotation is in fp32 and rounded once. Only the arguments are
    saved for backward. q and k are not copied if their feature stride is 1; the results then have their memory layout,
    otherwise they are contiguous. Under `torch.func` transforms, the operator runs in plain PyTorch.

    Args:
        q: [B, H, S, D] ("bhsd"), [B, S, H, D] ("bshd") or packed [T, H, D] ("thd"), bf16 | fp16 | fp32 | fp64, D even.
        k: like q, except for the number of heads.
        q_weight, k_weight: [D], same dtype, any of these; it may differ from that of q.
        eps: added to the mean square.
        offset: added to the weights, in fp32 (Gemma: 1).
        cast: rounding of the norm, as in `rms_norm`: "llama" (Qwen3), "gemma" (Gemma 3, Qwen3-Next) or "none".
        cos, sin, layout, rotary_dim, interleaved, positions, mrope_section, mrope_interleaved: as in `rope`.

    Returns:
        q and k, normalized and rotated: same shapes, in the dtype that `rms_norm` returns.

    Raises:
        ValueError: as `rope`; a wrong shape or device of a weight; weights of different dtypes; an unknown `cast`.

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
    if q_weight.dtype != k_weight.dtype:
        raise ValueError(f"q_weight is {q_weight.dtype} and k_weight {k_weight.dtype}: convert one of them")
    if cast not in get_args(Cast):
        raise ValueError(f"cast must be one of {', '.join(get_args(Cast))}, got {cast!r}")
    q, k = as_bhsd(layout, q, k)
    cos_sin = read_cos_sin(
        q, cos, sin, positions=positions, rotary_dim=rotary_dim, interleaved=interleaved,
        mrope_section=mrope_section, mrope_interleaved=mrope_interleaved,
    )  # fmt: skip
    inputs = (q, k, q_weight, k_weight, eps, offset, cast)
    if is_transformed():
        y_q, y_k = qk_norm_rope_reference(*inputs, cos_sin)
    else:
        y_q, y_k = _QKNormRope.apply(*inputs, *cos_sin)
    y_q, y_k = from_bhsd(layout, y_q, y_k)
    return y_q, y_k
