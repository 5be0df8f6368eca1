"""`reward`: score the chosen of two answers higher than the rejected one (Bradley-Terry).

    loss = -log s(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)²

with r the score of a prompt with its answer, s the sigmoid and c the coefficient of centering. Sources: Ouyang et al.
(arXiv:2203.02155), Touvron et al. (arXiv:2307.09288) for the margin, Eisenstein et al. (arXiv:2312.09244) for c.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from strata_platform.spec.sections.objectives import Reward as Settings
from tasks.runtime.data.dataset import Batch
from tasks.runtime.objectives.answers import sum_by_answer
from tasks.runtime.objectives.objective import MicroBatchLoss, model_inputs
from tasks.runtime.objectives.pairs import PairObjective, Pairs, pairs_of


class Reward(PairObjective):
    """The loss of a reward model, averaged over pairs of answers. The model is one of `score_positions`."""

    _beta = 1.0

    def __init__(self, settings: Settings) -> None:
        super().__init__(fused=False)
        self._coefficient = settings.center_coefficient

    def example_row(self, tokens: Tensor) -> Batch:
        """A row with `sides`, the positions that are scored, and margins."""
        return super().example_row(tokens) | {"scored": tokens, "margin": tokens.float()}

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """Loss and scores of the batch's pairs, divided by the pairs of the whole step."""
        scores: Tensor = model(**model_inputs(batch)).logits
        scores = scores.where(batch["scored"] != 0, 0.0)
        pairs = pairs_of(scores, batch)
        self._margins = sum_by_answer(batch["margin"], batch, batch["sides"] == 1, pairs.chosen.numel())
        return self._means(pairs, self.count(batch), items)

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair."""
        losses = -logsigmoid(pairs.chosen - pairs.rejected - self._margins)
        return losses + self._coefficient * (pairs.chosen + pairs.rejected).square()
