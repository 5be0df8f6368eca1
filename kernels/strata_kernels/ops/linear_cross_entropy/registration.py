"""The operators behind `linear_cross_entropy`: a scalar loss that comes with its gradients, and the losses of the rows.

Both take the tensors of `chunks.run` and, after them, its settings.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from .._launch import accumulator
from .._operator import register
from ..cross_entropy.reduction import refuse_double_backward, scaled
from .chunks import Settings, run

NAME = "linear_cross_entropy"

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


def _total(
    divisor: Tensor, row_weight: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weight: Tensor | None, *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # A divisor of fp64 would carry its dtype into the loss.
    divisor = divisor.to(accumulator(x.dtype))
    scale = divisor.reciprocal().expand(x.shape[0]) if row_weight is None else row_weight / divisor
    loss, *rest = run(x, weight, bias, target, class_weight, scale, Settings(*settings))
    total = (loss if row_weight is None else loss * row_weight).sum() / divisor
    dx, dw, db, prediction = rest
    return total, dx, dw, db, prediction


def _total_fake(
    divisor: Tensor, row_weight: Tensor | None, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    settings = Settings(*rest[_N_TENSORS - 2 :])
    return x.new_empty((), dtype=accumulator(x.dtype)), *_empty_results(x, weight, settings)


def _total_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *gradients, _ = output
    # Without this, autograd would fill a zero dW as the incoming gradient of the dW that forward returned.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*gradients)
    ctx.wanted = inputs[-3:]
    ctx.n_inputs = len(inputs)


def _total_backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_double_backward(NAME)
    nothing: tuple[None, ...] = (None,) * ctx.n_inputs
    if grad is None:
        return nothing
    dx, dw, db = (scaled(t, grad) if want else None for t, want in zip(ctx.saved_tensors, ctx.wanted, strict=True))
    return None, None, dx, dw, db, *nothing[5:]


def _rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    alone = replace(Settings(*settings), want_dx=False, want_dw=False, want_db=False)
    unread = x.new_empty(1, dtype=accumulator(x.dtype)).expand(x.shape[0])
    found = run(x, weight, bias, target, class_weight, unread, alone)
    return found.loss, found.prediction


def _rows_fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, prediction = _empty_results(x, weight, Settings(*rest[_N_TENSORS - 2 :]))
    return x.new_empty(x.shape[0], dtype=accumulator(x.dtype)), prediction


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:_N_TENSORS])
    ctx.settings = inputs[_N_TENSORS:]


def _rows_backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    refuse_double_backward(NAME)
    gradients: tuple[Tensor, ...] = _rows_bwd_op(grad, *ctx.saved_tensors, *ctx.settings)
    wanted = (g if want else None for g, want in zip(gradients, ctx.settings[-3:], strict=True))
    return *wanted, *(None,) * (_N_TENSORS - 3 + len(ctx.settings))


def _rows_bwd(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found = run(x, weight, bias, target, class_weight, grad, replace(Settings(*settings), predict=False))
    return found.dx, found.dw, found.db


def _rows_bwd_fake(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db, _ = _empty_results(x, weight, Settings(*rest[_N_TENSORS - 2 :]))
    return dx, dw, db


total_op = register(
    f"linear_cross_entropy(Tensor divisor, Tensor? row_weight, {_TENSORS}, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _total, _total_fake, setup_context=_total_setup, backward=_total_backward,
)  # fmt: skip
_rows_bwd_op = register(
    f"linear_cross_entropy_rows_bwd(Tensor grad, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _rows_bwd, _rows_bwd_fake,
)  # fmt: skip
rows_op = register(
    f"linear_cross_entropy_rows({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)",
    _rows, _rows_fake, setup_context=_rows_setup, backward=_rows_backward,
)  # fmt: skip
