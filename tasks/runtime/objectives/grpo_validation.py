"""How a model that learns from rewards is measured: by the rewards of its answers to held-out prompts.

The likeliest answer to each prompt is taken, at temperature 0. The loss is the mean reward, negated, so that lower is
better as for every objective.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import Grpo as Settings
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch
from tasks.runtime.data.prompts import prompts_of
from tasks.runtime.generation import Generator, Request
from tasks.runtime.objectives.objective import MicroBatchLoss, ObjectiveContext, target_tokens
from tasks.runtime.objectives.rollout import answers_of, sampling_of, total_of
from tasks.runtime.parallel.whole_model import WholeModel
from tasks.runtime.process.ranks import Processes
from tasks.runtime.rewards.scoring import Rewards


class GrpoValidation:
    """The negated reward of greedy answers, averaged over prompts.

    data, whole, generator: None for a plan, which generates nothing; otherwise the engine of the run, and the model
    whose weights it has.
    """

    unit = "reward, negated"

    def __init__(
        self,
        settings: Settings,
        data: PreparedData | None,
        whole: WholeModel | None = None,
        generator: Generator | None = None,
    ) -> None:
        self._generator = generator
        self._settings, self._data, self._whole = settings, data, whole
        self._rewards: Rewards | None = None
        # Of the micro-batches that are to come, in order.
        self._sums: deque[Tensor] = deque()

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Return the data unchanged."""
        return context.data

    def metadata(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Return the data unchanged."""
        return data

    def example_row(self, tokens: Tensor) -> Batch:
        """The columns of a prompt that models read."""
        return dict.fromkeys(("input_ids", "labels", "position_ids"), tokens)

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """Return the micro-batches unchanged."""
        return batches

    def rolled_back(self) -> None:
        """Do nothing: no step depends on another."""

    def count(self, batch: Batch) -> Tensor:
        """The number of prompts."""
        return target_tokens(batch) if batch["labels"].is_meta else (batch["labels"] != IGNORE_INDEX).any(-1).sum()

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Answer and score the prompts. A reward's mean is over the answers that it has a value for, as in training."""
        if self._data is None:
            return
        assert self._whole is not None and self._generator is not None
        self._whole.update()
        self._generator.update_weights()
        tables = [self._scored(batch, processes.device) for batch in batches]
        rows = torch.cat(tables)
        totals = torch.stack([(~rows.isnan()).sum(0), torch.full(rows.shape[1:], rows.shape[0])])
        totals = totals.to(processes.device)
        if processes.world_size > 1:
            dist.all_reduce(totals)
        known, prompts = totals.cpu().double()
        share = prompts / known.clamp(min=1)
        self._sums = deque(table.nansum(0) * share for table in tables)

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """The negated rewards of the answers, and what they are made of, divided by the items of the whole step.

        Of the micro-batches that `before_step` has got, in order.
        """
        if batch["input_ids"].is_meta:
            return MicroBatchLoss(torch.zeros((), device=items.device), {})
        names = ("reward", *(f"reward/{term.title}" for term in self._settings.rewards), "answer_tokens", "finished")
        means = (self._sums.popleft().to(items.device) / items).float()
        return MicroBatchLoss(-means[0], dict(zip(names, means.unbind(), strict=True)))

    def _scored(self, batch: Batch, device: torch.device) -> Tensor:
        """[prompts, 3 + rewards], fp64: the reward of each answer, the values of rewards, NaN where there is none, its
        tokens, and whether it is finished.
        """
        assert self._data is not None and self._whole is not None and self._generator is not None
        if self._rewards is None:
            self._rewards = Rewards(self._settings.rewards, device)
        prompts = [prompt for prompt in prompts_of(batch) if prompt is not None]
        rows: list[list[float]] = []
        if prompts:
            tokenizer = self._data.tokenizer()
            sampling = sampling_of(self._settings.generation, self._data, self._whole.model, temperature=0.0)
            samples = self._generator.generate([Request(prompt.token_ids, 0) for prompt in prompts], sampling)
            values = self._rewards.score(answers_of(prompts, samples, tokenizer))
            for index, sample in enumerate(samples):
                own = [value[index] for value in values]
                total = total_of(self._rewards, self._settings, own, sample)
                known = [math.nan if value is None else value for value in own]
                rows.append([total, *known, sample.token_ids.numel(), sample.finished])
        return torch.tensor(rows, dtype=torch.float64).view(-1, 3 + len(self._settings.rewards))
