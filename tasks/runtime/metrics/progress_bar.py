"""A progress bar below the log of a run, for a person at a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

# A terminal is not written to more often.
_SECONDS = 0.25


def has_terminal() -> bool:
    """Whether a bar can be shown: this process writes to a terminal that it shares with no other process of the run.

    What another process writes would end up in the line of the bar.
    """
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and os.environ.get("WORLD_SIZE", "1") == "1"


class ProgressBar:
    """Steps done, rate and remaining time; what is written to stdout meanwhile appears above.

    No thread redraws the bar, so that training has the interpreter for itself.
    """

    def __init__(self, done: int, steps: int) -> None:
        self._progress = _progress()
        self._task = self._progress.add_task("training", total=steps, completed=done, rate="")
        self._drawn = 0.0
        self._progress.start()
        self._draw()

    def step(self, done: int) -> None:
        """Move to `done` steps."""
        self._progress.update(self._task, completed=done, description="training")
        self._draw_if_due()

    def rate(self, tokens_per_second: float) -> None:
        """Show a rate."""
        self._progress.update(self._task, rate=f"{tokens_per_second:,.0f} tok/s")

    def activity(self, name: str) -> None:
        """Show what the run is doing in place of training."""
        self._progress.update(self._task, description=name)
        self._draw_if_due()

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def _draw_if_due(self) -> None:
        if time.monotonic() - self._drawn >= _SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._progress.refresh()


def _progress() -> Progress:
    """The columns, on a console that leaves log lines and the cursor as they are."""
    # Imported here: most runs have no terminal.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class WholeLines(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            # A log line goes on behind the edge of the terminal, where the terminal wraps it, and stays one line.
            super().print(*objects, **{"soft_wrap": True, **options})

        def show_cursor(self, show: bool = True) -> bool:
            # A process that is killed could not show it again.
            return False

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=WholeLines(file=sys.stdout),
        auto_refresh=False,
        transient=True,
        # An error log in a file stays there.
        redirect_stderr=sys.stderr.isatty(),
    )
