"""Log-probabilities and entropies of generated tokens, for objectives that learn from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strata_kernels import LogProbsAndEntropy, linear_logprobs_with_entropy
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch
from tasks.runtime.objectives.objective import model_inputs, next_labels


def answer_log_probs(
    model: nn.Module, batch: Batch, *, temperature: float, fused: bool, max_targets: int | None = None
) -> LogProbsAndEntropy:
    """Log-probability of the label that each position predicts, and the entropy of its distribution: two [B, T], fp32;
    0 without a label. Both are of logits over `temperature`.

    With `fused`, the patched model materializes no logits and computes at most `max_targets` positions.
    """
    labels = next_labels(batch)
    if not fused:
        logits: Tensor = model(**model_inputs(batch)).logits
        learned = labels != IGNORE_INDEX
        log_p = (logits.float() / temperature).log_softmax(-1)
        log_probs = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(learned, 0.0)
        return LogProbsAndEntropy(log_probs, -(log_p.exp() * log_p).sum(-1).where(learned, 0.0))

    def both(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
        found = linear_logprobs_with_entropy(
            hidden, weight, labels, bias=bias, softcap=softcap, temperature=temperature, max_targets=max_targets
        )
        # The model returns one tensor. The entropy is only told.
        return torch.stack([found.log_probs, found.entropy.detach()])

    output: Any = model(**model_inputs(batch), head_loss=both)
    log_probs, entropy = output.loss.unbind()
    return LogProbsAndEntropy(log_probs, entropy)


@torch.no_grad()
def frozen_answer_log_probs(
    model: nn.Module, batch: Batch, *, temperature: float, fused: bool, max_targets: int | None = None
) -> Tensor:
    """The log-probabilities of `answer_log_probs`, without gradients and dropout."""
    training = model.training
    model.eval()
    try:
        found = answer_log_probs(model, batch, temperature=temperature, fused=fused, max_targets=max_targets)
    finally:
        model.train(training)
    return found.log_probs
