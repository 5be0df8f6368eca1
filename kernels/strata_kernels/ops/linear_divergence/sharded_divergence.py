"""A divergence of rows whose vocabulary several processes hold: what `divergence_rows` does with whole rows.

Each process has the logits of some classes, of student and teacher. Three things are of all classes: the log-sum-exps
of both, the divergence Σ terms, and Σ pc, which the gradient pc - p Σ pc takes (`ops.divergence`). The processes
exchange these few numbers of a row. The log-sum-exps are computed by the kernel of cross entropy; terms and gradients
by plain PyTorch, some columns at a time: nothing the size of a chunk's logits is made in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..cross_entropy.row_statistics import Options, Statistics, losses_of
from ..cross_entropy.rows import partial_statistics
from ..divergence.divergence_reference import Form, divergence_terms, gradient_terms
from ..head.vocabulary_parallel import VocabularyShard

# Elements of a part of the logits: an fp32 copy of them takes 16 MiB.
_PART_ELEMENTS = 2**22


def sharded_divergence(
    z: Tensor, t: Tensor, target: Tensor, scale: Tensor, loss: Tensor, form: Form, shard: VocabularyShard,
    *, gradient: bool, labels: tuple[Tensor, Statistics] | None = None,
) -> None:  # fmt: skip
    """Fill `loss` with the divergences of rows over all shards, and overwrite z by its gradient. A collective.

    Args:
        z: [N, V], logits of the student, of this process's classes.
        t: [N, V'], logits of the teacher, of the first V' <= V of them.
        target, scale, loss, form: as in `divergence_rows`.
        shard: the classes of this process.
        gradient: whether to overwrite z by scale · dloss/dz.
        labels: weights [N] of the cross entropies of the targets, whose gradients are added, and the statistics of the
            rows at temperature 1 over the whole vocabulary.
    """
    both = t.shape[1]
    counted = target != form.ignore_index
    # Any class serves as the target: only the log-sum-exp is used.
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
    """Fill `loss` with the cross entropies of rows; returns their statistics over all shards. A collective."""
    whole = shard.gather_statistics([partial_statistics(z, target, options, shard.columns(0))])
    loss.copy_(losses_of(whole, target, options))
    return whole


def _parts(n_rows: int, *stops: int) -> Iterator[slice]:
    """Columns up to the largest of `stops`, so many at a time that none crosses another of them."""
    step, start = max(_PART_ELEMENTS // max(n_rows, 1), 1), 0
    for stop in sorted(stops):
        for first in range(start, stop, step):
            yield slice(first, min(first + step, stop))
        start = stop


def _log_probs(z: Tensor, softcap: float, temperature: float, whole: Statistics) -> Tensor:
    """Log-probabilities of some columns, from the statistics of their rows over the whole vocabulary."""
    wide = z.to(whole.largest.dtype)
    wide = softcap * torch.tanh(wide / softcap) if softcap else wide
    # Far from zero, the sum of both would lose digits.
    return wide / temperature - whole.largest[:, None] - whole.log_sum[:, None]
