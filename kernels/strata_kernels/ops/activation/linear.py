"""An activation and the projection behind it, without keeping what lies between.

    y = activation(gate, up)        out = y · Wᵀ + b
    dy = d_out · W                  dW = d_outᵀ · y                 db = Σ d_out

dW needs y, which autograd would keep: half as much again as gate and up. Here it is dropped, and written once more by
the activation's backward kernel, which computes f anyway. The products are those that `torch.nn.functional.linear` asks
for, so that results and gradients have the bits that they have without, except where a matrix has more elements than 32
bits count: it is multiplied in parts. There cuBLAS 13.0 gives zeros for d_outᵀ · y, without an error, where d_out has
64 columns or fewer (seen on an H200).
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import describe
from .._launch_cache import TENSOR_TYPES
from .._operator import is_observed, is_recorded
from .host import Activation, Form, define

# Elements of the largest matrix in a product.
_LARGEST = 2**31 - 1

_ACTIVATIONS: dict[str, Activation] = {}


def define_projected(name: str, activation: str, form: Form) -> Callable[..., Any]:
    """`define`, and return `strata::<name>` as a function of its parameters and of a projection's weight and bias.

    weight: [H, D] for a result of the activation of shape [..., D], which it turns into [..., H]; None for none.
    bias: [H], or None.

    The function raises ValueError where weight and bias do not fit.
    """
    defined = _ACTIVATIONS[name] = define(name, activation, form)

    def apply(*inputs: Any, weight: Tensor | None = None, bias: Tensor | None = None) -> Any:
        if weight is None and bias is None:
            return defined.forward(*inputs)
        gate, _ = form.split(*inputs)
        weight = _checked(weight, bias, gate.shape[-1])
        tensors = inputs[: form.tensors]
        if not _is_fused(tensors, weight):
            return functional.linear(defined.forward(*inputs), weight, bias)
        # Memory that is filled later must be the node's own, which subclasses of tensors do not promise.
        if is_observed() or not TENSOR_TYPES.issuperset(map(type, tensors)):
            return _Projected.apply(name, False, weight, bias, *inputs)
        out = _Projected.apply(name, True, weight, bias, *inputs)
        with torch.no_grad():
            _fill(out, defined.forward(*inputs), weight, bias)
        return out

    return apply


def _fill(out: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """`out = functional.linear(y, weight, bias)`."""
    for rows, flat in zip(_parts(y, weight), _parts(out, weight), strict=True):
        if bias is None:
            torch.mm(rows, weight.t(), out=flat)
        else:
            torch.addmm(bias, rows, weight.t(), out=flat)


def _parts(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    """The rows of x; in parts if those of a product with the weight are too many for one. A compiled product is one."""
    rows = x.reshape(-1, x.shape[-1])
    most = _LARGEST // max(weight.shape)
    return (rows,) if torch.compiler.is_compiling() or rows.shape[0] <= most else rows.split(most)


def _checked(weight: Tensor | None, bias: Tensor | None, width: int) -> Tensor:
    if weight is None:
        raise ValueError("bias is that of a projection: pass its weight too, or no bias")
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(f"weight must have the shape [H, {width}], got {describe(weight)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have the shape [{weight.shape[0]}], got {describe(bias)}")
    return weight


def _is_fused(tensors: Sequence[Tensor], weight: Tensor) -> bool:
    """Whether there is something to win, and nobody for whom the two steps must stay two."""
    if not is_recorded() or not weight.requires_grad or not any(x.requires_grad for x in tensors):
        # y is kept for the weight's gradient, and what y is made of for its own: without both, fusing keeps more.
        return False
    first = tensors[0]
    # On meta tensors autocast cannot be asked for, nor be on.
    cast = not first.is_meta and torch.is_autocast_enabled(first.device.type)
    return weight.dtype == first.dtype and weight.numel() > 0 and not cast and not _is_taken_apart()


def _is_taken_apart() -> bool:
    """Whether a transform of torch.func, an export or a trace is at work, which do not see into a node."""
    transformed: bool = torch._C._are_functorch_transforms_active()
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return transformed or traced or torch.compiler.is_exporting()


# What `torch.compiler.assume_constant_result` sets, without importing the compiler: it is asked once per compilation.
_is_taken_apart._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Projected(torch.autograd.Function):
    """Activation, by name, and projection as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, name: str, later: bool, weight: Tensor, bias: Tensor | None, *inputs: Any) -> Tensor:
        """The result, or memory for it that is filled when the node is made.

        Recomputation of a checkpointed layer ends with the last tensor that a node keeps, and what nodes keep is handed
        over when they are made. A product behind that is not computed again.
        """
        activation = _ACTIVATIONS[name]
        tensors = activation.form.tensors
        ctx.name, ctx.settings = name, inputs[tensors:]
        ctx.save_for_backward(weight, *inputs[:tensors])
        if later:
            gate, _ = activation.form.split(*inputs)
            return gate.new_empty(*gate.shape[:-1], weight.shape[0])
        return functional.linear(activation.forward(*inputs), weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        """The gradients; differentiable where asked for."""
        weight, *tensors = ctx.saved_tensors
        activation, inputs = _ACTIVATIONS[ctx.name], (*tensors, *ctx.settings)
        parts = _parts(d_out, weight)
        products = [rows @ weight for rows in parts]
        dy = (products[0] if len(products) == 1 else torch.cat(products)).view(*d_out.shape[:-1], weight.shape[1])
        # Before the next operators take memory of their own, as dy below.
        del products
        if torch.is_grad_enabled():
            gradients, y = activation.backward(dy, *inputs), activation.forward(*inputs)
        else:
            *gradients, y = activation.backward_and_output(dy, *inputs)
        del dy
        d_weight = d_bias = None
        if ctx.needs_input_grad[2]:
            d_weight = reduce(torch.add, (rows.t() @ of_y for rows, of_y in zip(parts, _parts(y, weight), strict=True)))
        if ctx.needs_input_grad[3]:
            d_bias = d_out.reshape(-1, d_out.shape[-1]).sum(0)
        return None, None, d_weight, d_bias, *gradients, *(None for _ in ctx.settings)
