"""A queue between training and a tracker. A slow or broken tracker neither delays nor ends training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from tasks.runtime.metrics.trackers.tracker import Tracker, Values

log = logging.getLogger(__name__)

# How long `close` waits for a complete run, and for one that ends early, often because its machine is being reclaimed.
PATIENCE_SECONDS = {True: 60.0, False: 10.0}


class Channel:
    """Passes values to a tracker in a thread. Values that did not arrive are sent again with the next ones."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name, self._open = name, open_tracker
        # Training appends and the thread removes from the front; both operations are atomic in CPython.
        self._waiting: list[Values] = []
        self._news = SimpleQueue[bool | None]()
        self._warned = False
        self._thread = threading.Thread(target=self._carry, name=f"tracking {name}", daemon=True)
        self._thread.start()

    def log(self, values: Sequence[Values]) -> None:
        """Queue values; returns immediately."""
        self._waiting.extend(values)
        self._news.put(None)

    def close(self, *, complete: bool) -> None:
        """Wait a limited time for queued values, and warn about those that did not arrive."""
        self._news.put(complete)
        self._thread.join(PATIENCE_SECONDS[complete])
        lost = list(self._waiting)
        if lost:
            steps = f"{lost[0].step} to {lost[-1].step}"
            log.warning("tracking: %s did not get steps %s; metrics.jsonl has them", self._name, steps)
        elif self._thread.is_alive():
            log.warning("tracking: %s is still busy at the end of the run and may lack some of it", self._name)

    def _carry(self) -> None:
        """The thread's loop; ends when it learns whether the run is complete."""
        tracker: Tracker | None = None
        complete: bool | None = None
        while complete is None:
            complete = self._news.get()
            values = list(self._waiting)
            try:
                tracker = tracker or self._open()
                if values:
                    tracker.log(values)
                    del self._waiting[: len(values)]
                if complete is not None:
                    tracker.close(complete=complete)
            # Clients and servers raise errors of many classes.
            except Exception as error:
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        since = f"from step {self._waiting[0].step} on " if self._waiting else ""
        log.warning(
            "tracking: %s failed and is tried again at every report (%s: %s); training continues, and metrics.jsonl "
            "has the values that it misses %suntil then",
            self._name, type(error).__name__, error, since,
        )  # fmt: skip
