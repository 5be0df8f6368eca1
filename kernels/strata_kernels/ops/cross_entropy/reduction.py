"""Shared by the losses: reduction of row losses to a scalar, and scaling by its incoming gradient."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import describe, launch, multiprocessors, takes_kernel
from .._operator import has_mode

Reduction = Literal["mean", "sum", "none"]

# Block and warps of kernels in which one program loops over all rows.
_ROWS, _WARPS = 4096, 16


@triton.jit(do_not_specialize=["n_rows"])
def divisor_kernel(p_target, p_weight, p_divisor, n_rows, ignore_index, V: tl.constexpr, BLOCK: tl.constexpr):
    """The number of rows that are not ignored, or Σ w_target; then its reciprocal, or 1 if it is 0."""
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_n in range(0, n_rows, BLOCK):
        o_n = i_n + tl.arange(0, BLOCK)
        b_target = tl.load(p_target + o_n, mask=o_n < n_rows, other=ignore_index)
        m_n = b_target != ignore_index
        if p_weight is None:
            b_sum += m_n.to(tl.float32)
        else:
            b_sum += tl.load(p_weight + b_target, mask=m_n & (b_target >= 0) & (b_target < V), other=0.0)
    divisor = tl.sum(b_sum, 0)
    tl.store(p_divisor, divisor)
    tl.store(p_divisor + 1, 1.0 / tl.where(divisor == 0.0, 1.0, divisor))


@triton.jit(do_not_specialize=["n_rows"])
def total_kernel(p_loss, p_divisor, p_total, n_rows, BLOCK: tl.constexpr):
    """Σ loss / divisor, NaN if the divisor is 0; one program, so bitwise reproducible."""
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_n in range(0, n_rows, BLOCK):
        o_n = i_n + tl.arange(0, BLOCK)
        b_sum += tl.load(p_loss + o_n, mask=o_n < n_rows, other=0.0)
    divisor = tl.load(p_divisor)
    none = divisor == 0.0
    tl.store(p_total, tl.where(none, float("nan"), tl.sum(b_sum, 0) / tl.where(none, 1.0, divisor)))


@triton.jit
def multiply_kernel(p_x, p_factor, n_elements, BLOCK: tl.constexpr):
    """x *= factor; if factor is 1, programs return without memory traffic."""
    factor = tl.load(p_factor).to(tl.float32)
    if factor != 1.0:
        # Not tl.cdiv: its addition would overflow for n_elements just below 2^31.
        for i_x in range(tl.program_id(0), (n_elements - 1) // BLOCK + 1, tl.num_programs(0)):
            o_x = tl.cast(i_x, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            m_x = o_x < n_elements
            b_x = tl.load(p_x + o_x, mask=m_x)
            tl.store(p_x + o_x, (b_x.to(tl.float32) * factor).to(b_x.dtype), mask=m_x)


def divisors(target: Tensor, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
    """(divisor of the mean over the rows, its reciprocal) as a tensor [2] with the dtype of `like`.

    target: [N], int64. weight: [V] of that dtype, contiguous. A target outside [0, V) has weight 0.
    """
    pair = like.new_empty(2)
    if takes_kernel(like):
        launch(
            divisor_kernel, (1,), target, weight, pair, target.shape[0], ignore_index,
            V=0 if weight is None else weight.shape[0], BLOCK=_ROWS, num_warps=_WARPS,
        )  # fmt: skip
        return pair
    counted = target != ignore_index
    divisor = counted.sum() if weight is None else weight[target.where(counted, 0)].where(counted, 0.0).sum()
    return torch.stack((divisor.to(like.dtype), divisor.to(like.dtype).reciprocal()))


def total(loss: Tensor, divisor: Tensor) -> Tensor:
    """loss.sum() / divisor for losses [N] and a 0-d divisor of the same dtype and device."""
    if not takes_kernel(loss):
        return loss.sum() / divisor
    result = loss.new_empty(())
    launch(total_kernel, (1,), loss, divisor, result, loss.shape[0], BLOCK=_ROWS, num_warps=_WARPS)
    return result


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor for a 0-d factor on the device; in place if that is safe, and then without traffic for a factor of 1.

    In place is not safe with retain_graph=True, while a compiler traces (x is then a Tensor subclass), or for a batch
    of factors (`is_grads_batched=True`).
    """
    if type(x) is not Tensor or has_mode() or not takes_kernel(x):
        # As the kernel does: on a GPU, `x * factor` would first round an fp32 factor to the dtype of x.
        return (x.to(torch.promote_types(x.dtype, factor.dtype)) * factor).to(x.dtype)
    if torch._C._autograd._get_current_graph_task_keep_graph() or not x.is_contiguous():
        x = x.clone(memory_format=torch.contiguous_format)
    block = 8192
    programs = min(triton.cdiv(x.numel(), block), 8 * multiprocessors(x.device))
    launch(multiply_kernel, (programs,), x, factor, x.numel(), BLOCK=block, num_warps=8)
    return x


def check_options(
    label_smoothing: float, softcap: float | None, reduction: str, num_items: int | Tensor | None
) -> None:
    """Raise ValueError for an invalid option."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} must be between 0 and 1")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap {softcap} must be positive, or None")
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction {reduction!r} must be one of {', '.join(get_args(Reduction))}")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items is the divisor of reduction 'mean'; reduction {reduction!r} has no divisor")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items {describe(num_items)} must have one element")
