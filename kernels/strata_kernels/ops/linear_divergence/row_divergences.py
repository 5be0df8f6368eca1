"""Divergences as `RowLoss` of `ops.head`: the computation on each chunk of the student's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._launch import accumulator
from ..cross_entropy.row_statistics import Columns, Options, Statistics
from ..cross_entropy.rows import cross_entropy_gradient, cross_entropy_rows
from ..divergence.divergence_reference import Form
from ..divergence.divergence_rows import Labels, divergence_rows
from ..head.head_pass import HeadGradients, HeadPass, Wanted, logits_into
from ..head.memory import ChunkPlan, logits_view, plan_chunks
from ..head.vocabulary_parallel import VocabularyShard
from .sharded_divergence import sharded_cross_entropy, sharded_divergence


class Teacher(NamedTuple):
    """x [N, H'], weight [V, H'] and bias [V] of the teacher."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class PassSettings:
    """Settings of a pass over the rows.

    chunk_bytes: bytes of logits per chunk.
    exact: whether a 16-bit dW is rounded once.
    wanted: which gradients to compute.
    shard: the vocabulary shard of this rank.
    """

    chunk_bytes: int
    exact: bool
    wanted: Wanted
    shard: VocabularyShard

    def plan(self, x: Tensor, weight: Tensor) -> ChunkPlan:
        """The plan for the logits of two heads, by the widest shard, so that all ranks issue the same collectives."""
        shape = torch.Size((self.shard.widest, weight.shape[1]))
        return plan_chunks(x, shape, self.wanted.dw, self.exact, self.chunk_bytes, tensors=2)


def divergences_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, teacher: Teacher, scale: Tensor, form: Form,
    settings: PassSettings,
) -> tuple[Tensor, HeadGradients]:  # fmt: skip
    """(divergences [N], gradients of their sum weighted by scale [N]); x [N, H], weight [V, H], target [N]."""
    plan = settings.plan(x, weight)
    loss = x.new_empty(x.shape[0], dtype=accumulator(x.dtype))
    taken = _Divergence(target, teacher, scale, form, settings, loss, x.new_empty(plan.buffer_size))
    run = HeadPass(x, weight, bias, settings.shard, settings.wanted, fp32_dw=plan.fp32_dw)
    return loss, run.run_chunks(taken, plan.chunk_rows, x.new_empty(plan.buffer_size), plan.panels_size)


class _Divergence:
    """The `RowLoss` of a divergence from a teacher with a head."""

    def __init__(
        self, target: Tensor, teacher: Teacher, scale: Tensor, form: Form, settings: PassSettings, loss: Tensor,
        buffer: Tensor,
    ) -> None:  # fmt: skip
        self._target, self._teacher, self._scale, self._form = target, teacher, scale, form
        self._gradient, self._shard = settings.wanted.any, settings.shard
        self._loss, self._buffer = loss, buffer

    def take(self, z: Tensor, rows: slice) -> None:
        if self._shard.group:
            self.overwrite_shard(z, rows)
        else:
            self.overwrite(z, rows)

    def overwrite_shard(self, z: Tensor, rows: slice, labels: tuple[Tensor, Statistics] | None = None) -> None:
        """Overwrite logits with their gradient, for a vocabulary sharded over processes."""
        sharded_divergence(
            z, self._teacher_logits(rows), self._target[rows], self._scale[rows], self._loss[rows], self._form,
            self._shard, gradient=self._gradient, labels=labels,
        )  # fmt: skip

    def _teacher_logits(self, rows: slice) -> Tensor:
        t = logits_view(self._buffer, rows.stop - rows.start, self._teacher.weight.shape[0])
        logits_into(t, self._teacher.x[rows], self._teacher.weight, self._teacher.bias)
        return t

    def overwrite(self, z: Tensor, rows: slice, labels: Labels | None = None) -> int:
        """Overwrite the logits of the teacher's classes with their gradient; returns the number of these classes."""
        t = self._teacher_logits(rows)
        z = z[:, : t.shape[1]]
        dz = z if self._gradient else None
        divergence_rows(z, t, self._target[rows], self._scale[rows], self._loss[rows], self._form, dz, labels)
        return t.shape[1]


class Scales(NamedTuple):
    """Row scales of the gradients of both terms, each [N]; labels None: no gradient of the cross entropy."""

    labels: Tensor | None
    divergence: Tensor


def distillation_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, teacher: Teacher, scales: Scales, form: Form,
    options: Options, settings: PassSettings,
) -> tuple[Tensor, HeadGradients]:  # fmt: skip
    """(cross entropies and divergences [2, N], gradients of their sum weighted by scales).

    teacher: has the first V' <= V classes. options: options of the cross entropy.
    """
    plan = settings.plan(x, weight)
    losses = x.new_empty(2, x.shape[0], dtype=accumulator(x.dtype))
    divergence = _Divergence(
        target, teacher, scales.divergence, form, settings, losses[1], x.new_empty(plan.buffer_size)
    )
    taken = _Distillation(divergence, target, scales.labels, options, settings, losses[0])
    run = HeadPass(x, weight, bias, settings.shard, settings.wanted, fp32_dw=plan.fp32_dw)
    return losses, run.run_chunks(taken, plan.chunk_rows, x.new_empty(plan.buffer_size), plan.panels_size)


class _Distillation:
    """The `RowLoss` of a cross entropy and a divergence, whose gradients are added before they are rounded."""

    def __init__(
        self, divergence: _Divergence, target: Tensor, scale: Tensor | None, options: Options, settings: PassSettings,
        loss: Tensor,
    ) -> None:  # fmt: skip
        self._divergence, self._target, self._scale = divergence, target, scale
        self._options, self._loss = options, loss
        self._gradient, self._shard = settings.wanted.any, settings.shard

    def take(self, z: Tensor, rows: slice) -> None:
        target, loss = self._target[rows], self._loss[rows]
        if self._shard.group:
            whole = sharded_cross_entropy(z, target, loss, self._options, self._shard)
            self._divergence.overwrite_shard(z, rows, None if self._scale is None else (self._scale[rows], whole))
            return
        largest, log_sum = (torch.empty_like(loss) for _ in range(2))
        cross_entropy_rows(z, target, None, loss, self._options, False, largest=largest, log_sum=log_sum)
        labels = None if self._scale is None else Labels(self._scale[rows], largest, log_sum, z.shape[1])
        both = self._divergence.overwrite(z, rows, labels)
        if both == z.shape[1] or not self._gradient:
            return
        # Columns of classes that the teacher does not have.
        if labels is None:
            z[:, both:].zero_()
        else:
            columns = Columns(both, z.shape[1])
            # padding=False: the next row, not padding, follows these columns.
            cross_entropy_gradient(
                z[:, both:], target, labels.scale, largest, log_sum, None, self._options, columns=columns, padding=False
            )


def topk_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, tokens: Tensor, log_probs: Tensor, scale: Tensor,
    options: Options, settings: PassSettings,
) -> tuple[Tensor, HeadGradients]:  # fmt: skip
    """(Σ_k q_k (log q_k - log p_k) [N], gradients of their sum weighted by scale [N]).

    tokens: [N, K], int64. log_probs: [N, K], log q, dtype of the losses.
    """
    plan = plan_chunks(x, weight.shape, settings.wanted.dw, settings.exact, settings.chunk_bytes)
    loss = x.new_empty(x.shape[0], dtype=accumulator(x.dtype))
    taken = _TopK(target, tokens, log_probs, scale, options, settings.wanted.any, loss)
    run = HeadPass(x, weight, bias, settings.shard, settings.wanted, fp32_dw=plan.fp32_dw)
    return loss, run.run_chunks(taken, plan.chunk_rows, x.new_empty(plan.buffer_size), plan.panels_size)


class _TopK:
    """The `RowLoss` of a divergence from K tokens: cross entropy of the first, then K columns of the gradient."""

    def __init__(
        self, target: Tensor, tokens: Tensor, log_probs: Tensor, scale: Tensor, options: Options, gradient: bool,
        loss: Tensor,
    ) -> None:  # fmt: skip
        self._target, self._tokens, self._log_probs, self._scale = target, tokens, log_probs, scale
        self._options, self._gradient, self._loss = options, gradient, loss

    def take(self, z: Tensor, rows: slice) -> None:
        options, tokens, log_q = self._options, self._tokens[rows], self._log_probs[rows]
        counted = (self._target[rows] != options.ignore_index)[:, None]
        q, scale = log_q.exp(), self._scale[rows, None]
        mass = q.sum(1, keepdim=True)
        loss, largest, log_sum = (torch.empty_like(self._loss[rows]) for _ in range(3))
        logits = z.gather(1, tokens).to(loss.dtype)
        # Gradient of -mass log p of the first token; the columns of the K tokens are overwritten below.
        first = tokens[:, 0].where(counted[:, 0], options.ignore_index)
        cross_entropy_rows(
            z, first, (scale * mass)[:, 0], loss, options, self._gradient, largest=largest, log_sum=log_sum
        )
        squashed = torch.tanh(logits / options.softcap) if options.softcap else logits
        wide = (options.softcap or 1.0) * squashed / options.temperature
        log_p = wide - largest[:, None] - log_sum[:, None]
        # 0 · log 0 is 0.
        terms = (q * (log_q - log_p).masked_fill(q == 0, 0.0)).where(counted, 0.0)
        self._loss[rows].copy_(terms.sum(1))
        if self._gradient:
            slope = (1 - squashed.square() if options.softcap else 1.0) / options.temperature
            dz = scale * (mass * log_p.exp() - q) * slope
            z.scatter_(1, tokens, dz.where(counted, 0.0).to(z.dtype))
