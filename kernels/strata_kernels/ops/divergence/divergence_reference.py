"""Divergences of rows and their gradients in plain PyTorch: for CPUs, fp64 and `torch.func`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator

# The last two have no softmax: cosine of the logits, tvd of probabilities.
Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd", "cosine", "tvd_probabilities"]
# Lower bound of a norm, as `eps` of torch.nn.functional.cosine_similarity.
COSINE_EPS = 1e-8


@dataclass(frozen=True)
class Form:
    """Options of a row's divergence; softcap 0.0 is none.

    Attributes:
        divergence, beta, temperature: as in the package's docstring; beta is for jsd only.
        softcap, teacher_softcap: logits become softcap · tanh(logits / softcap), before the temperature.
        normalized: whether inputs are log-probabilities (probabilities for tvd_probabilities) instead of logits.
            Gradients are with respect to the inputs.
        ignore_index: rows with this target have zero loss and gradient.
    """

    divergence: Divergence
    beta: float = 0.5
    temperature: float = 1.0
    softcap: float = 0.0
    teacher_softcap: float = 0.0
    normalized: bool = False
    ignore_index: int = -100


def reference_divergence(z: Tensor, t: Tensor, target: Tensor, form: Form) -> Tensor:
    """The divergences [N] of logits z and t [N, V], differentiable by autograd and `torch.func`."""
    if form.divergence == "cosine":
        wide = accumulator(z.dtype)
        cosine = functional.cosine_similarity(z.to(wide), t.to(wide), dim=-1, eps=COSINE_EPS)
        return (1 - cosine).where(target != form.ignore_index, 0.0)
    log_p, log_q = _log_probs(z, form.softcap, form), _log_probs(t, form.teacher_softcap, form)
    return divergence_terms(log_p, log_q, form).sum(-1).where(target != form.ignore_index, 0.0)


def reference_gradient(z: Tensor, t: Tensor, target: Tensor, scale: Tensor, form: Form) -> Tensor:
    """scale · dloss/dz [N, V]."""
    if form.divergence == "cosine":
        return (_cosine_gradient(z, t) * scale[:, None]).where((target != form.ignore_index)[:, None], 0.0)
    log_p, log_q = _log_probs(z, form.softcap, form), _log_probs(t, form.teacher_softcap, form)
    pc = gradient_terms(log_p, log_q, form)
    dz = pc if form.normalized else pc - log_p.exp() * pc.sum(-1, keepdim=True)
    if form.softcap:
        dz = dz * (1 - torch.tanh(z.to(dz.dtype) / form.softcap).square())
    dz = dz if form.temperature == 1 else dz / form.temperature
    return (dz * scale[:, None]).where((target != form.ignore_index)[:, None], 0.0)


def gradient_terms(log_p: Tensor, log_q: Tensor, form: Form) -> Tensor:
    """dloss/dlog p = p c [N, V]; the gradient of logits is p c - p Σ p c, Σ over the whole vocabulary."""
    p, q = log_p.exp(), log_q.exp()
    match form.divergence:
        case "forward_kl":
            return -q
        case "reverse_kl":
            return _times(p, log_p - log_q + form.normalized)
        case "jsd":
            return _times((1 - form.beta) * p, _from_mixture(log_p, log_q, form.beta)[0])
        case "tvd":
            return 0.5 * p * (p - q).sign()
        case "tvd_probabilities":
            return 0.5 * (log_p - log_q).sign()
        case "cosine":
            raise AssertionError("cosine is not a sum over the vocabulary")


def divergence_terms(log_p: Tensor, log_q: Tensor, form: Form) -> Tensor:
    """The terms whose sum over the vocabulary is a row's divergence: [N, V]."""
    p, q = log_p.exp(), log_q.exp()
    match form.divergence:
        case "forward_kl":
            return _times(q, log_q - log_p)
        case "reverse_kl":
            return _times(p, log_p - log_q)
        case "jsd":
            of_p, of_q = _from_mixture(log_p, log_q, form.beta)
            return form.beta * _times(q, of_q) + (1 - form.beta) * _times(p, of_p)
        case "tvd":
            return 0.5 * (p - q).abs()
        case "tvd_probabilities":
            return 0.5 * (log_p - log_q).abs()
        case "cosine":
            raise AssertionError("cosine is not a sum over the vocabulary")


def _cosine_gradient(z: Tensor, t: Tensor) -> Tensor:
    wide, teacher = z.to(accumulator(z.dtype)), t.to(accumulator(z.dtype))
    norm, teacher_norm = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (wide, teacher))
    least, unit = norm.clamp_min(COSINE_EPS), teacher / teacher_norm.clamp_min(COSINE_EPS)
    along = ((wide / least * unit).sum(-1, keepdim=True) / least).where(norm > COSINE_EPS, 0.0)
    gradient: Tensor = (along * wide - unit) / least
    return gradient


def _times(probability: Tensor, log_ratio: Tensor) -> Tensor:
    """probability · log_ratio; 0 · inf is 0, also in the gradient."""
    none = probability == 0
    return probability * log_ratio.masked_fill(none, 0.0)


def _from_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(log(p / m), log(q / m)), without cancellation for p ≈ q."""
    # -inf in both: equal.
    difference = (log_q - log_p).masked_fill((log_p == log_q) & log_p.isinf(), 0.0)
    larger = difference > 0
    share = torch.where(larger, beta, 1 - beta).to(log_p.dtype)
    log_m = torch.log1p((1 - share) * torch.expm1(torch.where(larger, -difference, difference)))
    return -log_m - difference.where(larger, 0.0), difference.masked_fill(larger, 0.0) - log_m


def _log_probs(z: Tensor, softcap: float, form: Form) -> Tensor:
    wide = z.to(accumulator(z.dtype))
    if form.normalized:
        return wide
    wide = softcap * torch.tanh(wide / softcap) if softcap else wide
    return (wide if form.temperature == 1 else wide / form.temperature).log_softmax(-1)
