"""`dpo`: make the chosen of two answers likelier than under the reference model, and the rejected one less likely.

    r = log p(answer | prompt) - log p_reference(answer | prompt)
    sigmoid    loss = -(1 - ε) log sigma(β (r_chosen - r_rejected)) - ε log sigma(-β (r_chosen - r_rejected))
    ipo        loss = (r_chosen / tokens_chosen - r_rejected / tokens_rejected - 1 / (2β))²

with ε the label smoothing. Sources: Rafailov et al. (arXiv:2305.18290), Azar et al. (arXiv:2310.12036). For IPO the
log-ratios are per token, as its authors advise; otherwise long answers would weigh more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from strata_platform.spec import RunSpec
from strata_platform.spec.model import Lora
from strata_platform.spec.objectives import Dpo as Settings
from strata_platform.spec.run_spec import Adapter
from tasks.runtime.data import PreparedData, collator
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch
from tasks.runtime.models.lora import without_adapter
from tasks.runtime.objectives.objective import MicroBatchLoss, ObjectiveContext, next_labels
from tasks.runtime.objectives.reference import score_rows, with_reference_log_probs
from tasks.runtime.objectives.token_losses import token_losses
from tasks.runtime.process.ranks import Processes


class Dpo:
    """The DPO loss, averaged over pairs of answers.

    The batch has the log-probabilities of the reference model; with an adapter, the base model can compute them in each
    step instead.
    """

    unit = "per pair"

    def __init__(self, settings: Settings, adapter: Adapter, *, fused: bool) -> None:
        self._settings, self._fused = settings, fused
        is_reference = isinstance(adapter, Lora) and adapter.starts_from_base
        self._disables_adapter = is_reference and settings.reference != "precomputed"

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Add the reference log-probabilities to the data, unless each step computes them without the adapter."""
        if self._disables_adapter:
            return context.data
        score = lambda batch: self.scores(context.model, batch)  # noqa: E731
        data = with_reference_log_probs(context, score)
        if context.spec.evaluation.every is None:
            return data
        return with_reference_log_probs(replace(context, data=data), score, split="validation")

    def metadata(self) -> dict[str, Any]:
        """Empty: the data and the base weights have their own metadata."""
        return {}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Add log-probabilities of `model` to the validation rows that evaluation reads; drop the other rows."""
        rows, size = data.validation, spec.training.micro_batch_size
        limit = spec.evaluation.max_batches
        # With several sources, evaluation reads the first rows of each.
        read = len(rows) if limit is None or data.manifest.sources else min(len(rows), size * limit)
        collate = collator(spec.model.attention)
        found = score_rows(rows, read, lambda batch: self.scores(model, batch), Processes(), size, collate)
        assert found is not None
        return data.with_reference_log_probs(validation=found)

    def example_row(self, tokens: Tensor) -> Batch:
        """A row with `sides`, which tells the answers of a pair apart, and with `reference` if rows have it."""
        batch = dict.fromkeys(("input_ids", "labels", "position_ids", "sides"), tokens)
        return batch if self._disables_adapter else batch | {"reference": tokens.float()}

    def count(self, batch: Batch) -> Tensor:
        """The number of pairs."""
        return (_begins(batch) & (batch["sides"] == 1)).sum()

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """Loss and rewards of the batch's pairs, divided by the pairs of the whole step."""
        if "reference" not in batch:
            with without_adapter(model):
                batch = {**batch, "reference": self.log_probs(model, batch, max_targets)}
        log_ratios = -token_losses(model, batch, fused=self._fused, max_targets=max_targets) - batch["reference"]
        chosen, rejected = (_sum_by_answer(log_ratios, batch, side) for side in (1, -1))
        losses = self._losses(chosen, rejected, batch)
        # The tensors have space for more pairs than there are, because only the device knows their number.
        real = torch.arange(losses.numel(), device=losses.device) < self.count(batch)
        beta = self._settings.beta
        metrics = {
            "reward_chosen": beta * chosen,
            "reward_rejected": beta * rejected,
            "reward_margin": beta * (chosen - rejected),
            "reward_accuracy": (chosen > rejected).double(),
        }
        return MicroBatchLoss(
            (losses.where(real, 0.0).sum() / items).float(),
            {name: (value.detach().where(real, 0.0).sum() / items).float() for name, value in metrics.items()},
        )

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Sums of `log_probs` over the answers of the batch, chosen and rejected in turn, then zeros: [D], fp64."""
        values = self.log_probs(model, batch)
        return torch.stack([_sum_by_answer(values, batch, side) for side in (1, -1)], dim=1).flatten()

    @torch.no_grad()
    def log_probs(self, model: nn.Module, batch: Batch, max_targets: int | None = None) -> Tensor:
        """Log-probability of the label that each position predicts, without dropout: [B, T], fp32."""
        training = model.training
        model.eval()
        try:
            return -token_losses(model, batch, fused=self._fused, max_targets=max_targets)
        finally:
            model.train(training)

    def _losses(self, chosen: Tensor, rejected: Tensor, batch: Batch) -> Tensor:
        beta, smoothing = self._settings.beta, self._settings.label_smoothing
        if self._settings.loss == "ipo":
            learned = (next_labels(batch) != IGNORE_INDEX).float()
            tokens = [_sum_by_answer(learned, batch, side).clamp(min=1.0) for side in (1, -1)]
            return (chosen / tokens[0] - rejected / tokens[1] - 0.5 / beta).square()
        z = beta * (chosen - rejected)
        return -(1.0 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def _begins(batch: Batch) -> Tensor:
    return batch["position_ids"] == 0


def _sum_by_answer(values: Tensor, batch: Batch, side: int) -> Tensor:
    """Sums over each answer of a side, in order, then zeros: [B T // 4], since a pair has at least four tokens.

    In fp64: the sums are differences of large numbers, and must not depend on the order in which a GPU adds them.
    """
    here = (batch["sides"] == side).flatten()
    room = here.numel() // 4
    number = (_begins(batch).flatten() & here).cumsum(0) - 1
    sums = values.new_zeros(room + 1, dtype=torch.float64)
    return sums.index_add(0, number.where(here, room), values.flatten().double())[:room]
