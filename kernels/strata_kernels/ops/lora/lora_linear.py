"""Linear layers on one input, each with a frozen weight and a LoRA adapter, as one autograd node.

    h   = x · Aᵀ                       A = [A₁; A₂; ...]: x is read once for all layers
    yᵢ  = x · Wᵢᵀ + bᵢ + sᵢ · hᵢ · Bᵢᵀ
    eᵢ  = sᵢ · dyᵢ · Bᵢ                dBᵢ = sᵢ · dyᵢᵀ · hᵢ
    dx  = Σ dyᵢ · Wᵢ + e · A           dA = eᵀ · x

With dropout, each adapter has its own mask of x. Dropped x is computed for the product and again in backward; neither
it nor the mask is saved.

The adapter's product is added in place to the frozen one, so yᵢ is rounded twice; separate operators round four times
and read and write yᵢ three more times. x and h [T, R] are saved once for all layers.

Axes: T tokens, K inputs, N outputs of a layer, R rank.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685).
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._launch import describe
from .._operator import refuse_double_backward
from .frozen_weight import Frozen, rows_of
from .low_rank import add_low_rank
from .seeded_dropout import seeded_dropout


@dataclass(frozen=True)
class AdaptedLayer:
    """A frozen linear layer and its LoRA adapter.

    frozen: the weight, [N, K].
    bias: [N], frozen, dtype of the input unless the weight is FP8; or None.
    a, b: [R, K] and [N, R], dtype of the input.
    scale: factor of the adapter's product.
    """

    frozen: Frozen
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scale: float


def lora_linear(
    x: Tensor, layers: Sequence[AdaptedLayer], *, dropout: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`linear(x, W, bias) + scale * linear(linear(x, a), b)` of each layer, differentiable in x and the adapters.

    Args:
        x: [..., K], bf16 | fp16 | fp32 | fp64.
        layers: one or more layers with K inputs.
        dropout: probability in [0, 1) that an element of x is dropped for an adapter; others are scaled as in
            `torch.dropout`. Seeds come from PyTorch's generator of the device.
        residual: added to the result, only with a single layer; same shape and dtype.

    Returns:
        [..., N] for each layer, dtype of x.

    Raises:
        ValueError: a wrong shape or dtype of an adapter's factors.

    Example:
        >>> from strata_kernels.ops.lora.frozen_weight import ExactWeight
        >>> x, w, a, b = torch.ones(2, 8), torch.ones(4, 8), torch.ones(1, 8), torch.ones(4, 1)
        >>> lora_linear(x, [AdaptedLayer(ExactWeight(w), None, a, b, 0.5)])[0][0, 0]
        tensor(12.)
    """
    for layer in layers:
        require_factors(x.shape[-1], x.dtype, layer)
    factors = [factor for layer in layers for factor in (layer.a, layer.b)]
    # On the device, without host synchronization.
    seeds = tuple(torch.randint(2**62, (1,), device=x.device) for _ in layers if dropout)
    call = Call(tuple(layers), dropout, seeds)
    ys: tuple[Tensor, ...] = _LoraLinear.apply(call, x, residual, *factors)
    # Activation checkpointing stops recomputation after the last tensor that a node saves, when the node is created:
    # so these products are not recomputed.
    with torch.no_grad():
        call.fill(x, ys, residual)
    return ys


def require_factors(width: int, dtype: torch.dtype, layer: AdaptedLayer) -> None:
    """Raise ValueError unless the adapter's factors match the weight and an input of `width` features in `dtype`."""
    a, b = layer.a, layer.b
    shapes = a.dim() == b.dim() == 2 and a.shape[1] == width and b.shape == (layer.frozen.outputs, a.shape[0])
    if not shapes or not a.dtype == b.dtype == dtype:
        raise ValueError(
            f"a must be [R, {width}] and b [{layer.frozen.outputs}, R], {str(dtype)[6:]} like x, "
            f"got {describe(a)} and {describe(b)}"
        )


class Call:
    """The layers of one call, the seeds of their dropout, and their h until `fill`."""

    def __init__(self, layers: tuple[AdaptedLayer, ...], dropout: float = 0.0, seeds: Sequence[Tensor] = ()) -> None:
        self.layers, self.dropout, self.seeds = layers, dropout, seeds
        self.h: Sequence[Tensor] = ()

    def parts(self, h: Tensor) -> Sequence[Tensor]:
        """The columns of h [T, R₁ + R₂ + ...] of each layer."""
        found: Sequence[Tensor] = h.split([layer.a.shape[0] for layer in self.layers], dim=1)
        return found

    def reduce(self, x: Tensor, a: Sequence[Tensor]) -> Tensor:
        """h = x · Aᵀ of all layers, [T, R₁ + R₂ + ...]."""
        if not self.dropout:
            return x @ _joined(a).t()
        h = [seeded_dropout(x, seed, self.dropout) @ own.t() for seed, own in zip(self.seeds, a, strict=True)]
        return torch.cat(h, dim=1)

    def gradients_of_a(self, x: Tensor, e: Tensor) -> Sequence[Tensor]:
        """dA of each layer."""
        if not self.dropout:
            found: Sequence[Tensor] = (e.t() @ x).split([layer.a.shape[0] for layer in self.layers])
            return found
        parts = zip(self.seeds, self.parts(e), strict=True)
        return [own.t() @ seeded_dropout(x, seed, self.dropout) for seed, own in parts]

    def gradients_of_b(self, h: Tensor, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        """dB of each layer."""
        found: list[Tensor | None] = []
        for layer, dy, own_h in zip(self.layers, dys, self.parts(h), strict=True):
            d_b = None
            if dy is not None:
                d_b = layer.b.new_empty(layer.b.shape)
                torch.addmm(d_b, rows_of(dy).t(), own_h, beta=0, alpha=layer.scale, out=d_b)
            found.append(d_b)
        return found

    def reduce_gradients(self, h: Tensor, b: Sequence[Tensor], dys: Sequence[Tensor | None]) -> Tensor:
        """e = s · dy · B of all layers, in the shape of h."""
        e = torch.empty_like(h) if all(dy is not None for dy in dys) else torch.zeros_like(h)
        for layer, dy, factor, own in zip(self.layers, dys, b, self.parts(e), strict=True):
            if dy is not None:
                torch.addmm(own, rows_of(dy), factor, beta=0, alpha=layer.scale, out=own)
        return e

    def frozen_input_gradients(self, dys: Sequence[Tensor | None]) -> list[Tensor]:
        """Terms of dx from the frozen weights, to be summed."""
        products: list[Tensor] = []
        for layer, dy in zip(self.layers, dys, strict=True):
            if dy is not None:
                layer.frozen.add_input_gradient(dy, products)
        return products

    def input_gradient(self, e: Tensor, a: Sequence[Tensor], frozen: list[Tensor]) -> Tensor:
        """dx: the sum of `frozen`, plus the adapters' terms."""
        dx, *others = frozen
        while len(others) > (0 if self.dropout else 2):
            dx.add_(others.pop())
        if not self.dropout:
            return add_low_rank(dx, e, _joined(a), others=others)
        for seed, own, factor in zip(self.seeds, self.parts(e), a, strict=True):
            dx = seeded_dropout(own @ factor, seed, self.dropout, base=dx)
        return dx

    def fill(self, x: Tensor, ys: Sequence[Tensor], residual: Tensor | None = None) -> None:
        """Compute the results into `ys`; `residual` is added to each."""
        others = [] if residual is None else [rows_of(residual).contiguous()]
        for layer, h, y in zip(self.layers, self.h, ys, strict=True):
            rows = y.view(-1, y.shape[-1])
            layer.frozen.multiply(x, layer.bias, rows)
            add_low_rank(rows, h, layer.b.t(), layer.scale, others=others)
        self.h = ()


class _LoraLinear(torch.autograd.Function):
    """Returns uninitialized results, which the caller fills after the node is created."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, residual: Tensor | None, *factors: Tensor) -> tuple[Tensor, ...]:
        h = call.reduce(rows_of(x), factors[::2])
        call.h = call.parts(h)
        # A copy without computed tensors: the node outlives the call.
        ctx.call = Call(call.layers, call.dropout, call.seeds)
        ctx.save_for_backward(x, h, *factors)
        ctx.set_materialize_grads(False)
        return tuple(x.new_empty(*x.shape[:-1], layer.frozen.outputs) for layer in call.layers)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("lora_linear")
        call: Call = ctx.call
        x, h, *factors = ctx.saved_tensors
        e = call.reduce_gradients(h, factors[1::2], dys)
        of_b = call.gradients_of_b(h, dys)
        products = call.frozen_input_gradients(dys) if ctx.needs_input_grad[1] else []
        # None, not zeros, for a layer whose result is unused: with zeros, the optimizer would apply weight decay.
        of_a = [None if dy is None else d_a for dy, d_a in zip(dys, call.gradients_of_a(rows_of(x), e), strict=True)]
        dx = call.input_gradient(e, factors[::2], products).view(x.shape) if products else None
        return None, dx, dys[0] if ctx.needs_input_grad[2] else None, *by_turns(of_a, of_b)


def by_turns(of_a: Sequence[Tensor | None], of_b: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Interleave dA and dB of the layers, in the order of the factors."""
    return [gradient for pair in zip(of_a, of_b, strict=True) for gradient in pair]


def _joined(factors: Sequence[Tensor]) -> Tensor:
    """[R₁ + R₂ + ..., K]"""
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))
