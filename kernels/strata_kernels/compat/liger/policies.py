"""Liger's losses of policy optimization (GRPO and variants), from hidden states or materialized logits.

Formulas: `strata_kernels.policy`. `chunk_size`, `compiled` and `inplace` are ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...ops.cross_entropy.selective_log_softmax import selective_log_softmax
from ...ops.linear_cross_entropy.linear_logprobs import linear_logprobs
from ...policy import policy_losses
from .options import WithOptions

# (k, lambda) of vespo for non-negative advantages, then for negative ones.
_Gamma = tuple[float, float, float, float]
_OF_TOKENS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True)
class _Policy:
    """Common options of Liger's functions, with Liger's names."""

    beta: float
    epsilon_low: float
    epsilon_high: float
    loss_type: str
    importance_sampling_level: str
    sapo_temperatures: tuple[float, float]
    delta: float | None
    use_bias_correction_kl: bool
    max_completion_length: int | None = None
    num_items_in_batch: int | Tensor | None = None
    gamma: _Gamma = field(default=(2.0, 3.0, 3.0, 2.0))

    def __post_init__(self) -> None:
        if self.loss_type not in (*_OF_TOKENS, "cispo", "sapo", "vespo"):
            raise ValueError(f"Unknown loss type: {self.loss_type}")
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"Unknown importance sampling level: {self.importance_sampling_level}. Possible values are 'token' and "
                "'sequence'."
            )
        if self.importance_sampling_level == "sequence" and self.loss_type not in _OF_TOKENS:
            raise ValueError(
                f"Sequence-level importance sampling is not supported for loss_type='{self.loss_type}'. Use "
                "importance_sampling_level='token' instead."
            )
        if self.loss_type == "sapo" and min(self.sapo_temperatures) <= 0:
            raise ValueError(f"sapo_temperature must be positive, got {self.sapo_temperatures}")
        if self.delta is not None and self.delta <= 0:
            raise ValueError(f"delta must be positive, got {self.delta}")
        if self.delta is not None and self.loss_type not in _OF_TOKENS:
            raise ValueError(
                f"delta (two-sided clipping) is not supported for loss_type='{self.loss_type}', which does not clip "
                "on two sides; leave it out"
            )


@dataclass(frozen=True)
class _Terms:
    """[B, T] each: losses, KL terms, and whether the ratio is clipped."""

    loss: Tensor
    kl: Tensor
    clipped: Tensor


def _vespo_weight(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, sampling: Tensor | None, gamma: _Gamma
) -> Tensor:
    """e^lambda w^k e^(-lambda w) [B, 1], w the ratio of the answer, without gradient."""
    log_w = (log_ratio.detach().clamp(-20.0, 20.0) * mask).sum(-1, keepdim=True)
    if sampling is not None:
        log_w = log_w + sampling.log().clamp(math.log(1e-8), 20.0).sum(-1, keepdim=True)
    log_w = log_w.clamp(math.log(1e-8), 20.0)
    positive = advantages[:, None] >= 0
    k, rate = (torch.where(positive, gamma[i], gamma[i + 2]) for i in (0, 1))
    rate = rate.clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


def _terms(
    log_probs: Tensor, mask: Tensor, advantages: Tensor, reference: Tensor | None, old: Tensor | None,
    sampling: Tensor | None, policy: _Policy,
) -> _Terms:  # fmt: skip
    """Terms for log_probs [B, T]; sampling: [B, 1] or [B, T]."""
    old = log_probs.detach() if old is None else old.float()
    log_ratio = log_probs - old
    by_answer = policy.importance_sampling_level == "sequence"
    if by_answer:
        # The ratio of the answer, for each of its tokens.
        lengths = mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = ((log_ratio * mask).sum(-1, keepdim=True) / lengths).expand_as(log_probs)
    if policy.loss_type == "vespo":
        weight = _vespo_weight(log_ratio, advantages, mask, sampling, policy.gamma)
        loss, clipped = -weight * advantages[:, None] * log_probs, torch.zeros_like(log_probs)
    else:
        answers = torch.arange(len(advantages), device=log_probs.device)[:, None].expand_as(log_probs)
        kind: Any = "grpo" if policy.loss_type in _OF_TOKENS else policy.loss_type
        # cispo multiplies log_probs, and has no ratio of an answer.
        given, before = (log_ratio, torch.zeros_like(log_ratio)) if by_answer else (log_probs, old)
        found = policy_losses(
            given.flatten(), advantages, answers.flatten(), loss=kind, old_log_probs=before.flatten(),
            epsilon_low=policy.epsilon_low, epsilon_high=policy.epsilon_high,
            delta=policy.delta, sapo_temperatures=policy.sapo_temperatures,
        )  # fmt: skip
        loss, clipped = found.loss.view(log_probs.shape), found.clipped.view(log_probs.shape)
        loss = loss if sampling is None else loss * sampling
    kl = torch.zeros_like(log_probs)
    if policy.beta:
        difference = (log_probs.detach() if reference is None else reference.float()) - log_probs
        kl = difference.exp() - difference - 1
        kl = kl * log_ratio.exp() if policy.use_bias_correction_kl else kl
        loss = loss + policy.beta * kl
    return _Terms(loss, kl, clipped)


def _processes() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1


def _reduced(loss: Tensor, mask: Tensor, policy: _Policy) -> Tensor:
    """Reduce losses [B, T] to a scalar."""
    kept, kind = loss * mask, policy.loss_type
    if kind in ("grpo", "sapo"):
        return (kept.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    if kind == "bnpo":
        return kept.sum() / mask.sum().clamp(min=1)
    if kind == "dr_grpo":
        if policy.max_completion_length is None:
            raise ValueError("max_completion_length must be provided for loss_type 'dr_grpo'")
        return kept.sum() / (loss.shape[0] * policy.max_completion_length)
    if kind == "luspo":
        # Not masked, as in TRL.
        return (loss * mask.sum(-1, keepdim=True)).mean()
    items, processes = policy.num_items_in_batch, _processes()
    if items is None:
        items = mask.sum()
        if processes > 1:
            torch.distributed.all_reduce(items)
    return kept.sum() / (torch.as_tensor(items, device=loss.device).float() / processes).clamp(min=1)


def _figures(terms: _Terms, mask: Tensor, policy: _Policy) -> tuple[Tensor, ...]:
    """Means over tokens, without gradient: of the KL terms if beta is not 0, and of `clipped`."""
    shown = (terms.kl, terms.clipped) if policy.beta else (terms.clipped,)
    return tuple((values.detach() * mask).sum() / mask.sum().clamp(min=1) for values in shown)


def _where_masked(values: Tensor | None, log_probs: Tensor, mask: Tensor) -> Tensor | None:
    """`values`, log-probabilities of another policy; for masked tokens `log_probs`, so that the ratio is 1."""
    return None if values is None else values.float().where(mask.bool(), log_probs.detach())


def _sampling(ratio: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The ratio as [B, 1] or [B, T]; it may be [B]."""
    if ratio is None:
        return None
    wide = ratio[:, None] if ratio.dim() == 1 else ratio
    if wide.dim() != 2 or wide.shape[0] != shape[0] or wide.shape[1] not in (1, shape[1]):
        # AssertionError, as in Liger.
        raise AssertionError(f"vllm_is_ratio must be [B], [B, 1] or [B, T], got {list(ratio.shape)}")
    return wide.float()


class LigerFusedLinearGRPOFunction:
    """`linear_logprobs`, then a loss of policy optimization."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor,
        bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, beta: float = 0.04, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
        loss_type: str = "dapo", max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1, vllm_is_ratio: Tensor | None = None,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: int | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """_input: [B, T, H], tokens and mask: [B, T], advantages: [B] → the loss and Liger's metrics."""
        policy = _Policy(
            beta, epsilon_low, epsilon_high, loss_type, importance_sampling_level,
            (sapo_temperature_pos, sapo_temperature_neg), delta, use_bias_correction_kl, max_completion_length,
            num_items_in_batch, (vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        )  # fmt: skip
        mask = attention_mask.float()
        # Only luspo uses masked tokens.
        target = selected_token_ids if loss_type == "luspo" else selected_token_ids.where(attention_mask.bool(), -100)
        log_probs = linear_logprobs(_input, weight, target, bias=bias, temperature=temperature)
        reference = ref_per_token_logps if use_ref_model else None
        if use_ref_model and reference is None:
            assert ref_input is not None and ref_weight is not None, (
                "use_ref_model needs ref_per_token_logps or ref_input"
            )
            with torch.no_grad():
                reference = linear_logprobs(ref_input, ref_weight, target, bias=ref_bias, temperature=temperature)
        old = old_per_token_logps
        if loss_type != "luspo":
            reference, old = (_where_masked(t, log_probs, mask) for t in (reference, old))
        sampling = _sampling(vllm_is_ratio, mask.shape)
        terms = _terms(log_probs, mask, advantages.float(), reference, old, sampling, policy)
        return _reduced(terms.loss, mask, policy), _figures(terms, mask, policy)


class LigerFusedLinearGRPOLoss(WithOptions):
    """`LigerFusedLinearGRPOFunction` as a module."""

    function: Any = LigerFusedLinearGRPOFunction
    defaults = {  # noqa: RUF012
        "beta": 0.04, "compiled": True, "use_ref_model": True, "chunk_size": 1, "epsilon_low": 0.2, "epsilon_high": 0.2,
        "loss_type": "dapo", "max_completion_length": None, "importance_sampling_level": "token",
        "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "temperature": 1.0, "delta": None,
        "use_bias_correction_kl": False, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the function's `apply`."""
        result: tuple[Tensor, tuple[Tensor, ...]] = self.call(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
        return result


def triton_grpo_loss(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None = None, temperature: float = 0.9, beta: float = 0.04, eps_low: float = 0.2,
    eps_high: float = 0.4, inplace: bool = True, loss_type: str = "dapo", max_completion_length: int | None = None,
    importance_sampling_level: str = "token", reduce: bool = False, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
    use_bias_correction_kl: bool = False, num_items_in_batch: int | Tensor | None = None, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> tuple[Any, ...]:  # fmt: skip
    """A loss of policy optimization from logits [B, T + 1, V], by `selective_log_softmax`.

    Returns the loss and a list of metrics; without `reduce`, losses, KL terms (None if beta is 0) and clipping flags,
    each [B, T].
    """
    policy = _Policy(
        beta, eps_low, eps_high, loss_type, importance_sampling_level, (sapo_temperature_pos, sapo_temperature_neg),
        delta, use_bias_correction_kl, max_completion_length or completion_ids.shape[1], num_items_in_batch,
        (vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
    )  # fmt: skip
    log_probs = selective_log_softmax(logits[:, :-1], completion_ids, temperature=temperature)
    mask = torch.ones_like(log_probs) if completion_mask is None else completion_mask.float()
    sampling = _sampling(vllm_is_ratio, mask.shape)
    reference, old = (_where_masked(t, log_probs, mask) for t in (ref_logp, old_logp))
    terms = _terms(log_probs, mask, advantages.float(), reference, old, sampling, policy)
    if reduce:
        return _reduced(terms.loss * mask, mask, policy), list(_figures(terms, mask, policy))
    return terms.loss * mask, (terms.kl.detach() * mask if beta else None), terms.clipped * mask


liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply
