"""The options of `linear_cross_entropy`, and the checks of its arguments."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype
from ..cross_entropy.reduction import Reduction, check_options
from .vocabulary_parallel import VocabularyShard

Accumulate = Literal["exact", "lean"]


class CallOptions(NamedTuple):
    """The options of a call."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: Reduction
    num_items: int | Tensor | None
    max_targets: int | None
    accumulate: Accumulate
    chunk_bytes: int | None
    predict: bool


def check_linear_options(options: CallOptions) -> None:
    """Raise ValueError for an option that does not fit."""
    check_options(options.label_smoothing, options.softcap, options.reduction, options.num_items)
    if options.accumulate not in get_args(Accumulate):
        raise ValueError(f"accumulate {options.accumulate!r} must be one of {', '.join(get_args(Accumulate))}")
    if options.chunk_bytes is not None and options.chunk_bytes < 1:
        raise ValueError(f"chunk_bytes {options.chunk_bytes} must be positive; leave it out for the default")
    if options.max_targets is not None and options.max_targets < 0:
        raise ValueError(f"max_targets {options.max_targets} must not be negative; leave it out to keep all rows")


def check_tensors(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    row_weight: Tensor | None, shard: VocabularyShard,
) -> None:  # fmt: skip
    """Raise ValueError for a shape or device that does not fit."""
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {describe(x)} and weight {describe(weight)} must be [..., H] and [V, H] with the same H")
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(f"target {describe(target)} must be int64 {list(x.shape[:-1])}, the leading shape of x")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {describe(bias)} must be [{weight.shape[0]}], one value per row of weight")
    if class_weight is not None and (class_weight.shape != (shard.total,) or not class_weight.is_floating_point()):
        raise ValueError(f"class_weight {describe(class_weight)} must be floating point [{shard.total}], one per class")
    if row_weight is not None and row_weight.shape != target.shape:
        raise ValueError(f"row_weight {describe(row_weight)} must be {list(target.shape)}, the shape of target")
    if any(t is not None and t.requires_grad for t in (class_weight, row_weight)):
        raise ValueError(
            "class_weight and row_weight get no gradient: detach them, or multiply the losses of reduction='none'"
        )
    tensors = [t for t in (x, weight, target, bias, class_weight, row_weight) if t is not None]
    if any(t.device != x.device for t in tensors):
        devices = ", ".join(str(t.device) for t in tensors)
        raise ValueError(f"x, weight, target and other tensors must be on one device, not {devices}")
    if weight.numel() == 0:
        raise ValueError(f"weight {describe(weight)} must have at least one class and one feature")


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias in autocast's dtype where it is on."""
    device = x.device.type
    # Meta tensors have no autocast, and torch.amp.is_autocast_available cannot be traced by torch 2.11.
    if device == "meta" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless x, weight and bias have one dtype that the operator takes."""
    given = [t for t in (x, weight, bias) if t is not None]
    if not has_dtype(x) or any(t.dtype != x.dtype for t in given):
        raise ValueError(
            f"x, weight and bias must have one dtype of {DTYPES}, not {', '.join(describe(t) for t in given)}"
        )
