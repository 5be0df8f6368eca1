"""Metrics of every step, without a synchronisation at every step.

Losses stay on the device until `log_every` steps are gathered, then travel to the host in one copy: after one reduction
over the processes the main one writes them to the metrics file and TensorBoard and prints a line.
"""

from __future__ import annotations

import logging
import math
import resource
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strata_platform.spec import RunSpec
from tasks.runtime.folder import RunFolder
from tasks.runtime.metrics import MetricsFile, Point, read_points
from tasks.runtime.objectives import Share
from tasks.runtime.processes import Processes

log = logging.getLogger(__name__)

_LOSS = "loss"


@dataclass(slots=True)
class _Step:
    step: int
    values: dict[str, Tensor]
    grad_norm: Tensor | None
    learning_rate: float
    targets: Tensor
    tokens: int


class Recorder:
    """Collects a run's steps. Every process calls every method; only the main one writes."""

    def __init__(self, spec: RunSpec, folder: RunFolder, processes: Processes, attempt: int) -> None:
        self._spec, self._folder, self._processes, self.attempt = spec, folder, processes, attempt
        self._pending: list[_Step] = []
        self._values: dict[str, Tensor] = {}
        self._targets: Tensor | None = None
        self._tokens = 0
        self._steps = 0
        self._totals = (0, 0)
        self._flushed_at, self._flushed_step = 0.0, 0
        self._file: MetricsFile | None = None
        self._board: Any = None

    def begin(self, step: int, steps: int) -> None:
        """Training goes on after `step`, up to `steps`."""
        self._steps = steps
        self._flushed_at, self._flushed_step = time.monotonic(), step
        if not self._processes.is_main:
            return
        done = [point for point in read_points(self._folder.metrics) if point.step <= step]
        if done:
            self._totals = (done[-1].tokens, done[-1].target_tokens)
        self._file = MetricsFile(self._folder.metrics)
        if self._spec.tracking.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder.tensorboard), purge_step=step + 1)

    @property
    def step_is_open(self) -> bool:
        """Whether a step has begun since the last `end_step`."""
        return self._targets is not None

    def begin_step(self, targets: Tensor) -> None:
        """A step of so many target tokens, over all processes, begins."""
        self._values, self._targets, self._tokens = {}, targets, 0

    def add_micro_batch(self, share: Share, *, tokens: int) -> None:
        """This process's share of the step grows by a micro-batch of so many `tokens`."""
        for name, value in {_LOSS: share.loss.detach(), **share.metrics}.items():
            self._values[name] = self._values[name] + value.float() if name in self._values else value.float()
        self._tokens += tokens * self._processes.world_size

    def end_step(self, step: int, grad_norm: Tensor | float | None, learning_rate: float) -> None:
        """An optimizer step is done."""
        assert self._targets is not None
        norm = None if grad_norm is None else torch.as_tensor(grad_norm).detach()
        self._pending.append(_Step(step, self._values, norm, learning_rate, self._targets, self._tokens))
        self._targets = None
        if step % self._spec.tracking.log_every == 0 or step == self._steps:
            self.flush()

    def flush(self) -> None:
        """Write what is pending. A collective: every process calls it at the same step.

        Raises ValueError, on every process, when a loss or a gradient norm is not finite: no later step can mend that.
        """
        steps, self._pending = self._pending, []
        if not steps:
            return
        names = list(steps[0].values)
        sums = torch.stack([torch.stack([step.values[name] for name in names]) for step in steps]).double()
        peak = torch.tensor(float(_peak_memory(self._processes)), dtype=torch.float64, device=sums.device)
        if self._processes.world_size > 1:
            # Shares of one mean: each process has divided by what all have.
            dist.all_reduce(sums)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        values = [dict(zip(names, row, strict=True)) for row in sums.tolist()]
        losses = [value.pop(_LOSS) for value in values]
        norms = [None if step.grad_norm is None else float(step.grad_norm) for step in steps]
        now = time.monotonic()
        seconds = (now - self._flushed_at) / (steps[-1].step - self._flushed_step)
        rate = sum(step.tokens for step in steps) / (now - self._flushed_at)
        self._flushed_at, self._flushed_step = now, steps[-1].step
        if self._file is not None:
            self._write(steps, losses, values, norms, seconds, rate, int(peak))
        for step, loss, norm in zip(steps, losses, norms, strict=True):
            if not math.isfinite(loss) or not math.isfinite(norm or 0.0):
                raise ValueError(
                    f"step {step.step}: the loss is {loss} and the gradient norm {norm}, so the weights are lost; "
                    "start anew under another name with a lower optimizer.lr or a higher schedule.warmup_ratio"
                )

    def _write(
        self,
        steps: list[_Step],
        losses: list[float],
        metrics: list[dict[str, float]],
        norms: list[float | None],
        seconds: float,
        rate: float,
        memory: int,
    ) -> None:
        assert self._file is not None
        tokens, targets = self._totals
        points = []
        for step, loss, told, norm in zip(steps, losses, metrics, norms, strict=True):
            tokens, targets = tokens + step.tokens, targets + int(step.targets)
            points.append(
                Point(
                    step=step.step,
                    attempt=self.attempt,
                    time=time.time(),
                    loss=loss,
                    learning_rate=step.learning_rate,
                    grad_norm=norm,
                    tokens=tokens,
                    target_tokens=targets,
                    tokens_per_second=rate,
                    step_seconds=seconds,
                    memory_bytes=memory,
                    metrics=told,
                )
            )
        self._totals = (tokens, targets)
        self._file.write(points)
        self._plot(points)
        self._show(points[-1])

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Numbers of the run and of no step, for TensorBoard; what is not a number is left out."""
        if self._board is not None:
            for key, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{name}/{key}", value, self._steps)

    def sync(self) -> None:
        """Wait until what was written is on the disk, as a checkpoint that relies on it will be."""
        if self._file is not None:
            self._file.sync()

    def restart_clock(self) -> None:
        """Leave out what was not training, such as a checkpoint, from the next rate."""
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Close the files. Pending steps of a broken attempt are dropped: they are after its last checkpoint."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _plot(self, points: list[Point]) -> None:
        if self._board is None:
            return
        for point in points:
            for name in ("loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes"):
                value = getattr(point, name)
                if value is not None:
                    self._board.add_scalar(f"train/{name}", value, point.step, walltime=point.time)
            for name, value in point.metrics.items():
                self._board.add_scalar(f"train/{name}", value, point.step, walltime=point.time)
        self._board.flush()

    def _show(self, point: Point) -> None:
        left = (self._steps - point.step) * point.step_seconds
        width = len(str(self._steps))
        log.info(
            "step %*d/%d  loss %.4f%s  lr %.2e  %s tok/s  memory %.2f GiB  %s left",
            width,
            point.step,
            self._steps,
            point.loss,
            "".join(f"  {name} {value:.3f}" for name, value in point.metrics.items()),
            point.learning_rate,
            f"{point.tokens_per_second:,.0f}",
            point.memory_bytes / 2**30,
            f"{int(left) // 60}:{int(left) % 60:02d}",
        )


def _peak_memory(processes: Processes) -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(processes.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def throughput(points: list[Point]) -> float:
    """Median tokens per second over a run's steps; 0 when it has none."""
    return statistics.median(point.tokens_per_second for point in points) if points else 0.0
