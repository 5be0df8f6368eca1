"""What every objective that generates answers reports of a step's, under the same names."""

from __future__ import annotations

import torch
from torch import Tensor


def generation_metrics(
    *, answers: float, tokens: float, finished: float, generating: float, before_training: float, step: float
) -> dict[str, float]:
    """The metrics of the answers of all ranks in one step; 0 where there is none.

    answers, tokens, finished: how many there are, their tokens, and how many ended by themselves. generating: seconds
    that the engine took. before_training: seconds before the answers were there. step: seconds of the whole step.
    """
    return {
        "answer_tokens": tokens / max(answers, 1),
        "finished": finished / max(answers, 1),
        "generated_tokens_per_second": tokens / max(generating, 1e-9),
        "generation_share": before_training / max(step, 1e-9),
    }


def parts_of_step(metrics: dict[str, float], parts: int, device: torch.device) -> dict[str, Tensor]:
    """What each of the micro-batches of all ranks adds to metrics that are known of the step as a whole."""
    values = torch.tensor([*metrics.values()], dtype=torch.float64) / parts
    return dict(zip(metrics, values.to(device, non_blocking=True).unbind(), strict=True))
