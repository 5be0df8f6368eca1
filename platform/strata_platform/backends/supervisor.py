"""The process beside a local run: `python -m strata_platform.backends.supervisor RUN LOCK RETRIES GRACE`.

It starts the run, writes down what that prints and tells, and starts it again when it was killed or hung, as Flyte does
on a cluster. It is detached from whoever submitted the run; when it is killed itself, the kernel kills the run's
processes. Not a part of the interface: `LocalBackend` starts it, with the lock of the run's files.
"""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from strata_platform import progress_line
from strata_platform.backends.run_state import RunFiles, State
from strata_platform.runs import Event, LogLine, Phase, Stage
from strata_platform.spec import RunSpec, load_spec

CANCEL = signal.SIGUSR1
"""What the supervisor is sent to cancel the run. SIGTERM is what a machine sends that shuts down."""
RESUBMIT = "submit it again to continue from its last checkpoint"
"""What to do about a run that ended before its end."""

_PR_SET_PDEATHSIG = 1
_EXIT_BAD_INPUT, _EXIT_HUNG, _EXIT_PREEMPTED = 2, 75, 128 + signal.SIGTERM
# How torchrun's lines begin that are of one of its workers, and how its report tells the exit code of each that failed.
_OF_WORKER = re.compile(r"\[default(\d+)\]:")
_CODE_OF_WORKER = re.compile(r"^\s*exitcode\s*: (-?\d+)")
# What a worker of a rank other than 0 puts before its warnings; the rank is known here.
_OF_RANK = re.compile(r"\[rank \d+\] ")


def command(spec: Path, processes: int, scratch: str) -> list[str]:
    """What starts a run: one process, or torchrun with several, whose restarts are left to the supervisor."""
    if processes == 1:
        return [sys.executable, "-u", "-m", "tasks.runtime", str(spec)]
    torchrun = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--tee", "3", "--log-dir", scratch]
    return [*torchrun, "--nproc-per-node", str(processes), "-m", "tasks.runtime", str(spec)]


@dataclass
class Attempt:
    """One start of the run's processes: what is kept of their words until it is known how they end."""

    number: int
    words: dict[int, list[str]] = field(default_factory=dict)
    """The last lines on standard error, by rank."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of workers, as far as torchrun has told any."""

    def hear(self, rank: int | None, text: str) -> None:
        """Note a line of standard error."""
        if rank is None:
            if found := _CODE_OF_WORKER.match(text):
                self.codes.append(int(found[1]))
        elif text.strip():
            before = [] if text.startswith("error: ") else self.words.get(rank, [])
            self.words[rank] = [*before, text][-20:]

    def verdict(self, code: int) -> tuple[bool, str]:
        """Whether another start may go better, and why this one ended, by the exit code of what was started."""
        codes = self.codes or [code]
        words = self.words[min(self.words)] if self.words else [f"exit code {codes[0]}"]
        if _EXIT_BAD_INPUT in codes:
            return False, "\n".join(words).removeprefix("error: ")
        killed = next((-code for code in codes if code < 0 and code != -signal.SIGTERM), None)
        if killed is not None:
            return True, f"a process was killed by {_named(killed)}"
        if _EXIT_HUNG in codes:
            return True, "training hung; the stacks of its processes are in the run's folder, in hangs"
        if set(codes) <= {_EXIT_PREEMPTED, -signal.SIGTERM}:
            return True, "a process was told to stop, by SIGTERM"
        return False, words[-1].strip()


class Supervisor:
    """Runs a submitted run to its end."""

    def __init__(self, files: RunFiles, retries: int, grace: int) -> None:
        self._files, self._retries, self._grace = files, retries, grace
        self._spec: RunSpec = load_spec(files.spec)
        self._state: State = files.state()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped_by: int | None = None

    def run(self) -> None:
        """Start the run until it is done, or given up, or somebody ends it."""
        for sent in (CANCEL, signal.SIGTERM, signal.SIGINT):
            signal.signal(sent, self._stop)
        signal.signal(signal.SIGALRM, self._kill)
        self._set(phase=Phase.RUNNING, started=time.time(), pid=os.getpid())
        for number in range(self._retries + 1):
            attempt = Attempt(number)
            self._event("Started", f"start {number + 1} of at most {self._retries + 1}")
            code = self._attempt(attempt)
            again, why = attempt.verdict(code) if code else (False, "")
            if self._stopped_by or not again:
                break
            self._event("Died", why, "warning")
            if number < self._retries:
                self._set(restarts=number + 1, stage=Stage.STARTING, message=f"started again: {why}")
        self._end(code, why, lost=again)

    def _end(self, code: int, why: str, *, lost: bool) -> None:
        """`lost`: the last start ended by what is no fault of the run."""
        if code == 0:
            self._finish(Phase.SUCCEEDED, "Succeeded", "all steps are done, measured and exported")
        elif self._stopped_by == CANCEL:
            self._finish(Phase.ABORTED, "Canceled", f"canceled; {RESUBMIT}")
        elif self._stopped_by:
            self._finish(Phase.INTERRUPTED, "Interrupted", f"ended by {_named(self._stopped_by)}; {RESUBMIT}")
        elif lost:
            self._finish(Phase.FAILED, "GivenUp", f"given up after {self._retries + 1} starts: {why}")
        else:
            self._finish(Phase.FAILED, "Failed", why)

    def _finish(self, phase: Phase, reason: str, message: str) -> None:
        self._event(reason, message, "normal" if phase is Phase.SUCCEEDED else "warning")
        self._set(phase=phase, stage=None, message="" if phase is Phase.SUCCEEDED else message, ended=time.time())

    def _attempt(self, attempt: Attempt) -> int:
        """Start the processes, listen to them, and return how what was started ended."""
        processes = self._spec.topology.world_size
        with tempfile.TemporaryDirectory(prefix="strata-") as scratch:
            self._child = subprocess.Popen(
                command(self._files.spec, processes, scratch),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, progress_line.VARIABLE: "1"},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            if self._stopped_by:
                # It came while there was no child to tell.
                self._stop_child()
            self._read_output(attempt, self._child)
            code = self._child.wait()
            signal.alarm(0)
        return code

    def _read_output(self, attempt: Attempt, child: subprocess.Popen[bytes]) -> None:
        """Until both streams are closed, or are silent although the child is gone: some other process has them."""
        assert child.stdout is not None
        assert child.stderr is not None
        rests = {child.stdout.fileno(): b"", child.stderr.fileno(): b""}
        errors = child.stderr.fileno()
        with selectors.DefaultSelector() as selector, child.stdout, child.stderr:
            for stream in rests:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                ended = child.poll() is not None
                ready = selector.select(timeout=1.0)
                if ended and not ready:
                    break
                for stream in (key.fd for key, _ in ready):
                    new = os.read(stream, 1 << 16)
                    if not new:
                        selector.unregister(stream)
                        # A line without an end.
                        new = b"\n" if rests[stream] else b""
                    *lines, rests[stream] = (rests[stream] + new).split(b"\n")
                    for line in lines:
                        self._handle_line(attempt, line.decode(errors="replace"), is_error=stream == errors)

    def _handle_line(self, attempt: Attempt, text: str, *, is_error: bool) -> None:
        # Of a bar, what was drawn last.
        text = text.rstrip("\r").rpartition("\r")[2]
        rank = 0 if self._spec.topology.world_size == 1 else None
        if found := _OF_WORKER.match(text):
            rank, text = int(found[1]), _OF_RANK.sub("", text[found.end() :], count=1)
        if (values := progress_line.decode(text)) is not None:
            self._handle_progress(values)
            return
        if is_error:
            attempt.hear(rank, text)
        self._files.add_line(LogLine(time.time(), rank, text, attempt=attempt.number))

    def _handle_progress(self, values: dict[str, Any]) -> None:
        if "stage" in values:
            stage = Stage(values["stage"])
            self._event("Stage", stage.value)
            self._set(stage=stage, steps=values.get("steps", self._state.steps))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped_by = number
        self._stop_child()

    def _stop_child(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            signal.alarm(self._grace)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        assert self._child is not None
        self._event("Killed", f"it did not end within {self._grace} s", "warning")
        os.killpg(self._child.pid, signal.SIGKILL)

    def _set(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._files.set_state(self._state)

    def _event(self, reason: str, message: str, kind: Any = "normal") -> None:
        self._files.add_event(Event(time.time(), reason, message, kind))


def _named(number: int) -> str:
    """A signal by its name; those for real-time use have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _end_with_parent() -> None:
    """Have the kernel kill the calling process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Detach, then run. The lock's descriptor, the second argument, is held by being open."""
    run, _, retries, grace = sys.argv[1:]
    supervisor = Supervisor(RunFiles(Path(run)), int(retries), int(grace))
    if os.fork() == 0:
        supervisor.run()


if __name__ == "__main__":
    main()
