"""Sums over rows of logits, in chunks of rows: the logits of a model never exist as a whole.

A sum over rows is linear in its incoming gradient. The forward pass therefore computes the gradient chunk by chunk, and
logits are neither stored nor recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

# Of one model's fp32 logits; computing the gradient of a chunk takes several times as much.
CHUNK_BYTES = 128 * 2**20

# Logits [n, V] of a chunk, and which rows it has → [K], sums over these rows; the first is the loss.
SumsOf = Callable[[Tensor, slice], Tensor]


class Head(NamedTuple):
    """Turns rows [N, H] into logits: softcap · tanh((x Wᵀ + b) / softcap). Without a weight, rows are logits
    already.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None

    def logits(self, rows: Tensor) -> Tensor:
        """[N, V], in fp32 or fp64."""
        return _softcapped(_at_least_fp32(self.project(rows)), self.softcap)

    def project(self, rows: Tensor) -> Tensor:
        """Logits before the softcap, in the dtype of the rows."""
        return rows if self.weight is None else linear(rows, self.weight, self.bias)


def head_sums(x: Tensor, head: Head, sums_of: SumsOf) -> tuple[Tensor, ...]:
    """`sums_of` over all rows of x [N, H]: K scalars in fp32 or fp64. The first has gradients, for x and the head.

    Equivalent, where logits fit into memory: `sums_of(head.logits(x), slice(0, N)).unbind()`.
    """
    if torch.is_grad_enabled():
        found: tuple[Tensor, ...] = _HeadSums.apply(x, head.weight, head.bias, (head.softcap, sums_of))
        return found
    total = sum(sums_of(head.logits(x[part]), part) for part in _chunks(x, head.weight))
    assert isinstance(total, Tensor)
    return total.unbind()


class _HeadSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rest: tuple[float | None, SumsOf]
    ) -> Any:
        softcap, sums_of = rest
        head = Head(weight, bias, softcap)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        dx = torch.empty_like(x)
        dw, db = (
            torch.zeros_like(p, dtype=wide) if p is not None and p.requires_grad else None for p in (weight, bias)
        )
        sums: Tensor | None = None
        for part in _chunks(x, weight):
            z = _at_least_fp32(head.project(x[part])).detach().requires_grad_()
            with torch.enable_grad():
                parts = sums_of(_softcapped(z, softcap), part)
                (dz,) = torch.autograd.grad(parts[0], z)
            sums = parts.detach() if sums is None else sums + parts.detach()
            dz = dz.to(x.dtype)
            dx[part] = dz if weight is None else dz @ weight
            if dw is not None:
                dw += dz.T @ x[part]
            if db is not None:
                db += dz.sum(dim=0, dtype=wide)
        gradients = (dx, None if dw is None else dw.to(x.dtype), None if db is None else db.to(x.dtype))
        ctx.present = [gradient is not None for gradient in gradients]
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        assert sums is not None
        loss, *metrics = sums.unbind()
        ctx.mark_non_differentiable(*metrics)
        return loss.clone(), *(value.clone() for value in metrics)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        return *(next(saved) * incoming[0] if present else None for present in ctx.present), None


def _chunks(x: Tensor, weight: Tensor | None) -> list[slice]:
    """The rows of each chunk."""
    width = x.shape[1] if weight is None else weight.shape[0]
    size = max(1, CHUNK_BYTES // (4 * width))
    return [slice(begin, min(begin + size, x.shape[0])) for begin in range(0, x.shape[0], size)]


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
