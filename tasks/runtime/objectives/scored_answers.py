"""The scored answers of a step: those of a rank and of all ranks, and the rows that the loss of `grpo` learns from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from strata_kernels.policy import group_advantages, known_deviation
from strata_platform.spec.sections.objectives import Grpo as Settings
from tasks.runtime.data.dataset import IGNORE_INDEX, Row
from tasks.runtime.data.prompts import Prompt
from tasks.runtime.generation import Sample
from tasks.runtime.objectives.generation_metrics import generation_metrics
from tasks.runtime.rewards.reward_function import Answers

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """The answers of a step.

    prompts, samples: of this rank, in order of length, the longest first. advantages: of these, [n]; learned: whether
    their tokens carry loss, [n], bool. answers, tokens: those that carry loss, on all ranks. metrics: means over all
    answers of the step.
    """

    prompts: list[Prompt]
    samples: list[Sample]
    advantages: Tensor
    learned: Tensor
    answers: int
    tokens: int
    metrics: dict[str, float]
    logged: list[dict[str, Any]]
    """This rank's answers to its first prompt, with the rewards that are learned from, to be read."""


@dataclass(frozen=True)
class Drawn:
    """Answers to prompts, and the seconds that they took."""

    prompts: list[Prompt]
    samples: list[Sample]
    answers: Answers
    seconds: float

    @classmethod
    def joined(cls, parts: Sequence[Drawn]) -> Drawn:
        """Those of several ranks, in order; the seconds of the slowest."""
        prompts, samples = ([*chain(*(getattr(part, name) for part in parts))] for name in ("prompts", "samples"))
        columns = ([getattr(part.answers, field.name) for part in parts] for field in fields(Answers))
        answers = Answers(*([*chain(*lists)] for lists in columns))
        return cls(prompts, samples, answers, max(part.seconds for part in parts))

    def replaced(self, places: Sequence[int], by: Drawn) -> Drawn:
        """With other prompts and answers at some places."""
        answers = Answers(
            *(
                replaced_at(getattr(self.answers, field.name), places, getattr(by.answers, field.name))
                for field in fields(Answers)
            )
        )
        prompts, samples = replaced_at(self.prompts, places, by.prompts), replaced_at(self.samples, places, by.samples)
        return Drawn(prompts, samples, answers, self.seconds + by.seconds)


@dataclass(frozen=True)
class Outcome:
    """Answers of all ranks, in the order of their numbers.

    numbers, lengths, finished: [n]. values: of each reward, [n, rewards]. groups: the rewards that are learned from,
    [groups, group_size]. All fp64; a reward is NaN where there is none.
    """

    numbers: Tensor
    lengths: Tensor
    finished: Tensor
    values: Tensor
    groups: Tensor

    @property
    def signal(self) -> Tensor:
        """Whether the rewards of a group differ, [groups]."""
        centered = group_advantages(self.groups.flatten(), self.groups.shape[1], scale="none")
        return centered.view_as(self.groups).any(1)


class Written(NamedTuple):
    """All answers that a step has generated on all ranks, replaced ones included: their number, their tokens, and how
    many ended by themselves.
    """

    answers: int
    tokens: float
    finished: float

    @classmethod
    def of(cls, outcome: Outcome, counted: Tensor | None = None) -> Written:
        """Those of an outcome that are counted, [n]; by default all."""
        counted = torch.ones_like(outcome.numbers, dtype=torch.bool) if counted is None else counted
        return cls(int(counted.sum()), float(outcome.lengths[counted].sum()), float(outcome.finished[counted].sum()))

    def and_also(self, more: Written) -> Written:
        """Both together."""
        return Written(self.answers + more.answers, self.tokens + more.tokens, self.finished + more.finished)


def replaced_at(values: Sequence[T], places: Sequence[int], by: Sequence[T]) -> list[T]:
    """`values` with others at some places."""
    found = list(values)
    for place, value in zip(places, by, strict=True):
        found[place] = value
    return found


def withheld(rewards: Tensor, finished: Tensor) -> Tensor:
    """Rewards of groups [G, N], of which answers that were cut have no more than the lowest that ended.

    A reward of 0 would be a prize where functions punish: the model would learn to write without an end.
    """
    lowest = rewards.masked_fill(~finished | rewards.isnan(), math.inf).amin(1, keepdim=True)
    return rewards.where(finished, rewards.minimum(lowest))


def step_of(
    settings: Settings, drawn: Drawn, own: list[list[float | None]], outcomes: Sequence[Outcome], written: Written,
    seconds: Tensor, staleness: int,
) -> Step:  # fmt: skip
    """What a rank learns from.

    own: of each reward, its values of this rank's answers. outcomes: of the first answers, and after each round that
    has replaced some; the last is learned from. seconds: of generating these answers, of waiting for answers, of
    scoring, and of the step, [4], fp64. staleness: steps between the weights that generated and those that learn.
    """
    prompts, samples = drawn.prompts, drawn.samples
    first, last = outcomes[0], outcomes[-1]
    rewards = last.groups.flatten()
    advantages = group_advantages(rewards, settings.group_size, scale=settings.scale_rewards)
    signal = last.signal.repeat_interleave(settings.group_size)
    kept = signal if settings.filter_groups else torch.ones_like(signal)
    learned = kept & (last.finished.bool() | (settings.overlong != "mask"))
    places = {int(number): place for place, number in enumerate(last.numbers.tolist())}
    logged = [
        {
            "prompt": drawn.answers.prompts[index],
            "answer": drawn.answers.completions[index],
            "finished": sample.finished,
            "reward": _number(rewards[places[prompt.answer or 0]]),
            "rewards": {term.title: of[index] for term, of in zip(settings.rewards, own, strict=True)},
        }
        for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
        if prompt.token_ids == prompts[0].token_ids
    ]
    order = sorted(
        range(len(prompts)),
        key=lambda index: -len(prompts[index].token_ids) - samples[index].token_ids.numel(),
    )  # fmt: skip
    prompts, samples = [prompts[index] for index in order], [samples[index] for index in order]
    mine = torch.tensor([places[prompt.answer or 0] for prompt in prompts])
    # Of the first prompts: those in the place of others are chosen by their rewards.
    metrics = {
        "reward": float(first.groups.nanmean().nan_to_num()),
        "reward_std": float(known_deviation(first.groups).mean()),
        "unscored": float(first.groups.isnan().double().mean()),
        **{
            f"reward/{term.title}": float(column.nanmean().nan_to_num())
            for term, column in zip(settings.rewards, first.values.unbind(1), strict=True)
        },
        "groups_with_signal": float(first.signal.double().mean()),
        **generation_metrics(
            answers=written.answers,
            tokens=written.tokens,
            finished=written.finished,
            generating=float(seconds[0]),
            before_training=float(seconds[1]),
            step=float(seconds[3]),
        ),
        "reward_share": float(seconds[2] / seconds[3].clamp(min=1e-9)),
        **({"staleness": float(staleness)} if settings.generate_ahead else {}),
    }
    return Step(
        prompts,
        samples,
        advantages[mine],
        learned[mine],
        answers=int(kept.sum()),
        tokens=int(last.lengths[learned].sum()),
        metrics=metrics,
        logged=logged,
    )


def _number(value: Tensor) -> float | None:
    """What JSON has of a reward."""
    return None if value.isnan() else float(value)


def rows_of(step: Step, first: int, size: int) -> list[Row]:
    """The rows of `size` answers from `first` on, with what the loss needs of each token at the position that predicts
    it: `sequence`, the answer's place among them counted from 1, 0 for no answer; `advantage`, at its first token;
    `generated`, the log-probability that generation computed. `counted` is 1 at the first token of each row.
    """
    rows = []
    for place in range(size):
        prompt, sample = step.prompts[first + place], step.samples[first + place]
        answer = sample.token_ids
        begin, length = len(prompt.token_ids), len(prompt.token_ids) + answer.numel()
        ids = torch.cat([torch.tensor(prompt.token_ids), answer])
        row = {
            "input_ids": ids,
            "labels": torch.full((length,), IGNORE_INDEX),
            "position_ids": torch.arange(length),
            "sequence": torch.zeros(length, dtype=torch.int64),
            "advantage": torch.zeros(length),
            "generated": torch.zeros(length),
            "counted": torch.zeros(length, dtype=torch.int64),
        }
        row["counted"][0] = 1
        if step.learned[first + place]:
            row["labels"][begin:] = answer
            row["sequence"][begin - 1 : length - 1] = place + 1
            row["advantage"][begin - 1] = step.advantages[first + place]
            row["generated"][begin - 1 : length - 1] = sample.log_probs
        rows.append(row)
    return rows
