"""Norms whose result is scaled and shifted by a conditioning input, as in diffusion transformers (adaLN).

    x̂ = (x - mean) rstd            n = x̂ (offset + w) + b            y = n (1 + s_m) + t_m
    g = dy (1 + s_m) (offset + w)  dx = rstd (g - mean(g) - x̂ mean(g x̂))
    A_m = Σ_rows of m dy x̂         T_m = Σ_rows of m dy              ds_m = (offset + w) A_m + b T_m        dt_m = T_m
    dw  = Σ_m (1 + s_m) A_m        db  = Σ_m (1 + s_m) T_m

without mean and mean(g) for RMSNorm. Source: Peebles and Xie (arXiv:2212.09748). Axes: N rows, D features, M
modulations (scale and shift), each for N / M consecutive rows of x. A and T are summed in fp32 in a fixed order.

Minimum bytes moved per element: forward 2·itemsize, backward 3·itemsize; 3 and 6 if M = N.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from .._launch import DTYPES, accumulator, as_rows, dense, describe, has_dtype, launch, multiprocessors, takes_kernel
from .._operator import Operator, is_transformed, operator, plain_gradients
from .modulated_norm_kernels import modulated_norm_bwd_kernel, modulated_norm_fwd_kernel

# Features of the widest row that the kernels support; a program holds a row in registers.
_MOST_FEATURES = 65536
# Elements per program: several narrow rows, or one row.
_TILE = 2048
_ELEMENTS_PER_WARP = 512
# Programs per multiprocessor; each loops over rows.
_OCCUPANCY = 2


def _plan(width: int, center: bool) -> dict[str, Any]:
    """The constexprs of both kernels."""
    block = triton.next_power_of_2(width)
    rows = max(_TILE // block, 1)
    warps = min(max(rows * block // _ELEMENTS_PER_WARP, 1), 32)
    return {"D": width, "CENTER": center, "ROWS": rows, "BLOCK": block, "num_warps": warps}


def _has_kernel(x: Tensor) -> bool:
    return takes_kernel(x) and x.shape[-1] <= _MOST_FEATURES


def _normalized(x: Tensor, eps: float, center: bool) -> tuple[Tensor, Tensor]:
    """(x̂, statistics [1 + center, N]: rstd, then mean if `center`)."""
    wide = x.to(accumulator(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    wide = wide - mean if center else wide
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * rstd, torch.cat([t.reshape(1, -1) for t in (rstd, mean)[: 1 + center]])


def _over_rows(modulation: Tensor, x: Tensor) -> Tensor:
    """modulation [..., D] as [..., 1, ..., D], broadcastable against x."""
    width, leading = x.shape[-1], modulation.shape[:-1]
    return modulation.reshape(*leading, *[1] * (x.dim() - 1 - len(leading)), width)


def modulated_norm_reference(
    x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, offset: float, center: bool,
) -> Tensor:  # fmt: skip
    """`modulated_rms_norm` or, if `center`, `modulated_layer_norm`, in plain PyTorch."""
    y, _ = _normalized(x, eps, center)
    y = y if weight is None else y * (weight.to(y.dtype) + offset)
    y = y if bias is None else y + bias
    y = y * (1 + _over_rows(scale, x).to(y.dtype))
    return (y if shift is None else y + _over_rows(shift, x)).to(x.dtype)


def _shared(x: Tensor, scale: Tensor) -> int:
    """Number of rows of x per modulation."""
    return x.numel() // max(scale.numel(), 1)


@operator(
    "modulated_norm_bwd(Tensor dy, Tensor x, Tensor scale, Tensor? shift, Tensor? weight, Tensor? bias, Tensor stats,"
    " float offset, bool center) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
class _Backward(Operator):
    """dx, dscale, dshift, dw and db; empty tensors for absent inputs."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        stats: Tensor, offset: float, center: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        dx, dscale, dshift, dw, db = _Backward.fake(dy, x, scale, shift, weight, bias)
        n_shared, width = _shared(x, scale), x.shape[-1]
        each = n_shared == 1
        if _has_kernel(x):
            sums = _launch_backward(
                dy, x, scale, weight, bias, stats, dx, dscale, dshift if shift is not None else None, offset, center
            )
        else:
            sums = _reference_sums(dy, x, scale, shift, weight, bias, stats, dx, dscale, dshift, offset, center)
        of_x, of_one = sums
        if not each:
            wide = scale.reshape(-1, width).to(sums.dtype)
            times = of_x if weight is None else of_x * (weight.to(sums.dtype) + offset)
            dscale.view(-1, width).copy_(times if bias is None else times + of_one * bias.to(sums.dtype))
            if shift is not None:
                dshift.view(-1, width).copy_(of_one)
            of_x, of_one = (1 + wide) * of_x, (1 + wide) * of_one
        if weight is not None:
            dw.copy_(of_x.sum(0))
        if bias is not None:
            db.copy_(of_one.sum(0))
        return dx, dscale, dshift, dw, db

    @staticmethod
    def fake(
        dy: Tensor, x: Tensor, scale: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        dshift, dw, db = (x.new_empty(0) if t is None else t.new_empty(t.shape) for t in others[:3])
        return x.new_empty(x.shape), scale.new_empty(scale.shape), dshift, dw, db


def _launch_backward(
    dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    dx: Tensor, dscale: Tensor, dshift: Tensor | None, offset: float, center: bool,
) -> Tensor:  # fmt: skip
    """Fill dx, and dscale and dshift if each row has its own modulation; return A and T, [2, M, D] fp32."""
    n_shared, width, plan = _shared(x, scale), x.shape[-1], _plan(x.shape[-1], center)
    rows, incoming, modulation = as_rows(x), as_rows(dy), as_rows(scale)
    n_rows, each = rows.shape[0], n_shared == 1
    n_modulations = 1 if each else modulation.shape[0]
    n_shared = n_rows if each else n_shared
    most = triton.cdiv(_OCCUPANCY * multiprocessors(x.device), max(n_modulations, 1))
    programs = min(triton.cdiv(n_shared, plan["ROWS"]), most)
    sums = x.new_zeros(2, n_modulations, max(programs, 1), width, dtype=torch.float32)
    launch(
        modulated_norm_bwd_kernel, (n_modulations * programs if n_rows else 0,),
        rows, incoming, dx, stats, dense(weight), dense(bias), modulation,
        dscale if each else None, dshift if each else None, sums,
        n_rows, n_shared, programs, rows.stride(0), incoming.stride(0), modulation.stride(0), offset,
        EACH=each, **plan,
    )  # fmt: skip
    return sums.sum(2)


def _reference_sums(
    dy: Tensor, x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, dx: Tensor, dscale: Tensor, dshift: Tensor, offset: float, center: bool,
) -> Tensor:  # fmt: skip
    """As `_launch_backward`, in plain PyTorch."""
    width, wide, n_shared = x.shape[-1], stats.dtype, _shared(x, scale)
    normal = x.to(wide).reshape(-1, width)
    rstd = stats[0][:, None]
    normal = (normal - stats[1][:, None] if center else normal) * rstd
    g = dy.to(wide).reshape(-1, width)
    factor = 1 + scale.to(wide).reshape(-1, width).repeat_interleave(n_shared, 0)
    times = 1.0 if weight is None else weight.to(wide) + offset
    if n_shared == 1:
        dscale.view(-1, width).copy_(g * (normal * times + (0.0 if bias is None else bias.to(wide))))
        if shift is not None:
            dshift.view(-1, width).copy_(g)
    through = g * factor * times
    slope = through - normal * (through * normal).mean(-1, keepdim=True)
    slope = slope - through.mean(-1, keepdim=True) if center else slope
    dx.view(-1, width).copy_(slope * rstd)
    if n_shared == 1:
        g, groups = g * factor, (1, g.shape[0])
    else:
        groups = (scale.numel() // width, n_shared)
    return torch.stack((g * normal, g)).view(2, *groups, width).sum(2)


@operator(
    "modulated_norm(Tensor x, Tensor scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, float offset,"
    " bool center) -> (Tensor, Tensor)"
)
class _ModulatedNorm(Operator):
    """y, and statistics [1 + center, N]: rstd, then mean if `center`."""

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        eps: float, offset: float, center: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not _has_kernel(x):
            y = modulated_norm_reference(x, scale, shift, weight, bias, eps, offset, center).contiguous()
            return y, _normalized(x, eps, center)[1]
        (y, stats), rows = _ModulatedNorm.fake(x, center), as_rows(x)
        plan, n_rows = _plan(x.shape[-1], center), rows.shape[0]
        if n_rows + plan["ROWS"] >= 2**31:
            raise ValueError(f"x has {n_rows} rows, too many for a 32-bit index: split it")
        scales, shifts = as_rows(scale), None if shift is None else as_rows(shift)
        launch(
            modulated_norm_fwd_kernel, (triton.cdiv(n_rows, plan["ROWS"]),),
            rows, y, stats, dense(weight), dense(bias), scales, shifts, n_rows, _shared(x, scale),
            rows.stride(0), scales.stride(0), 0 if shifts is None else shifts.stride(0), eps, offset, **plan,
        )  # fmt: skip
        return y, stats

    @staticmethod
    def fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        n_rows = x.numel() // x.shape[-1]
        return x.new_empty(x.shape), x.new_empty(1 + rest[-1], n_rows, dtype=accumulator(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:5], output[1])
        ctx.settings = inputs[5:]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 8
        *inputs, stats = ctx.saved_tensors
        eps, offset, center = ctx.settings
        if torch.is_grad_enabled():
            plain = partial(modulated_norm_reference, eps=eps, offset=offset, center=center)
            return *plain_gradients(plain, inputs, dy), None, None, None
        gradients = _Backward.apply(dy, *inputs, stats, offset, center)
        return *(None if t is None else g for t, g in zip(inputs, gradients, strict=True)), None, None, None


def modulated_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
) -> Tensor:
    """RMSNorm, then scale and shift by a conditioning input.

    Equivalent to::

        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)
        y = y * (1 + scale) + shift              # scale and shift broadcast over the missing axes

    computed in fp32 and rounded once. Under `torch.func` transforms, the operator runs in plain PyTorch.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, any strides. fp64 and D > 65536 run in plain PyTorch.
        scale, shift: same shape, any of these dtypes: the shape of x, or leading axes of x and D, e.g. [D], [B, D] or
            [B, 1, D] for x [B, T, D]. shift may be None.
        weight: [D], any of these dtypes, or None.
        eps: added to the mean square.
        offset: added to the weight, in fp32.

    Returns:
        Same shape and dtype as x, contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device.

    Example:
        >>> modulated_rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), eps=0.0)
        tensor([[1.6971, 2.1314]])
    """
    return _modulated_norm(x, scale, shift, weight, None, eps, offset, False)


def modulated_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """LayerNorm, then scale and shift by a conditioning input: `modulate(norm(x), shift, scale)` in DiT.

    Equivalent to::

        y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
        y = y * (1 + scale) + shift              # scale and shift broadcast over the missing axes

    computed in fp32 and rounded once. Arguments, result and errors as in `modulated_rms_norm`; bias: [D], any of
    these dtypes, or None.

    Example:
        >>> modulated_layer_norm(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 0.0]), torch.zeros(2), eps=0.0)
        tensor([[-2.,  1.]])
    """
    return _modulated_norm(x, scale, shift, weight, bias, eps, 0.0, True)


def _modulated_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, offset: float, center: bool,
) -> Tensor:  # fmt: skip
    if not has_dtype(x) or x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be {DTYPES} of shape [..., D] with D > 0, got {describe(x)}")
    leading = scale.shape[:-1]
    while leading and leading[-1] == 1 and leading != x.shape[: len(leading)]:
        leading = leading[:-1]
    fits = scale.shape[-1:] == x.shape[-1:] and leading == x.shape[: len(leading)] and scale.dim() <= x.dim()
    if not fits or not has_dtype(scale):
        raise ValueError(
            f"scale {describe(scale)} must be {DTYPES} with leading axes of x {describe(x)} and {x.shape[-1]} features"
        )
    if shift is not None and (shift.shape != scale.shape or not has_dtype(shift)):
        raise ValueError(f"shift {describe(shift)} must be {DTYPES} and have the shape of scale {describe(scale)}")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and (given.shape != x.shape[-1:] or not has_dtype(given)):
            raise ValueError(f"{name} must be {DTYPES} of shape [{x.shape[-1]}], got {describe(given)}")
    for given in (scale, shift, weight, bias):
        if given is not None and given.device != x.device:
            raise ValueError(f"a tensor is on {given.device} and x on {x.device}: move one of them")
    if is_transformed():
        return modulated_norm_reference(x, scale, shift, weight, bias, eps, offset, center)
    y: Tensor = _ModulatedNorm.apply(x, scale, shift, weight, bias, eps, offset, center)[0]
    return y
