"""The learning rate of each step: a pure function of the schedule and the number of finished steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from strata_platform.spec.training import Schedule


def learning_rate_factor(schedule: Schedule, steps: int) -> Callable[[int], float]:
    """The learning rate of a step as a share of the peak: a function of the number of steps `done` before it.

    `steps`: steps of the whole run. The share is above 0 for every step, so that no step reads data in vain.
    """
    warmup = math.ceil(schedule.warmup_ratio * steps)
    begin = max(warmup, steps - math.ceil(schedule.falling * steps)) if schedule.falling else warmup
    shape = _SHAPES[schedule.type]

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        return shape(max(0, done - begin) / max(1, steps - begin))

    return factor


# Argument: the finished share of the steps after the warm-up (`wsd`: of the decay), 0 to 1.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "wsd": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
