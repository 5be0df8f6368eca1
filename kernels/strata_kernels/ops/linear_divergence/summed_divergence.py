"""Base class of the operators in this package: outputs, and a backward pass that scales saved gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._launch import accumulator
from .._operator import Operator, refuse_double_backward
from ..cross_entropy.reduction import scaled


class SummedDivergence(Operator):
    """(Σ_rows loss / divisor, ..., dx, dW, db for an incoming gradient of 1); gradients are empty if not requested.

    The first four inputs are divisor, x, weight and bias, the last three want_dx, want_dw and want_db.
    """

    @staticmethod
    def fake(divisor: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Uninitialized outputs with the shapes of `forward`'s."""
        dx, dw, db = rest[-3:]
        return (
            x.new_empty((), dtype=accumulator(x.dtype)),
            x.new_empty(x.shape if dx else 0),
            weight.new_empty(weight.shape if dw else 0),
            weight.new_empty(weight.shape[0] if db else 0),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save dx, dW and db."""
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[-3:])
        ctx.wanted, ctx.n_inputs = inputs[-3:], len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """The saved gradients times the incoming gradient."""
        refuse_double_backward("a divergence")
        nothing: tuple[None, ...] = (None,) * ctx.n_inputs
        if grad is None:
            return nothing
        gradients = (scaled(t, grad) if want else None for t, want in zip(ctx.saved_tensors, ctx.wanted, strict=True))
        return None, *gradients, *nothing[4:]
