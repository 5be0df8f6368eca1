"""Cross entropy of a linear layer, in little more memory than its gradients take.

    z    = softcap · tanh((x Wᵀ + b) / softcap)        lse = log Σ_v exp z_v        p = exp(z - lse)
    loss = a · lse - (1 - ε) w_target z_target - (ε / V) Σ_v w_v z_v + z_loss · lse²
    dz   = ((a + 2 · z_loss · lse) p - (1 - ε) w_target onehot(target) - (ε / V) w) · s · (1 - (z / softcap)²)
    dx   = dz W          dW = dzᵀ x          db = Σ_rows dz

with ε the label smoothing, w the class weights (1 without), a = (1 - ε) w_target + (ε / V) Σ_v w_v the weight of lse,
and s the factor of a row's loss: its row weight over the divisor of the mean. Sources: the gradient in the forward pass
is Liger-Kernel's idea (arXiv:2410.10989, section 3.2); label smoothing Szegedy et al. (arXiv:1512.00567), z-loss de
Brébisson and Vincent (arXiv:1604.08859), softcap Gemma 2 (arXiv:2408.00118).

Axes: N rows, H features, V vocabulary entries. A matrix product computes logits, a kernel computes the losses and
overwrites the logits by dz, and two products give dx and dW: 6·N·H·V FLOPs (4·N·H·V without dW). Nothing is recomputed,
because a scalar loss is linear in its incoming gradient: the backward pass only multiplies by it. Nothing accumulates
with atomics: results repeat bit for bit.

A scalar loss and its gradients are one operator, `strata::linear_cross_entropy`. `strata::linear_cross_entropy_rows`
gives the losses of the rows, and its backward operator computes the logits once more. Below them:

    chunks                 the engine: products and the row kernel, some rows at a time
    memory                 the size of chunks, where logits lie, how dW accumulates
    vocabulary_parallel    a vocabulary sharded over processes, DTensors
    arguments              options, and the checks of arguments

The row kernel is that of `cross_entropy`, behind the functions of `cross_entropy.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from .._operator import Operator, is_transformed, operator
from ..cross_entropy import LossAndPredictions
from ..cross_entropy.reduction import Reduction, refuse_double_backward, scaled
from ..cross_entropy.row_reference import reference_losses
from ..cross_entropy.row_statistics import Options
from .arguments import Accumulate, CallOptions, autocast, check_dtypes, check_linear_options, check_tensors
from .chunks import Settings, losses_and_gradients
from .vocabulary_parallel import VocabularyShard, local_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Bytes of logits at a time, beside dW.
_CHUNK_BYTES = 640 * 2**20
# On a CPU, a chunk that stays in the last-level cache is faster.
_CPU_CHUNK_BYTES = 16 * 2**20

# The arguments of all three operators: five tensors, then the fields of Settings.
_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_SETTINGS = ", ".join(f"{'SymInt' if f.type == 'int' else f.type} {f.name}" for f in fields(Settings))
_N_TENSORS = _TENSORS.count("Tensor")


def _empty_results(x: Tensor, weight: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dW, db and prediction, unfilled."""
    return (
        x.new_empty(x.shape if settings.want_dx else 0),
        weight.new_empty(weight.shape if settings.want_dw else 0),
        weight.new_empty(weight.shape[0] if settings.want_db else 0),
        x.new_empty(x.shape[0] if settings.predict else 0, dtype=torch.int64),
    )


@operator(
    f"linear_cross_entropy(Tensor divisor, Tensor? row_weight, {_TENSORS}, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
class _ScalarLoss(Operator):
    """The loss, dx, dW and db for an incoming gradient of 1, and the predictions; empty where not wanted."""

    @staticmethod
    def forward(
        divisor: Tensor, row_weight: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        class_weight: Tensor | None, *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        # A divisor of fp64 would carry its dtype into the loss.
        divisor = divisor.to(accumulator(x.dtype))
        scale = divisor.reciprocal().expand(x.shape[0]) if row_weight is None else row_weight / divisor
        losses, *rest = losses_and_gradients(x, weight, bias, target, class_weight, scale, Settings(*settings))
        dx, dw, db, predictions = rest
        loss = (losses if row_weight is None else losses * row_weight).sum() / divisor
        return loss, dx, dw, db, predictions

    @staticmethod
    def fake(divisor: Tensor, row_weight: Tensor | None, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        settings = Settings(*rest[_N_TENSORS - 2 :])
        return x.new_empty((), dtype=accumulator(x.dtype)), *_empty_results(x, weight, settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *gradients, _ = output
        # Otherwise autograd would fill a zero tensor as the incoming gradient of the dW that forward returned.
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


@operator(f"linear_cross_entropy_rows_bwd(Tensor grad, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)")
class _RowLossesBackward(Operator):
    """dx, dW and db, with the logits computed once more; empty where not wanted."""

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        no_predictions = replace(Settings(*settings), predict=False)
        found = losses_and_gradients(x, weight, bias, target, class_weight, grad, no_predictions)
        return found.dx, found.dw, found.db

    @staticmethod
    def fake(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        dx, dw, db, _ = _empty_results(x, weight, Settings(*rest[_N_TENSORS - 2 :]))
        return dx, dw, db


@operator(f"linear_cross_entropy_rows({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)")
class _RowLosses(Operator):
    """The losses of the rows and the predictions."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        no_gradients = replace(Settings(*settings), want_dx=False, want_dw=False, want_db=False)
        # Nothing reads the scale of the losses without a gradient.
        scale = x.new_empty(1, dtype=accumulator(x.dtype)).expand(x.shape[0])
        found = losses_and_gradients(x, weight, bias, target, class_weight, scale, no_gradients)
        return found.loss, found.prediction

    @staticmethod
    def fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *_, prediction = _empty_results(x, weight, Settings(*rest[_N_TENSORS - 2 :]))
        return x.new_empty(x.shape[0], dtype=accumulator(x.dtype)), prediction

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:_N_TENSORS])
        ctx.settings = inputs[_N_TENSORS:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_cross_entropy")
        gradients: tuple[Tensor, ...] = _RowLossesBackward.apply(grad, *ctx.saved_tensors, *ctx.settings)
        wanted = (g if want else None for g, want in zip(gradients, ctx.settings[-3:], strict=True))
        return *wanted, *(None,) * (_N_TENSORS - 3 + len(ctx.settings))


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

    The z-loss is averaged over the same rows, by the same divisor, as the cross entropy.

    The forward pass computes the gradients of x, weight and bias that are needed: a frozen weight saves a third of the
    work. With reduction="none", a row's incoming gradient is known only in the backward pass, which then computes the
    logits a second time. So it does in fp16, whose gradients would underflow without the loss scale, which arrives with
    the incoming gradient. Double backward is not supported.

    Args:
        x: [..., H], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        weight: [V, H], of x's dtype. Under autocast both are cast to its dtype. With a `group`, this process's shard.
            A DTensor with placement Shard(0) is vocabulary-parallel over its mesh dimension, a replicated one is not
            sharded; x and bias then are DTensors of the same mesh, and so is the result.
        target: [...], int64, each in [0, V) or `ignore_index`. On a GPU another value turns the loss and its row's
            gradient to NaN; on a CPU it raises.
        bias: [V], of x's dtype; sharded as weight is.
        class_weight: [V], a weight per class; of the whole vocabulary, also where weight is sharded.
        row_weight: of target's shape, multiplies each row's loss, without a gradient of its own. It does not enter the
            divisor of the mean: for a weighted mean, pass its sum as `num_items`.
        ignore_index: rows with this target have loss and gradient zero.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-partition function.
        softcap: logits are squashed into (-softcap, softcap).
        reduction: "mean", "sum" or "none".
        num_items: divisor of "mean" instead of the (weighted) number of rows that are not ignored. A tensor is not read
            by the host.
        max_targets: upper bound of the rows that are not ignored. Only so many rows are multiplied: ignored rows are
            dropped first, without a synchronization, since the caller knows their number (a collator sees the labels
            on the CPU). If more rows are not ignored, the result and its gradients are NaN.
        group: the processes that hold the vocabulary, in shards of equal size in the order of their ranks. All of them
            call this with the same x, target and options, and get the same loss and gradient of x.
        accumulate: how a 16-bit gradient of weight accumulates. "exact" rounds it once: all rows are taken at once,
            their logits mostly in the memory of that gradient, or, where that would take more memory, in chunks that
            accumulate in fp32. Both take up to 4·V·H bytes more than "lean", which rounds after every chunk of rows:
            with three to five chunks, its worst element has been up to three times as far from fp64 as PyTorch's.
        chunk_bytes: bytes of logits at a time, beside the gradient of weight; by default 640 MiB, on a CPU 16 MiB.
            Fewer and larger chunks are faster and, with "lean", more exact.

    Returns:
        fp32 (fp64 for fp64), a scalar, or the shape of target for "none". The mean over no rows is NaN, as in PyTorch,
        with zero gradients; the sum is 0.

    Raises:
        ValueError: a shape, dtype, placement or option does not fit.

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
    """`linear_cross_entropy`, with the arg-max of the logits and the accuracy from the same pass over them.

    Arguments, the loss and errors as in `linear_cross_entropy`; neither predictions nor accuracy carry a gradient.

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
    x, weight, bias, target, row_weight = local.x, local.weight, local.bias, local.target, local.row_weight
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
        # Targets beyond max_targets would be dropped silently. A factor of NaN reaches the gradients too.
        loss = loss * torch.where(counted.sum() > kept.shape[0], torch.nan, 1.0)
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
    """The divisor of the sum over the rows: a scalar on the device, computed without a synchronization."""
    if options.reduction != "mean":
        return torch.ones((), device=target.device)
    if isinstance(options.num_items, Tensor):
        return options.num_items.detach().to(target.device, non_blocking=True).reshape(())
    if options.num_items is not None:
        return torch.full((), options.num_items, dtype=torch.float32, device=target.device)
    counted = target != options.ignore_index
    if class_weight is None:
        return sum_over_row_shards(counted.sum())
    # A target outside the vocabulary turns its row's loss to NaN, and counts like any other.
    return sum_over_row_shards(class_weight[target.clamp(0, class_weight.shape[0] - 1)].where(counted, 0.0).sum())


def _drop_ignored(rows: _Rows, options: CallOptions) -> tuple[_Rows, Tensor | None]:
    """(at most `max_targets` rows, those that are not ignored first and in order; their indices, None for all)."""
    if options.max_targets is None or options.max_targets >= rows.target.shape[0]:
        return rows, None
    ignored = (rows.target == options.ignore_index).to(torch.uint8)
    kept = ignored.argsort(stable=True)[: options.max_targets]
    weight = None if rows.weight is None else rows.weight[kept]
    return _Rows(rows.x.index_select(0, kept), rows.target[kept], weight), kept


def _loss_of_rows(
    rows: _Rows, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, divisor: Tensor,
    shard: VocabularyShard, options: CallOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the scalar loss, or the losses of the rows without a reduction; the predictions)."""
    if is_transformed():
        return _reference(rows, weight, bias, class_weight, divisor, shard, options)
    chunk_bytes = options.chunk_bytes
    if chunk_bytes is None:
        chunk_bytes = _CPU_CHUNK_BYTES if rows.x.device.type == "cpu" else _CHUNK_BYTES
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (rows.x, weight, bias)]
    tensors = (rows.x, weight, bias, rows.target, class_weight)
    # In the order of Settings.
    settings = (
        options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0,
        chunk_bytes, options.accumulate == "exact", options.predict,
        shard.group, shard.ranks, shard.start, shard.total, shard.sum_dx, *wanted,
    )  # fmt: skip
    # In fp16, a probability over the number of rows underflows unless the loss scale multiplies it, which only the
    # backward pass knows.
    if options.reduction == "none" or rows.x.dtype == torch.float16:
        losses, predictions = _RowLosses.apply(*tensors, *settings)
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
    """The same in plain PyTorch, for transforms of `torch.func`."""
    if shard.group:
        raise NotImplementedError("torch.func cannot look into a vocabulary that several processes hold")
    z = functional.linear(rows.x, weight, bias)
    shape = Options(options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0)
    losses = reference_losses(z, rows.target, shape, class_weight)
    losses = losses if rows.weight is None else losses * rows.weight
    predictions = z.argmax(-1).where(rows.target != options.ignore_index, -1)
    return (losses if options.reduction == "none" else losses.sum() / divisor), predictions
