"""What a local run leaves for those who follow it, in `<output>/<name>/supervisor`.

| file | holds |
| --- | --- |
| `spec.yaml` | the spec as it was submitted |
| `state.json` | where the run is; replaced whole |
| `events.jsonl`, `log.jsonl` | what happened, what its processes printed; appended, over all submissions |
| `supervisor.log` | what the supervisor itself printed: nothing, unless it failed |
| `lock` | locked for as long as the supervisor lives, however it ends |

Only who has the lock writes.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata_platform.runs import Event, LogLine, Phase, Stage

# struct flock of Linux; the native layout pads it as the C compiler does.
_FLOCK = "hhqqi4x"


@dataclass(frozen=True)
class State:
    """Where a local run is."""

    phase: Phase = Phase.QUEUED
    stage: Stage | None = Stage.STARTING
    message: str = ""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    steps: int | None = None
    pid: int | None = None


class RunFiles:
    """The files of a local run, whose own folder is `run`."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.folder = run / "supervisor"
        self.spec = self.folder / "spec.yaml"
        self.output = self.folder / "supervisor.log"
        self._state = self.folder / "state.json"
        self.events = self.folder / "events.jsonl"
        self.log = self.folder / "log.jsonl"
        self.metrics = run / "metrics.jsonl"
        self._lock = self.folder / "lock"

    @property
    def exists(self) -> bool:
        """Whether a run was ever submitted here."""
        return self._state.exists()

    def lock(self) -> int | None:
        """A file descriptor that has the lock, and can be handed to another process; None when somebody has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Of the open file, not of the process: it goes along to the supervisor, and is gone with the last of both.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file())
        except BlockingIOError:
            os.close(descriptor)
            return None
        for file in (self.events, self.log):
            _end_torn_line(file)
        return descriptor

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor lives. Asks without locking, and so disturbs nobody who does."""
        try:
            descriptor = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file())
        finally:
            os.close(descriptor)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    @property
    def is_active(self) -> bool:
        """Whether a run is here that is not at its end."""
        return self.is_supervised and self.exists and not self.state().phase.is_end

    def state(self) -> State:
        """Where the run is, by what was last written."""
        values = json.loads(self._state.read_text(encoding="utf-8"))
        stage = values["stage"]
        return State(**{**values, "phase": Phase(values["phase"]), "stage": stage and Stage(stage)})

    def set_state(self, state: State) -> None:
        """Replace what `state` returns."""
        temporary = self._state.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        temporary.replace(self._state)

    def add_event(self, event: Event) -> None:
        """Append to the events."""
        _append(self.events, asdict(event))

    def add_line(self, line: LogLine) -> None:
        """Append to the log."""
        _append(self.log, asdict(line))


def tail(path: Path, is_over: Callable[[], bool], pause: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file as they are appended, until nothing more will be.

    Calls `pause` whenever there is nothing new. What was written before `is_over` first answered true is never missed;
    a line that was torn by a kill is left out.
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
    """The last objects of a JSON-lines file, as many as are in its last `size` bytes; [] when there is no file."""
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
    """End the line that a kill has torn, which would swallow the next one."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _whole_file() -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
