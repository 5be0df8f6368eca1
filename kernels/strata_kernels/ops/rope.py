"""Rotary position embedding of queries and keys, in the "rotate half" convention.

    x = [x1 | x2 | rest]        x1, x2 halves of the first R features, R the width of cos and sin
    y = [x1 · cos - x2 · sin | x2 · cos + x1 · sin | rest]

The gradient is the rotation by the opposite angle: the same kernel with the sign of the sine turned.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864).

Axes: B batch, S positions, H query heads, K key heads, D features. One program rotates a few heads at a few positions,
of queries and keys alike, so an angle is read once per program. Which of the two it takes more of follows the strides
of q: neighbors in memory go to one program. Bytes moved per element at the least: 2·itemsize, each way.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import DTYPES, describe, has_dtype, launch, takes_kernel
from ._register import register

Layout = Literal["bhsd", "bshd"]


@triton.jit
def _rotate_heads(
    p_x, p_y, stride_xs, stride_xh, stride_ys, stride_yh, b_cos, b_sin, o_s, m_s,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """All heads of one tensor at the positions o_s; p_x and p_y point at the batch row."""
    o_r = tl.arange(0, BLOCK_R)[None, None, :]
    p_xs = p_x + o_s[:, None, None] * stride_xs
    p_ys = p_y + o_s[:, None, None] * stride_ys
    for i_h in tl.static_range(0, HEADS, BLOCK_H):
        o_h = (i_h + tl.arange(0, BLOCK_H)[None, :, None]).to(tl.int64)
        m_h = m_s[:, None, None] & (o_h < HEADS)
        m = m_h & (o_r < HALF)
        p_x1 = p_xs + o_h * stride_xh + o_r
        p_y1 = p_ys + o_h * stride_yh + o_r
        b_x1 = tl.load(p_x1, mask=m, other=0.0)
        b_x2 = tl.load(p_x1 + HALF, mask=m, other=0.0)
        b_y1 = b_x1.to(tl.float32) * b_cos - b_x2.to(tl.float32) * b_sin
        b_y2 = b_x2.to(tl.float32) * b_cos + b_x1.to(tl.float32) * b_sin
        tl.store(p_y1, b_y1.to(p_y.dtype.element_ty), mask=m)
        tl.store(p_y1 + HALF, b_y2.to(p_y.dtype.element_ty), mask=m)
        if 2 * HALF < D:
            o_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
            m = m_h & (o_rest < D)
            tl.store(p_ys + o_h * stride_yh + o_rest, tl.load(p_xs + o_h * stride_xh + o_rest, mask=m), mask=m)


@triton.jit(do_not_specialize=["n_s"])
def rope_kernel(
    p_q, p_k, p_cos, p_sin, p_yq, p_yk, n_s,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_yqb, stride_yqs, stride_yqh, stride_ykb, stride_yks, stride_ykh,
    stride_cb, stride_cs, stride_sb, stride_ss,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """BLOCK_S positions of one batch row, all heads of q and k."""
    n_blocks = tl.cdiv(n_s, BLOCK_S)
    i_b = (tl.program_id(0) // n_blocks).to(tl.int64)
    o_s = (tl.program_id(0) % n_blocks) * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_s < n_s
    o_s = o_s.to(tl.int64)
    o_r = tl.arange(0, BLOCK_R)[None, None, :]
    m = m_s[:, None, None] & (o_r < HALF)
    # Both halves of cos and sin hold the same angles: the first is enough.
    b_cos = tl.load(p_cos + i_b * stride_cb + o_s[:, None, None] * stride_cs + o_r, mask=m, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_b * stride_sb + o_s[:, None, None] * stride_ss + o_r, mask=m, other=0.0).to(tl.float32)
    if INVERSE:
        b_sin = -b_sin
    _rotate_heads(
        p_q + i_b * stride_qb, p_yq + i_b * stride_yqb, stride_qs, stride_qh, stride_yqs, stride_yqh,
        b_cos, b_sin, o_s, m_s, H, D, HALF, BLOCK_H, BLOCK_R, BLOCK_REST,
    )  # fmt: skip
    _rotate_heads(
        p_k + i_b * stride_kb, p_yk + i_b * stride_ykb, stride_ks, stride_kh, stride_yks, stride_ykh,
        b_cos, b_sin, o_s, m_s, K, D, HALF, BLOCK_K, BLOCK_R, BLOCK_REST,
    )  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """The size of a program: elements of one half in its largest tile, the most heads in it, warps."""

    elements: int
    heads: int
    warps: int


_HEADS_ADJACENT = Launch(elements=2048, heads=64, warps=4)
_POSITIONS_ADJACENT = Launch(elements=2048, heads=4, warps=4)


def _blocks(q: Tensor, k: Tensor, half: int, heads_adjacent: bool) -> dict[str, int]:
    """Block sizes and warps for q: [B, H, S, D] and k: [B, K, S, D] of any strides."""
    table = _HEADS_ADJACENT if heads_adjacent else _POSITIONS_ADJACENT
    block_r = triton.next_power_of_2(half)
    most = min(table.heads, max(1, table.elements // block_r))
    block_h = min(triton.next_power_of_2(q.shape[1]), most)
    return {
        "BLOCK_S": max(1, table.elements // (block_h * block_r)),
        "BLOCK_H": block_h,
        "BLOCK_K": min(triton.next_power_of_2(k.shape[1]), most),
        "BLOCK_R": block_r,
        "BLOCK_REST": triton.next_power_of_2(max(1, q.shape[3] - 2 * half)),
        "num_warps": table.warps,
    }


def _dense_features(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, heads_adjacent: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, heads_adjacent: bool
) -> tuple[Tensor, Tensor]:
    y_q, y_k = _fake(q, k, cos, sin, inverse, heads_adjacent)
    q, k, cos, sin = (_dense_features(x) for x in (q, k, cos, sin))
    cos, sin = cos.expand(q.shape[0], -1, -1), sin.expand(q.shape[0], -1, -1)
    half = cos.shape[-1] // 2
    blocks = _blocks(q, k, half, heads_adjacent)
    launch(
        rope_kernel, (q.shape[0] * triton.cdiv(q.shape[2], blocks["BLOCK_S"]) if q.numel() + k.numel() else 0,),
        q, k, cos, sin, y_q, y_k, q.shape[2],
        q.stride(0), q.stride(2), q.stride(1), k.stride(0), k.stride(2), k.stride(1),
        y_q.stride(0), y_q.stride(2), y_q.stride(1), y_k.stride(0), y_k.stride(2), y_k.stride(1),
        cos.stride(0), cos.stride(1), sin.stride(0), sin.stride(1),
        H=q.shape[1], K=k.shape[1], D=q.shape[3], HALF=half, INVERSE=inverse, **blocks,
    )  # fmt: skip
    return y_q, y_k


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    y = torch.empty_like(x)
    torch.mul(x[..., :width], cos, out=y[..., :width])
    x1, x2 = x[..., :width].chunk(2, dim=-1)
    y1, y2 = y[..., :width].chunk(2, dim=-1)
    sin = sin[..., : width // 2]
    y1.addcmul_(x2, sin, value=-1)
    y2.addcmul_(x1, sin)
    y[..., width:] = x[..., width:]
    return y


def _reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, heads_adjacent: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = (x[:, None].to(q.dtype) for x in (cos, -sin if inverse else sin))
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, heads_adjacent: bool) -> tuple[Tensor, Tensor]:
    return (_triton if takes_kernel(q) else _reference)(q, k, cos, sin, inverse, heads_adjacent)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.inverse, ctx.heads_adjacent = inputs
    ctx.save_for_backward(cos, sin)


def _autograd(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
    # Cut as the forward pass was: which kernel runs must not hang on the layout that attention gives its gradients, or
    # the plan, taken with another attention, would miss it.
    return *_rope(d_q, d_k, *ctx.saved_tensors, not ctx.inverse, ctx.heads_adjacent), None, None, None, None


_rope = register(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse, bool heads_adjacent) -> (Tensor, Tensor)",
    _run,
    _fake,
    setup_context=_setup_context,
    backward=_autograd,
)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: Layout = "bhsd") -> tuple[Tensor, Tensor]:
    """`(q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin)`; on a GPU fused, in fp32 and rounded once.

    Neither q nor k is copied or written to, whatever their strides. The results keep their memory layout.

    Args:
        q: [B, H, S, D] ("bhsd") or [B, S, H, D] ("bshd"), bf16 | fp16 | fp32 | fp64.
        k: the same with its own number of heads and the dtype of q.
        cos, sin: [S, R] or [B, S, R] (or [1, S, R]), R even and at most D, any floating dtype, without gradient. The
            second half of R must repeat the first, as it does in `transformers`: the kernel reads only one. Features
            from R on are passed through.
        layout: the order of axes of q and k.

    Returns:
        q and k rotated, in the shape and dtype of each.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown layout, angles that need gradients.

    Example:
        >>> q, k = torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64)
        >>> angle = torch.outer(torch.arange(5.0), 1e4 ** -(torch.arange(32.0) / 32)).repeat(1, 2)
        >>> q, k = rope(q, k, angle.cos(), angle.sin())
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must have four axes ({layout}), got {describe(q)} and {describe(k)}")
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if cos.dim() == 2 and sin.dim() == 2:
        cos, sin = cos[None], sin[None]
    _check(q, k, cos, sin)
    y_q, y_k = _rope(q, k, cos, sin, False, q.stride(1) <= q.stride(2))
    return (y_q.transpose(1, 2), y_k.transpose(1, 2)) if layout == "bshd" else (y_q, y_k)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless q: [B, H, S, D], k: [B, K, S, D] and cos, sin: [B or 1, S, R] fit together."""
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.dtype != k.dtype or not has_dtype(q):
        raise ValueError(
            f"q and k must be {DTYPES} and may differ in their heads only, got {describe(q)} and {describe(k)} (bhsd)"
        )
    batch, _, positions, features = q.shape
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[:2] not in ((batch, positions), (1, positions)):
        raise ValueError(
            f"cos and sin must both be [{positions}, R] or [{batch}, {positions}, R], "
            f"got {describe(cos)} and {describe(sin)}"
        )
    if cos.shape[2] % 2 or cos.shape[2] > features:
        raise ValueError(f"the width of cos and sin must be even and at most {features}, got {cos.shape[2]}")
    if not q.device == k.device == cos.device == sin.device:
        devices = ", ".join(str(x.device) for x in (q, k, cos, sin))
        raise ValueError(f"q, k, cos and sin must be on one device, got {devices}")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos and sin get no gradient here: detach them, or rotate in plain PyTorch")
