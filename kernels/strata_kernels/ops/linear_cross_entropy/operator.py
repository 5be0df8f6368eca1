"""Cross entropy of a linear layer, in little more memory than its gradients take.

    z    = softcap · tanh((x Wᵀ + b) / softcap)        lse = log Σ_v exp z_v        p = exp(z - lse)
    loss = c · lse - (1 - ε) w_target z_target - (ε / V) Σ_v w_v z_v + z_loss · lse²
    dz   = ((c + 2 · z_loss · lse) p - (1 - ε) w_target onehot(target) - (ε / V) w) · s · (1 - (z / softcap)²)
    dx   = dz W          dW = dzᵀ x          db = Σ_rows dz

with ε the label smoothing, w the classes' weights (one without), c = (1 - ε) w_target + (ε / V) Σ_v w_v, and s what a
row's loss is multiplied by: its own weight over the divisor of the mean. Source: the order of work follows the
gradient-in-forward scheme of Liger-Kernel (arXiv:2410.10989, section 3.2), the formulas Szegedy et al. (smoothing,
arXiv:1512.00567), de Brébisson and Vincent (z-loss, arXiv:1604.08859) and Gemma 2 (softcap, arXiv:2408.00118).

Axes: N rows, H features, V vocabulary entries. A matrix product gives logits, a kernel reads them, gives the losses and
overwrites them by dz, and two products give dx and dW: 6·N·H·V FLOPs (4·N·H·V without dW) and no recomputation, since a
scalar loss is linear in its incoming gradient, which the backward pass multiplies in. Logits lie in the memory that dW
will take, or take turns in a buffer: `memory` says when. Nothing is accumulated with atomics: results repeat bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import DTYPES, accumulator, describe, has_dtype
from ..cross_entropy import LossAndPredictions
from ..cross_entropy.reduction import Reduction, check_options
from ..cross_entropy.rows import Options as LossOptions
from ..cross_entropy.rows import plain_losses
from .registration import rows_op, total_op
from .vocabulary_parallel import Cut, Localized, alone, equal_cut, is_dtensor, localize

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Accumulate = Literal["exact", "lean"]

# Logits held beside dW, bytes.
_CHUNK_BYTES = 640 * 2**20
# On a CPU a chunk that stays in the last-level cache is faster than one that does not.
_CPU_CHUNK_BYTES = 16 * 2**20


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    max_targets: int | None = None,
    group: ProcessGroup | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> Tensor:
    """Cross entropy of the logits `x @ weight.T + bias`, in little more memory than the gradients take.

    Equivalent to::

        logits = F.linear(x, weight, bias).float()
        logits = softcap * torch.tanh(logits / softcap)                                             # with a softcap
        options = {"weight": class_weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        loss = F.cross_entropy(logits, target, reduction="none", **options)
        loss += z_loss * logits.logsumexp(-1).square() * (target != ignore_index)
        loss *= row_weight
        loss = loss.sum() / (num_items or class_weight[target[target != ignore_index]].sum())       # reduction="mean"

    The z-loss thus is averaged over the same rows, by the same divisor, as the cross entropy.

    The gradients for x, weight and bias are computed in the forward pass, those that are needed: a frozen weight saves
    a third of the work. With reduction="none" a row's incoming gradient is known only in the backward pass, which
    then computes the logits a second time; so it does in fp16, whose gradients would vanish without the loss scale that
    arrives with it. Double backward is not supported.

    Args:
        x: [..., H], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        weight: [V, H], of x's dtype. Under autocast both are cast to its dtype. With a `group`, this process's part.
            A DTensor with placement Shard(0) is vocabulary-parallel over its mesh dimension, a replicated one is not
            cut; x and bias then are DTensors of the same mesh, and so is the result.
        target: [...], int64, each in [0, V) or `ignore_index`. On a GPU another value turns the loss and its row's
            gradient to NaN; on a CPU it raises.
        bias: [V], of x's dtype; cut as weight is.
        class_weight: [V], a weight per class; all of them, also where weight is cut.
        row_weight: of target's shape, multiplies each row's loss, without a gradient of its own. It does not enter the
            divisor of the mean: for a weighted mean, pass its sum as `num_items`.
        ignore_index: rows with this target have loss and gradient zero.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-partition function.
        softcap: logits are squashed into (-softcap, softcap).
        reduction: "mean", "sum" or "none".
        num_items: what "mean" divides by in place of the (weighted) number of rows that are not ignored; a tensor is
            not read by the host.
        max_targets: how many rows are not ignored, at most. Only that many rows are multiplied: ignored ones are
            dropped first, without waiting for the device to count them, since the caller knows (a collator sees the
            labels on the CPU). If more rows are not ignored, the result and its gradients are NaN.
        group: the processes that hold the vocabulary, in the order of their ranks, in parts of one size. All are
            called with the same x, target and options, and get the same loss and gradient of x.
        accumulate: how a 16-bit gradient of weight adds up. "exact" rounds it once: all rows are taken together, their
            logits mostly in the memory of that gradient, or, where that would take more memory, it is summed in fp32.
            Either takes up to 4·V·H bytes more than "lean", which rounds after every chunk of the rows: with three to
            five chunks its worst element has been up to three times as far from fp64 as PyTorch's.
        chunk_bytes: logits held at a time, beside the gradient of weight. 640 MiB by default, 16 MiB on a CPU. Fewer
            and larger chunks are faster and, with "lean", more exact.

    Returns:
        fp32 (fp64 for fp64), a scalar, or the shape of target for "none". The mean over no rows is NaN, as in PyTorch,
        with zero gradients; the sum is 0.

    Raises:
        ValueError: a shape, dtype, placement or option does not fit.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_cross_entropy(x, weight, torch.randint(32, (2, 8))).backward()
    """
    options = _Options(
        ignore_index, float(label_smoothing), float(z_loss), softcap, reduction, num_items, max_targets, accumulate,
        chunk_bytes, predict=False,
    )  # fmt: skip
    return _linear_cross_entropy(x, weight, target, bias, class_weight, row_weight, group, options).loss


def linear_cross_entropy_with_predictions(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    max_targets: int | None = None,
    group: ProcessGroup | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> LossAndPredictions:
    """`linear_cross_entropy`, with the arg-max of the logits and the accuracy from the same reading of them.

    Arguments, the loss and errors as in `linear_cross_entropy`; neither predictions nor accuracy carry a gradient.

    Example:
        >>> x, weight = torch.eye(3), torch.eye(3)
        >>> linear_cross_entropy_with_predictions(x, weight, torch.tensor([0, 2, -100])).predictions
        tensor([ 0,  1, -1])
    """
    options = _Options(
        ignore_index, float(label_smoothing), float(z_loss), softcap, reduction, num_items, max_targets, accumulate,
        chunk_bytes, predict=True,
    )  # fmt: skip
    return _linear_cross_entropy(x, weight, target, bias, class_weight, row_weight, group, options)


class _Options(NamedTuple):
    """What the caller chose, as it is handed from step to step."""

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


class _Rows(NamedTuple):
    """x: [N, H], target: [N], weight: [N] in the dtype of the losses."""

    x: Tensor
    target: Tensor
    weight: Tensor | None


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    row_weight: Tensor | None, group: ProcessGroup | None, options: _Options,
) -> LossAndPredictions:  # fmt: skip
    _check_options(options)
    here = _local(x, weight, target, bias, row_weight, group)
    x, weight, bias, target, row_weight = here.x, here.weight, here.bias, here.target, here.row_weight
    _check(x, weight, target, bias, class_weight, row_weight, here.cut)
    x, weight, bias = _autocast(x, weight, bias)
    _check_dtypes(x, weight, bias)

    wide = accumulator(x.dtype)
    labels = target.reshape(-1).contiguous()
    rows = _Rows(x.reshape(-1, x.shape[-1]), labels, None if row_weight is None else row_weight.reshape(-1).to(wide))
    class_weight = None if class_weight is None else class_weight.to(wide).contiguous()
    divisor = _divisor(labels, class_weight, options, here.sum_rows)
    if class_weight is not None:
        class_weight = class_weight[here.cut.start : here.cut.start + weight.shape[0]]

    rows, kept = _drop_ignored(rows, options)
    loss, predictions = _reduced(rows, weight, bias, class_weight, divisor, here.cut, options)
    counted = labels != options.ignore_index
    if kept is not None:
        if loss.dim():
            loss = loss.new_zeros(labels.shape).index_copy(0, kept, loss)
        # More targets than were announced would go missing in silence. A factor reaches the gradients, too.
        loss = loss * torch.where(counted.sum() > kept.shape[0], torch.nan, 1.0)
        if options.predict:
            predictions = predictions.new_full(labels.shape, -1).index_copy(0, kept, predictions)
    loss = here.wrap(loss.view(target.shape) if loss.dim() else loss)
    if not options.predict:
        return LossAndPredictions(loss, predictions, predictions)
    accuracy = here.sum_rows(((predictions == labels) & counted).sum()) / here.sum_rows(counted.sum())
    return LossAndPredictions(loss, here.wrap(predictions.view(target.shape)), accuracy)


def _local(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, row_weight: Tensor | None,
    group: ProcessGroup | None,
) -> Localized:  # fmt: skip
    """What this process computes with."""
    if is_dtensor(x) or is_dtensor(weight) or is_dtensor(bias):
        if group is not None:
            raise ValueError("group is for plain tensors; a DTensor's placements say which processes hold what")
        return localize(x, weight, target, bias, row_weight)
    cut = alone(weight.shape[0]) if group is None or group.size() == 1 else equal_cut(group, weight.shape[0])
    return Localized(x, weight, target, bias, row_weight, cut, _same, _same)


def _same(x: Tensor) -> Tensor:
    return x


def _autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = x.device.type
    # Meta tensors have no autocast, and torch.amp.is_autocast_available cannot be traced by torch 2.11.
    if device == "meta" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _divisor(
    target: Tensor, class_weight: Tensor | None, options: _Options, sum_rows: Callable[[Tensor], Tensor]
) -> Tensor:
    """What the sum of the rows' losses is divided by: a scalar on the device, made without waiting for it."""
    if options.reduction != "mean":
        return torch.ones((), device=target.device)
    if isinstance(options.num_items, Tensor):
        return options.num_items.detach().to(target.device, non_blocking=True).reshape(())
    if options.num_items is not None:
        return torch.full((), options.num_items, dtype=torch.float32, device=target.device)
    counted = target != options.ignore_index
    if class_weight is None:
        return sum_rows(counted.sum())
    # A target outside the vocabulary, which turns its row's loss to NaN, counts as any other row.
    return sum_rows(class_weight[target.clamp(0, class_weight.shape[0] - 1)].where(counted, 0.0).sum())


def _drop_ignored(rows: _Rows, options: _Options) -> tuple[_Rows, Tensor | None]:
    """At most `max_targets` rows, those that are not ignored first and in order, and where they come from."""
    if options.max_targets is None or options.max_targets >= rows.target.shape[0]:
        return rows, None
    ignored = (rows.target == options.ignore_index).to(torch.uint8)
    kept = ignored.argsort(stable=True)[: options.max_targets]
    weight = None if rows.weight is None else rows.weight[kept]
    return _Rows(rows.x.index_select(0, kept), rows.target[kept], weight), kept


def _reduced(
    rows: _Rows, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, divisor: Tensor, cut: Cut,
    options: _Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The scalar loss, or the losses of the rows, and the predictions."""
    if torch._C._are_functorch_transforms_active():
        return _plain(rows, weight, bias, class_weight, divisor, cut, options)
    budget = options.chunk_bytes
    if budget is None:
        budget = _CPU_CHUNK_BYTES if rows.x.device.type == "cpu" else _CHUNK_BYTES
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (rows.x, weight, bias)]
    tensors = (rows.x, weight, bias, rows.target, class_weight)
    # In the order of Settings.
    settings = (
        options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0,
        budget, options.accumulate == "exact", options.predict,
        cut.group, cut.ranks, cut.start, cut.total, cut.sum_dx, *wanted,
    )  # fmt: skip
    # A probability divided by the number of rows is below what fp16 holds, until the loss scale multiplies it: that is
    # known in the backward pass.
    if options.reduction == "none" or rows.x.dtype == torch.float16:
        losses, predictions = rows_op(*tensors, *settings)
        losses = losses if rows.weight is None else losses * rows.weight
        if options.reduction == "none":
            return losses, predictions
        return losses.sum() / divisor.to(losses.dtype), predictions
    loss, *_, predictions = total_op(divisor, rows.weight, *tensors, *settings)
    return loss, predictions


def _plain(
    rows: _Rows, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, divisor: Tensor, cut: Cut,
    options: _Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in plain PyTorch, which is all that a transform of `torch.func` sees into."""
    if cut.group:
        raise NotImplementedError("torch.func cannot look into a vocabulary that several processes hold")
    z = functional.linear(rows.x, weight, bias)
    shape = LossOptions(options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0)
    losses = plain_losses(z, rows.target, shape, class_weight)
    losses = losses if rows.weight is None else losses * rows.weight
    predictions = z.argmax(-1).where(rows.target != options.ignore_index, -1)
    return (losses if options.reduction == "none" else losses.sum() / divisor), predictions


def _check_options(options: _Options) -> None:
    check_options(options.label_smoothing, options.softcap, options.reduction, options.num_items)
    if options.accumulate not in get_args(Accumulate):
        raise ValueError(f"accumulate {options.accumulate!r} must be one of {', '.join(get_args(Accumulate))}")
    if options.chunk_bytes is not None and options.chunk_bytes < 1:
        raise ValueError(f"chunk_bytes {options.chunk_bytes} must be positive; leave it out for the default")
    if options.max_targets is not None and options.max_targets < 0:
        raise ValueError(f"max_targets {options.max_targets} must not be negative; leave it out to keep all rows")


def _check(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    row_weight: Tensor | None, cut: Cut,
) -> None:  # fmt: skip
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {describe(x)} and weight {describe(weight)} must be [..., H] and [V, H] with the same H")
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(f"target {describe(target)} must be int64 {list(x.shape[:-1])}, the leading shape of x")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {describe(bias)} must be [{weight.shape[0]}], one value per row of weight")
    if class_weight is not None and (class_weight.shape != (cut.total,) or not class_weight.is_floating_point()):
        raise ValueError(f"class_weight {describe(class_weight)} must be floating point [{cut.total}], one per class")
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


def _check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    given = [t for t in (x, weight, bias) if t is not None]
    if not has_dtype(x) or any(t.dtype != x.dtype for t in given):
        raise ValueError(
            f"x, weight and bias must have one dtype of {DTYPES}, not {', '.join(describe(t) for t in given)}"
        )
