"""Whether an engine has the weights and the forward pass of the model in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.runtime.generation.embedded import without_training
from tasks.runtime.generation.generator import Request, Sample, Sampling

# Tokens that are compared, at most.
_TOKENS = 64
# Of the mean difference, well above that of rounding: 1e-6 and 1e-2.
_LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.2, torch.float16: 0.2}


class FirstAnswer:
    """Compares the first answer that an engine draws after each start. dtype: of the engine."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._model, self._dtype, self._compared = model, dtype, False

    def compare(self, requests: Sequence[Request], samples: Sequence[Sample], sampling: Sampling) -> None:
        """Raises ValueError if the engine has other weights than the model, or computes it otherwise."""
        if not self._compared and samples and sampling.temperature > 0:
            self._compared = True
            require_same_log_probs(self._model, requests[0], samples[0], sampling.temperature, self._dtype)


@torch.no_grad()
def require_same_log_probs(
    model: PreTrainedModel, request: Request, sample: Sample, temperature: float, dtype: torch.dtype
) -> None:
    """Compare log-probabilities that an engine reports with those of `model`, which has the same weights.

    dtype: of the engine.

    Raises:
        ValueError: they are too far apart to be rounding.
    """
    answer, reported = sample.token_ids[:_TOKENS].to(model.device), sample.log_probs[:_TOKENS]
    ids = torch.cat([torch.tensor(request.prompt, device=model.device), answer])[None]
    with without_training(model):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    own = (logits[0, len(request.prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    difference = float((own.gather(-1, answer[:, None])[:, 0].cpu() - reported).abs().mean())
    # A NaN is no number below the limit.
    if not difference <= _LIMITS[dtype]:
        raise ValueError(
            f"objective.generation.engine: its log-probabilities are {difference:.2g} away from those of training "
            f"on average, more than the {_LIMITS[dtype]} that rounding explains. It computes model_type "
            f"{model.config.model_type!r} differently, or lacks weights; set objective.generation.engine to 'embedded'"
        )
