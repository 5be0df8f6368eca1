"""Measure the model while it is trained, without any effect on its training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Evaluation
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch, Row
from tasks.runtime.evaluation.evaluate_model import generate, without_router_loss
from tasks.runtime.evaluation.lm_eval_harness import task_scores
from tasks.runtime.models.attention.varlen_attention import plain_attention
from tasks.runtime.objectives import Objective
from tasks.runtime.objectives.validation_loss import validation_means
from tasks.runtime.parallel import Strategy
from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.rng import random_states, restore_random_states
from tasks.runtime.process.watchdog import SLOW_FACTOR

log = logging.getLogger(__name__)

Expect = Callable[[str, float], None]
"""Tells the watchdog the current activity, and how many times the timeout of a step it may take."""


@dataclass(frozen=True)
class Measured:
    """Results of one evaluation; equal on every rank, except for `samples`, which only rank 0 has."""

    loss: float
    metrics: dict[str, float]
    """Further metrics of the objective, and scores of tasks as `task/metric`."""
    samples: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class TrainingEvaluator:
    """Measures the model of a job on the validation split, as `evaluate_model` does before and after training."""

    spec: RunSpec
    processes: Processes
    unwrapped: PreTrainedModel
    wrapped: nn.Module
    strategy: Strategy
    objective: Objective
    """From `build_validation_objective`."""
    data: PreparedData
    collate: Callable[[list[Row]], Batch]
    varlen: bool
    """Whether the attention of the model needs the inputs of `with_cu_seqlens`."""

    def measure(self, expect: Expect, raise_if_stopping: Callable[[], None]) -> Measured:
        """Validation loss, samples and task scores of the current weights. A collective.

        `raise_if_stopping`: called before each pass on every rank; what it raises ends the evaluation, which leaves the
        training as it was.
        """
        started = time.monotonic()

        def before_batch(number: int, count: int) -> None:
            raise_if_stopping()
            expect(f"evaluation {number + 1}/{count}", SLOW_FACTOR)

        with undisturbed(self.unwrapped, self.wrapped), self.strategy.evaluation(self.wrapped) as model:
            means = validation_means(
                model,
                self.objective,
                self.data.validation_by_source(),
                self.processes,
                micro_batch_size=self.spec.training.micro_batch_size,
                max_batches=self.spec.evaluation.max_batches,
                collate=self.collate,
                before_batch=before_batch,
            )
            metrics = dict(means.of_all)
            loss = metrics.pop("loss", math.nan)
            samples, scores = self._generate(expect)
        return Measured(loss, metrics | scores, samples, time.monotonic() - started)

    def _generate(self, expect: Expect) -> tuple[tuple[str, ...], dict[str, float]]:
        """Samples and scores that `evaluation.during` asks for. Rank 0, which has the whole model, makes them."""
        evaluation = self.spec.evaluation
        if not evaluation.during:
            return (), {}
        # How long tasks take is known to nobody, and the other ranks wait for rank 0, whose own watchdog is on guard
        # during samples.
        expect("evaluation, samples and tasks", math.inf)

        def measure() -> tuple[tuple[str, ...], dict[str, float]]:
            model, tokenizer = self.unwrapped, self.data.tokenizer()
            samples, scores = [], {}
            with plain_attention(model, varlen=self.varlen):
                for prompt in self.data.samples(evaluation.samples if "samples" in evaluation.during else 0):
                    expect("evaluation, samples", SLOW_FACTOR)
                    samples.append(generate(model, tokenizer, prompt, self.data, evaluation.max_new_tokens))
                if "tasks" in evaluation.during:
                    expect("evaluation, tasks", math.inf)
                    size = self.spec.training.micro_batch_size
                    found = task_scores(model, tokenizer, evaluation, batch_size=size)
                    scores = {f"{task}/{metric}": score.value for (task, metric), score in found.items()}
            return tuple(samples), scores

        return self.processes.on_main(measure)


def require_validation_rows(evaluation: Evaluation, data: PreparedData) -> None:
    """Raises ValueError if the spec asks for evaluations and the data has nothing to evaluate on."""
    field = evaluation.interval_field
    if field and not data.manifest.validation.target_tokens:
        raise ValueError(
            f"{field} needs validation rows, and data.validation_fraction leaves none with a token to learn; raise "
            f"data.validation_fraction, set data.validation_source, or leave {field} out"
        )


@contextmanager
def undisturbed(model: PreTrainedModel, wrapped: nn.Module) -> Iterator[None]:
    """Inside the block, `model` is in evaluation mode and without the loss of its routers. Afterwards all is as before:
    the mode of every module, the values of buffers, and the random generators.
    """
    modes = [(module, module.training) for module in wrapped.modules()]
    buffers: dict[str, Tensor] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    states = random_states()
    wrapped.eval()
    try:
        with without_router_loss(model), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        restore_random_states(states)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
