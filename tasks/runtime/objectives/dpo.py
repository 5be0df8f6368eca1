"""`dpo`: make the chosen of two answers likelier than under the reference model, and the rejected one less likely.

The formulas of its losses are those of `strata_kernels.preference`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata_kernels.preference import dpo_losses
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.objectives import Dpo as Settings
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch
from tasks.runtime.models.adapters.lora import without_adapter
from tasks.runtime.objectives.objective import MicroBatchLoss, ObjectiveContext
from tasks.runtime.objectives.pairs import PairObjective, Pairs, pairs_of
from tasks.runtime.objectives.reference import (
    disables_adapter,
    with_initial_log_probs,
    with_validation_log_probs,
)
from tasks.runtime.objectives.token_losses import frozen_log_probs, token_losses


class Dpo(PairObjective):
    """A DPO loss, averaged over pairs of answers.

    The batch has the log-probabilities of the reference model; with an adapter, the base model can compute them in each
    step instead.
    """

    def __init__(self, settings: Settings, adapter: Adapter, *, fused: bool) -> None:
        super().__init__(fused=fused)
        self._beta = settings.beta
        self._options = settings.model_dump(
            include={"loss", "beta", "label_smoothing", "discopop_tau"}, exclude_none=True
        )
        self._disables_adapter = disables_adapter(settings.reference, adapter)

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair."""
        # Log-ratios are log-probabilities against a reference that gives all answers the same.
        same = torch.zeros_like(pairs.chosen)
        return dpo_losses(
            pairs.chosen,
            pairs.rejected,
            same,
            same,
            chosen_tokens=pairs.chosen_tokens,
            rejected_tokens=pairs.rejected_tokens,
            **self._options,
        )

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Add the reference log-probabilities to the data, unless each step computes them without the adapter."""
        if self._disables_adapter:
            return context.data
        return with_initial_log_probs(context, lambda batch: self.scores(context.model, batch))

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Add log-probabilities of `model` to the validation rows that evaluation reads; drop the other rows."""
        return with_validation_log_probs(data, spec, model, lambda batch: self.scores(model, batch))

    def example_row(self, tokens: Tensor) -> Batch:
        """A row with `sides`, which tells the answers of a pair apart, and with `reference` if rows have it."""
        batch = super().example_row(tokens)
        return batch if self._disables_adapter else batch | {"reference": tokens.float()}

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """Loss and rewards of the batch's pairs, divided by the pairs of the whole step."""
        if "reference" not in batch:
            with without_adapter(model):
                batch = {**batch, "reference": self.log_probs(model, batch, max_targets)}
        log_ratios = -token_losses(model, batch, fused=self._fused, max_targets=max_targets) - batch["reference"]
        return self._means(pairs_of(log_ratios, batch), self.count(batch), items)

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Sums of `log_probs` over the answers of the batch, chosen and rejected in turn, then zeros: [D], fp64."""
        pairs = pairs_of(self.log_probs(model, batch), batch)
        return torch.stack([pairs.chosen, pairs.rejected], dim=1).flatten()

    def log_probs(self, model: nn.Module, batch: Batch, max_targets: int | None = None) -> Tensor:
        """Log-probability of the label that each position predicts, without dropout: [B, T], fp32."""
        return frozen_log_probs(model, batch, fused=self._fused, max_targets=max_targets)
