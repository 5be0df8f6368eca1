"""The supervisor of a local run: `python -m strata_platform.backends.supervisor RUN LOCK RETRIES GRACE`.

The supervisor starts the run's processes, writes their output to the run's log, follows their progress lines, and
starts them again after an outcome that `strata_platform.outcomes` calls retryable, as Flyte does on a cluster. It is
detached from the process that submitted the run. If the supervisor itself is killed, the kernel kills the run's
processes.

Not a public interface: `LocalBackend` starts it and hands it the lock on the run's files.
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
from strata_platform.backends.backend import eval_loss
from strata_platform.backends.run_state import CANCEL, RESUBMIT, RunFiles, State
from strata_platform.outcomes import Outcome, outcome_of_job
from strata_platform.runs import Event, LogLine, Phase, Stage
from strata_platform.spec import RunSpec, load_spec

_PR_SET_PDEATHSIG = 1
# torchrun begins each line of a worker with the worker's rank, and its report has the exit code of each failed worker.
_OF_WORKER = re.compile(r"\[default(\d+)\]:")
_CODE_OF_WORKER = re.compile(r"^\s*exitcode\s*: (-?\d+)")
# Workers of other ranks than 0 begin their warnings with their rank, which is known here.
_OF_RANK = re.compile(r"\[rank \d+\] ")


def command(spec: Path, processes: int, scratch: str) -> list[str]:
    """The command that starts a run: one process, or torchrun without restarts, which the supervisor does itself."""
    if processes == 1:
        return [sys.executable, "-u", "-m", "tasks.runtime", str(spec)]
    torchrun = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--tee", "3", "--log-dir", scratch]
    return [*torchrun, "--nproc-per-node", str(processes), "-m", "tasks.runtime", str(spec)]


@dataclass
class Attempt:
    """One start of the run's processes, and the evidence of how it ended."""

    number: int
    last_lines: dict[int, list[str]] = field(default_factory=dict)
    """The last lines on standard error, by rank."""
    exit_codes: list[int] = field(default_factory=list)
    """Exit codes of workers, as far as torchrun reported any."""

    def add_stderr(self, rank: int | None, text: str) -> None:
        """Note a line of standard error; `rank` is None for torchrun's own."""
        if rank is None:
            if found := _CODE_OF_WORKER.match(text):
                self.exit_codes.append(int(found[1]))
        elif text.strip():
            before = [] if text.startswith("error: ") else self.last_lines.get(rank, [])
            self.last_lines[rank] = [*before, text][-20:]

    def outcome(self, code: int) -> Outcome:
        """How the attempt ended, by the exit code of the process that the supervisor started."""
        return outcome_of_job(self.exit_codes or [code])

    def reason(self, outcome: Outcome) -> str:
        """Why the attempt ended so, by the outcome and the last lines of the lowest rank that wrote any."""
        lines = self.last_lines[min(self.last_lines)] if self.last_lines else []
        error = "\n".join(lines).removeprefix("error: ")
        match outcome.kind:
            case "bad_input" | "time_limit":
                return error or outcome.sentence
            case "unreachable" | "unhealthy":
                return f"{outcome.message}: {error}" if error else outcome.message
            case "hung":
                return outcome.sentence
            case "failed":
                return lines[-1].strip() if lines else outcome.message
            case _:
                return outcome.message


class Supervisor:
    """Runs a submitted run to its end."""

    def __init__(self, files: RunFiles, retries: int, grace: int) -> None:
        self._files, self._retries, self._grace = files, retries, grace
        self._spec: RunSpec = load_spec(files.spec)
        self._state: State = files.state()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped_by: int | None = None

    def run(self) -> None:
        """Start the processes until the run succeeds, fails for good, or somebody stops it."""
        for sent in (CANCEL, signal.SIGTERM, signal.SIGINT):
            signal.signal(sent, self._stop)
        signal.signal(signal.SIGALRM, self._kill)
        self._set(phase=Phase.RUNNING, started=time.time(), pid=os.getpid())
        for number in range(self._retries + 1):
            attempt = Attempt(number)
            self._event("Started", f"start {number + 1} of at most {self._retries + 1}")
            outcome = attempt.outcome(self._attempt(attempt))
            reason = attempt.reason(outcome)
            if self._stopped_by or not outcome.retryable:
                break
            self._event("Died", reason, "warning")
            if number < self._retries:
                self._set(restarts=number + 1, stage=Stage.STARTING, message=f"started again: {reason}")
        self._end(outcome, reason)

    def _end(self, outcome: Outcome, reason: str) -> None:
        if outcome.kind == "complete":
            early = self._state.stopped_early
            message = outcome.message if early is None else f"stopped early after step {early}, measured and exported"
            self._finish(Phase.SUCCEEDED, "Succeeded", message)
        elif self._stopped_by == CANCEL:
            self._finish(Phase.ABORTED, "Canceled", f"canceled; {RESUBMIT}")
        elif self._stopped_by:
            name = signal.Signals(self._stopped_by).name
            self._finish(Phase.INTERRUPTED, "Interrupted", f"ended by {name}; {RESUBMIT}")
        elif outcome.retryable:
            self._finish(Phase.FAILED, "GivenUp", f"given up after {self._retries + 1} starts: {reason}")
        else:
            self._finish(Phase.FAILED, "Failed", reason)

    def _finish(self, phase: Phase, reason: str, message: str) -> None:
        self._event(reason, message, "normal" if phase is Phase.SUCCEEDED else "warning")
        self._set(phase=phase, stage=None, message="" if phase is Phase.SUCCEEDED else message, ended=time.time())

    def _attempt(self, attempt: Attempt) -> int:
        """Start the processes, read their output, and return the exit code of the started process."""
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
                # The signal came before there was a child to stop.
                self._stop_child()
            self._read_output(attempt, self._child)
            code = self._child.wait()
            signal.alarm(0)
        return code

    def _read_output(self, attempt: Attempt, child: subprocess.Popen[bytes]) -> None:
        """Read until both streams are closed, or silent after the child ended: another process may hold them open."""
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
                        # The last line may have no line break.
                        new = b"\n" if rests[stream] else b""
                    *lines, rests[stream] = (rests[stream] + new).split(b"\n")
                    for line in lines:
                        self._handle_line(attempt, line.decode(errors="replace"), is_error=stream == errors)

    def _handle_line(self, attempt: Attempt, text: str, *, is_error: bool) -> None:
        # A progress bar is rewritten after carriage returns: keep its last state.
        text = text.rstrip("\r").rpartition("\r")[2]
        rank = 0 if self._spec.topology.world_size == 1 else None
        if found := _OF_WORKER.match(text):
            rank, text = int(found[1]), _OF_RANK.sub("", text[found.end() :], count=1)
        if (values := progress_line.decode(text)) is not None:
            self._handle_progress(values)
            return
        if is_error:
            attempt.add_stderr(rank, text)
        self._files.add_line(LogLine(time.time(), rank, text, attempt=attempt.number))

    def _handle_progress(self, values: dict[str, Any]) -> None:
        if "stage" in values:
            stage = Stage(values["stage"])
            self._event("Stage", stage.value)
            self._set(stage=stage, steps=values.get("steps", self._state.steps))
        if "evaluation" in values and (loss := eval_loss(values["evaluation"])) is not None:
            self._set(eval_loss=loss)
        if "stopped_early" in values:
            self._event("StoppedEarly", f"after step {values['stopped_early']}")
            self._set(stopped_early=values["stopped_early"])

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


def _end_with_parent() -> None:
    """Have the kernel kill the calling process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Detach, then run. The second argument is the descriptor of the lock, which is held as long as it is open."""
    run, _, retries, grace = sys.argv[1:]
    supervisor = Supervisor(RunFiles(Path(run)), int(retries), int(grace))
    if os.fork() == 0:
        supervisor.run()


if __name__ == "__main__":
    main()
