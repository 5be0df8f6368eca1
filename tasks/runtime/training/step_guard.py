"""Skip steps that would ruin the model, and apply the policy of `faults` to them.

A step is skipped if its loss or its gradients are not finite, or if its loss is a spike and `faults.spike` watches for
spikes. The device decides, the same on every rank. The host reads the decision with the metrics and then continues,
returns to a checkpoint, or ends the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strata_platform.runs import MetricPoint
from strata_platform.spec.sections.faults import Faults
from tasks.runtime.data.loader import DataSkip
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# Standard deviation of a normal distribution in units of its median absolute deviation.
_DEVIATION = 1.4826
# Lower bound of the deviation as a fraction of the median loss; losses that barely differ have no meaningful deviation.
_LEAST_DEVIATION = 1e-3


class RollBack(Exception):
    """The run has to return to its last checkpoint and skip the data up to step `bad`."""

    def __init__(self, bad: int, reason: str) -> None:
        super().__init__(f"step {bad}: {reason}")
        self.bad = bad


class StepGuard:
    """Decides which steps to skip, and what follows; identical on every rank."""

    def __init__(self, faults: Faults, nonfinite: str, processes: Processes, metadata: dict[str, Any]) -> None:
        """`nonfinite`: the spec's `nonfinite`, with its default. `metadata`: that of the checkpoint that the run
        resumes from; empty for a new run.
        """
        self._faults, self._nonfinite, self._processes = faults, nonfinite, processes
        self.restore(metadata)

    def restore(self, metadata: dict[str, Any]) -> None:
        """Set the state to that of a checkpoint."""
        kept = metadata.get("guard", {"losses": [], "skips": 0, "passed_over": []})
        # The window fills from its end. Missing losses are NaN, which makes every median NaN.
        losses = kept["losses"][-self._faults.spike_window :]
        missing = self._faults.spike_window - len(losses)
        self._losses = torch.tensor([math.nan] * missing + losses, dtype=torch.float64, device=self._processes.device)
        self._skips: int = kept["skips"]
        self.data_skips: list[DataSkip] = [(step, steps) for step, steps in kept["passed_over"]]

    def metadata(self) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed run decides in the same way."""
        losses = [] if self._faults.spike == "ignore" else self._losses[~self._losses.isnan()].tolist()
        return {"guard": {"losses": losses, "skips": self._skips, "passed_over": self.data_skips}}

    def decide(self, local_loss: Tensor, norm: Tensor) -> Tensor:
        """Whether to skip the step: a scalar, 1 or 0, fp32, on the device. A collective that does not wait for the
        device.

        `local_loss`: this rank's part of the step's loss; `norm`: the gradient norm.
        """
        reduced = torch.stack(
            [local_loss.double(), (~norm.isfinite()).to(local_loss.device, torch.float64, non_blocking=True)]
        )
        if self._processes.world_size > 1:
            dist.all_reduce(reduced)
        loss, ruined = reduced.unbind()
        loss = loss / self._processes.tp_size
        skipped = ~loss.isfinite() | (ruined > 0)
        if self._faults.spike != "ignore":
            skipped = skipped | (loss > spike_limit(self._losses, self._faults.spike_deviations))
            self._losses = torch.where(skipped, self._losses, torch.cat([self._losses[1:], loss[None]]))
        return skipped.float()

    def apply_policy(self, points: Sequence[MetricPoint], *, newest: int, steps: int) -> None:
        """Apply `faults.nonfinite` and `faults.spike` to finished steps.

        `newest`: step of the newest checkpoint, 0 without one. `steps`: steps of the whole run.

        Raises:
            RollBack: the run has to return to its checkpoint. Raised on every rank.
            ValueError: the run ends here. Raised on every rank.
        """
        back: RollBack | None = None
        for point in points:
            reason = _reason(point)
            if reason is None:
                self._skips = 0
                continue
            field, why = reason
            action = self._nonfinite if field == "nonfinite" else self._faults.spike
            # Before the first checkpoint there is nothing to return to.
            if action == "rollback" and newest == 0 and point.skipped:
                action = "skip"
            if action == "rollback" and newest > 0:
                back = RollBack(point.step, why)
                if not point.skipped:
                    # The weights are lost; later points only show the consequences.
                    break
            elif action == "skip":
                self._skip(point, why, steps)
            else:
                raise ValueError(_end(point, field, why, action))
        if back is not None:
            raise back

    def skip_data(self, step: int, fault: RollBack, steps_of_rows: int = 1) -> None:
        """Skip the data from the checkpoint of `step` to the step at fault, and of further steps that read the same
        rows as that step, of `steps_of_rows` in all: otherwise later checkpoints would lie between such steps.

        Raises:
            ValueError: the run has used all of its `faults.max_rollbacks`.
        """
        limit = self._faults.max_rollbacks
        if len(self.data_skips) >= limit:
            raise ValueError(
                f"{fault}; the run has returned to a checkpoint {limit} times already, and faults.max_rollbacks "
                "allows no more. Start again under another name with a lower optimizer.lr or a higher "
                "schedule.warmup_ratio, look at the data, or raise faults.max_rollbacks and start it again"
            )
        self.data_skips.append((step, -(-(fault.bad - step) // steps_of_rows) * steps_of_rows))

    def _skip(self, point: MetricPoint, why: str, steps: int) -> None:
        self._skips += 1
        limit = self._faults.max_skips
        if self._skips > limit or self._skips == steps:
            raise ValueError(
                f"step {point.step}: {why}, as in the {self._skips - 1} steps before; all of them were skipped, and "
                f"faults.max_skips is {limit}. Start again under another name with a lower optimizer.lr or a higher "
                "schedule.warmup_ratio, or look at the data; the last checkpoint is from before these steps"
            )
        if self._processes.is_main:
            log.warning("step %d is skipped: %s (%d in a row)", point.step, why, self._skips)


def spike_limit(losses: Tensor, deviations: float) -> Tensor:
    """The loss above which the next step counts as a spike; NaN if any of `losses` [N] is NaN."""
    median = losses.median()
    deviation = _DEVIATION * (losses - median).abs().median()
    return median + deviations * torch.maximum(deviation, _LEAST_DEVIATION * median.abs())


def _reason(point: MetricPoint) -> tuple[str, str] | None:
    """The field of `faults` that applies to a step, and a description; None for a good step."""
    values = [value for value in (point.loss, point.grad_norm) if value is not None]
    if not all(map(math.isfinite, values)):
        norm = "" if point.grad_norm is None else f" and the gradient norm {point.grad_norm}"
        return "nonfinite", f"the loss is {point.loss}{norm}"
    if point.skipped:
        return "spike", f"the loss of {point.loss:.4f} is far above those before"
    return None


def _end(point: MetricPoint, field: str, why: str, action: str) -> str:
    state = "the step was skipped" if point.skipped else "the weights are lost"
    if action == "rollback":
        more = "There is no checkpoint to return to; lower checkpoint.every or raise checkpoint.per_epoch, or start"
    else:
        more = f"Set faults.{field} to 'rollback' and start it again, to continue from its last checkpoint; or start"
    return (
        f"step {point.step}: {why}; {state}, and faults.{field} is {action!r}. {more} again under another name with a "
        "lower optimizer.lr or a higher schedule.warmup_ratio"
    )
