"""`resources.time_limit`: a run is told before its time is used up, and is ended, with a checkpoint, when it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from strata_platform.outcomes import TIME_LIMIT, RunError
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# The notice comes this many seconds before the end, or with the last tenth of a shorter limit.
NOTICE = 600.0


class TimeLimitReached(RunError):
    """The run has trained for `resources.time_limit` and is not done."""

    outcome = TIME_LIMIT


class TimeLimit:
    """The time that a run has left. Identical on every rank: rank 0's clock decides.

    If rank 0 were asked after every step, all ranks would wait for each other. Its answer therefore has the next step
    to ask at, before half of the time to the next event is over: there are few questions, and events are not missed.
    """

    def __init__(
        self, limit: int | None, spent: float, processes: Processes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`spent`: seconds of training in earlier attempts. The time of this attempt counts from `begin` on."""
        self._limit, self._left, self._processes, self._clock = limit, (limit or 0) - spent, processes, clock
        self.is_used_up = limit is not None and self._left <= 0
        """Whether training has to end."""
        self._announced = False
        self._began: float | None = None
        self._asked_at, self._asked_after, self._ask_after = 0.0, 0, 0

    def require_left(self, when: str) -> None:
        """Raises TimeLimitReached if training has to end; `when` is part of the message."""
        if self._limit is not None and self.is_used_up:
            raise TimeLimitReached(
                f"resources.time_limit: {self._limit} s of training are used up {when}; raise it, or set it to null, "
                "and submit the run again to continue from its last checkpoint"
            )

    def begin(self, step: int) -> None:
        """Training begins after `step`, or goes on after a rollback."""
        self._asked_at = self._clock()
        self._asked_after, self._ask_after = step, step + 1
        if self._began is None:
            self._began = self._asked_at

    def after(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`, because the end is near or has come. A collective at some steps."""
        if self._limit is None or step < self._ask_after:
            return False
        left, self._ask_after = self._processes.on_main(lambda: self._look(step))
        self.is_used_up = left <= 0
        if self._announced or left > self._notice:
            return self.is_used_up
        self._announced = True
        if self._processes.is_main and not self.is_used_up:
            log.warning(
                "resources.time_limit: %.0f of %d s are left; step %d is saved now, and training ends with another "
                "checkpoint when they are over", left, self._limit, step,
            )  # fmt: skip
        return True

    @property
    def _notice(self) -> float:
        return min(NOTICE, (self._limit or 0) / 10)

    def _look(self, step: int) -> tuple[float, int]:
        """The seconds that are left, and the step to ask after next."""
        assert self._began is not None
        now = self._clock()
        seconds = (now - self._asked_at) / (step - self._asked_after)
        self._asked_at, self._asked_after = now, step
        left = self._left - (now - self._began)
        event = left - self._notice if left > self._notice else left
        return left, step + max(1, int(event / 2 / seconds)) if seconds > 0 else step + 1
