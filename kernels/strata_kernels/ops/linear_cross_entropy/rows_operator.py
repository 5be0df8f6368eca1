"""`strata::linear_cross_entropy_rows`: losses, predictions and entropies of rows; its backward operator.

The incoming gradients of the rows are known only in the backward pass. The forward pass saves two to four statistics
per row, and the backward pass recomputes the logits: 8·N·H·V FLOPs in all, 6·N·H·V with a frozen head. With the
statistics of complete rows, the backward pass can loop over blocks of vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from .._operator import Operator, operator, refuse_double_backward
from ..cross_entropy.row_statistics import Statistics
from ..head.head_pass import HeadGradients
from .row_losses import Rows, Settings, gradients_of_rows, losses_and_gradients

# Schema arguments that all operators of the package share: five tensors, then the fields of Settings.
TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
SETTINGS = ", ".join(f"{'SymInt' if f.type == 'int' else f.type} {f.name}" for f in fields(Settings))
N_TENSORS = TENSORS.count("Tensor")
_STATISTICS = "Tensor largest, Tensor log_sum, Tensor lse_weight, Tensor mean"
_N_STATISTICS = _STATISTICS.count("Tensor")


def empty_gradients(x: Tensor, weight: Tensor, settings: Settings) -> HeadGradients:
    """Uninitialized dx, dW and db."""
    return HeadGradients(
        x.new_empty(x.shape if settings.want_dx else 0),
        weight.new_empty(weight.shape if settings.want_dw else 0),
        weight.new_empty(weight.shape[0] if settings.want_db else 0),
    )


@operator(
    f"linear_cross_entropy_rows_bwd(Tensor grad, Tensor? grad_entropy, {TENSORS}, {_STATISTICS}, {SETTINGS})"
    " -> (Tensor, Tensor, Tensor)"
)
class _RowLossesBackward(Operator):
    """(dx, dW, db) with recomputed logits; empty tensors for what is not requested."""

    @staticmethod
    def forward(
        grad: Tensor, grad_entropy: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        class_weight: Tensor | None, largest: Tensor, log_sum: Tensor, lse_weight: Tensor, mean: Tensor,
        *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        weights = None if class_weight is None else lse_weight
        # The gradient does not use the field `linear`: pass any tensor.
        whole = Statistics(largest, log_sum, log_sum, weights, None, None if grad_entropy is None else mean)
        if grad_entropy is not None:
            # The kernel has one stride for both.
            grad, grad_entropy = grad.contiguous(), grad_entropy.contiguous()
        return gradients_of_rows(
            x, weight, bias, target, class_weight, grad, grad_entropy, whole, Settings(*settings)
        )  # fmt: skip

    @staticmethod
    def fake(grad: Tensor, grad_entropy: Tensor | None, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(empty_gradients(x, weight, Settings(*rest[N_TENSORS - 2 + _N_STATISTICS :])))


@operator(
    f"linear_cross_entropy_rows({TENSORS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
class _RowLosses(Operator):
    """(losses, predictions, entropies) of the rows, then the statistics for backward; see `Rows`."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *settings: Any
    ) -> tuple[Tensor, ...]:
        given = replace(Settings(*settings), want_dx=False, want_dw=False, want_db=False)
        found, _ = losses_and_gradients(x, weight, bias, target, class_weight, None, given, statistics=True)
        if given.entropy:
            # Statistics of ignored rows are undefined after combining those of several ranks.
            entropy = (found.log_sum - found.mean).where(target != given.ignore_index, 0.0)
        else:
            entropy = found.mean.clone()
        return found.loss, found.prediction, entropy, *found[2:]

    @staticmethod
    def fake(
        x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, *settings: Any
    ) -> tuple[Tensor, ...]:
        given = Settings(*settings)
        found = Rows.empty(x, given, class_weight=class_weight is not None, statistics=True)
        return found.loss, found.prediction, found.mean.new_empty(found.mean.shape), *found[2:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, prediction, entropy, *statistics = output
        settings = Settings(*inputs[N_TENSORS:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(prediction, *statistics, *(() if settings.entropy else (entropy,)))
        ctx.save_for_backward(*inputs[:N_TENSORS], *statistics)
        ctx.settings = inputs[N_TENSORS:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None, grad_entropy: Tensor | None, *__: None) -> Any:
        refuse_double_backward("linear_cross_entropy")
        settings = Settings(*ctx.settings)
        nothing: tuple[None, ...] = (None,) * (N_TENSORS + len(ctx.settings))
        if grad is None and grad_entropy is None:
            return nothing
        if grad is None:
            assert grad_entropy is not None
            grad = grad_entropy.new_zeros(grad_entropy.shape)
        gradients = _RowLossesBackward.apply(grad, grad_entropy, *ctx.saved_tensors, *ctx.settings)
        wanted = (settings.want_dx, settings.want_dw, settings.want_db)
        return *(g if want else None for g, want in zip(gradients, wanted, strict=True)), *nothing[3:]


losses_by_row: Callable[..., tuple[Tensor, ...]] = _RowLosses.apply
