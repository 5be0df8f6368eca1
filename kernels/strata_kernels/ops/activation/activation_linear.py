"""An activation and the projection after it, without keeping what lies between.

    y = activation(gate, up)        out = y · Wᵀ + b
    dy = d_out · W                  dW = d_outᵀ · y                 db = Σ d_out

dW needs y, which autograd would keep: half as much again as gate and up. Here it is dropped, and the activation's
backward kernel, which computes f anyway, writes it once more. The products are those of `torch.nn.functional.linear`,
so results and gradients have the bits of the two steps, except where a matrix has more elements than 32 bits count: it
is multiplied in parts. There cuBLAS 13.0 gives zeros for d_outᵀ · y, without an error, if d_out has 64 columns or fewer
(seen on an H200).
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import describe
from .._launch_cache import TENSOR_TYPES
from .._operator import is_observed, is_recorded
from .activation_operators import ACTIVATIONS, Activation

# Elements of the largest matrix in a product.
_LARGEST = 2**31 - 1


def activation_linear(activation: Activation, *inputs: Any, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`functional.linear(activation.forward(*inputs), weight, bias)`, without keeping what lies between.

    inputs: those of the activation's form, for a result of shape [..., D].
    weight: [H, D]. The result is [..., H]. None, without a bias either: the activation alone, [..., D].
    bias: [H], or None.

    Raises ValueError if weight and bias do not fit.
    """
    if weight is None and bias is None:
        return activation.forward(*inputs)
    form = activation.form
    gate, _ = form.split(*inputs)
    weight = _checked(weight, bias, gate.shape[-1])
    tensors = inputs[: form.tensors]
    if not _is_fused(tensors, weight):
        return functional.linear(activation.forward(*inputs), weight, bias)
    # Memory that is filled later must be the node's own, which subclasses of tensors do not promise.
    out: Tensor
    if is_observed() or not TENSOR_TYPES.issuperset(map(type, tensors)):
        out = _ActivationLinear.apply(activation.name, False, weight, bias, *inputs)
        return out
    out = _ActivationLinear.apply(activation.name, True, weight, bias, *inputs)
    with torch.no_grad():
        _fill(out, activation.forward(*inputs), weight, bias)
    return out


def _fill(out: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """`out = functional.linear(y, weight, bias)`."""
    for rows, flat in zip(_row_parts(y, weight), _row_parts(out, weight), strict=True):
        if bias is None:
            torch.mm(rows, weight.t(), out=flat)
        else:
            torch.addmm(bias, rows, weight.t(), out=flat)


def _row_parts(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    """The rows of x, in parts if their product with the weight is too large for one; never while compiling."""
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
    """Whether fusing saves memory, and nothing has to see the two steps."""
    if not is_recorded() or not weight.requires_grad or not any(x.requires_grad for x in tensors):
        # y is kept for the weight's gradient, and what y is made of for its own: without both, fusing keeps more.
        return False
    first = tensors[0]
    # On meta tensors autocast cannot be asked for, nor be on.
    cast = not first.is_meta and torch.is_autocast_enabled(first.device.type)
    return weight.dtype == first.dtype and weight.numel() > 0 and not cast and not _is_transformed()


def _is_transformed() -> bool:
    """Whether a transform of torch.func, an export or a trace is active, which do not see into a node."""
    transformed: bool = torch._C._are_functorch_transforms_active()
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return transformed or traced or torch.compiler.is_exporting()


# What `torch.compiler.assume_constant_result` sets, without importing the compiler: it is asked once per compilation.
_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _ActivationLinear(torch.autograd.Function):
    """Activation, by name, and projection as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, name: str, later: bool, weight: Tensor, bias: Tensor | None, *inputs: Any) -> Tensor:
        """The result, or memory for it that is filled when the node is made.

        Recomputation of a checkpointed layer ends with the last tensor that a node keeps, and what nodes keep is handed
        over when they are made. A product behind that is not computed again.
        """
        activation = ACTIVATIONS[name]
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
        activation, inputs = ACTIVATIONS[ctx.name], (*tensors, *ctx.settings)
        parts = _row_parts(d_out, weight)
        products = [rows @ weight for rows in parts]
        dy = (products[0] if len(products) == 1 else torch.cat(products)).view(*d_out.shape[:-1], weight.shape[1])
        # Before the next operators take memory of their own, as dy below.
        del products
        gradients: Sequence[Tensor]
        if torch.is_grad_enabled():
            gradients, y = activation.backward(dy, *inputs), activation.forward(*inputs)
        else:
            *gradients, y = activation.backward_and_output(dy, *inputs)
        del dy
        d_weight = d_bias = None
        if ctx.needs_input_grad[2]:
            pairs = zip(parts, _row_parts(y, weight), strict=True)
            d_weight = reduce(torch.add, (d_rows.t() @ rows for d_rows, rows in pairs))
        if ctx.needs_input_grad[3]:
            d_bias = d_out.reshape(-1, d_out.shape[-1]).sum(0)
        return None, None, d_weight, d_bias, *gradients, *(None for _ in ctx.settings)
