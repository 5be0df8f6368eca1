"""Checks and casts of x, weight, bias and target, for all losses over an LM head; selection of rows."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype

Accumulate = Literal["exact", "lean"]

# Default bytes of logits per chunk, outside dW's buffer.
_CHUNK_BYTES = 640 * 2**20
# The same for logits of student and teacher: 2048 rows of each with 128256 classes.
_PAIR_BYTES = 1024 * 2**20
# On a CPU, a chunk that stays in the last-level cache is faster.
_CPU_CHUNK_BYTES = 16 * 2**20


def check_head(x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Raise ValueError unless x [..., H], weight [V, H] and bias [V] match; prefix: of their names in messages."""
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{prefix}x {describe(x)} and {prefix}weight {describe(weight)} must be [..., H] and [V, H] with the same H"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{prefix}bias {describe(bias)} must be [{weight.shape[0]}], one value per row of {prefix}weight"
        )
    if weight.numel() == 0:
        raise ValueError(f"{prefix}weight {describe(weight)} must have at least one class and one feature")


def check_target(x: Tensor, target: Tensor) -> None:
    """Raise ValueError unless target is int64 and has the leading shape of x."""
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(f"target {describe(target)} must be int64 {list(x.shape[:-1])}, the leading shape of x")


def check_devices(*tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device."""
    given = [t for t in tensors if t is not None]
    if any(t.device != given[0].device for t in given):
        devices = ", ".join(str(t.device) for t in given)
        raise ValueError(f"x, weight, target and other tensors must be on one device, not {devices}")


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias, cast if autocast is enabled."""
    device = x.device.type
    # Meta tensors have no autocast, and torch 2.11 cannot trace torch.amp.is_autocast_available.
    if device == "meta" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Raise ValueError unless x, weight and bias have the same, supported dtype."""
    given = [t for t in (x, weight, bias) if t is not None]
    if not has_dtype(x) or any(t.dtype != x.dtype for t in given):
        names = ", ".join(describe(t) for t in given)
        raise ValueError(f"{prefix}x, {prefix}weight and {prefix}bias must have one dtype of {DTYPES}, not {names}")


def check_memory_options(accumulate: str, chunk_bytes: int | None, max_targets: int | None) -> None:
    """Raise ValueError for an invalid option."""
    if accumulate not in get_args(Accumulate):
        raise ValueError(f"accumulate {accumulate!r} must be one of {', '.join(get_args(Accumulate))}")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes {chunk_bytes} must be positive; leave it out for the default")
    if max_targets is not None and max_targets < 0:
        raise ValueError(f"max_targets {max_targets} must not be negative; leave it out to keep all rows")


def logits_bytes(x: Tensor, chunk_bytes: int | None, tensors: int = 1) -> int:
    """Bytes of logits per chunk: `chunk_bytes`, or the default for the device of x and one or two tensors."""
    if chunk_bytes is not None:
        return chunk_bytes
    if x.device.type == "cpu":
        return _CPU_CHUNK_BYTES
    return _CHUNK_BYTES if tensors == 1 else _PAIR_BYTES


def wanted_gradients(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[bool, bool, bool]:
    """(want_dx, want_dw, want_db): whether x, weight and bias require gradients."""
    wanted = (torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias))
    dx, dw, db = wanted
    return dx, dw, db


def kept_rows(target: Tensor, ignore_index: int, max_targets: int | None) -> Tensor | None:
    """Indices of `max_targets` rows of target [N], rows that are not ignored first, in order; None for all rows.

    Without host synchronization: the host does not know how many rows are ignored.
    """
    if max_targets is None or max_targets >= target.shape[0]:
        return None
    return (target == ignore_index).to(torch.uint8).argsort(stable=True)[:max_targets]


def nan_beyond(target: Tensor, ignore_index: int, max_targets: int) -> Tensor:
    """1, or NaN if more than `max_targets` rows of target [N] are not ignored: they would be dropped silently.

    As a factor of the loss, the NaN also reaches the gradients.
    """
    return torch.where((target != ignore_index).sum() > max_targets, torch.nan, 1.0)
