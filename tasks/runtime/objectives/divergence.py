"""Cross entropy and a divergence from a teacher, in chunks of rows: the logits of a model never exist as a whole.

    z, t = logits of student and teacher         p, q = softmax(z / T), softmax(t / T)         m = (p + q) / 2
    forward_kl = Σ q log(q / p)      reverse_kl = Σ p log(p / q)      jsd = (Σ p log(p / m) + Σ q log(q / m)) / 2
    loss = (1 - w) cross entropy(z, label) + w T² divergence

T² keeps the gradient of the divergence as large as at temperature 1. Sources: Hinton et al. (arXiv:1503.02531), Agarwal
et al. (arXiv:2306.13649). A sum over rows is linear in its incoming gradient. The forward pass therefore computes the
gradient chunk by chunk, and logits are neither stored nor recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, log_softmax

from strata_platform.spec.objectives import Distill as Settings

# Of one model's fp32 logits; computing the gradient of a chunk takes several times as much.
CHUNK_BYTES = 128 * 2**20


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


class Sums(NamedTuple):
    """Sums over the rows with a label, divided by `items`; only `loss` has a gradient."""

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def distillation(
    x: Tensor, head: Head, labels: Tensor, teacher_x: Tensor, teacher: Head, settings: Settings, items: Tensor
) -> Sums:
    """Sums over the rows of x [N, H], labels [N] and teacher_x [N, H'], divided by `items`; label -100 skips a row.

    Vocabularies may be padded to different sizes: the divergence covers the tokens that both have. x and the head get
    gradients.
    """
    sums = _Distillation.apply(x, head.weight, head.bias, (head.softcap, labels, teacher_x, teacher, settings, items))
    return Sums(*sums)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rest: tuple[Any, ...]) -> Any:
        softcap, labels, teacher_x, teacher, settings, items = rest
        head = Head(weight, bias, softcap)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        dx = torch.empty_like(x)
        dw, db = (
            torch.zeros_like(p, dtype=wide) if p is not None and p.requires_grad else None for p in (weight, bias)
        )
        sums = torch.zeros(3, dtype=wide, device=x.device)
        width = x.shape[1] if weight is None else weight.shape[0]
        for rows in torch.arange(x.shape[0], device="cpu").split(max(1, CHUNK_BYTES // (4 * width))):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            z = _at_least_fp32(head.project(x[part])).detach().requires_grad_()
            with torch.enable_grad():
                parts = (
                    _losses(_softcapped(z, softcap), teacher.logits(teacher_x[part]), labels[part], settings) / items
                )
                (dz,) = torch.autograd.grad(parts[0], z)
            sums += parts.detach()
            dz = dz.to(x.dtype)
            dx[part] = dz if weight is None else dz @ weight
            if dw is not None:
                dw += dz.T @ x[part]
            if db is not None:
                db += dz.sum(dim=0, dtype=wide)
        gradients = (dx, None if dw is None else dw.to(x.dtype), None if db is None else db.to(x.dtype))
        ctx.present = [gradient is not None for gradient in gradients]
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        loss, *metrics = sums.unbind()
        ctx.mark_non_differentiable(*metrics)
        return loss.clone(), *(value.clone() for value in metrics)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        return *(next(saved) * incoming[0] if present else None for present in ctx.present), None


def _losses(z: Tensor, t: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """Loss, cross entropy and divergence, summed over the rows with a label: [3]."""
    learned = labels != -100
    entropy = cross_entropy(z, labels, reduction="sum")
    common = min(z.shape[1], t.shape[1])
    p, q = (log_softmax(logits[:, :common] / settings.temperature, dim=-1) for logits in (z, t))
    divergence = _DIVERGENCES[settings.divergence](p, q).sum(dim=-1).where(learned, 0.0).sum()
    loss = (1 - settings.weight) * entropy + settings.weight * settings.temperature**2 * divergence
    return torch.stack([loss, entropy, divergence])


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Terms of KL(a || b) from log-probabilities."""
    return a.exp() * (a - b)


def _jsd(p: Tensor, q: Tensor) -> Tensor:
    m = torch.logaddexp(p, q) - math.log(2)
    return (_kl(p, m) + _kl(q, m)) / 2


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": lambda p, q: _kl(q, p),
    "reverse_kl": _kl,
    "jsd": _jsd,
}


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
