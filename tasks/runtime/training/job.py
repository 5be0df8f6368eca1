"""A training run, built and loaded: everything except the loop, which a framework drives."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from strata_kernels.row_buckets import row_bucket
from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.flat_shard import local_values
from tasks.runtime.checkpoint.writer import CheckpointWriter
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch, Row
from tasks.runtime.data.loader import training_loader
from tasks.runtime.evaluation.during_training import TrainingEvaluator
from tasks.runtime.extensions import RunInfo
from tasks.runtime.extensions.callback_runner import CallbackRunner
from tasks.runtime.metrics.recorder import Recorder
from tasks.runtime.objectives import Objective, target_tokens
from tasks.runtime.optim.gradient_sums import GradientSums
from tasks.runtime.optim.in_backward import norm_in_backward
from tasks.runtime.optim.library_optimizers import averaged_weights
from tasks.runtime.optim.lr_schedule import learning_rate_factor
from tasks.runtime.parallel import Strategy
from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.signals import Preempted, StopRequest
from tasks.runtime.process.watchdog import SLOW_FACTOR, Watchdog
from tasks.runtime.training.early_stopping import EarlyStopping
from tasks.runtime.training.step_guard import RollBack, StepGuard
from tasks.runtime.training.time_limit import TimeLimit

log = logging.getLogger(__name__)


@dataclass
class Job:
    """A training run from the step after `start` to step `steps`, in one process.

    A framework iterates over `loader`; `training.gradient_accumulation_steps` micro-batches make one step. For each
    step it calls `count` once and `loss` for each micro-batch, inside `backward_pass`. It then calls
    `clip_gradients`, steps `optimizer` at `learning_rate`, and calls `end_step`. It sets the learning rate before the
    backward pass, because with `optimizer.in_backward` that pass steps the optimizer.
    """

    spec: RunSpec
    processes: Processes
    unwrapped_model: PreTrainedModel
    """The model as it was built. It has the same parameters as `model`."""
    model: nn.Module
    """The module to call in a forward pass: the model as the strategy wrapped it."""
    strategy: Strategy
    objective: Objective
    optimizer: torch.optim.Optimizer
    data: PreparedData
    collate: Callable[[list[Row]], Batch]
    """Makes a batch of rows, with the inputs that the model takes."""
    start: int
    steps: int
    recorder: Recorder
    writer: CheckpointWriter
    watchdog: Watchdog
    guard: StepGuard
    load: Callable[[Path | None], Callable[[], None]]
    """Loads a checkpoint, if there is one. Returns a function that sets the random states of the next step. A
    collective.
    """
    set_random_states: Callable[[], None]
    """Sets the random states of the next step."""
    seed_bits: int
    """`row_order.seed_bits_of` the run."""
    early_stopping: EarlyStopping
    time_limit: TimeLimit
    evaluator: TrainingEvaluator | None
    """None without evaluations during training."""
    step_ended: Callable[[], None]
    """Called after every step; returns immediately."""
    callbacks: CallbackRunner
    """Those of the user's; none on ranks other than 0."""
    gradient_sums: GradientSums | None = None
    """Adds the gradients of micro-batches; None if backward passes add to the parameters' gradients."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    """Set by SIGTERM: the job stops after the current step; see `checkpoint.on_sigterm`."""
    learning_rate_factor: Callable[[int], float] = field(init=False)
    """The fraction of the peak learning rate, by the number of finished steps."""
    newest: int = field(init=False)
    """Step of the newest checkpoint; 0 without one."""
    skipped: Tensor | None = field(init=False, default=None)
    """Scalar on the device, 1 if the current step is skipped; None until `clip_gradients` has decided."""
    _max_targets: deque[int | None] = field(default_factory=deque, init=False)
    """Upper bounds of the target tokens of the micro-batches that `count` has seen and `loss` has not, in order."""

    def __post_init__(self) -> None:
        self.learning_rate_factor = learning_rate_factor(self.spec.schedule, self.steps)
        self.newest = self.start

    def run(self, framework: Framework) -> None:
        """Let a framework train until the last step or until it stops early; start it again after each rollback. A
        collective.
        """
        while True:
            self._max_targets.clear()
            try:
                return framework(self)
            except StoppedEarly:
                return None
            except RollBack as fault:
                self._roll_back(fault)

    def learning_rate(self, done: int) -> float:
        """The learning rate of the step after `done` finished steps."""
        return self.spec.peak_lr * self.learning_rate_factor(done)

    def loader(self) -> DataLoader[dict[str, Tensor]]:
        """This rank's micro-batches of all remaining steps."""
        loader = training_loader(
            self.spec,
            self.data,
            self.processes,
            collate=self.collate,
            start=self.start,
            stop=self.steps,
            data_skips=self.guard.data_skips,
            seed_bits=self.seed_bits,
        )
        loader.on_wait = self.recorder.add_data_wait
        return loader

    def begin(self) -> None:
        """Start training. Call it right before the first step, and draw no random number in between.

        Raises StoppedEarly if an evaluation that was due when the run was interrupted ends it; `run` handles it.
        """
        self.recorder.begin(self.start, self.steps)
        self.watchdog.start()
        self.callbacks.train_start(self._info)
        self._evaluate_at_start()
        self.time_limit.begin(self.start)
        self.watchdog.expect(f"step {self.start + 1}", SLOW_FACTOR)
        self.set_random_states()

    def count(self, batches: list[Batch]) -> Tensor:
        """Start a step and count the items that its loss averages over, on all ranks. A collective.

        `batches`: the step's micro-batches on the host, as the loader yields them; those that the objective makes of
        them replace them. Returns a scalar on the device.
        """
        batches[:] = self.objective.step_batches(self.model, batches, self.processes)
        counts = [torch.stack([self.objective.count(batch), target_tokens(batch)]) for batch in batches]
        for batch, (_, targets) in zip(batches, counts, strict=True):
            self._max_targets.append(row_bucket(int(targets), batch["input_ids"].numel()))
        total = torch.stack(counts).sum(dim=0).to(self.processes.device, non_blocking=True)
        if self.processes.world_size > 1:
            dist.all_reduce(total)
            # Each rank of a tensor-parallel group has counted the same items.
            total //= self.processes.tp_size
        items, targets = total.unbind()
        self.objective.before_step(self.model, batches, self.processes)
        self.recorder.begin_step(targets)
        return items

    @contextmanager
    def backward_pass(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Around the forward and the backward pass of a micro-batch; `last`: of the step's last one."""
        with (
            self.strategy.backward_pass(model, last=last),
            nullcontext() if self.gradient_sums is None else self.gradient_sums.backward_pass(last=last),
        ):
            yield

    def loss(self, model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
        """The loss of a micro-batch for its backward pass. `model` is `self.model` or a framework's wrapper of it.

        The objective divides a micro-batch's sum by the `items` of the whole step. Strategies average gradients over
        ranks (tensor-parallel groups count once), so the result is scaled by their number: the sum over micro-batches,
        averaged over ranks, is then the mean over the step.
        """
        share = self.objective.micro_batch_loss(model, batch, items, self._max_targets.popleft())
        self.recorder.add_micro_batch(share, tokens=batch["input_ids"].numel())
        return share.loss * self.processes.dp_cp_size

    def clip_gradients(self) -> Tensor | None:
        """Clip the gradients and decide whether to skip the step. Call it after the step's last backward pass.

        Returns:
            The gradient norm for `end_step`. With `optimizer.in_backward`, which has stepped already, None if it does
            not clip.
        """
        if self.spec.optimizer.in_backward:
            return norm_in_backward(self.optimizer)
        norm = self.strategy.clip(self.model, self.optimizer, self.spec.optimizer.max_grad_norm)
        self.skipped = self.guard.decide(self.recorder.local_loss, norm)
        self.strategy.skip_step(self.optimizer, self.skipped)
        return norm

    def end_step(self, step: int, grad_norm: Tensor | None, learning_rate: float) -> None:
        """Record step number `step`, and save a checkpoint if one is due. A collective.

        Raises:
            Preempted: a rank received SIGTERM, and the checkpoint that `checkpoint.on_sigterm` asks for is saved.
            RollBack: the run has to return to a checkpoint; `run` handles it.
            StoppedEarly: the validation loss has stopped to fall, and the step is saved; `run` handles it.
            TimeLimitReached: `resources.time_limit` is used up, and the step is saved.
            ValueError: `faults` ends the run because of a bad step, or weights are not finite.
        """
        self._apply_policy(self.recorder.end_step(step, grad_norm, learning_rate, self.skipped))
        self.skipped = None
        self.step_ended()
        self.callbacks.step_end(step, self.writer.take_saved())
        stop = self._stop_requested()
        best = False
        if not stop and self._is_evaluated(step):
            # Before the checkpoint, which contains the decision. A run that is killed in between repeats both.
            try:
                best = self._evaluate(step)
            except _StopRequested:
                # The next attempt evaluates first.
                stop = True
        over = step == self.steps or self.early_stopping.is_over
        due = self.spec.is_saved(step, self.data.rows) or (best and self.spec.checkpoint.keep_best)
        if self.time_limit.after(step) or stop or over or due:
            self.watchdog.expect(f"the checkpoint of step {step}", SLOW_FACTOR)
            # Write metrics first, so that every step before a checkpoint is on record.
            self._apply_policy(self.recorder.flush())
            self.recorder.sync()
            self._require_finite(step)
            self.writer.save(step, self._metadata())
            self.newest = step
            self.recorder.restart_clock()
        if stop and not over:
            self.writer.wait()
            log.info("received SIGTERM: step %d is done and saved", step)
            raise Preempted("SIGTERM")
        if self.early_stopping.is_over:
            self._stop_early(step)
        if not over:
            if self.time_limit.is_used_up:
                self.watchdog.expect("the end", math.inf)
                self.writer.finish()
            self.time_limit.require_left(f"after step {step} of {self.steps}, which is saved")
            self.watchdog.expect(f"step {step + 1}")

    def _is_evaluated(self, step: int) -> bool:
        return self.evaluator is not None and (step == self.steps or self.spec.is_evaluated(step, self.data.rows))

    def _evaluate(self, step: int) -> bool:
        """Evaluate the weights after `step`; returns whether their validation loss is the lowest so far."""
        assert self.evaluator is not None
        # Weights of a step that has to be taken back are not worth an evaluation. It also excludes the time of the
        # steps that are not flushed yet from that of the evaluation.
        self._apply_policy(self.recorder.flush())
        self.recorder.evaluating()
        with averaged_weights(self.optimizer):
            measured = self.evaluator.measure(self._expect_evaluation(step), self._raise_if_stop_requested)
        best = self.early_stopping.add(step, measured.loss)
        self.recorder.evaluated(step, measured.loss, measured.metrics, measured.samples, measured.seconds, best=best)
        self.callbacks.evaluation(step, measured.loss, measured.metrics)
        return best

    def _expect_evaluation(self, step: int) -> Callable[[str, float], None]:
        def expect(activity: str, factor: float) -> None:
            self.watchdog.expect(f"{activity} after step {step}", factor)
            self.recorder.show_activity(activity)

        return expect

    def _evaluate_at_start(self) -> None:
        """Evaluate the checkpoint that the run continues from if that was due and SIGTERM came first."""
        step = self.start
        if not step or not self._is_evaluated(step) or self.early_stopping.last >= step:
            return
        try:
            self._evaluate(step)
        except _StopRequested:
            # The checkpoint is there already, and the first step ends with the request.
            return
        folder, _ = self.processes.on_main(self._newest_checkpoint)
        if folder is not None:
            self.writer.update_metadata(folder, self._metadata())
        self.recorder.restart_clock()
        if self.early_stopping.is_over:
            self._stop_early(step)

    def _stop_early(self, step: int) -> None:
        if step == self.steps:
            return
        self.recorder.stopped_early(step)
        if self.processes.is_main:
            early = self.early_stopping
            log.info(
                "stopped early at step %d of %d: the validation loss was lowest after step %d, %.4f, and "
                "evaluation.early_stopping_patience is %d",
                step, self.steps, early.best_step, early.best_loss, self.spec.evaluation.early_stopping_patience,
            )  # fmt: skip
        raise StoppedEarly(step)

    def _stop_requested(self) -> bool:
        """Whether a rank received SIGTERM and has to save first. A collective with `checkpoint.on_sigterm: save`."""
        return self.spec.checkpoint.on_sigterm == "save" and not self.processes.all_true(not self.stop_request.received)

    def _raise_if_stop_requested(self) -> None:
        if self._stop_requested():
            raise _StopRequested

    def _metadata(self) -> dict[str, Any]:
        """State for a checkpoint beside its tensors."""
        early = self.early_stopping
        best = {checkpoint.BEST_STEP: early.best_step} if self.spec.checkpoint.keep_best and early.best_step else {}
        return {**self.guard.metadata(), **early.metadata(), **best}

    def _info(self) -> RunInfo:
        folder, spec = self.writer.root.parent, self.spec.model_dump(mode="json")
        return RunInfo(self.spec.name, folder, spec, self.start, self.steps)

    def _apply_policy(self, points: list[MetricPoint]) -> None:
        self.callbacks.metrics(points)
        self.guard.apply_policy(points, newest=self.newest, steps=self.steps)

    def _roll_back(self, fault: RollBack) -> None:
        """Return to the newest complete checkpoint. It records from now on which data the run skips after it."""
        self.watchdog.expect("the return to a checkpoint", SLOW_FACTOR)
        self.skipped = None
        self.writer.wait()
        folder, metadata = self.processes.on_main(self._newest_checkpoint)
        if folder is None:
            raise ValueError(f"{fault}; and there is no complete checkpoint in {self.writer.root} to return to")
        self.start = self.newest = checkpoint.step_of(folder)
        self.guard.restore(metadata)
        self.early_stopping.restore(metadata)
        self.guard.skip_data(self.start, fault, self.spec.steps_of_rows)
        self.processes.on_main(lambda: checkpoint.discard_after(self.writer.root, self.start))
        self.writer.update_metadata(folder, self.guard.metadata())
        self.recorder.rolled_back()
        self.objective.rolled_back()
        if self.processes.is_main:
            log.warning("%s; returning to step %d and skipping the data up to there", fault, self.start)
        self.set_random_states = self.load(folder)

    def _newest_checkpoint(self) -> tuple[Path | None, dict[str, Any]]:
        """The newest complete checkpoint and its metadata. Only rank 0 calls it: other ranks could see another one."""
        folder = checkpoint.latest(self.writer.root)
        return folder, {} if folder is None else checkpoint.metadata_of(folder)

    def _require_finite(self, step: int) -> None:
        """With `optimizer.in_backward` no gradient norm shows that a step made the weights non-finite."""
        learned = [
            local_values(parameter) for parameter in self.unwrapped_model.parameters() if parameter.requires_grad
        ]
        finite = [values.isfinite().all().to(self.processes.device) for values in learned]
        if not self.processes.all_true(bool(torch.stack(finite).all())):
            if self.spec.nonfinite == "rollback" and self.newest:
                raise RollBack(step, "the weights are not finite")
            raise ValueError(
                f"step {step}: the weights are no longer finite, so they are not saved; start again under another "
                "name with a lower optimizer.lr, a higher schedule.warmup_ratio, or optimizer.max_grad_norm above 0"
            )


class StoppedEarly(Exception):
    """Training has ended before its last step, because the validation loss no longer falls."""


class _StopRequested(Exception):
    """A rank received SIGTERM during an evaluation, which ends early."""


class Framework(Protocol):
    """Runs the training loop."""

    def __call__(self, job: Job) -> None:
        """Train `job.model` in place until `job.steps`."""
