"""The state of a local run, as its supervisor keeps it in `<output>/<name>/supervisor` for those who follow the run.

`SupervisorLayout` lists the files. Only the process that holds the lock writes them.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata_platform.file_io import write_atomic
from strata_platform.run_layout import RunLayout
from strata_platform.runs import Event, LogLine, Phase, Stage

CANCEL = signal.SIGUSR1
"""The signal that cancels the run. Not SIGTERM, which a machine sends when it shuts down."""
RESUBMIT = "submit it again to continue from its last checkpoint"
"""Advice for a run that ended before its last step."""

# struct flock of Linux; native alignment pads it as the C compiler does.
_FLOCK = "hhqqi4x"


@dataclass(frozen=True)
class State:
    """State of a local run."""

    phase: Phase = Phase.QUEUED
    stage: Stage | None = Stage.STARTING
    message: str = ""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    steps: int | None = None
    eval_loss: float | None = None
    """Validation loss of the newest evaluation during training."""
    stopped_early: int | None = None
    """The step at which early stopping ended training."""
    pid: int | None = None
    """Of the supervisor."""


class RunFiles:
    """Reads and writes the supervisor's files of the run whose folder is `run`."""

    def __init__(self, run: Path) -> None:
        layout = RunLayout(run)
        self.run = run
        self.metrics = layout.metrics
        self._layout = layout.supervisor
        self.folder = self._layout.root
        self.spec, self.output = self._layout.spec, self._layout.output
        self.events, self.log = self._layout.events, self._layout.log

    @property
    def exists(self) -> bool:
        """Whether a run was ever submitted here."""
        return self._layout.state.exists()

    def lock(self) -> int | None:
        """Take the lock: a file descriptor that another process may inherit; None while somebody else holds it.

        The lock belongs to the open file (F_OFD_SETLK), as that of `flock` does: the supervisor inherits it, and it
        ends with the last process that has the file open. Unlike `flock`, F_OFD_GETLK can ask for it without taking it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._layout.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file())
        except BlockingIOError:
            os.close(descriptor)
            return None
        for file in (self.events, self.log):
            _end_torn_line(file)
        return descriptor

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor lives. Does not take the lock, and so never keeps a supervisor from taking it."""
        try:
            descriptor = os.open(self._layout.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file())
        finally:
            os.close(descriptor)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    @property
    def is_active(self) -> bool:
        """Whether a run is here that has not ended."""
        return self.is_supervised and self.exists and not self.state().phase.is_end

    @property
    def owner(self) -> str:
        """The user that submitted the run."""
        try:
            return self._layout.state.owner()
        except KeyError:
            # The user of a container may have no name.
            return str(self._layout.state.stat().st_uid)

    def state(self) -> State:
        """The state that was last written."""
        values = json.loads(self._layout.state.read_text(encoding="utf-8"))
        stage = values["stage"]
        return State(**{**values, "phase": Phase(values["phase"]), "stage": stage and Stage(stage)})

    def set_state(self, state: State) -> None:
        """Replace the state."""
        text = json.dumps(asdict(state), indent=2) + "\n"
        write_atomic(self._layout.state, text.encode(), durable=False)

    def add_event(self, event: Event) -> None:
        """Append to the events."""
        _append(self.events, asdict(event))

    def add_line(self, line: LogLine) -> None:
        """Append to the log."""
        _append(self.log, asdict(line))


def tail(path: Path, is_over: Callable[[], bool], pause: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file as they are appended, until `is_over`.

    Calls `pause` when there is nothing new. Reads everything that was written before `is_over` first returned true, and
    skips a line that a kill cut off.
    """
    position, rest = 0, b""
    while True:
        over = is_over()
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                while new := file.read(1 << 20):
                    position += len(new)
                    *lines, rest = (rest + new).split(b"\n")
                    yield from (values for line in lines if (values := _object(line)) is not None)
        if over:
            return
        pause()


def read_last(path: Path, size: int = 1 << 14) -> list[dict[str, Any]]:
    """The objects in the last `size` bytes of a JSON-lines file; [] if there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - size))
        lines = file.read().split(b"\n")
    return [values for values in map(_object, lines) if values is not None]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _append(path: Path, values: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def _end_torn_line(path: Path) -> None:
    """End a line that a kill cut off, so that it does not swallow the next one."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _whole_file() -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
