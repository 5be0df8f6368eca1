"""TRL's own trainers as functions of log-probabilities, so that ours can be compared with them.

A trainer's loss function runs on a stand-in for the trainer that has its settings, and on a model that returns given
log-probabilities. Everything between is TRL's code.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    # TRL's of what is experimental, and its own of what is deprecated in the libraries below.
    warnings.simplefilter("ignore")
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer


def _trainer(device: torch.device, **settings: Any) -> Any:
    accelerator = SimpleNamespace(
        device=device,
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def _model(log_probs: Tensor, mask: Tensor) -> Any:
    noise = torch.zeros_like(log_probs.detach())
    outputs = SimpleNamespace(
        log_probs=log_probs.where(mask, 0.0), entropy=noise, mean_logits=noise, is_top1=noise.bool()
    )
    return lambda **_: outputs


def _with_prompt(mask: Tensor) -> Tensor:
    """One more token in front, which is no answer's."""
    return torch.nn.functional.pad(mask.long(), (1, 0))


def dpo(log_probs: Tensor, reference: Tensor, mask: Tensor, **settings: Any) -> Tensor:
    """The mean loss over pairs; all [2 B, T], the chosen answers first, 0 where not masked."""
    chosen, rejected = reference.sum(1).chunk(2)
    completion = _with_prompt(mask)
    inputs = {
        "input_ids": completion, "completion_mask": completion, "attention_mask": completion,
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    trainer = _trainer(
        mask.device, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False,
        loss_types=[settings["loss"]], loss_weights=[1.0], beta=settings["beta"],
        label_smoothing=settings["label_smoothing"], args=SimpleNamespace(discopop_tau=settings["discopop_tau"]),
    )  # fmt: skip
    return DPOTrainer._compute_loss(trainer, _model(log_probs, mask), inputs, False)


def cpo(chosen: Tensor, rejected: Tensor, *, loss: str, beta: float, label_smoothing: float, gamma: float = 0.0) -> Any:
    """Losses [B] of log-probabilities [B]; per token for ipo and simpo."""
    trainer = _trainer(
        chosen.device, alpha=0.0, loss_type=loss, beta=beta, label_smoothing=label_smoothing, simpo_gamma=gamma
    )
    return CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """What TRL subtracts from the negative log-likelihood, [B], of log-probabilities per token [B]."""
    return ORPOTrainer.odds_ratio_loss(_trainer(chosen.device, beta=beta), chosen, rejected)[0]


def kto(
    log_probs: Tensor, reference: Tensor, mask: Tensor, desirable: Tensor, kl: Tensor, reference_kl: Tensor,
    *, loss: str, beta: float, desirable_weight: float, undesirable_weight: float,
) -> Tensor:  # fmt: skip
    """The mean loss over answers; tokens [B, T], `kl` and `reference_kl` [B] of the answers of other prompts."""
    completion = _with_prompt(mask)
    inputs = {
        "input_ids": completion, "completion_mask": completion, "attention_mask": completion, "label": desirable,
        "ref_logps": reference.sum(1), "ref_KL_logps": reference_kl,
    }  # fmt: skip
    trainer = _trainer(
        mask.device, precompute_ref_logps=True, calculate_KL=loss == "kto", loss_type=loss, beta=beta,
        desirable_weight=desirable_weight, undesirable_weight=undesirable_weight,
        _compute_kl_logps=lambda model, batch: kl,
    )  # fmt: skip
    return KTOTrainer._compute_loss(trainer, _model(log_probs, mask), inputs, False)


def grpo(
    log_probs: Tensor, mask: Tensor, advantages: Tensor, old: Tensor | None, reference: Tensor | None,
    importance_weights: Tensor | None, items: Tensor, *, loss: str, beta: float, epsilon_low: float,
    epsilon_high: float, delta: float | None, sapo_temperatures: tuple[float, float], max_tokens: int,
) -> Tensor:  # fmt: skip
    """The loss of answers [B, T] with advantages [B]; `items` are the tokens of the step."""
    prompt = torch.ones(len(mask), 1, dtype=torch.int64, device=mask.device)
    inputs = {
        "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask.long(), "completion_mask": mask.long(),
        "advantages": advantages, "num_items_in_batch": items,
    }  # fmt: skip
    given = {
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": importance_weights,
    }
    inputs |= {name: value for name, value in given.items() if value is not None}
    low, high = sapo_temperatures[1], sapo_temperatures[0]
    trainer = _trainer(
        mask.device, _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=beta,
        loss_type="grpo" if loss == "gspo" else loss,
        importance_sampling_level="sequence" if loss == "gspo" else "token",
        epsilon_low=epsilon_low, epsilon_high=epsilon_high, max_completion_length=max_tokens,
        args=SimpleNamespace(
            delta=delta, use_bias_correction_kl=False, sapo_temperature_pos=high, sapo_temperature_neg=low,
            steps_per_generation=1,
        ),
        use_vllm=importance_weights is not None, vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
    )  # fmt: skip
    return GRPOTrainer._compute_loss(trainer, None, inputs)
