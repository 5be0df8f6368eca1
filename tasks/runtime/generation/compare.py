"""Whether an engine has the weights and the forward pass of the model in training."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.runtime.generation.embedded import without_training
from tasks.runtime.generation.generator import Request, Sample

# Tokens that are compared, at most.
_TOKENS = 64
# Of the mean difference, well above that of rounding: 1e-6 and 1e-2.
_LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.2, torch.float16: 0.2}


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
            f"objective.generation.engine: vLLM's log-probabilities are {difference:.2g} away from those of training "
            f"on average, more than the {_LIMITS[dtype]} that rounding explains. It computes model_type "
            f"{model.config.model_type!r} otherwise, or lacks weights; set objective.generation.engine to 'embedded'"
        )
