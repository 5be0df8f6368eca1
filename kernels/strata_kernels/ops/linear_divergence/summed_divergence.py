"""What the operators of divergences over a head share: their outputs, and a backward pass that only multiplies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._launch import accumulator
from .._operator import Operator, refuse_double_backward
from ..cross_entropy.reduction import scaled


class SummedDivergence(Operator):
    """The sum of the rows by the divisor; last dx, dW and db for an incoming gradient of 1, empty where not wanted.

    The first three inputs are divisor, x and weight, the fourth is the bias, the last three say what is wanted.
    """

    @staticmethod
    def fake(divisor: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Empty outputs of the shapes that `forward` gives them."""
        dx, dw, db = rest[-3:]
        return (
            x.new_empty((), dtype=accumulator(x.dtype)),
            x.new_empty(x.shape if dx else 0),
            weight.new_empty(weight.shape if dw else 0),
            weight.new_empty(weight.shape[0] if db else 0),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the gradients."""
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[-3:])
        ctx.wanted, ctx.n_inputs = inputs[-3:], len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """The gradients times the incoming one."""
        refuse_double_backward("a divergence")
        nothing: tuple[None, ...] = (None,) * ctx.n_inputs
        if grad is None:
            return nothing
        gradients = (scaled(t, grad) if want else None for t, want in zip(ctx.saved_tensors, ctx.wanted, strict=True))
        return None, *gradients, *nothing[4:]
