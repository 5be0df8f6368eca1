"""`kto`: raise answers that are labelled good above the reference model, and lower bad ones below it.

    r = log p(answer | prompt) - log p_reference(answer | prompt)
    good   loss = w_good (1 - s(β (r - KL)))        bad   loss = w_bad (1 - s(β (KL - r)))

with s the sigmoid and β a scale. KL = max(0, mean of r over prompts with another row's answer) is one number for all
answers of a step and has no gradient. `apo_zero_unpaired` sets it to 0. The formulas are those of
`strata_kernels.preference`.

Which answers are mismatched is decided by the prepared rows, and the mean is over the micro-batches of all ranks. So
the KL of a step, like its loss, depends on neither. It takes a forward pass over the step before the first backward
pass, and one more of the reference model, unless its log-probabilities are in the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata_kernels.preference import kto_losses
from strata_kernels.row_buckets import row_bucket
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.objectives import Kto as Settings
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import MISMATCHED, Batch
from tasks.runtime.models.adapters.lora import without_adapter
from tasks.runtime.models.attention.varlen_attention import add_cu_seqlens
from tasks.runtime.objectives.answers import begins, count_answers, sum_by_answer
from tasks.runtime.objectives.objective import MicroBatchLoss, ObjectiveContext, model_inputs, target_tokens
from tasks.runtime.objectives.reference import (
    disables_adapter,
    with_initial_log_probs,
    with_validation_log_probs,
)
from tasks.runtime.objectives.token_losses import frozen_log_probs, token_losses
from tasks.runtime.process.ranks import Processes

_COLUMNS = ("input_ids", "labels", "position_ids", "sides")


class Kto:
    """The KTO loss, averaged over answers.

    The batch has the log-probabilities of the reference model; with an adapter, the base model can compute them in each
    step instead.
    """

    unit = "per answer"

    def __init__(self, settings: Settings, adapter: Adapter, *, fused: bool) -> None:
        self._settings, self._fused = settings, fused
        self._options = settings.model_dump(include={"loss", "beta", "desirable_weight", "undesirable_weight"})
        self._disables_adapter = disables_adapter(settings.reference, adapter)
        self._step: Tensor | None = None

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Add the reference log-probabilities to the data, unless each step computes them without the adapter."""
        if self._disables_adapter:
            return context.data
        return with_initial_log_probs(context, lambda batch: self.scores(context.model, batch))

    def metadata(self) -> dict[str, Any]:
        """Empty: the data and the base weights have their own metadata."""
        return {}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Add log-probabilities of `model` to the validation rows that evaluation reads; drop the other rows."""
        return with_validation_log_probs(data, spec, model, lambda batch: self.scores(model, batch))

    def example_row(self, tokens: Tensor) -> Batch:
        """A row with `sides`, its mismatched columns, and with `reference` if rows have it."""
        row = dict.fromkeys(_COLUMNS, tokens)
        row |= {} if self._disables_adapter else {"reference": tokens.float()}
        return row | {f"{MISMATCHED}{name}": tensor for name, tensor in row.items()}

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """Return the micro-batches unchanged."""
        return batches

    def rolled_back(self) -> None:
        """Do nothing: no step depends on another."""

    def count(self, batch: Batch) -> Tensor:
        """The number of answers."""
        return count_answers(batch, 1) + count_answers(batch, -1)

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Estimate the KL divergence of the step's micro-batches. A collective.

        `max_targets`: of meta tensors, whose labels have no values.
        """
        total = torch.zeros(3, dtype=torch.float64, device=processes.device)
        for batch in batches:
            counts = torch.stack([count_answers(batch, side) for side in (1, -1)])
            planned = batch["input_ids"].is_meta
            total[1:] += 0.0 if planned else counts.to(processes.device)
            if self._settings.loss != "kto":
                continue
            other, bound = mismatched(batch), max_targets
            if not planned:
                bound = row_bucket(int(target_tokens(other)), other["input_ids"].numel())
                other = {name: tensor.to(processes.device, non_blocking=True) for name, tensor in other.items()}
            growth = self._growth(model, other, bound).sum()
            total[0] += 0.0 if planned else growth
        if processes.world_size > 1:
            dist.all_reduce(total)
            # Ranks of a tensor-parallel group have computed the same rows.
            total /= processes.tp_size
        grown, good, bad = total.unbind()
        kl = (grown / (good + bad).clamp(min=1.0)).clamp(min=0.0)
        # Means over the good and over the bad answers are sums over all answers, times these factors.
        scales = (good + bad) / torch.stack([good, bad]).clamp(min=1.0)
        self._step = torch.cat([kl[None], scales])

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """Loss and rewards of the batch's answers, divided by the answers of the whole step."""
        assert self._step is not None, "before_step comes first"
        settings, answers = self._settings, batch["sides"] != 0
        kl, *scales = self._step.to(answers.device).unbind()
        if "reference" not in batch:
            batch = {**batch, "reference": self._reference(model, batch, max_targets)}
        log_ratios = -token_losses(model, batch, fused=self._fused, max_targets=max_targets) - batch["reference"]
        # A document has at least two tokens.
        room = answers.numel() // 2
        growth = sum_by_answer(log_ratios, batch, answers, room)
        # 1, -1, and 0 behind the last answer: only the device knows their number.
        label = sum_by_answer(batch["sides"].where(begins(batch), 0), batch, answers, room)
        losses = kto_losses(growth, torch.zeros_like(growth), label > 0, kl, **self._options)
        reward = (settings.beta * growth).detach()
        chosen, rejected = (
            (reward.where(here, 0.0).sum() * scale) for here, scale in zip((label > 0, label < 0), scales, strict=True)
        )
        metrics = {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
            "reward_accuracy": (label * (growth - kl) > 0).sum(),
            "kl": kl * self.count(batch),
        }
        loss = losses.where(label != 0, 0.0).sum() / items
        return MicroBatchLoss(loss.float(), {name: (value.detach() / items).float() for name, value in metrics.items()})

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Log-probabilities of the answers of the batch and of their prompts' mismatched ones, then zeros: [D, 2],
        fp64.
        """
        found = [self._sums(self._log_probs(model, part), part) for part in (batch, mismatched(batch))]
        return torch.stack(found, dim=1)

    def _growth(self, model: nn.Module, batch: Batch, max_targets: int | None) -> Tensor:
        """Log-ratios of the answers of a batch, without gradients: [D], fp64."""
        values = self._log_probs(model, batch, max_targets)
        if "reference" not in batch:
            batch = {**batch, "reference": self._reference(model, batch, max_targets)}
        return self._sums(values - batch["reference"], batch)

    def _reference(self, model: nn.Module, batch: Batch, max_targets: int | None) -> Tensor:
        with without_adapter(model):
            return self._log_probs(model, batch, max_targets)

    def _log_probs(self, model: nn.Module, batch: Batch, max_targets: int | None = None) -> Tensor:
        return frozen_log_probs(model, batch, fused=self._fused, max_targets=max_targets)

    @staticmethod
    def _sums(values: Tensor, batch: Batch) -> Tensor:
        return sum_by_answer(values, batch, batch["sides"] != 0, values.numel() // 2)


def mismatched(batch: Batch) -> Batch:
    """The batch of the same prompts with other completions."""
    found = {name.removeprefix(MISMATCHED): tensor for name, tensor in batch.items() if name.startswith(MISMATCHED)}
    if batch["input_ids"].is_meta:
        return {**model_inputs(batch), **found}
    if "cu_seqlens" not in batch:
        return found
    # They are computed on the host. Before training, the reference's batches are on the device already.
    device = batch["input_ids"].device
    found = add_cu_seqlens({name: tensor.cpu() for name, tensor in found.items()})
    return {name: tensor.to(device) for name, tensor in found.items()}
