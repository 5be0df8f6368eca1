"""Cross entropy of materialized logits.

    z    = softcap · tanh(logits / softcap)            lse = log Σ_v exp z_v        p = exp(z - lse)
    loss = a · lse - (1 - ε) w_target z_target - (ε / V) Σ_v w_v z_v + z_loss · lse²
    dz   = ((a + 2 · z_loss · lse) p - (1 - ε) w_target onehot(target) - (ε / V) w) · s · (1 - (z / softcap)²)

with ε the label smoothing, w the class weights (default 1), a = (1 - ε) w_target + (ε / V) Σ_v w_v the weight of lse,
and s the factor of a row's loss in the reduction. Sources: Szegedy et al. (label smoothing, arXiv:1512.00567), de
Brébisson and Vincent (z-loss, arXiv:1604.08859), Gemma 2 (softcap, arXiv:2408.00118); the gradient in the forward pass
is Liger-Kernel's idea (arXiv:2410.10989, section 3.2).

Axes: N rows, V vocabulary entries. The gradient of a scalar loss is linear in the incoming gradient, so the forward
pass also writes the gradient while the logits are in cache, and the backward pass scales it: 4 bytes of traffic per
logit in bf16. With reduction="none", the backward pass reads the logits again, and lse as two numbers, the maximum
logit and the logarithm of a sum: for large logits, their rounded sum would be too inaccurate for p. No atomic
accumulation: results are bitwise reproducible.

`strata::cross_entropy` computes a scalar loss and its gradient. `strata::cross_entropy_rows` computes the losses of the
rows, and the statistics from which its backward operator computes the gradient. Modules:

    rows              launch table and host functions: kernel or reference
    row_kernel        the kernel
    row_reference     the same in plain PyTorch
    row_statistics    the statistics that the kernel computes per row, and the loss as their function
    reduction         reduction of row losses to a scalar, and scaling by its incoming gradient
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._launch import DTYPES, accumulator, describe, has_dtype
from .._operator import Operator, is_transformed, operator, refuse_double_backward
from .reduction import Reduction, check_options, divisors, scaled, total
from .row_reference import reference_losses
from .row_statistics import Options
from .rows import cross_entropy_gradient, cross_entropy_rows, rows_of

_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap"


def _scalar_loss(
    logits: Tensor, weight: Tensor | None, target: Tensor, items: Tensor | None, mean: bool, options: Options,
    dlogits: Tensor | None, predict: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, predictions); also fills dlogits, which may be `logits`, with the gradient of the loss."""
    loss = logits.new_empty(target.numel(), dtype=accumulator(logits.dtype))
    predictions = target.new_empty(target.shape if predict else 0)
    labels, weight = target.reshape(-1).contiguous(), _contiguous(weight, loss.dtype)
    if items is not None:
        divisor = items.to(loss.dtype)
        divisor, scale = divisor, divisor.reciprocal()
    elif mean:
        divisor, scale = divisors(labels, weight, options.ignore_index, loss).unbind()
    else:
        divisor = scale = loss.new_ones(())
    rows = rows_of(logits)
    dz = None if dlogits is None else rows if dlogits is logits else dlogits.view(rows.shape)
    cross_entropy_rows(
        rows, labels, scale.expand(loss.shape), loss, options, dlogits is not None, weight=weight,
        dz=dz, prediction=predictions.view(-1) if predict else None, padding=False,
    )  # fmt: skip
    return total(loss, divisor), predictions


def _contiguous(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to(dtype).contiguous()


@operator(
    f"cross_entropy(Tensor logits, Tensor? weight, Tensor target, Tensor? items, bool mean, {_OPTIONS}, "
    "bool want_gradient, bool predict) -> (Tensor, Tensor, Tensor)"
)
class _ScalarLoss(Operator):
    """(loss, dlogits for an incoming gradient of 1, predictions); empty tensors for what is not requested."""

    @staticmethod
    def forward(
        logits: Tensor, weight: Tensor | None, target: Tensor, items: Tensor | None, mean: bool,
        ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, want_gradient: bool, predict: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        options = Options(ignore_index, label_smoothing, z_loss, softcap)
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format) if want_gradient else None
        loss, predictions = _scalar_loss(logits, weight, target, items, mean, options, dlogits, predict)
        return loss, logits.new_empty(0) if dlogits is None else dlogits, predictions

    @staticmethod
    def fake(
        logits: Tensor, weight: Tensor | None, target: Tensor, items: Tensor | None, mean: bool,
        ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, want_gradient: bool, predict: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dlogits = logits.new_empty(logits.shape if want_gradient else 0)
        loss = logits.new_empty((), dtype=accumulator(logits.dtype))
        return loss, dlogits, target.new_empty(target.shape if predict else 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, dlogits, predictions = output
        # Otherwise autograd would allocate zeros as the incoming gradient of the output dlogits.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(dlogits, predictions)
        ctx.save_for_backward(dlogits)
        ctx.n_inputs = len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("cross_entropy")
        rest: tuple[None, ...] = (None,) * (ctx.n_inputs - 1)
        return None if grad is None else scaled(ctx.saved_tensors[0], grad), *rest


class _InPlace(torch.autograd.Function):
    """The scalar loss; overwrites the logits with their gradient. Eager mode only: autograd detects the overwrite."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dlogits = logits.detach()
        weight, target, items, mean, options, predict = rest
        loss, predictions = _scalar_loss(dlogits, weight, target, items, mean, options, dlogits, predict)
        torch.autograd.graph.increment_version(logits)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(predictions)
        ctx.save_for_backward(dlogits)
        return loss, predictions

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Any:
        refuse_double_backward("cross_entropy")
        return None if grad is None else scaled(ctx.saved_tensors[0], grad), *(None,) * 6


@operator(
    "cross_entropy_rows_bwd(Tensor grad, Tensor logits, Tensor? weight, Tensor target, Tensor largest, "
    f"Tensor log_sum, Tensor lse_weight, {_OPTIONS}) -> Tensor"
)
class _RowLossesBackward(Operator):
    """dlogits, from the logits and the statistics of their rows."""

    @staticmethod
    def forward(
        grad: Tensor, logits: Tensor, weight: Tensor | None, target: Tensor, largest: Tensor, log_sum: Tensor,
        lse_weight: Tensor,
        ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    ) -> Tensor:  # fmt: skip
        dlogits, rows = _RowLossesBackward.fake(grad, logits), rows_of(logits)
        cross_entropy_gradient(
            rows, target.reshape(-1).contiguous(), grad.reshape(-1).to(largest.dtype), largest, log_sum,
            None if weight is None else lse_weight, Options(ignore_index, label_smoothing, z_loss, softcap),
            weight=_contiguous(weight, largest.dtype), dz=dlogits.view(rows.shape), padding=False,
        )  # fmt: skip
        return dlogits

    @staticmethod
    def fake(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
        return logits.new_empty(logits.shape)


@operator(
    f"cross_entropy_rows(Tensor logits, Tensor? weight, Tensor target, {_OPTIONS}, bool predict)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
class _RowLosses(Operator):
    """(losses, three statistics of the rows, predictions); empty tensors for what is not requested."""

    @staticmethod
    def forward(
        logits: Tensor, weight: Tensor | None, target: Tensor,
        ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, predict: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        results = loss, largest, log_sum, lse_weight, predictions = _RowLosses.fake(
            logits, weight, target, ignore_index, label_smoothing, z_loss, softcap, predict
        )
        cross_entropy_rows(
            rows_of(logits), target.reshape(-1).contiguous(), None, loss.view(-1),
            Options(ignore_index, label_smoothing, z_loss, softcap), False, weight=_contiguous(weight, loss.dtype),
            largest=largest, log_sum=log_sum, lse_weight=None if weight is None else lse_weight,
            prediction=predictions.view(-1) if predict else None, padding=False,
        )  # fmt: skip
        return results

    @staticmethod
    def fake(
        logits: Tensor, weight: Tensor | None, target: Tensor,
        ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, predict: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        dtype, n_rows = accumulator(logits.dtype), target.numel()
        return (
            logits.new_empty(target.shape, dtype=dtype),
            logits.new_empty(n_rows, dtype=dtype),
            logits.new_empty(n_rows, dtype=dtype),
            logits.new_empty(0 if weight is None else n_rows, dtype=dtype),
            target.new_empty(target.shape if predict else 0),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *statistics, predictions = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*statistics, predictions)
        ctx.save_for_backward(*inputs[:3], *statistics)
        ctx.options = inputs[3:-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("cross_entropy")
        return None if grad is None else _RowLossesBackward.apply(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 7


class LossAndPredictions(NamedTuple):
    """A loss, the predicted classes, and their accuracy.

    loss: the result of `cross_entropy`.
    predictions: target's shape, int64: index of the row's maximum logit, the first in a tie; -1 for ignored rows.
    accuracy: fp32 scalar: fraction of the rows that are not ignored whose prediction is the target; NaN for no rows.
    """

    loss: Tensor
    predictions: Tensor
    accuracy: Tensor


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    reuse_logits: bool = False,
) -> Tensor:
    """Cross entropy of logits; loss and gradient are computed by one kernel.

    Equivalent to::

        logits = softcap * torch.tanh(logits.float() / softcap)                                     # if softcap
        options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        loss = F.cross_entropy(logits, target, reduction="none", **options)
        loss += z_loss * logits.logsumexp(-1).square() * (target != ignore_index)
        loss = loss.sum() / (num_items or weight[target[target != ignore_index]].sum())             # reduction="mean"

    for logits [N, V]; classes are always the last axis. The z-loss has the same rows and divisor as the cross entropy.

    For a scalar loss, the forward pass also computes the gradient, into a new tensor of the size of the logits. With
    reduction="none", the incoming gradients of the rows are known only in the backward pass, which reads the logits a
    second time. The same holds for fp16, where gradients would underflow without the loss scale, a factor of the
    incoming gradient. Double backward is not supported. Under `torch.func` transforms, it runs in plain PyTorch.

    Args:
        logits: [..., V], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides. Not copied if the class stride is 1
            and the leading axes collapse to at most two, as in `logits[:, :-1]`. If all logits of a row are masked,
            even with `torch.finfo(dtype).min`, its loss may not be finite: set its target to `ignore_index`.
        target: [...], int64, each in [0, V) or `ignore_index`. On a GPU, any other value makes the loss and the
            gradient of its row NaN; on a CPU it raises.
        weight: [V], class weights, without a gradient; None for 1.
        ignore_index: rows with this target have zero loss and gradient.
        label_smoothing: in [0, 1].
        z_loss: factor of lse², the squared logsumexp of a row.
        softcap: logits become softcap · tanh(logits / softcap); None for no softcap.
        reduction: "mean", "sum" or "none".
        num_items: divisor of "mean", instead of the (weighted) number of rows that are not ignored. A tensor causes no
            host synchronization.
        reuse_logits: overwrite the logits with the gradient of a scalar loss, which saves a tensor of their size. If
            another operator has saved the logits, autograd raises in the backward pass. Ignored under `torch.compile`,
            which plans memory itself, and under `torch.func` transforms.

    Returns:
        fp32 (fp64 for fp64), a scalar, or target's shape for "none". If all rows are ignored, the mean is NaN, as in
        PyTorch, with zero gradients; the sum is 0.

    Raises:
        ValueError: a wrong shape, dtype or option, or `reuse_logits` with logits that cannot be overwritten.

    Example:
        >>> logits = torch.randn(2, 8, 32, requires_grad=True)
        >>> cross_entropy(logits, torch.randint(32, (2, 8))).backward()
    """
    _check(logits, target, weight)
    check_options(label_smoothing, softcap, reduction, num_items)
    options = Options(ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    return _cross_entropy(logits, target, weight, options, reduction, num_items, reuse_logits, False)[0]


def cross_entropy_with_predictions(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    reuse_logits: bool = False,
) -> LossAndPredictions:
    """`cross_entropy`, with `logits.argmax(-1)` and the accuracy from the same pass over the logits.

    Arguments, loss and errors as in `cross_entropy`; predictions and accuracy have no gradient.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0], [1.0, 0.0], [3.0, 0.0]])
        >>> cross_entropy_with_predictions(logits, torch.tensor([1, 1, -100])).accuracy
        tensor(0.5000)
    """
    _check(logits, target, weight)
    check_options(label_smoothing, softcap, reduction, num_items)
    options = Options(ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    loss, predictions = _cross_entropy(logits, target, weight, options, reduction, num_items, reuse_logits, True)
    counted = target != ignore_index
    accuracy = ((predictions == target) & counted).sum() / counted.sum()
    return LossAndPredictions(loss, predictions, accuracy)


def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options, reduction: Reduction,
    num_items: int | Tensor | None, reuse_logits: bool, predict: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, predictions if `predict`)."""
    if is_transformed():
        return _reference(logits, target, weight, options, reduction, num_items)
    flags = (options.ignore_index, options.label_smoothing, options.z_loss, options.softcap)
    trained = torch.is_grad_enabled() and logits.requires_grad
    # In fp16, p / N underflows without the loss scale, which is known only in the backward pass.
    if reduction == "none" or (trained and logits.dtype == torch.float16):
        loss, *_, predictions = _RowLosses.apply(logits, weight, target, *flags, predict)
        if reduction == "mean":
            loss = loss.sum() / _divisor(target, weight, options.ignore_index, num_items).to(loss.dtype)
        return loss.sum() if reduction == "sum" else loss, predictions
    items = None if num_items is None else _on_device(num_items, logits.device)
    if reuse_logits and trained and not torch.compiler.is_compiling():
        _check_reuse(logits)
        reused: tuple[Tensor, Tensor] = _InPlace.apply(
            logits, weight, target, items, reduction == "mean", options, predict
        )
        return reused
    loss, _, predictions = _ScalarLoss.apply(
        logits, weight, target, items, reduction == "mean", *flags, trained, predict
    )
    return loss, predictions


def _reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Options, reduction: Reduction,
    num_items: int | Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_cross_entropy` in plain PyTorch, for `torch.func` transforms."""
    rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = reference_losses(rows, labels, options, _contiguous(weight, accumulator(logits.dtype)))
    predictions = rows.argmax(-1).where(labels != options.ignore_index, -1).view(target.shape)
    if reduction == "none":
        return loss.view(target.shape), predictions
    if reduction == "mean":
        return loss.sum() / _divisor(target, weight, options.ignore_index, num_items).to(loss.dtype), predictions
    return loss.sum(), predictions


def _on_device(items: int | Tensor, device: torch.device) -> Tensor:
    """The number of items as a 0-d tensor on the device, without host synchronization."""
    if isinstance(items, Tensor):
        return items.detach().to(device, non_blocking=True).reshape(())
    return torch.full((), items, dtype=torch.float32, device=device)


def _divisor(target: Tensor, weight: Tensor | None, ignore_index: int, num_items: int | Tensor | None) -> Tensor:
    if num_items is not None:
        return _on_device(num_items, target.device)
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.clamp(0, weight.shape[0] - 1)].where(counted, 0.0).sum()


def _check_reuse(logits: Tensor) -> None:
    if logits.is_leaf:
        raise ValueError("reuse_logits would overwrite a leaf that requires grad; pass logits that were computed")
    rows = rows_of(logits)
    repeated = any(size > 1 and stride == 0 for size, stride in zip(rows.shape, rows.stride(), strict=True))
    if repeated or rows.data_ptr() != logits.data_ptr():
        raise ValueError(
            "reuse_logits needs a class stride of 1, leading axes that collapse to at most two, and no overlap; "
            f"logits {describe(logits)} have the strides {logits.stride()}"
        )


def _check(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    if not has_dtype(logits) or logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be {DTYPES} of shape [..., V] with V > 0, got {describe(logits)}")
    if target.shape != logits.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"target {describe(target)} must be int64 {list(logits.shape[:-1])}, the leading shape of logits"
        )
    if weight is not None and (weight.shape != logits.shape[-1:] or not has_dtype(weight)):
        raise ValueError(f"weight must be {DTYPES} of shape [{logits.shape[-1]}], got {describe(weight)}")
    if weight is not None and weight.requires_grad:
        raise ValueError("weight gets no gradient: detach it, or multiply the losses of reduction='none'")
    tensors = [logits, target] if weight is None else [logits, target, weight]
    if any(t.device != logits.device for t in tensors):
        raise ValueError(
            f"logits, target and weight must be on one device, not {', '.join(str(t.device) for t in tensors)}"
        )
