"""PolyNorm, an activation function: a learned sum of normalized powers.

    r_p = 1 / sqrt(mean(x^(2p)) + eps)       n_p = x^p r_p       y = w_0 n_3 + w_1 n_2 + w_2 n_1 + b
    S_p = Σ_d dy n_p                         dx = Σ_p w_(3-p) p x^(p-1) r_p (dy - n_p S_p / D)
    dw_(3-p) = Σ_rows S_p                    db = Σ_rows Σ_d dy

Source: Zhuo et al., "Polynomial Composition Activations" (arXiv:2411.03884). Axes: N rows, D features, p = 1, 2, 3.
A program holds one row, or several narrow rows, in registers. In backward, it loops over tiles of rows and accumulates
four sums; the sums of all programs are added in a fixed order.

Minimum bytes moved per element: forward 2·itemsize, backward 3·itemsize.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import DTYPES, accumulator, as_rows, describe, has_dtype, launch, multiprocessors, takes_kernel
from ._operator import Operator, is_transformed, operator, plain_gradients

# Longest row that a program holds in registers.
_MOST_FEATURES = 65536
# Elements per program: several narrow rows, or one row.
_TILE = 4096
_ELEMENTS_PER_WARP = 1024
# Programs per multiprocessor; each loops over rows.
_OCCUPANCY = 2


@triton.jit
def _load(p_x, o_r, stride, o_d, m):
    return tl.load(p_x + o_r[:, None] * stride + o_d[None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def _rstd(b_u, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(b_u * b_u, 1) / D + eps)


@triton.jit(do_not_specialize=["n_rows"])
def poly_norm_fwd_kernel(
    p_x, p_y, p_rstd, p_weight, p_bias, n_rows, stride_x, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y of ROWS rows, and p_rstd [3, N]: r_1, r_2 and r_3."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < n_rows
    o_d = tl.arange(0, BLOCK)
    m = m_r[:, None] & (o_d < D)[None, :]
    b_x = _load(p_x, o_r, stride_x, o_d, m)
    b_y = tl.zeros([ROWS, BLOCK], tl.float32) + tl.load(p_bias).to(tl.float32)
    b_power = b_x
    for i in tl.static_range(3):
        b_rstd = _rstd(b_power, eps, D)
        tl.store(p_rstd + tl.cast(n_rows, tl.int64) * i + o_r, b_rstd, mask=m_r)
        b_y += tl.load(p_weight + 2 - i).to(tl.float32) * (b_power * b_rstd[:, None])
        b_power = b_power * b_x
    tl.store(p_y + o_r[:, None] * D + o_d[None, :], b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["n_rows"])
def poly_norm_bwd_kernel(
    p_x, p_dy, p_dx, p_rstd, p_weight, p_sums, n_rows, stride_x, stride_dy,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of every n-th tile of ROWS rows, n the number of programs, and p_sums [n, 4]: terms of dw and db."""
    i_p = tl.program_id(0)
    o_d = tl.arange(0, BLOCK)
    w_0 = tl.load(p_weight).to(tl.float32)
    w_1 = tl.load(p_weight + 1).to(tl.float32)
    w_2 = tl.load(p_weight + 2).to(tl.float32)
    b_dw_0 = tl.zeros([ROWS], tl.float32)
    b_dw_1 = tl.zeros([ROWS], tl.float32)
    b_dw_2 = tl.zeros([ROWS], tl.float32)
    b_db = tl.zeros([ROWS], tl.float32)
    for i_t in range(i_p, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        o_r = tl.cast(i_t, tl.int64) * ROWS + tl.arange(0, ROWS)
        m_r = o_r < n_rows
        m = m_r[:, None] & (o_d < D)[None, :]
        b_x = _load(p_x, o_r, stride_x, o_d, m)
        b_dy = _load(p_dy, o_r, stride_dy, o_d, m)
        p_row = p_rstd + o_r
        b_r1 = tl.load(p_row, mask=m_r, other=0.0)[:, None]
        b_r2 = tl.load(p_row + n_rows, mask=m_r, other=0.0)[:, None]
        b_r3 = tl.load(p_row + 2 * tl.cast(n_rows, tl.int64), mask=m_r, other=0.0)[:, None]
        b_square = b_x * b_x
        b_n1 = b_x * b_r1
        b_n2 = b_square * b_r2
        b_n3 = b_square * b_x * b_r3
        b_s1 = tl.sum(b_dy * b_n1, 1)
        b_s2 = tl.sum(b_dy * b_n2, 1)
        b_s3 = tl.sum(b_dy * b_n3, 1)
        b_dx = w_2 * b_r1 * (b_dy - b_n1 * (b_s1 / D)[:, None])
        b_dx += w_1 * 2.0 * b_x * b_r2 * (b_dy - b_n2 * (b_s2 / D)[:, None])
        b_dx += w_0 * 3.0 * b_square * b_r3 * (b_dy - b_n3 * (b_s3 / D)[:, None])
        tl.store(p_dx + o_r[:, None] * D + o_d[None, :], b_dx.to(p_dx.dtype.element_ty), mask=m)
        b_dw_0 += b_s3
        b_dw_1 += b_s2
        b_dw_2 += b_s1
        b_db += tl.sum(b_dy, 1)
    tl.store(p_sums + i_p * 4, tl.sum(b_dw_0, 0))
    tl.store(p_sums + i_p * 4 + 1, tl.sum(b_dw_1, 0))
    tl.store(p_sums + i_p * 4 + 2, tl.sum(b_dw_2, 0))
    tl.store(p_sums + i_p * 4 + 3, tl.sum(b_db, 0))


def _plan(width: int) -> dict[str, Any]:
    """The constexprs of both kernels."""
    block = triton.next_power_of_2(width)
    rows = max(_TILE // block, 1)
    return {
        "D": width, "ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // _ELEMENTS_PER_WARP, 1), 32)
    }  # fmt: skip


def _has_kernel(x: Tensor) -> bool:
    return takes_kernel(x) and x.shape[-1] <= _MOST_FEATURES


def _powers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(accumulator(x.dtype))
    return wide, wide * wide, wide * wide * wide


def _statistics(x: Tensor, eps: float) -> list[Tensor]:
    """r_p [..., 1] for p = 1, 2, 3."""
    return [torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) for u in _powers(x)]


def poly_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`poly_norm` in plain PyTorch."""
    terms = zip(weight.to(accumulator(x.dtype)).flip(0), _powers(x), _statistics(x, eps), strict=True)
    first, second, third = (w * u * r for w, u, r in terms)
    y: Tensor = first + second + third + bias
    return y.to(x.dtype)


def _reference_gradients(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db in the dtype of rstd."""
    wide, g = weight.to(rstd.dtype), dy.to(rstd.dtype)
    dx, dw = torch.zeros_like(g), []
    for p, (u, r) in enumerate(zip(_powers(x), rstd.view(3, *x.shape[:-1], 1), strict=True), 1):
        n = u * r
        slope = r * (g - n * (g * n).mean(-1, keepdim=True))
        dx = dx + wide[3 - p] * p * slope * (1.0 if p == 1 else _powers(x)[p - 2])
        dw.append((g * n).sum())
    return dx, torch.stack(dw[::-1]), g.sum()


@operator("poly_norm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor rstd) -> (Tensor, Tensor, Tensor)")
class _Backward(Operator):
    """dx, dw and db."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if _has_kernel(x):
            dx, rows, incoming = x.new_empty(x.shape), as_rows(x), as_rows(dy)
            plan = _plan(x.shape[-1])
            programs = min(triton.cdiv(rows.shape[0], plan["ROWS"]), _OCCUPANCY * multiprocessors(x.device))
            sums = x.new_zeros(max(programs, 1), 4, dtype=torch.float32)
            launch(
                poly_norm_bwd_kernel, (programs,), rows, incoming, dx, rstd, weight.contiguous(), sums,
                rows.shape[0], rows.stride(0), incoming.stride(0), **plan,
            )  # fmt: skip
            total = sums.sum(0, dtype=torch.float64)
            dw, db = total[:3], total[3]
        else:
            dx, dw, db = _reference_gradients(dy, x, weight, rstd)
            dx = dx.to(x.dtype).contiguous()
        return dx, dw.to(weight.dtype), db.to(bias.dtype).reshape(bias.shape)

    @staticmethod
    def fake(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


@operator("poly_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)")
class _PolyNorm(Operator):
    """y, and the saved statistics [3, N]: r_1, r_2, r_3."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not _has_kernel(x):
            rstd = torch.cat([r.reshape(1, -1) for r in _statistics(x, eps)])
            return poly_norm_reference(x, weight, bias, eps).contiguous(), rstd
        (y, rstd), rows = _PolyNorm.fake(x), as_rows(x)
        plan = _plan(x.shape[-1])
        launch(
            poly_norm_fwd_kernel, (triton.cdiv(rows.shape[0], plan["ROWS"]),),
            rows, y, rstd, weight.contiguous(), bias, rows.shape[0], rows.stride(0), eps, **plan,
        )  # fmt: skip
        return y, rstd

    @staticmethod
    def fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(3, x.numel() // x.shape[-1], dtype=accumulator(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], output[1])
        ctx.eps = inputs[3]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            *inputs, _ = ctx.saved_tensors
            return *plain_gradients(partial(poly_norm_reference, eps=ctx.eps), inputs, dy), None
        return *_Backward.apply(dy, *ctx.saved_tensors), None


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """A learned sum of normalized powers of x: a replacement for an activation function.

    Equivalent to::

        norm = lambda u: u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
        y = weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias

    computed in fp32 and rounded once. Under `torch.func` transforms, the operator runs in plain PyTorch.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, any strides. fp64 and D > 65536 run in plain PyTorch.
        weight: [3], any of these dtypes: factors of the third, second and first power.
        bias: one element, any of these dtypes.
        eps: added to the mean squares.

    Returns:
        Same shape and dtype as x, contiguous.

    Raises:
        ValueError: a wrong shape or dtype.

    Example:
        >>> poly_norm(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5]), eps=0.0)
        tensor([ 3.5000, -0.5000])
    """
    if x.dim() == 0 or x.shape[-1] == 0 or weight.shape != (3,) or bias.numel() != 1:
        raise ValueError(
            f"x {describe(x)}, weight {describe(weight)} and bias {describe(bias)} must be [..., D], [3], one element"
        )
    if not all(map(has_dtype, (x, weight, bias))):
        raise ValueError(f"x, weight and bias must be {DTYPES}, not {x.dtype}, {weight.dtype}, {bias.dtype}")
    if is_transformed():
        return poly_norm_reference(x, weight, bias, eps)
    y: Tensor = _PolyNorm.apply(x, weight, bias, eps)[0]
    return y
