"""The learning rate of each step: a pure function of the schedule and the number of finished steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from strata_platform.spec.sections.training import Schedule

# Planning a run compares schedules without PyTorch.
if TYPE_CHECKING:
    import torch


def learning_rate_factor(schedule: Schedule, steps: int) -> Callable[[int], float]:
    """The learning rate of a step as a share of the peak: a function of the number of steps `done` before it.

    `steps`: steps of the whole run. The share is above 0 for every step, so that no step reads data in vain. After the
    warm-up the shapes are those of `transformers.get_scheduler`; with `min_lr_ratio` m, a share s is m + (1 - m) s.

    Raises:
        ValueError: `schedule.warmup_steps` is more than `steps`, or `schedule.num_cycles` than the steps after it.
    """
    warmup = math.ceil(schedule.warmup_share * steps) if schedule.warmup_steps is None else schedule.warmup_steps
    if warmup > steps:
        raise ValueError(
            f"schedule.warmup_steps {warmup} is more than the {steps} steps of the run, so the learning rate would not "
            "reach its peak; lower it, or set schedule.warmup_ratio instead"
        )
    begin = max(warmup, steps - math.ceil(schedule.falling * steps)) if schedule.falling else warmup
    length = max(1, steps - begin)
    if schedule.num_cycles is not None and schedule.num_cycles > length:
        raise ValueError(
            f"schedule.num_cycles {schedule.num_cycles} is more than the {length} steps after the warm-up; lower it"
        )
    shape, least = _SHAPES[schedule.type], schedule.min_lr_ratio

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        share = shape(max(0, done - begin), length, schedule.cycles)
        return least + (1.0 - least) * share

    return factor


def same_learning_rates(one: tuple[Schedule, int], other: tuple[Schedule, int], done: int) -> bool:
    """Whether the first `done` steps have the same learning rates under two schedules, each with its run's steps."""
    factor, other_factor = learning_rate_factor(*one), learning_rate_factor(*other)
    return all(math.isclose(factor(step), other_factor(step), rel_tol=1e-9) for step in range(done))


def _cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


# Arguments: finished steps and all steps after the warm-up (`wsd`: of the decay), and the cycles.
_SHAPES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda done, length, cycles: 1.0,
    "linear": lambda done, length, cycles: 1.0 - done / length,
    "wsd": lambda done, length, cycles: 1.0 - done / length,
    "cosine": lambda done, length, cycles: _cosine(done / length),
    # The remainder is one of integers: rounded, a cycle could begin one step late, with a rate of 0 before.
    "cosine_with_restarts": lambda done, length, cycles: _cosine(cycles * done % length / length),
}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step; groups with a rate of their own keep their ratio to it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
