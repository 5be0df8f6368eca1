"""Answers that the student of a distillation writes itself, in the place of those of the data.

Which rows get one, and what it draws, depends on the seed and the row's place in the stream of rows alone: a resumed
run writes the same answers, and so does another number of processes or micro-batches, up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strata_platform.spec.sections.objectives import Distill as Settings
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch, Row
from tasks.runtime.data.prompts import ANSWER
from tasks.runtime.generation import Request, Sample, Sampling
from tasks.runtime.generation.sampling import uniform_numbers
from tasks.runtime.objectives.generation_metrics import generation_metrics
from tasks.runtime.objectives.objective import ObjectiveContext
from tasks.runtime.objectives.rollout import sampling_of

OWN = "own"
"""Column of a row: 1 for tokens that the student has written, [T], int64."""
# Numbers of rows are below: the choice of a row draws from another stream than its answer.
_CHOICES = 1 << 63


class _Document(NamedTuple):
    """Tokens and labels [T] of a document, where its last answer begins, and its number in the stream of rows."""

    input_ids: Tensor
    labels: Tensor
    begin: int
    number: int


class OwnAnswers:
    """Writes the answers of steps with the weights that are trained.

    Raises:
        ValueError: the data have images or audio.
    """

    def __init__(self, settings: Settings, context: ObjectiveContext) -> None:
        spec = context.spec
        self._share, self._spec, self._collate = settings.on_policy, spec, context.collate
        data = context.data
        if data.manifest.has_media:
            raise ValueError(
                "objective.on_policy: the data have images or audio, and the student can only answer text; set "
                "objective.on_policy to 0"
            )
        assert context.whole is not None and context.generator is not None
        self._whole, self._generator = context.whole, context.generator
        self._sampling: Sampling = sampling_of(settings.generation, data, self._whole.model)
        self._processes = context.processes
        self._ended = time.monotonic()
        self.metrics: dict[str, float] = {}
        """Of the last step, on all ranks."""

    def step_batches(self, batches: list[Batch]) -> list[Batch]:
        """The micro-batches of a step, with answers of the student. A collective."""
        began = time.monotonic()
        self._whole.update()
        self._generator.update_weights()
        documents = [list(_documents(batch)) for batch in batches]
        chosen = {
            document.number: Request(tuple(document.input_ids[: document.begin].tolist()), document.number)
            for part in documents
            for document in part
            if float(uniform_numbers(self._spec.seed, [_CHOICES + document.number], 1)) < self._share
        }
        asked = time.monotonic()
        # The ranks of a tensor-parallel group read the same rows, and each answers a share of them.
        share = self._processes.tp_share([*chosen.values()])
        samples = self._generator.generate(share, self._sampling) if share else []
        generating = time.monotonic() - asked
        of_group = chain(*self._processes.tp_gather(samples))
        answers = {number: sample.token_ids for number, sample in zip(chosen, of_group, strict=True)}
        found = [self._batch(part, answers) for part in documents]
        ended = time.monotonic()
        self.metrics = self._measured(samples, generating, ended - began, ended - self._ended)
        self._ended = ended
        return found

    def _measured(self, samples: list[Sample], *seconds: float) -> dict[str, float]:
        """The metrics of the answers of all ranks. seconds: of generating, before training, and of the step."""
        drawn = (-float(sample.log_probs.sum(dtype=torch.float64)) for sample in samples)
        tokens = sum(sample.token_ids.numel() for sample in samples)
        finished = sum(sample.finished for sample in samples)
        sums = torch.tensor([len(samples), tokens, finished, sum(drawn)], dtype=torch.float64)
        longest = torch.tensor(seconds, dtype=torch.float64)
        if self._processes.world_size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        answers, tokens, finished, surprise = sums.tolist()
        generating, before_training, step = longest.tolist()
        return {
            # The mean of -log p over tokens that are drawn from p; the exact one would need another pass of the head.
            "entropy": surprise / max(tokens, 1),
            **generation_metrics(
                answers=answers,
                tokens=tokens,
                finished=finished,
                generating=generating,
                before_training=before_training,
                step=step,
            ),
        }

    def rolled_back(self) -> None:
        """Measure the next step's time from here: the return to a checkpoint is no part of it."""
        self._ended = time.monotonic()

    def _batch(self, documents: list[_Document], answers: dict[int, Tensor]) -> Batch:
        return self._collate([self._row(document, answers.get(document.number)) for document in documents])

    def _row(self, document: _Document, answer: Tensor | None) -> Row:
        """A row with the answer, as much of it as fits."""
        ids, labels = document.input_ids, document.labels
        own = torch.zeros_like(ids)
        if answer is not None:
            answer = answer[: self._spec.data.sequence_length - document.begin]
            ids = torch.cat([ids[: document.begin], answer])
            labels = torch.full_like(ids, IGNORE_INDEX)
            labels[document.begin :] = answer
            own = (labels != IGNORE_INDEX).long()
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(ids.numel()), OWN: own}


def _documents(batch: Batch) -> Iterator[_Document]:
    """The documents of a batch on the host, without padding."""
    for ids, labels, positions, numbers in zip(
        *(batch[name] for name in ("input_ids", "labels", "position_ids", ANSWER)), strict=True
    ):
        bounds = [*(positions == 0).nonzero().flatten().tolist(), positions.numel()]
        for begin, end in pairwise(bounds):
            targets = labels[begin:end] != IGNORE_INDEX
            if not targets.any():
                continue
            # The first token is no target, so that a prompt has at least one.
            last = int(targets.nonzero()[-1])
            before = (~targets[:last]).nonzero().flatten()
            yield _Document(ids[begin:end], labels[begin:end], int(before[-1]) + 1, int(numbers[begin]))
