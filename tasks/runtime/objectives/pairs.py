"""What objectives over pairs of answers share: the answers of a batch, means over pairs, and their metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch
from tasks.runtime.objectives.answers import count_answers, sum_by_answer
from tasks.runtime.objectives.objective import MicroBatchLoss, ObjectiveContext, next_labels
from tasks.runtime.objectives.token_losses import token_losses
from tasks.runtime.process.ranks import Processes


class Pairs(NamedTuple):
    """Sums over the tokens of each answer, and their numbers: four tensors [P], fp64.

    The sums are log-probabilities, or log-ratios to a reference.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    def per_token(self) -> tuple[Tensor, Tensor]:
        """The means over the tokens of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


class PairObjective:
    """An objective that averages over pairs of answers. A subclass has `losses`, and `rewards` if they are others.

    The values of a token are its log-probabilities; a subclass may make others of them.
    """

    unit = "per pair"
    _beta: float

    def __init__(self, *, fused: bool) -> None:
        self._fused = fused

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair: [P], finite for pairs of zeros, which fill up the tensors."""
        raise NotImplementedError

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """The rewards of chosen and rejected answers, each [P]."""
        return self._beta * pairs.chosen, self._beta * pairs.rejected

    def metrics(self, pairs: Pairs) -> dict[str, Tensor]:
        """Further values of each pair to log, each [P]."""
        return {}

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Return the data unchanged."""
        return context.data

    def metadata(self) -> dict[str, Any]:
        """Empty: the data and the base weights have their own metadata."""
        return {}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Return the data unchanged."""
        return data

    def example_row(self, tokens: Tensor) -> Batch:
        """A row with `sides`, which tells the answers of a pair apart."""
        return dict.fromkeys(("input_ids", "labels", "position_ids", "sides"), tokens)

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """Return the micro-batches unchanged."""
        return batches

    def rolled_back(self) -> None:
        """Do nothing: no step depends on another."""

    def count(self, batch: Batch) -> Tensor:
        """The number of pairs."""
        return count_answers(batch, 1)

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Do nothing."""

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """Loss and rewards of the batch's pairs, divided by the pairs of the whole step."""
        values = -token_losses(model, batch, fused=self._fused, max_targets=max_targets)
        return self._means(pairs_of(values, batch), self.count(batch), items)

    def _means(self, pairs: Pairs, count: Tensor, items: Tensor) -> MicroBatchLoss:
        chosen, rejected = (reward.detach() for reward in self.rewards(pairs))
        metrics = {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
            "reward_accuracy": (chosen > rejected).double(),
            **self.metrics(pairs),
        }
        losses = self.losses(pairs)
        # The tensors have space for more pairs than there are, because only the device knows their number.
        real = torch.arange(losses.numel(), device=losses.device) < count
        return MicroBatchLoss(
            (losses.where(real, 0.0).sum() / items).float(),
            {name: (value.detach().where(real, 0.0).sum() / items).float() for name, value in metrics.items()},
        )


def pairs_of(values: Tensor, batch: Batch) -> Pairs:
    """The pairs of a batch by the values of its tokens [B, T]; pairs of zeros follow. A pair has at least four
    tokens.
    """
    room = values.numel() // 4
    learned = (next_labels(batch) != IGNORE_INDEX).float()
    sides = [batch["sides"] == side for side in (1, -1)]
    sums = (sum_by_answer(values, batch, here, room) for here in sides)
    return Pairs(*sums, *(sum_by_answer(learned, batch, here, room).clamp(min=1.0) for here in sides))
