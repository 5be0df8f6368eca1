"""The options of `linear_cross_entropy`, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._launch import describe
from ..cross_entropy.reduction import Reduction, check_options
from ..head.head_arguments import Accumulate, check_devices, check_head, check_memory_options, check_target
from ..head.vocabulary_parallel import VocabularyShard


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
    """Raise ValueError for an invalid option."""
    check_options(options.label_smoothing, options.softcap, options.reduction, options.num_items)
    check_memory_options(options.accumulate, options.chunk_bytes, options.max_targets)


def check_tensors(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    row_weight: Tensor | None, shard: VocabularyShard,
) -> None:  # fmt: skip
    """Raise ValueError for a wrong shape, dtype or device."""
    check_head(x, weight, bias)
    check_target(x, target)
    if class_weight is not None and (class_weight.shape != (shard.total,) or not class_weight.is_floating_point()):
        raise ValueError(f"class_weight {describe(class_weight)} must be floating point [{shard.total}], one per class")
    if row_weight is not None and row_weight.shape != target.shape:
        raise ValueError(f"row_weight {describe(row_weight)} must be {list(target.shape)}, the shape of target")
    if any(t is not None and t.requires_grad for t in (class_weight, row_weight)):
        raise ValueError(
            "class_weight and row_weight get no gradient: detach them, or multiply the losses of reduction='none'"
        )
    check_devices(x, weight, target, bias, class_weight, row_weight)
