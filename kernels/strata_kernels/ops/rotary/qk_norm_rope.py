"""RMSNorm of every head of queries and keys, then rotary position embedding: one read and one write.

    rstd = 1 / sqrt(mean(x²) + eps)         x̂ = x · rstd         n = x̂ · (offset + w)         y = rotate(n)
    dn   = rotate⁻¹(dy)                     g = dn · (offset + w)
    dx   = rstd · (g - x̂ · mean(g · x̂))                          dw = Σ_rows dn · x̂

Sources: Henry et al., "Query-Key Normalization for Transformers", 2020 (arXiv:2010.04245); those of `rms_norm` and
`rope`.

A row is one head at one position; rows follow each other as in `rope`. Nothing is kept for the backward pass, which
reads x anyway and computes rstd again. Its programs are persistent, some for q, the others for k; each sums dw in
registers and leaves one fp32 row of it, and a second kernel adds the rows in a fixed order, so results repeat bit for
bit. Bytes moved per element at the least: forward 2·itemsize, backward 3·itemsize.
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
from ..norm.host import gradient_like, norm_backward, norm_reference
from .._operator import is_transformed, plain_gradients, register
from ..norm.rms_norm import Cast
from .cos_sin import ANGLES, Angles, read_angles, rotate_reference
from .heads import (
    Layout,
    as_bhsd,
    check_heads,
    dense_features,
    from_bhsd,
    heads_adjacent,
    laid_out_like,
    strides,
    tiles,
    unfilled_like,
)
from .qk_norm_rope_kernels import qk_norm_rope_bwd_kernel, qk_norm_rope_dw_kernel, qk_norm_rope_fwd_kernel


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
    y_q = unfilled_like(q, _output_dtype(q, q_weight, cast))
    return y_q, unfilled_like(k, _output_dtype(k, k_weight, cast))


def _triton(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, offset: float, cast: str, angles: Angles
) -> tuple[Tensor, Tensor]:
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
        q, k, q_weight, k_weight, *tensors, y_q, y_k, n_b, n_s, heads_adjacent(q), eps, offset or None, *sizes,
        *strides(q, k, y_q, y_k),
        H=n_qh, K=n_kh, **constexprs, CAST=cast, IN_PAIRS=not q.is_cpu, **cut,
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
    return unfilled_like(q), unfilled_like(k), d_wq, d_wk


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
        n_b, n_s, heads_adjacent(q), tiles_q, tiles_k, programs_q, eps, offset or None, *sizes,
        *strides(d_yq, d_yk, q, k, d_q, d_k),
        H=n_qh, K=n_kh, **constexprs, WEIGHT_GRAD=weight_grad, **cut, STAGES=_BACKWARD.stages,
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
    *tensors, ctx.eps, ctx.offset, ctx.cast, cos, sin, positions = inputs[:10]
    ctx.rotation = inputs[10:]
    ctx.save_for_backward(*tensors, cos, sin, positions)


def _autograd(ctx: Any, d_yq: Tensor, d_yk: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, cos, sin, positions = ctx.saved_tensors
    if torch.is_grad_enabled():
        angles = Angles(cos, sin, positions, *ctx.rotation)
        plain = partial(_reference, eps=ctx.eps, offset=ctx.offset, cast=ctx.cast, angles=angles)
        return *plain_gradients(plain, tensors, (d_yq, d_yk)), *[None] * (3 + len(Angles._fields))
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
    results keep the memory layout; where features are not adjacent in it, they are contiguous. Under `torch.func` all
    is plain PyTorch.

    Args:
        q: [B, H, S, D] ("bhsd"), [B, S, H, D] ("bshd") or packed [T, H, D] ("thd"), bf16 | fp16 | fp32 | fp64, D even.
        k: the same with its own number of heads and the dtype of q.
        q_weight, k_weight: [D], both of one of these dtypes, which may be another than that of q.
        eps: added to the mean square.
        offset: added to the weights, in fp32 (Gemma: 1).
        cast: where the norm rounds, as in `rms_norm`: "llama" (Qwen3), "gemma" (Gemma 3, Qwen3-Next) or "none".
        cos, sin, layout, rotary_dim, interleaved, positions, mrope_section, mrope_interleaved: as in `rope`.

    Returns:
        q and k normalized and rotated, in the shape of each and the dtype that `rms_norm` gives.

    Raises:
        ValueError: what `rope` raises it for, a weight of another shape or device, weights of two dtypes, an unknown
            cast.

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
