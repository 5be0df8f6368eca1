"""Group normalization: statistics over the channels of a group and all positions.

    x̂  = (x - mean) rstd           rstd = 1 / sqrt(var + eps)          y = x̂ w_c + b_c
    g  = dy w_c                    dx = rstd (g - mean(g) - x̂ mean(g x̂))
    dw_c = Σ_{b, s} dy x̂           db_c = Σ_{b, s} dy

with mean, var and means over a group. Source: Wu and He (arXiv:1803.08494). Axes: B batch, C channels, G groups, S
positions; a row is the L = C / G · S elements of a group, which are contiguous.

Rows are split into parts of BLOCK elements, so that few large groups also fill a GPU. In forward, a row of one part is
read once. For longer rows, a first kernel stores mean and sum of squared deviations of each part, and the second merges
them (Chan, Golub and LeVeque, 1983), which is accurate for means far from zero. In backward, a first kernel sums dy and
dy x̂ over each channel, and the second computes dx from their sums over a group.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ._launch import DTYPES, accumulator, dense, describe, has_dtype, launch, takes_kernel
from ._operator import Operator, is_transformed, operator, plain_gradients

# Elements of the longest row of one part, and of a part of longer rows.
_ONE_PART, _PART = 32768, 16384
# Elements per program of the sums over channels, and of dx.
_SUM_BLOCK, _GRADIENT_BLOCK = 8192, 4096
_ELEMENTS_PER_WARP = 1024


@triton.jit(do_not_specialize=["n_parts"])
def group_norm_part_kernel(p_x, p_parts, n_parts, L: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """p_parts [2, rows, PARTS]: mean and sum of squared deviations of one part of a row."""
    i_a = tl.program_id(0)
    o_l = i_a % PARTS * BLOCK + tl.arange(0, BLOCK)
    m_l = o_l < L
    b_x = tl.load(p_x + (i_a // PARTS).to(tl.int64) * L + o_l, mask=m_l, other=0.0).to(tl.float32)
    count = tl.minimum(L - i_a % PARTS * BLOCK, BLOCK).to(tl.float32)
    # IEEE division: if all elements of a group are equal, the deviations are exactly 0.
    mean = tl.div_rn(tl.sum(b_x, 0), count)
    b_x = tl.where(m_l, b_x - mean, 0.0)
    tl.store(p_parts + i_a, mean)
    tl.store(p_parts + n_parts + i_a, tl.sum(b_x * b_x, 0))


@triton.jit(do_not_specialize=["n_rows"])
def group_norm_fwd_kernel(
    p_x, p_y, p_stats, p_parts, p_weight, p_bias, n_rows, eps,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr, L: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of one part of a row, and p_stats [2, rows]: its mean and rstd. CHANNELS: channels per group."""
    i_a = tl.program_id(0)
    i_r = i_a // PARTS
    o_l = i_a % PARTS * BLOCK + tl.arange(0, BLOCK)
    m_l = o_l < L
    p_row = i_r.to(tl.int64) * L + o_l
    b_x = tl.load(p_x + p_row, mask=m_l, other=0.0).to(tl.float32)
    if PARTS == 1:
        mean = tl.div_rn(tl.sum(b_x, 0), tl.cast(L, tl.float32))
        b_d = tl.where(m_l, b_x - mean, 0.0)
        squares = tl.sum(b_d * b_d, 0)
    else:
        o_p = tl.arange(0, PADDED)
        p_part = p_parts + i_r * PARTS + o_p
        b_count = tl.where(o_p < PARTS, tl.minimum(L - o_p * BLOCK, BLOCK), 0).to(tl.float32)
        b_mean = tl.load(p_part, mask=o_p < PARTS, other=0.0)
        mean = tl.div_rn(tl.sum(b_mean * b_count, 0), tl.cast(L, tl.float32))
        b_d = b_mean - mean
        squares = tl.sum(tl.load(p_part + n_rows * PARTS, mask=o_p < PARTS, other=0.0) + b_count * b_d * b_d, 0)
    rstd = tl.rsqrt(squares / L + eps)
    if i_a % PARTS == 0:
        tl.store(p_stats + i_r, mean)
        tl.store(p_stats + n_rows + i_r, rstd)
    b_y = (b_x - mean) * rstd
    o_c = i_r % GROUPS * CHANNELS + o_l // (L // CHANNELS)
    if p_weight is not None:
        b_y *= tl.load(p_weight + o_c, mask=m_l, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_c, mask=m_l, other=0.0).to(tl.float32)
    tl.store(p_y + p_row, b_y.to(p_y.dtype.element_ty), mask=m_l)


@triton.jit(do_not_specialize=["n_channels", "n_rows"])
def group_norm_sums_kernel(
    p_x, p_dy, p_stats, p_sums, n_channels, n_rows,
    CHANNELS: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p_sums [2, n_channels, PARTS]: Σ dy x̂ and Σ dy of one part of ROWS channels; n_channels: B · C."""
    i_p = tl.program_id(0) % PARTS
    o_c = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    o_s = i_p * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < n_channels
    m = m_c[:, None] & (o_s < S)[None, :]
    o_x = o_c.to(tl.int64)[:, None] * S + o_s[None, :]
    b_mean = tl.load(p_stats + o_c // CHANNELS, mask=m_c, other=0.0)
    b_rstd = tl.load(p_stats + n_rows + o_c // CHANNELS, mask=m_c, other=0.0)
    b_dy = tl.load(p_dy + o_x, mask=m, other=0.0).to(tl.float32)
    b_x = (tl.load(p_x + o_x, mask=m, other=0.0).to(tl.float32) - b_mean[:, None]) * b_rstd[:, None]
    p_sum = p_sums + o_c.to(tl.int64) * PARTS + i_p
    tl.store(p_sum, tl.sum(b_dy * b_x, 1), mask=m_c)
    tl.store(p_sum + tl.cast(n_channels, tl.int64) * PARTS, tl.sum(b_dy, 1), mask=m_c)


@triton.jit(do_not_specialize=["n_rows"])
def group_norm_bwd_kernel(
    p_x, p_dy, p_dx, p_stats, p_means, p_weight, n_rows,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr, L: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of one part of a row; p_means [2, rows]: means of g x̂ and of g."""
    i_a = tl.program_id(0)
    i_r = i_a // PARTS
    o_l = i_a % PARTS * BLOCK + tl.arange(0, BLOCK)
    m_l = o_l < L
    p_row = i_r.to(tl.int64) * L + o_l
    rstd = tl.load(p_stats + n_rows + i_r)
    b_x = (tl.load(p_x + p_row, mask=m_l, other=0.0).to(tl.float32) - tl.load(p_stats + i_r)) * rstd
    b_g = tl.load(p_dy + p_row, mask=m_l, other=0.0).to(tl.float32)
    if p_weight is not None:
        o_c = i_r % GROUPS * CHANNELS + o_l // (L // CHANNELS)
        b_g *= tl.load(p_weight + o_c, mask=m_l, other=0.0).to(tl.float32)
    b_dx = rstd * (b_g - tl.load(p_means + n_rows + i_r) - b_x * tl.load(p_means + i_r))
    tl.store(p_dx + p_row, b_dx.to(p_dx.dtype.element_ty), mask=m_l)


def _cut(length: int, one_part: int, part: int) -> dict[str, int]:
    """PARTS, BLOCK and num_warps for a row of this length."""
    block = triton.next_power_of_2(length) if length <= one_part else part
    return {
        "PARTS": triton.cdiv(length, block), "BLOCK": block, "num_warps": min(max(block // _ELEMENTS_PER_WARP, 1), 32)
    }  # fmt: skip


def _sizes(x: Tensor, groups: int) -> tuple[int, dict[str, int]]:
    """(number of rows, constexprs of their sizes)."""
    channels, positions = x.shape[1] // groups, x.shape[2:].numel()
    return x.shape[0] * groups, {"GROUPS": groups, "CHANNELS": channels, "L": channels * positions}


def group_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    """`group_norm` in plain PyTorch."""
    w, b = (None if t is None else t.to(accumulator(x.dtype)) for t in (weight, bias))
    return functional.group_norm(x.to(accumulator(x.dtype)), groups, w, b, eps).to(x.dtype)


def _reference_statistics(x: Tensor, groups: int, eps: float) -> Tensor:
    rows = x.to(accumulator(x.dtype)).reshape(x.shape[0] * groups, x.shape[1:].numel() // groups)
    mean = rows.mean(1)
    return torch.stack((mean, torch.rsqrt((rows - mean[:, None]).square().mean(1) + eps)))


def _means_of_groups(sums: Tensor, weight: Tensor | None, groups: int, length: int) -> Tensor:
    """[2, rows]: means of g x̂ and of g over a group, from the sums [2, B, C] of dy x̂ and of dy."""
    weighted = sums if weight is None else sums * weight.to(sums.dtype)
    return weighted.view(2, sums.shape[1] * groups, sums.shape[2] // groups).sum(2) / length


@operator(
    "group_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, int groups)"
    " -> (Tensor, Tensor, Tensor)"
)
class _Backward(Operator):
    """dx, dw, db; the latter empty without a weight or bias."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        n_rows, sizes = _sizes(x, groups)
        shape, length = (2, x.shape[0], x.shape[1]), sizes["L"]
        if takes_kernel(x):
            dx, x, dy = x.new_empty(x.shape), x.contiguous(), dy.contiguous()
            positions, n_channels = x.shape[2:].numel(), x.shape[0] * x.shape[1]
            cut = _cut(positions, _SUM_BLOCK, _SUM_BLOCK)
            rows = max(_SUM_BLOCK // 2 // cut["BLOCK"], 1)
            cut |= {"ROWS": rows, "num_warps": min(max(rows * cut["BLOCK"] // _ELEMENTS_PER_WARP, 1), 32)}
            parts = x.new_empty(*shape, cut["PARTS"], dtype=torch.float32)
            launch(
                group_norm_sums_kernel, (triton.cdiv(n_channels, rows) * cut["PARTS"],),
                x, dy, stats, parts, n_channels, n_rows, CHANNELS=sizes["CHANNELS"], S=positions, **cut,
            )  # fmt: skip
            sums = parts.sum(3)
            means = _means_of_groups(sums, weight, groups, length)
            cut = _cut(length, _GRADIENT_BLOCK, _GRADIENT_BLOCK)
            launch(
                group_norm_bwd_kernel, (n_rows * cut["PARTS"],),
                x, dy, dx, stats, means, dense(weight), n_rows, **sizes, **cut,
            )  # fmt: skip
        else:
            mean, rstd = stats.view(2, n_rows, 1)
            normal = (x.to(stats.dtype).reshape(n_rows, length) - mean) * rstd
            g = dy.to(stats.dtype)
            sums = torch.stack((g * normal.view(x.shape), g)).reshape(*shape, length // sizes["CHANNELS"]).sum(3)
            of_gx, of_g = _means_of_groups(sums, weight, groups, length)[..., None]
            if weight is not None:
                g = g * weight.to(g.dtype).view(-1, *[1] * (x.dim() - 2))
            dx = (rstd * (g.reshape(n_rows, length) - of_g - normal * of_gx)).view(x.shape).to(x.dtype).contiguous()
        dw, db = (
            x.new_empty(0) if t is None else total.to(t.dtype)
            for t, total in zip((weight, bias), sums.sum(1), strict=True)
        )
        return dx, dw, db

    @staticmethod
    def fake(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dw, db = (x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (weight, bias))
        return x.new_empty(x.shape), dw, db


@operator("group_norm(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps) -> (Tensor, Tensor)")
class _GroupNorm(Operator):
    """y, and mean and rstd of the groups, [2, rows]."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not takes_kernel(x):
            y = group_norm_reference(x, weight, bias, groups, eps).contiguous()
            return y, _reference_statistics(x, groups, eps)
        y, stats = _GroupNorm.fake(x, weight, bias, groups, eps)
        x = x.contiguous()
        n_rows, sizes = _sizes(x, groups)
        cut = _cut(sizes["L"], _ONE_PART, _PART)
        n_parts, parts = n_rows * cut["PARTS"], None
        if cut["PARTS"] > 1:
            parts = stats.new_empty(2, n_parts)
            launch(group_norm_part_kernel, (n_parts,), x, parts, n_parts, L=sizes["L"], **cut)
        launch(
            group_norm_fwd_kernel, (n_parts,),
            x, y, stats, parts, dense(weight), dense(bias), n_rows, eps,
            PADDED=triton.next_power_of_2(cut["PARTS"]), **sizes, **cut,
        )  # fmt: skip
        return y, stats

    @staticmethod
    def fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(2, x.shape[0] * groups, dtype=accumulator(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], output[1])
        ctx.groups, ctx.eps = inputs[3:]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 5
        x, weight, bias, stats = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = partial(group_norm_reference, groups=ctx.groups, eps=ctx.eps)
            return *plain_gradients(plain, (x, weight, bias), dy), None, None
        dx, dw, db = _Backward.apply(dy, x, weight, bias, stats, ctx.groups)
        return dx, None if weight is None else dw, None if bias is None else db, None, None


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`torch.nn.functional.group_norm(x, groups, weight, bias, eps)`, computed in fp32 and rounded once.

    Under `torch.func` transforms, the operator runs in plain PyTorch.

    Args:
        x: [B, C, ...], bf16 | fp16 | fp32 (fp64 in plain PyTorch). Copied unless contiguous, e.g. if
            channels-last.
        groups: number of groups; must divide C.
        weight, bias: [C], any of these dtypes, or None.
        eps: added to the variance.

    Returns:
        Same shape and dtype as x, contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device, or C is not divisible by groups.

    Example:
        >>> group_norm(torch.tensor([[[1.0, 3.0], [5.0, 7.0]]]), 2, eps=0.0)
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])
    """
    if not has_dtype(x) or x.dim() < 2 or 0 in x.shape[1:]:
        raise ValueError(f"x must be {DTYPES} of shape [B, C, ...] with elements, got {describe(x)}")
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"groups {groups} must divide the {x.shape[1]} channels of x {describe(x)}")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and (given.shape != x.shape[1:2] or not has_dtype(given) or given.device != x.device):
            raise ValueError(
                f"{name} must be {DTYPES} of shape [{x.shape[1]}] on {x.device}, got {describe(given)} on "
                f"{given.device}"
            )
    if is_transformed():
        return group_norm_reference(x, weight, bias, groups, eps)
    y: Tensor = _GroupNorm.apply(x, weight, bias, groups, eps)[0]
    return y
