"""Record metrics of every step without synchronizing with the device at every step.

Losses stay on the device until `tracking.log_every` steps are pending; the first step of an attempt does not wait. One
reduction over the ranks and one copy bring them to the host. Rank 0 then writes them to the metrics file, passes them
to the trackers and prints a line.
"""

from __future__ import annotations

import logging
import math
import resource
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from strata_platform.runs import EvaluationPoint, MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime.metrics.mfu import Mfu
from tasks.runtime.metrics.progress import report_progress
from tasks.runtime.metrics.progress_bar import ProgressBar, has_terminal
from tasks.runtime.metrics.trackers import Trackers
from tasks.runtime.objectives import MicroBatchLoss
from tasks.runtime.process.log import indented
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import MetricsFile, read_points

if TYPE_CHECKING:
    from tasks.runtime.metrics.trackers.prometheus import Prometheus

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
    """Of this rank."""
    skipped: Tensor | None


class Recorder:
    """Records the steps of a run. Every rank calls every method; rank 0 writes."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        processes: Processes,
        attempt: int,
        *,
        mfu: Mfu | None = None,
        prometheus: Prometheus | None = None,
    ) -> None:
        self._mfu, self._prometheus = mfu, prometheus
        self._spec, self._folder, self._processes, self.attempt = spec, folder, processes, attempt
        self._pending: list[_Step] = []
        self._values: dict[str, Tensor] = {}
        self._targets: Tensor | None = None
        self._tokens = 0
        self._steps = 0
        self._totals = (0, 0)
        self._data_wait = 0.0
        self._flushed_at, self._flushed_step = 0.0, 0
        self._first = 0
        self._file: MetricsFile | None = None
        self._bar: ProgressBar | None = None
        self._trackers: Trackers | None = None

    def begin(self, step: int, steps: int) -> None:
        """Training continues after `step`, up to `steps`. Called again after a rollback."""
        self._steps, self._first = steps, step + 1
        self._totals = self._processes.on_main(lambda: self._totals_after(step))
        if self._processes.is_main and self._file is None:
            self._file = MetricsFile(self._folder.metrics)
            self._trackers = Trackers(self._spec, self._folder, done=step)
            if has_terminal():
                self._bar = ProgressBar(step, steps)
        if self._prometheus is not None:
            self._prometheus.begin(steps)
        self._flushed_at, self._flushed_step = time.monotonic(), step

    def _totals_after(self, step: int) -> tuple[int, int]:
        done = [point for point in read_points(self._folder.metrics) if point.step <= step]
        return (done[-1].tokens, done[-1].target_tokens) if done else (0, 0)

    @property
    def step_is_open(self) -> bool:
        """Whether a step has begun since the last `end_step`."""
        return self._targets is not None

    def begin_step(self, targets: Tensor) -> None:
        """Start a step with `targets` target tokens on all ranks together."""
        self._values, self._targets, self._tokens = {}, targets, 0

    def add_micro_batch(self, part: MicroBatchLoss, *, tokens: int) -> None:
        """Add a micro-batch of this rank, with `tokens` tokens, to the current step."""
        for name, value in {_LOSS: part.loss.detach(), **part.metrics}.items():
            self._values[name] = self._values[name] + value.float() if name in self._values else value.float()
        self._tokens += tokens

    @property
    def local_loss(self) -> Tensor:
        """This rank's part of the current step's loss."""
        return self._values[_LOSS]

    def add_data_wait(self, seconds: float) -> None:
        """Add seconds that this rank waited for data."""
        self._data_wait += seconds

    def end_step(
        self, step: int, grad_norm: Tensor | float | None, learning_rate: float, skipped: Tensor | None
    ) -> list[MetricPoint]:
        """Record an optimizer step; `skipped` is 1 if it changed nothing. Returns the points that were written,
        if any.
        """
        assert self._targets is not None
        norm = None if grad_norm is None else torch.as_tensor(grad_norm).detach()
        self._pending.append(_Step(step, self._values, norm, learning_rate, self._targets, self._tokens, skipped))
        self._targets = None
        if self._bar is not None:
            self._bar.step(step)
        # The first step shows that the run works, long before `tracking.log_every` steps are done.
        return self.flush() if step % self._spec.tracking.log_every == 0 or step in (self._first, self._steps) else []

    def flush(self) -> list[MetricPoint]:
        """Write the pending points and return them. A collective: every rank calls it at the same step."""
        steps, self._pending = self._pending, []
        if not steps:
            return []
        names = list(steps[0].values)
        sums = torch.stack([torch.stack([step.values[name] for name in names]) for step in steps]).double()
        # Rows that are not packed differ in length, so each rank has another number of tokens.
        tokens = torch.tensor([[step.tokens] for step in steps], dtype=torch.float64, device=sums.device)
        sums = torch.cat([sums, tokens], dim=1)
        memory, data_wait = _peak_memory(self._processes), self._data_wait
        maxima = torch.tensor([float(memory), data_wait], dtype=torch.float64, device=sums.device)
        if self._processes.world_size > 1:
            # Each rank has divided its sums by the item count of all ranks, so their sum is the mean.
            dist.all_reduce(sums)
            sums /= self._processes.tp_size
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        rows = sums.tolist()
        values = [dict(zip(names, row[:-1], strict=True)) for row in rows]
        points = self._points(steps, values, [round(row[-1]) for row in rows], maxima.tolist())
        self._data_wait = 0.0
        if self._file is not None and self._trackers is not None:
            self._file.write(points)
            self._trackers.log(points)
            for point in points:
                report_progress(point=point.to_dict())
            self._show(points[-1])
        if self._prometheus is not None:
            self._prometheus.report(points, memory_bytes=memory, data_wait_seconds=data_wait)
        return points

    def _points(
        self, steps: list[_Step], values: list[dict[str, float]], tokens_of_steps: list[int], maxima: list[float]
    ) -> list[MetricPoint]:
        """Points of `steps`, which took until now, with sums over all ranks of each step's values and tokens.

        maxima: the highest peak memory and data wait of any rank.
        """
        now, count = time.monotonic(), steps[-1].step - self._flushed_step
        rate = sum(tokens_of_steps) / (now - self._flushed_at)
        of_all: dict[str, Any] = {
            "attempt": self.attempt,
            "time": time.time(),
            "tokens_per_second": rate,
            "step_seconds": (now - self._flushed_at) / count,
            "memory_bytes": int(maxima[0]),
            "data_wait_seconds": maxima[1] / count,
            "mfu": self._mfu.of(rate) if self._mfu else None,
        }
        points = []
        tokens, targets = self._totals
        for step, step_values, step_tokens in zip(steps, values, tokens_of_steps, strict=True):
            tokens, targets = tokens + step_tokens, targets + int(step.targets)
            norm = None if step.grad_norm is None else float(step.grad_norm)
            # DeepSpeed finds non-finite gradients itself, inside its step.
            ruined = norm is not None and not math.isfinite(norm)
            point = MetricPoint(
                step=step.step,
                loss=step_values.pop(_LOSS),
                learning_rate=step.learning_rate,
                grad_norm=norm,
                tokens=tokens,
                target_tokens=targets,
                metrics=step_values,
                skipped=int(ruined or (step.skipped is not None and bool(step.skipped))),
                **of_all,
            )
            points.append(point)
        self._totals = (tokens, targets)
        self._flushed_at, self._flushed_step = now, steps[-1].step
        return points

    def evaluating(self) -> None:
        """An evaluation begins; `evaluated` follows, unless SIGTERM ends it."""
        if self._prometheus is not None:
            self._prometheus.evaluating()

    def show_activity(self, name: str) -> None:
        """Show what the run does between two steps, if there is a progress bar."""
        if self._bar is not None:
            self._bar.activity(name)

    def evaluated(
        self,
        step: int,
        loss: float,
        metrics: Mapping[str, float],
        samples: tuple[str, ...],
        seconds: float,
        *,
        best: bool,
    ) -> None:
        """Write an evaluation of the weights after `step`, which took `seconds` since the last flush."""
        if self._file is not None and self._trackers is not None:
            point = EvaluationPoint(step, self.attempt, time.time(), loss, metrics, seconds, samples)
            self._file.write([point])
            self._trackers.log_evaluation(point)
            report_progress(evaluation=point.to_dict())
            log.info(
                "step %*d/%d  validation loss %.4f%s%s  in %.1f s",
                len(str(self._steps)),
                step,
                self._steps,
                loss,
                " (lowest)" if best else "",
                "".join(f"  {name} {value:.3f}" for name, value in metrics.items()),
                seconds,
            )
            for sample in samples:
                log.info("sample after step %d: %s", step, indented(sample))
        if self._prometheus is not None:
            self._prometheus.evaluated(loss, seconds)
        # The next rate is that of training.
        self._flushed_at = time.monotonic()

    def stopped_early(self, step: int) -> None:
        """Training ends with `step`."""
        self._steps = step
        if self._prometheus is not None:
            self._prometheus.begin(step)

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Pass numbers that belong to the run, not to a step, to the trackers; ignores other values."""
        if self._trackers is not None:
            numbers = {f"{name}/{key}": value for key, value in values.items() if isinstance(value, int | float)}
            self._trackers.note(numbers, step=self._steps)

    def sync(self) -> None:
        """Wait until the written points are on disk, because a checkpoint relies on them."""
        if self._file is not None:
            self._file.sync()

    def rolled_back(self) -> None:
        """The run returned to a checkpoint; `begin` follows."""
        if self._prometheus is not None:
            self._prometheus.rolled_back()

    def restart_clock(self) -> None:
        """Leave the time since `flush` out of the next rate: it went into a checkpoint."""
        now = time.monotonic()
        if self._prometheus is not None:
            self._prometheus.saved(now - self._flushed_at)
        self._flushed_at = now

    def close(self) -> None:
        """Close the files. Drops pending steps of a failed attempt: they come after its last checkpoint."""
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            self._trackers.close(complete=self._flushed_step == self._steps)
        if self._prometheus is not None:
            self._prometheus.close()

    def _show(self, point: MetricPoint) -> None:
        if self._bar is not None:
            self._bar.rate(point.tokens_per_second)
        width = len(str(self._steps))
        log.info(
            "step %*d/%d  loss %.4f%s  lr %.2e  %s tok/s%s  memory %.2f GiB  %s",
            width,
            point.step,
            self._steps,
            point.loss,
            "".join(f"  {name} {value:.3f}" for name, value in point.metrics.items()),
            point.learning_rate,
            f"{point.tokens_per_second:,.0f}",
            "" if point.mfu is None else f"  mfu {100 * point.mfu:.1f} %",
            point.memory_bytes / 2**30,
            # Much of the first step is compiling and loading: no other step takes as long.
            f"in {point.step_seconds:.1f} s"
            if point.step == self._first
            else f"{_clock((self._steps - point.step) * point.step_seconds)} left",
        )


def _clock(seconds: float) -> str:
    """Minutes and seconds, or hours with both."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _peak_memory(processes: Processes) -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(processes.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def throughput(points: list[MetricPoint]) -> float:
    """Median tokens per second over the steps; 0 without steps."""
    return statistics.median(point.tokens_per_second for point in points) if points else 0.0


def utilization(points: list[MetricPoint]) -> float | None:
    """Median MFU over the steps; None if it was not measured."""
    measured = [point.mfu for point in points if point.mfu is not None]
    return statistics.median(measured) if measured else None
