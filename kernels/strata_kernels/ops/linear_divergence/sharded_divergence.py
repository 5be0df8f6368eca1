"""`divergence_rows` for a vocabulary that is sharded over processes.

Each rank has the logits of its classes, of student and teacher. Three reductions are over all classes: log-sum-exp of
both, the divergence Σ terms, and Σ p c for the gradient p c - p Σ p c (`ops.divergence`); ranks exchange these numbers
of each row. The cross-entropy kernel computes log-sum-exps; plain PyTorch computes terms and gradients in blocks of
columns, so that no fp32 tensor of the size of a chunk's logits is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..cross_entropy.row_statistics import Options, Statistics, losses_of
from ..cross_entropy.rows import partial_statistics
from ..divergence.divergence_reference import Form, divergence_terms, gradient_terms
from ..head.vocabulary_parallel import VocabularyShard

# Elements per block of logits; an fp32 copy has 16 MiB.
_PART_ELEMENTS = 2**22


def sharded_divergence(
    z: Tensor, t: Tensor, target: Tensor, scale: Tensor, loss: Tensor, form: Form, shard: VocabularyShard,
    *, gradient: bool, labels: tuple[Tensor, Statistics] | None = None,
) -> None:  # fmt: skip
    """Fill `loss` with the divergences of rows over all shards, and overwrite z with its gradient. Collective.

    Args:
        z: [N, V], logits of the student, classes of this rank.
        t: [N, V'], logits of the teacher, the first V' <= V of these classes.
        target, scale, loss, form: as in `divergence_rows`.
        shard: the classes of this rank.
        gradient: whether to overwrite z with scale · dloss/dz.
        labels: (scales [N] of cross entropies of the targets, whose gradients are added; statistics of the rows at
            temperature 1 over the whole vocabulary).
    """
    both = t.shape[1]
    counted = target != form.ignore_index
    # The target can be any class: only the log-sum-exp is used.
    anything = torch.full_like(target, int(form.ignore_index == 0)).where(counted, form.ignore_index)
    columns = shard.columns(0)
    of_z, of_t = (
        shard.gather_statistics(
            [partial_statistics(x, anything, Options(form.ignore_index, 0.0, 0.0, cap, form.temperature), columns)]
        )
        for x, cap in ((z[:, :both], form.softcap), (t, form.teacher_softcap))
    )
    sums = loss.new_zeros(2, loss.shape[0])
    for part in _parts(z.shape[0], both):
        log_p = _log_probs(z[:, part], form.softcap, form.temperature, of_z)
        log_q = _log_probs(t[:, part], form.teacher_softcap, form.temperature, of_t)
        sums[0] += divergence_terms(log_p, log_q, form).sum(1)
        sums[1] += gradient_terms(log_p, log_q, form).sum(1)
    divergence, pc_sum = shard.sum_over_shards(sums)
    loss.copy_(divergence.where(counted, 0.0))
    if not gradient:
        return
    for part in _parts(z.shape[0], both, z.shape[1]):
        dz = loss.new_zeros(z.shape[0], part.stop - part.start)
        if part.stop <= both:
            log_p = _log_probs(z[:, part], form.softcap, form.temperature, of_z)
            log_q = _log_probs(t[:, part], form.teacher_softcap, form.temperature, of_t)
            pc = gradient_terms(log_p, log_q, form)
            dz += (pc - log_p.exp() * pc_sum[:, None]) * (scale / form.temperature)[:, None]
        if labels is not None:
            weight, whole = labels
            p = _log_probs(z[:, part], form.softcap, 1.0, whole).exp()
            column = (target - shard.start - part.start)[:, None]
            is_here = (column >= 0) & (column < p.shape[1])
            p.scatter_add_(1, column.where(is_here, 0), -is_here.to(p.dtype))
            dz += p * weight[:, None]
        if form.softcap:
            dz *= 1 - torch.tanh(z[:, part].to(dz.dtype) / form.softcap).square()
        z[:, part] = dz.where(counted[:, None], 0.0)


def sharded_cross_entropy(
    z: Tensor, target: Tensor, loss: Tensor, options: Options, shard: VocabularyShard
) -> Statistics:
    """Fill `loss` with the cross entropies of rows; returns their statistics over all shards. Collective."""
    whole = shard.gather_statistics([partial_statistics(z, target, options, shard.columns(0))])
    loss.copy_(losses_of(whole, target, options))
    return whole


def _parts(n_rows: int, *stops: int) -> Iterator[slice]:
    """Blocks of columns up to the largest of `stops`; no block crosses one of `stops`."""
    step, start = max(_PART_ELEMENTS // max(n_rows, 1), 1), 0
    for stop in sorted(stops):
        for first in range(start, stop, step):
            yield slice(first, min(first + step, stop))
        start = stop


def _log_probs(z: Tensor, softcap: float, temperature: float, whole: Statistics) -> Tensor:
    """Log-probabilities of logits z, from the statistics of their rows over the whole vocabulary."""
    wide = z.to(whole.largest.dtype)
    wide = softcap * torch.tanh(wide / softcap) if softcap else wide
    # Two subtractions: the sum of both would be rounded to few digits of log_sum.
    return wide / temperature - whole.largest[:, None] - whole.log_sum[:, None]
