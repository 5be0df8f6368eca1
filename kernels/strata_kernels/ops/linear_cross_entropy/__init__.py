"""Cross entropy of a linear layer (an LM head), in little more memory than its gradients need.

    z    = softcap · tanh((x Wᵀ + b) / softcap)        lse = log Σ_v exp z_v        p = exp(z - lse)
    loss = a · lse - (1 - ε) w_target z_target - (ε / V) Σ_v w_v z_v + z_loss · lse²
    dz   = ((a + 2 · z_loss · lse) p - (1 - ε) w_target onehot(target) - (ε / V) w) · s · (1 - (z / softcap)²)
    dx   = dz W          dW = dzᵀ x          db = Σ_rows dz

with ε the label smoothing, w the class weights (default 1), a = (1 - ε) w_target + (ε / V) Σ_v w_v the weight of lse,
and s the factor of a row's loss: its row weight over the divisor of the mean. Sources: the gradient in the forward pass
is Liger-Kernel's idea (arXiv:2410.10989, section 3.2); label smoothing Szegedy et al. (arXiv:1512.00567), z-loss de
Brébisson and Vincent (arXiv:1604.08859), softcap Gemma 2 (arXiv:2408.00118).

Axes: N rows, H features, V vocabulary entries. For each block of logits, a matrix product computes them, a kernel
computes the losses and overwrites the logits with dz, and two products compute dx and dW: 6·N·H·V FLOPs (4·N·H·V
without dW). Nothing is recomputed: the gradient of a scalar loss is linear in the incoming gradient, so the backward
pass only scales it. No atomic accumulation: results are bitwise reproducible.

`strata::linear_cross_entropy` computes a scalar loss and its gradients. `strata::linear_cross_entropy_rows` in
`rows_operator` computes losses of rows and `linear_logprobs`. Modules:

    row_losses    the computation on a chunk of logits for cross entropy
    arguments     options, and checks of arguments
    ops.head      the chunk loop: matrix products, memory, vocabulary parallelism

The row kernel is that of `cross_entropy`, called through `cross_entropy.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from .._operator import Operator, is_transformed, operator, refuse_double_backward
from ..cross_entropy import LossAndPredictions
from ..cross_entropy.reduction import Reduction, scaled
from ..cross_entropy.row_reference import reference_losses
from ..cross_entropy.row_statistics import Options
from ..head.head_arguments import (
    Accumulate,
    autocast,
    check_dtypes,
    kept_rows,
    logits_bytes,
    nan_beyond,
    wanted_gradients,
)
from ..head.vocabulary_parallel import VocabularyShard, local_tensors
from .arguments import CallOptions, check_linear_options, check_tensors
from .row_losses import Settings, losses_and_gradients
from .rows_operator import N_TENSORS, SETTINGS, TENSORS, empty_gradients, losses_by_row

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@operator(
    f"linear_cross_entropy(Tensor divisor, Tensor? row_weight, {TENSORS}, {SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
class _ScalarLoss(Operator):
    """(loss, dx, dW, db, predictions); gradients for an incoming gradient of 1; empty if not requested."""

    @staticmethod
    def forward(
        divisor: Tensor, row_weight: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        class_weight: Tensor | None, *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        # An fp64 divisor would promote the loss to fp64.
        divisor = divisor.to(accumulator(x.dtype))
        scale = divisor.reciprocal().expand(x.shape[0]) if row_weight is None else row_weight / divisor
        given = Settings(*settings)
        found, gradients = losses_and_gradients(x, weight, bias, target, class_weight, scale, given)
        loss = (found.loss if row_weight is None else found.loss * row_weight).sum() / divisor
        return loss, *gradients, found.prediction

    @staticmethod
    def fake(divisor: Tensor, row_weight: Tensor | None, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        settings = Settings(*rest[N_TENSORS - 2 :])
        prediction = x.new_empty(x.shape[0] if settings.predict else 0, dtype=torch.int64)
        return x.new_empty((), dtype=accumulator(x.dtype)), *empty_gradients(x, weight, settings), prediction

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *gradients, _ = output
        # Otherwise autograd would allocate zeros as the incoming gradient of the output dW.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*gradients)
        ctx.wanted = inputs[-3:]
        ctx.n_inputs = len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_cross_entropy")
        nothing: tuple[None, ...] = (None,) * ctx.n_inputs
        if grad is None:
            return nothing
        dx, dw, db = (scaled(t, grad) if want else None for t, want in zip(ctx.saved_tensors, ctx.wanted, strict=True))
        return None, None, dx, dw, db, *nothing[5:]


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
    """Cross entropy of the logits `x @ weight.T + bias`, in little more memory than the gradients need.

    Equivalent to::

        logits = F.linear(x, weight, bias).float()
        logits = softcap * torch.tanh(logits / softcap)                                             # if softcap
        options = {"weight": class_weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        loss = F.cross_entropy(logits, target, reduction="none", **options)
        loss += z_loss * logits.logsumexp(-1).square() * (target != ignore_index)
        loss *= row_weight
        loss = loss.sum() / (num_items or class_weight[target[target != ignore_index]].sum())       # reduction="mean"

    The z-loss has the same rows and divisor as the cross entropy.

    The forward pass computes the required gradients of x, weight and bias; a frozen weight saves a third of the FLOPs.
    With reduction="none", the incoming gradients of the rows are known only in the backward pass, which recomputes the
    logits. The same holds for fp16, where gradients would underflow without the loss scale, a factor of the
    incoming gradient. Double backward is not supported.

    Args:
        x: [..., H], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        weight: [V, H], x's dtype. Autocast casts x and weight. With a `group`, the shard of this rank. A DTensor with
            placement Shard(0) is vocabulary-parallel over its mesh dimension, a replicated one is not sharded; x and
            bias are then DTensors of the same mesh, and so is the result.
        target: [...], int64, each in [0, V) or `ignore_index`. On a GPU, any other value makes the loss and the
            gradient of its row NaN; on a CPU it raises.
        bias: [V], x's dtype; sharded like weight.
        class_weight: [V], floating point, without a gradient; the whole vocabulary, even if weight is sharded.
        row_weight: [...], factor of each row's loss, without a gradient. Does not change the divisor of "mean": for a
            weighted mean, pass its sum as `num_items`.
        ignore_index: rows with this target have zero loss and gradient.
        label_smoothing: in [0, 1].
        z_loss: factor of lse², the squared logsumexp of a row.
        softcap: logits become softcap · tanh(logits / softcap); None for no softcap.
        reduction: "mean", "sum" or "none".
        num_items: divisor of "mean", instead of the (weighted) number of rows that are not ignored. A tensor causes no
            host synchronization.
        max_targets: upper bound of the rows that are not ignored, e.g. from a collator, which has labels on the CPU.
            Only this many rows enter the matrix products: ignored rows are dropped, without host synchronization. If
            more rows are not ignored, the result and its gradients are NaN.
        group: process group over which the vocabulary is sharded, equal shards in rank order. All ranks call this with
            the same x, target and options, and get the same loss and gradient of x.
        accumulate: accumulation of a 16-bit weight gradient over chunks. "exact" rounds once: either one chunk of all
            rows, most of whose logits reuse the gradient's buffer, or, if that needs more memory, chunks accumulated in
            fp32. Both need up to 4·V·H bytes more than "lean", which rounds after every chunk: with three to five
            chunks, its maximum error against fp64 was up to three times PyTorch's.
        chunk_bytes: bytes of logits per chunk, outside the gradient's buffer; default 640 MiB, on a CPU 16 MiB. Larger
            chunks are faster and, with "lean", more accurate.

    Returns:
        fp32 (fp64 for fp64), a scalar, or target's shape for "none". If all rows are ignored, the mean is NaN, as in
        PyTorch, with zero gradients; the sum is 0.

    Raises:
        ValueError: a wrong shape, dtype, placement or option.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_cross_entropy(x, weight, torch.randint(32, (2, 8))).backward()
    """
    options = CallOptions(
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
    """`linear_cross_entropy`, with `logits.argmax(-1)` and the accuracy from the same pass over the logits.

    Arguments, loss and errors as in `linear_cross_entropy`; predictions and accuracy have no gradient.

    Example:
        >>> x, weight = torch.eye(3), torch.eye(3)
        >>> linear_cross_entropy_with_predictions(x, weight, torch.tensor([0, 2, -100])).predictions
        tensor([ 0,  1, -1])
    """
    options = CallOptions(
        ignore_index, float(label_smoothing), float(z_loss), softcap, reduction, num_items, max_targets, accumulate,
        chunk_bytes, predict=True,
    )  # fmt: skip
    return _linear_cross_entropy(x, weight, target, bias, class_weight, row_weight, group, options)


class _Rows(NamedTuple):
    """x: [N, H], target: [N], weight: [N] in the dtype of the losses."""

    x: Tensor
    target: Tensor
    weight: Tensor | None


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    row_weight: Tensor | None, group: ProcessGroup | None, options: CallOptions,
) -> LossAndPredictions:  # fmt: skip
    check_linear_options(options)
    local = local_tensors(x, weight, target, bias, row_weight, group)
    x, weight, bias, target, row_weight = local.x, local.weight, local.bias, local.target, local.beside
    check_tensors(x, weight, target, bias, class_weight, row_weight, local.shard)
    x, weight, bias = autocast(x, weight, bias)
    check_dtypes(x, weight, bias)

    dtype = accumulator(x.dtype)
    labels = target.reshape(-1).contiguous()
    rows = _Rows(x.reshape(-1, x.shape[-1]), labels, None if row_weight is None else row_weight.reshape(-1).to(dtype))
    class_weight = None if class_weight is None else class_weight.to(dtype).contiguous()
    divisor = _divisor(labels, class_weight, options, local.sum_over_row_shards)
    if class_weight is not None:
        class_weight = class_weight[local.shard.start : local.shard.start + weight.shape[0]]

    rows, kept = _drop_ignored(rows, options)
    loss, predictions = _loss_of_rows(rows, weight, bias, class_weight, divisor, local.shard, options)
    counted = labels != options.ignore_index
    if kept is not None:
        if loss.dim():
            loss = loss.new_zeros(labels.shape).index_copy(0, kept, loss)
        loss = loss * nan_beyond(labels, options.ignore_index, kept.shape[0])
        if options.predict:
            predictions = predictions.new_full(labels.shape, -1).index_copy(0, kept, predictions)
    loss = local.to_dtensor(loss.view(target.shape) if loss.dim() else loss)
    if not options.predict:
        return LossAndPredictions(loss, predictions, predictions)
    hits = local.sum_over_row_shards(((predictions == labels) & counted).sum())
    accuracy = hits / local.sum_over_row_shards(counted.sum())
    return LossAndPredictions(loss, local.to_dtensor(predictions.view(target.shape)), accuracy)


def _divisor(
    target: Tensor, class_weight: Tensor | None, options: CallOptions, sum_over_row_shards: Callable[[Tensor], Tensor]
) -> Tensor:
    """The divisor of the sum over the rows: a 0-d tensor, computed without host synchronization."""
    if options.reduction != "mean":
        return torch.ones((), device=target.device)
    if isinstance(options.num_items, Tensor):
        return options.num_items.detach().to(target.device, non_blocking=True).reshape(())
    if options.num_items is not None:
        return torch.full((), options.num_items, dtype=torch.float32, device=target.device)
    counted = target != options.ignore_index
    if class_weight is None:
        return sum_over_row_shards(counted.sum())
    # A target outside the vocabulary makes its row's loss NaN, and is counted like any other.
    return sum_over_row_shards(class_weight[target.clamp(0, class_weight.shape[0] - 1)].where(counted, 0.0).sum())


def _drop_ignored(rows: _Rows, options: CallOptions) -> tuple[_Rows, Tensor | None]:
    """(first `max_targets` rows, with rows that are not ignored sorted first; their indices, None for all rows)."""
    kept = kept_rows(rows.target, options.ignore_index, options.max_targets)
    if kept is None:
        return rows, None
    weight = None if rows.weight is None else rows.weight[kept]
    return _Rows(rows.x.index_select(0, kept), rows.target[kept], weight), kept


def _loss_of_rows(
    rows: _Rows, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, divisor: Tensor,
    shard: VocabularyShard, options: CallOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(scalar loss, or the losses of the rows for reduction="none"; predictions)."""
    if is_transformed():
        return _reference(rows, weight, bias, class_weight, divisor, shard, options)
    tensors = (rows.x, weight, bias, rows.target, class_weight)
    # In the field order of Settings.
    settings = (
        options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0, 1.0,
        logits_bytes(rows.x, options.chunk_bytes), options.accumulate == "exact", options.predict, False,
        *astuple(shard), *wanted_gradients(rows.x, weight, bias),
    )  # fmt: skip
    # In fp16, p / N underflows without the loss scale, which is known only in the backward pass.
    if options.reduction == "none" or rows.x.dtype == torch.float16:
        losses, predictions, *_ = losses_by_row(*tensors, *settings)
        losses = losses if rows.weight is None else losses * rows.weight
        if options.reduction == "none":
            return losses, predictions
        return losses.sum() / divisor.to(losses.dtype), predictions
    loss, *_, predictions = _ScalarLoss.apply(divisor, rows.weight, *tensors, *settings)
    return loss, predictions


def _reference(
    rows: _Rows, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, divisor: Tensor,
    shard: VocabularyShard, options: CallOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_loss_of_rows` in plain PyTorch, for `torch.func` transforms."""
    if shard.group:
        raise NotImplementedError("torch.func is not supported for a vocabulary that is sharded over processes")
    z = functional.linear(rows.x, weight, bias)
    shape = Options(options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0)
    losses = reference_losses(z, rows.target, shape, class_weight)
    losses = losses if rows.weight is None else losses * rows.weight
    predictions = z.argmax(-1).where(rows.target != options.ignore_index, -1)
    return (losses if options.reduction == "none" else losses.sum() / divisor), predictions
