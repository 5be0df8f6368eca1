"""The learning rate of each step: a pure function of the spec and the number of steps done."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from strata_platform.spec import RunSpec


def learning_rate_factor(spec: RunSpec, steps: int) -> Callable[[int], float]:
    """Share of the peak learning rate that the step after `done` of `steps` steps takes: a pure function of `done`.

    It is 0 for no step: one would read its data without learning it.
    """
    warmup = math.ceil(spec.schedule.warmup_ratio * steps)
    begin = max(warmup, steps - math.ceil(spec.schedule.falling * steps)) if spec.schedule.falling else warmup
    shape = _SHAPES[spec.schedule.type]

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        return shape(max(0, done - begin) / max(1, steps - begin))

    return factor


# From the share of the steps after the warm-up, or of those in which the rate falls, that are done, 0 to 1.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "wsd": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """What the next step takes."""
    for group in optimizer.param_groups:
        group["lr"] = rate
