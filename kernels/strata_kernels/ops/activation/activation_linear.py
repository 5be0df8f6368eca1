"""An activation and the following projection, without saving the activation's result for backward.

    y = activation(gate, up)        out = y · Wᵀ + b
    dy = d_out · W                  dW = d_outᵀ · y                 db = Σ d_out

dW needs y, which autograd would save: half the size of gate and up together. Here y is freed, and the activation's
backward kernel, which computes f anyway, writes y again. Matrix products are those of `torch.nn.functional.linear`, so
results and gradients are bitwise equal to the two separate operators, except for a matrix of 2^31 elements or more,
which is multiplied in parts: if d_out has 64 columns or fewer, cuBLAS 13.0 returns zeros for such a d_outᵀ · y without
an error (seen on an H200).
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

# Maximum number of elements of a matrix in one product.
_LARGEST = 2**31 - 1


def activation_linear(activation: Activation, *inputs: Any, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`functional.linear(activation.forward(*inputs), weight, bias)`, without saving `forward(...)` for backward.

    inputs: as in the schema of the activation's `Form`; its result has shape [..., D].
    weight: [H, D], result [..., H]; or None, with bias None: the activation alone, result [..., D].
    bias: [H], or None.

    Raises ValueError for a wrong shape of weight or bias.
    """
    if weight is None and bias is None:
        return activation.forward(*inputs)
    form = activation.form
    gate, _ = form.split(*inputs)
    weight = _checked(weight, bias, gate.shape[-1])
    tensors = inputs[: form.tensors]
    if not _is_fused(tensors, weight):
        return functional.linear(activation.forward(*inputs), weight, bias)
    # Filling the output after the node returned requires that no Tensor subclass wraps or copies it.
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
    """The rows of x, split if a matrix would have more than _LARGEST elements; never under torch.compile."""
    rows = x.reshape(-1, x.shape[-1])
    most = _LARGEST // max(weight.shape)
    return (rows,) if torch.compiler.is_compiling() or rows.shape[0] <= most else rows.split(most)


def _checked(weight: Tensor | None, bias: Tensor | None, width: int) -> Tensor:
    if weight is None:
        raise ValueError("bias belongs to a projection: pass its weight too, or omit bias")
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(f"weight must have the shape [H, {width}], got {describe(weight)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have the shape [{weight.shape[0]}], got {describe(bias)}")
    return weight


def _is_fused(tensors: Sequence[Tensor], weight: Tensor) -> bool:
    """Whether one node saves memory, and no transform has to trace the two operators separately."""
    if not is_recorded() or not weight.requires_grad or not any(x.requires_grad for x in tensors):
        # Two operators save y for dW, and gate and up for their gradients. If either is not needed, they save less.
        return False
    first = tensors[0]
    # is_autocast_enabled does not accept "meta", for which autocast does not exist.
    cast = not first.is_meta and torch.is_autocast_enabled(first.device.type)
    return weight.dtype == first.dtype and weight.numel() > 0 and not cast and not _is_transformed()


def _is_transformed() -> bool:
    """Whether a torch.func transform, torch.export or torch.jit.trace is active; none can trace this node."""
    transformed: bool = torch._C._are_functorch_transforms_active()
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return transformed or traced or torch.compiler.is_exporting()


# As `torch.compiler.assume_constant_result`, without importing the compiler: evaluated once per compilation.
_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _ActivationLinear(torch.autograd.Function):
    """Activation, by name, and projection as one autograd node."""

    @staticmethod
    def forward(ctx: Any, name: str, later: bool, weight: Tensor, bias: Tensor | None, *inputs: Any) -> Tensor:
        """The result; with `later`, an uninitialized tensor that the caller fills after the node is created.

        Activation checkpointing stops the recomputed forward after the last saved tensor, and tensors are saved when
        the node is created. So with `later` the matrix product is not recomputed.
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
        """The gradients; differentiable under create_graph=True."""
        weight, *tensors = ctx.saved_tensors
        activation, inputs = ACTIVATIONS[ctx.name], (*tensors, *ctx.settings)
        parts = _row_parts(d_out, weight)
        products = [rows @ weight for rows in parts]
        dy = (products[0] if len(products) == 1 else torch.cat(products)).view(*d_out.shape[:-1], weight.shape[1])
        # Free before the next operators allocate; the same for dy below.
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
