"""`distill`: learn the distributions of a teacher with the same vocabulary, in addition to the next token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import Distill as Settings
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch
from tasks.runtime.data.top_columns import TOP_COLUMNS
from tasks.runtime.objectives.generation_metrics import parts_of_step
from tasks.runtime.objectives.head_sums import Head
from tasks.runtime.objectives.objective import (
    MicroBatchLoss,
    ObjectiveContext,
    model_inputs,
    next_labels,
    next_values,
    target_tokens,
)
from tasks.runtime.objectives.own_answers import OWN, OwnAnswers
from tasks.runtime.objectives.teacher_divergence import Shares, distillation, top_tokens_distillation
from tasks.runtime.objectives.teacher_model import Teacher
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.record import NATS

# Key of the teacher's fingerprint in a checkpoint's metadata.
_METADATA_KEY = "teacher"


class Distill:
    """Cross entropy and the divergence from a teacher, averaged over the target tokens.

    The teacher is a model that runs in each step, or its likeliest tokens are in the rows.
    """

    unit = NATS

    def __init__(self, spec: RunSpec, *, fused: bool) -> None:
        assert isinstance(spec.objective, Settings)
        self._settings, self._fused = spec.objective, fused
        self.teacher = None if spec.objective.teacher is None else Teacher(spec)
        self._own: OwnAnswers | None = None
        # Micro-batches of a step on all ranks.
        self._parts = spec.training.gradient_accumulation_steps * spec.dp_size

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Load the teacher.

        Raises:
            ValueError: the teacher has too few positions or token embeddings for the rows, or other weights than at
                the start of the run.
            Unreachable: the Hub does not answer.
        """
        if self.teacher is not None:
            # Checkpoints of earlier versions have no fingerprint of the teacher.
            expected = context.metadata.get(_METADATA_KEY)
            self.teacher.load(context.processes, context.data, context.strategy, expected)
        if self._settings.on_policy:
            self._own = OwnAnswers(self._settings, context)
        return context.data

    def metadata(self) -> dict[str, Any]:
        """The fingerprint of the teacher's weights."""
        return {} if self.teacher is None else {_METADATA_KEY: self.teacher.fingerprint}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Return the data unchanged."""
        return data

    def example_row(self, tokens: Tensor) -> Batch:
        """The columns of a row. Loads the teacher on the meta device."""
        row = dict.fromkeys(("input_ids", "labels", "position_ids"), tokens)
        if self.teacher is None:
            return row | dict(zip(TOP_COLUMNS, (tokens[:, None], tokens[:, None].float()), strict=True))
        self.teacher.plan()
        return row

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """Put answers of the student in the place of those of the data, for `on_policy` of the rows."""
        return batches if self._own is None else self._own.step_batches(batches)

    def rolled_back(self) -> None:
        """Measure the next step's time from here."""
        if self._own is not None:
            self._own.rolled_back()

    def count(self, batch: Batch) -> Tensor:
        """The number of target tokens."""
        return target_tokens(batch)

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Do nothing."""

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """Loss, cross entropy and divergence, divided by the target tokens of the whole step."""
        labels, settings = next_labels(batch), self._settings
        if self.teacher is None:
            tokens, log_probs = (next_values(batch[name]) for name in TOP_COLUMNS)

            def shares(hidden: Tensor, head: Head) -> Shares:
                return top_tokens_distillation(hidden, head, labels, tokens, log_probs, settings, items, max_targets)

        else:
            teacher_x, teacher = self.teacher.run(batch)

            def shares(hidden: Tensor, head: Head) -> Shares:
                return distillation(
                    hidden, head, labels, teacher_x, teacher, settings, items, max_targets, labelled=self._labelled
                )

        def loss(hidden: Tensor, *head: Any) -> Tensor:
            return torch.stack(shares(hidden, Head(*head)))

        inputs = model_inputs(batch)
        sums: Tensor = model(**inputs, head_loss=loss).loss if self._fused else loss(model(**inputs).logits)
        metrics: dict[str, Tensor] = {settings.divergence: sums[2].detach()}
        if self._labelled:
            return MicroBatchLoss(sums[0], {"next_token_loss": sums[1].detach()} | metrics)
        if OWN in batch and self._own is not None:
            metrics["own_tokens"] = (batch[OWN] != 0).sum() / items
            metrics |= parts_of_step(self._own.metrics, self._parts, items.device)
        return MicroBatchLoss(sums[0], metrics)

    @property
    def _labelled(self) -> bool:
        """Whether answers are labels: what the student writes itself is none."""
        return self._settings.on_policy == 0
