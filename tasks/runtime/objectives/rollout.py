"""From prompts to scored answers, which a step of `grpo` learns from.

Each rank generates and scores the answers that its micro-batches ask for. Rewards are exchanged, so that a group may be
spread over micro-batches and ranks, and all ranks know the totals of the step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from strata_platform.spec.sections.objectives import Generation
from strata_platform.spec.sections.objectives import Grpo as Settings
from tasks.runtime.data import PreparedData
from tasks.runtime.data.prompts import Prompt
from tasks.runtime.generation import Generator, Request, Sample, Sampling
from tasks.runtime.objectives.scored_answers import Drawn, Outcome, Step, Written, replaced_at, step_of, withheld
from tasks.runtime.process.ranks import Processes
from tasks.runtime.rewards.reward_function import Answers
from tasks.runtime.rewards.scoring import Rewards

# As `Generator.generate`; None if the engine is gone.
WhileTraining = Callable[[Sequence[Request], Sampling], list[Sample] | None]


def end_tokens(model: PreTrainedModel, data: PreparedData) -> tuple[int, ...]:
    """The tokens that end an answer: those of the data, and of the model's own generation."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = own if isinstance(own, list) else [] if own is None else [own]
    return tuple(sorted({*data.manifest.stop_token_ids, *ends}))


def sampling_of(generation: Generation, data: PreparedData, model: PreTrainedModel, **changes: Any) -> Sampling:
    """How answers are drawn. They end with the tokens of the data, or of the model's own generation."""
    values: dict[str, Any] = {
        "max_new_tokens": generation.max_new_tokens,
        "temperature": generation.temperature,
        "top_k": generation.top_k,
        "top_p": generation.top_p,
        "stop_token_ids": end_tokens(model, data),
        "stop_strings": generation.stop,
    }
    return Sampling(**values | changes)


def _requests(prompts: Sequence[Prompt]) -> list[Request]:
    return [Request(prompt.token_ids, prompt.answer or 0) for prompt in prompts]


def answers_of(prompts: Sequence[Prompt], samples: Sequence[Sample], tokenizer: Any) -> Answers:
    """The answers as rewards get them: as texts without special tokens."""
    return Answers(
        prompts=[prompt.known["prompt"] for prompt in prompts],
        completions=[
            tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for sample in samples
        ],
        token_ids=[sample.token_ids.tolist() for sample in samples],
        columns=[prompt.known["columns"] for prompt in prompts],
        where=[prompt.known["where"] for prompt in prompts],
    )


def total_of(rewards: Rewards, settings: Settings, values: Sequence[float | None], sample: Sample) -> float:
    """The reward of an answer; NaN if no reward has a value for it.

    With `objective.overlong: unrewarded`, an answer that was cut has at most 0, and 0 in place of NaN.
    """
    total = rewards.total(values)
    if sample.finished or settings.overlong != "unrewarded":
        return total
    return 0.0 if math.isnan(total) else min(total, 0.0)


class _Background:
    """Work in a thread, which does not outlive the process."""

    def __init__(self, work: Callable[[], Drawn | None]) -> None:
        self._work = work
        self._found: Drawn | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="answers of the next step", daemon=True)
        self._thread.start()

    def result(self) -> Drawn | None:
        """Wait for it; raises what it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._work()
        except Exception as error:
            self._error = error


class Rollout:
    """Generates and scores the answers of steps."""

    def __init__(
        self, settings: Settings, generator: Generator, sampling: Sampling, rewards: Rewards, tokenizer: Any,
        replacement: Callable[[int, int], Prompt] | None = None, while_training: WhileTraining | None = None,
    ) -> None:  # fmt: skip
        """replacement: the prompt in the place of an answer of the step, by the answer's number and the round.
        while_training: generates beside training, by an engine that has its own weights and devices.
        """
        self._replacement, self._while_training = replacement, while_training
        # The answers of the next step that `while_training` generates; seconds that this step waited for its own.
        self._pending: _Background | None = None
        self._waited = 0.0
        self._settings, self._generator, self._sampling = settings, generator, sampling
        self._rewards, self._tokenizer = rewards, tokenizer
        self._ended = time.monotonic()
        # Those of the next step, which rewards score meanwhile.
        self._ahead: Drawn | None = None

    def update_weights(self, processes: Processes) -> None:
        """Generate with the weights that the model has now. A collective."""
        self._collect()
        if self._while_training is not None:
            # No rank may still be waiting for answers of the weights before.
            processes.all_true(True)
        self._generator.update_weights()

    def _collect(self) -> None:
        """Wait for the answers that are generated while the model learns."""
        began = time.monotonic()
        if self._pending is not None:
            self._ahead, self._pending = self._pending.result(), None
        self._waited = time.monotonic() - began

    def rolled_back(self) -> None:
        """Drop answers that are generated ahead, and measure the next step's time from here."""
        self._collect()
        if self._ahead is not None:
            # Functions would reply to the next question with what they think of these.
            self._rewards.finish()
            self._ahead = None
        self._ended = time.monotonic()

    def run(self, prompts: list[Prompt], processes: Processes, upcoming: Sequence[Prompt] = ()) -> Step:
        """Answer the prompts of this rank, and after them `upcoming`, the prompts of the next call. A collective.

        The ranks of a tensor-parallel group, which have the same prompts, each answer and score a share of them.
        """
        started = time.monotonic()
        prompts, upcoming = processes.tp_share(prompts), processes.tp_share(upcoming)
        drawn, staleness = self._ahead, int(self._ahead is not None)
        if drawn is None:
            drawn = self._draw(prompts)
            self._rewards.begin(drawn.answers)
        assert [prompt.answer for prompt in drawn.prompts] == [prompt.answer for prompt in prompts]
        self._ahead = self._draw(upcoming) if upcoming and self._while_training is None else None
        generated = time.monotonic()
        values = self._rewards.finish()
        if self._ahead is not None:
            self._rewards.begin(self._ahead.answers)
        if upcoming and self._while_training is not None:
            self._pending = _Background(partial(self._draw_while_training, upcoming, self._while_training))
        scored = time.monotonic()
        outcomes = [self._outcome(drawn, values, processes)]
        written, replaced = Written.of(outcomes[0]), 0
        generating, scoring = self._waited + generated - started, scored - generated
        while len(outcomes) <= self._settings.replacement_rounds and not bool(outcomes[-1].signal.all()):
            silent = set(outcomes[-1].numbers.view_as(outcomes[-1].groups)[~outcomes[-1].signal].flatten().tolist())
            places = [place for place, prompt in enumerate(drawn.prompts) if prompt.answer in silent]
            assert self._replacement is not None
            others = [self._replacement(prompts[place].answer or 0, len(outcomes)) for place in places]
            began = time.monotonic()
            by = self._draw(others)
            generated = time.monotonic()
            found = self._rewards.score(by.answers) if others else [[] for _ in values]
            generating, scoring = generating + generated - began, scoring + time.monotonic() - generated
            drawn = drawn.replaced(places, by)
            values = [replaced_at(own, places, new) for own, new in zip(values, found, strict=True)]
            before = outcomes[-1].numbers
            outcomes.append(self._outcome(drawn, values, processes))
            written = written.and_also(Written.of(outcomes[-1], ~torch.isin(outcomes[-1].numbers, before)))
            replaced += len(silent) // self._settings.group_size
        ended = time.monotonic()
        seconds = torch.tensor([drawn.seconds, generating, scoring, ended - self._ended], dtype=torch.float64)
        self._ended = ended
        if processes.world_size > 1:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        shares = processes.tp_gather((drawn, values))
        drawn = Drawn.joined([share for share, _ in shares])
        values = [[*chain(*of_ranks)] for of_ranks in zip(*(own for _, own in shares), strict=True)]
        step = step_of(self._settings, drawn, values, outcomes, written, seconds, staleness)
        if self._settings.replacement_rounds:
            step.metrics.update(replacement_rounds=float(len(outcomes) - 1), replaced_groups=float(replaced))
        return step

    def _outcome(self, drawn: Drawn, values: list[list[float | None]], processes: Processes) -> Outcome:
        """The answers of all ranks. A collective."""
        table = self._table(drawn.prompts, drawn.samples, values)
        if processes.world_size > 1:
            parts = [torch.empty_like(table) for _ in range(processes.world_size)]
            dist.all_gather(parts, table)
            table = torch.cat(parts)
        table = table[table[:, 0].argsort()]
        numbers, rewards, lengths, finished = table[:, :4].unbind(1)
        groups = rewards.view(-1, self._settings.group_size)
        if self._settings.overlong == "unrewarded":
            groups = withheld(groups, finished.bool().view_as(groups))
        return Outcome(numbers, lengths, finished, table[:, 4:], groups)

    def _draw_while_training(self, prompts: Sequence[Prompt], generate: WhileTraining) -> Drawn | None:
        """Answers, which functions have begun to score; None if there are none. In a thread."""
        began = time.monotonic()
        samples = generate(_requests(prompts), self._sampling)
        if samples is None:
            return None
        drawn = Drawn(list(prompts), samples, answers_of(prompts, samples, self._tokenizer), time.monotonic() - began)
        self._rewards.begin(drawn.answers)
        return drawn

    def _draw(self, prompts: Sequence[Prompt]) -> Drawn:
        began = time.monotonic()
        samples = self._generator.generate(_requests(prompts), self._sampling)
        answers = answers_of(prompts, samples, self._tokenizer)
        return Drawn(list(prompts), samples, answers, time.monotonic() - began)

    def _table(self, prompts: list[Prompt], samples: list[Sample], values: list[list[float | None]]) -> Tensor:
        """[n, 4 + rewards], fp64: the answer's number, its reward, its tokens, whether it is finished, and values of
        rewards; NaN where there is no reward or value.
        """
        rows = []
        for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
            own = [value[index] for value in values]
            total = total_of(self._rewards, self._settings, own, sample)
            known = [float("nan") if value is None else value for value in own]
            rows.append([prompt.answer or 0, total, sample.token_ids.numel(), sample.finished, *known])
        return torch.tensor(rows, dtype=torch.float64)
