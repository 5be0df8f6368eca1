"""What a framework is given to train: all is built, loaded and in its place, and the loop is what is left."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from strata_kernels.targets import rounded_targets
from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.flat_shard import local_values
from tasks.runtime.checkpoint.writer import CheckpointWriter
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch, Row
from tasks.runtime.data.loader import training_loader
from tasks.runtime.metrics.recorder import Recorder
from tasks.runtime.objectives import Objective, target_tokens
from tasks.runtime.optim.lr_schedule import learning_rate_factor
from tasks.runtime.parallel import Strategy
from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.signals import Notice, Preempted
from tasks.runtime.process.watchdog import SLOW, Watchdog
from tasks.runtime.training.step_guard import RollBack, StepGuard

log = logging.getLogger(__name__)


@dataclass
class Job:
    """A training run from the step after `start` to step `steps`, in one of its processes.

    A framework goes through `loader`, whose micro-batches belong together by `training.gradient_accumulation_steps`;
    for each step it calls `count` once and `loss` for every micro-batch, runs forward and backward passes inside
    `strategy.backward_pass`, calls `clip_gradients`, takes a step of `optimizer` at `learning_rate`, and calls
    `end_step`. The rate is set before the backward pass, which takes the steps itself with `optimizer.in_backward`.
    """

    spec: RunSpec
    processes: Processes
    unwrapped_model: PreTrainedModel
    """The model as it was built; its parameters are those of `model`."""
    model: nn.Module
    """What a forward pass calls: `bare`, as the strategy wrapped it."""
    strategy: Strategy
    objective: Objective
    optimizer: torch.optim.Optimizer
    data: PreparedData
    collate: Callable[[list[Row]], Batch]
    """Rows to a batch, as the model takes it."""
    start: int
    steps: int
    recorder: Recorder
    writer: CheckpointWriter
    watchdog: Watchdog
    guard: StepGuard
    load: Callable[[Path | None], Callable[[], None]]
    """Loads a checkpoint, if there is one, and returns what sets the random states of its next step. A collective."""
    set_random_states: Callable[[], None]
    """Sets those that the next step starts from."""
    step_ended: Callable[[], None]
    """Is called after every step, and returns at once."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    """Given when the job is to stop after the step; see `checkpoint.on_sigterm`."""
    learning_rate_factor: Callable[[int], float] = field(init=False)
    """Share of the peak rate for the step after so many are done."""
    newest: int = field(init=False)
    """Step of the newest checkpoint, 0 for none."""
    skipped: Tensor | None = field(init=False, default=None)
    """1 where the step that is open is not to be taken; None while that is not known."""
    _max_targets: deque[int | None] = field(default_factory=deque, init=False)
    """Of the micro-batches that were counted and have not come to their loss yet, in order."""

    def __post_init__(self) -> None:
        self.learning_rate_factor = learning_rate_factor(self.spec, self.steps)
        self.newest = self.start

    def run(self, framework: Framework) -> None:
        """Let a framework train to the last step, and once more after each return to a checkpoint. A collective."""
        while True:
            self._max_targets.clear()
            try:
                return framework(self)
            except RollBack as fault:
                self._roll_back(fault)

    def learning_rate(self, done: int) -> float:
        """For the step after `done` steps."""
        return self.spec.peak_lr * self.learning_rate_factor(done)

    def loader(self) -> DataLoader[dict[str, Tensor]]:
        """This process's micro-batches of all steps that are left."""
        loader = training_loader(
            self.spec,
            self.data,
            self.processes,
            collate=self.collate,
            start=self.start,
            stop=self.steps,
            data_skips=self.guard.data_skips,
        )
        loader.on_wait = self.recorder.add_data_wait
        return loader

    def begin(self) -> None:
        """Call right before the first step: nothing may draw a random number in between."""
        self.recorder.begin(self.start, self.steps)
        self.watchdog.start()
        self.watchdog.expect(f"step {self.start + 1}", SLOW_FACTOR)
        self.set_random_states()

    def count(self, batches: Sequence[Batch]) -> Tensor:
        """What the loss of a step is a mean over, on this process's device; `batches` are its micro-batches.

        They are on the host, as the loader gives them. Over those of all processes: a collective, which opens the step.
        """
        counts = [torch.stack([self.objective.count(batch), target_tokens(batch)]) for batch in batches]
        for batch, (_, targets) in zip(batches, counts, strict=True):
            self._max_targets.append(rounded_targets(int(targets), batch["input_ids"].numel()))
        total = torch.stack(counts).sum(dim=0).to(self.processes.device, non_blocking=True)
        if self.processes.world_size > 1:
            dist.all_reduce(total)
            # Those that compute the same have all counted it.
            total //= self.processes.tp_size
        items, targets = total.unbind()
        self.recorder.begin_step(targets)
        return items

    def loss(self, model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
        """What a micro-batch's backward pass starts from, in a step of so many `items`. `model` wraps that of the job.

        The micro-batch's share of the step's loss, times the number of those that have one, because every strategy
        averages gradients over them: the average over them of the sum over micro-batches is the mean over the step.
        """
        share = self.objective.micro_batch_loss(model, batch, items, self._max_targets.popleft())
        self.recorder.add_micro_batch(share, tokens=batch["input_ids"].numel())
        return share.loss * self.processes.dp_cp_size

    def clip_gradients(self) -> Tensor | None:
        """Call after a step's last backward pass, right before the optimizer's step, which it may forbid.

        Returns the gradients' norm for `end_step`; None with `optimizer.in_backward`, which has taken the step.
        """
        if self.spec.optimizer.in_backward:
            return None
        norm = self.strategy.clip(self.model, self.spec.optimizer.max_grad_norm)
        self.skipped = self.guard.decide(self.recorder.local_loss, norm)
        self.strategy.skip_step(self.optimizer, self.skipped)
        return norm

    def end_step(self, step: int, grad_norm: Tensor | None, learning_rate: float) -> None:
        """Call when step number `step` is done: puts it on record, and saves a checkpoint where one is due.

        Raises, on every process: `Preempted` when one of them was told to stop and the spec wants that saved first;
        `RollBack` when the run is to go back, which `run` does; ValueError when a step, or weights that are not finite,
        end it.
        """
        self._follow(self.recorder.end_step(step, grad_norm, learning_rate, self.skipped))
        self.skipped = None
        self.step_ended()
        stop = self.spec.checkpoint.on_sigterm == "save" and not self.processes.all_true(not self.stop_request.received)
        if stop or step % self.spec.checkpoint.every == 0 or step == self.steps:
            self.watchdog.expect(f"the checkpoint of step {step}", SLOW_FACTOR)
            # Metrics first: a whole checkpoint implies that every step up to it is on record.
            self._follow(self.recorder.flush())
            self.recorder.sync()
            self._require_finite(step)
            self.writer.save(step, self.guard.metadata())
            self.newest = step
            self.recorder.restart_clock()
        if stop and step < self.steps:
            self.writer.wait()
            log.info("told to stop: step %d is done and saved", step)
            raise Preempted("SIGTERM")
        if step < self.steps:
            self.watchdog.expect(f"step {step + 1}")

    def _follow(self, points: list[MetricPoint]) -> None:
        self.guard.apply_policy(points, newest=self.newest, steps=self.steps)

    def _roll_back(self, fault: RollBack) -> None:
        """To the newest whole checkpoint, which from now on says what data is passed over after it."""
        self.watchdog.expect("the return to a checkpoint", SLOW)
        self.skipped = None
        self.writer.wait()
        folder, metadata = self.processes.on_main(self._newest)
        if folder is None:
            raise ValueError(f"{fault}; and there is no whole checkpoint in {self.writer.root} to go back to")
        self.start = self.newest = checkpoint.step_of(folder)
        self.guard.restore(facts)
        self.guard.skip_data(self.start, fault)
        self.processes.on_main(lambda: checkpoint.discard_after(self.writer.root, self.start))
        self.writer.update_metadata(folder, self.guard.metadata())
        self.recorder.rolled_back()
        if self.processes.is_main:
            log.warning("%s; back to step %d, and past the data up to there", fault, self.start)
        self.set_random_states = self.load(folder)

    def _newest(self) -> tuple[Path | None, dict[str, Any]]:
        """The newest whole checkpoint and what it notes. For one process, which changes that while others go on."""
        folder = checkpoint.latest(self.writer.root)
        return folder, {} if folder is None else checkpoint.metadata_of(folder)

    def _require_finite(self, step: int) -> None:
        """Where steps are taken in the backward pass no norm tells that they ruined the weights."""
        learned = [values_of(parameter) for parameter in self.unwrapped_model.parameters() if parameter.requires_grad]
        finite = [values.isfinite().all().to(self.processes.device) for values in learned]
        if not self.processes.all_true(bool(torch.stack(finite).all())):
            if self.spec.nonfinite == "rollback" and self.newest:
                raise RollBack(step, "the weights are not finite")
            raise ValueError(
                f"step {step}: the weights are not finite any more, so they are not saved; start anew under another "
                "name with a lower optimizer.lr, a higher schedule.warmup_ratio, or optimizer.max_grad_norm above 0"
            )


class Framework(Protocol):
    """Drives the loop."""

    def __call__(self, job: Job) -> None:
        """Train `job.model` in place until `job.steps`."""
