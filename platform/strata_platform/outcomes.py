"""How a process of a run ends: the one set of exit codes, what each means, and whether another attempt may succeed.

    code            kind         retried   raised as, in the runtime
    0               complete     -
    2               bad_input    no        ValueError, SpecError, OutOfMemoryError
    68              unreachable  yes       Unreachable
    69              unhealthy    yes       Unhealthy
    74              lost         yes       RuntimeError, OSError, if another attempt may mend it
    75              hung         yes       none: the watchdog ends the process
    124             time_limit   no        TimeLimitReached
    143, -15        preempted    yes       Preempted
    -N, 128 + N     killed       yes       none: signal N ended the process
    any other       failed       no        any other exception

The Flyte tasks, `python -m tasks.runtime` and the supervisor of local runs all decide by these, so that a run is
retried under one backend exactly when it is retried under the other.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

Kind = Literal[
    "complete", "bad_input", "unreachable", "unhealthy", "lost", "hung", "time_limit", "preempted", "killed", "failed"
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended.

    Attributes:
        exit_code: of the process, as `subprocess` counts: negative for a signal.
        retryable: whether another attempt may succeed without a change to the spec, the data or the code.
        message: what happened, without its cause.
        advice: what it usually means and what to do.
    """

    kind: Kind
    exit_code: int
    retryable: bool
    message: str
    advice: str = ""

    @property
    def sentence(self) -> str:
        """Message and advice."""
        return f"{self.message}; {self.advice}" if self.advice else self.message


COMPLETE = Outcome("complete", 0, False, "all steps are done, measured and exported")
BAD_INPUT = Outcome("bad_input", 2, False, "the spec or the data must change", "the error names the field")
# EX_NOHOST, EX_UNAVAILABLE, EX_IOERR and EX_TEMPFAIL of sysexits.h.
UNREACHABLE = Outcome(
    "unreachable",
    68,
    True,
    "the Hugging Face Hub, checkpoint.url or objective.generation.server could not be reached",
    "start the run again when it answers",
)
UNHEALTHY = Outcome(
    "unhealthy",
    69,
    True,
    "a GPU or a connection is not fit to train on",
    "start the run on another machine and take this one out of the cluster",
)
LOST = Outcome(
    "lost", 74, True, "a process failed or lost its peers", "another attempt continues from the last checkpoint"
)
HUNG = Outcome("hung", 75, True, "training hung", "the stacks of its processes are in the run's folder, in hangs")
# As coreutils' timeout.
TIME_LIMIT = Outcome(
    "time_limit",
    124,
    False,
    "resources.time_limit is used up",
    "raise it and start the run again to continue from its last checkpoint",
)
# As a shell counts SIGTERM.
PREEMPTED = Outcome(
    "preempted",
    128 + signal.SIGTERM,
    True,
    "a process received SIGTERM",
    "the cluster stopped the pod, or the machine shuts down; start the run again to continue from its last checkpoint",
)

_BY_CODE = {
    outcome.exit_code: outcome
    for outcome in (COMPLETE, BAD_INPUT, UNREACHABLE, UNHEALTHY, LOST, HUNG, TIME_LIMIT, PREEMPTED)
}
_SIGNAL_ADVICE: dict[int, str] = {
    signal.SIGKILL: "the machine is gone, somebody killed the process, or it ran out of memory",
    signal.SIGINT: "somebody interrupted it from the keyboard",
    signal.SIGSEGV: "native code crashed",
    signal.SIGBUS: "usually /dev/shm is full: raise resources.shared_memory",
    signal.SIGABRT: "native code aborted, for example NCCL after a collective timed out; its log says why",
    signal.SIGILL: "the image is built for a processor with other instructions",
    signal.SIGFPE: "native code divided by zero",
    signal.SIGALRM: "it hung in native code, and its stacks are in the log",
}
# The order in which outcomes decide about a job whose processes ended differently: the cause comes first. A process
# that merely lost a peer ends as "lost", and the agent sends SIGTERM to the rest.
_CAUSES: tuple[Kind, ...] = (
    "bad_input",
    "time_limit",
    "killed",
    "hung",
    "unhealthy",
    "unreachable",
    "failed",
    "lost",
    "preempted",
    "complete",
)


def outcome_of_exit(code: int) -> Outcome:
    """The outcome that an exit code stands for; a signal is negative, or 128 and more as in a shell.

    >>> outcome_of_exit(-9).sentence
    'a process was killed by SIGKILL; the machine is gone, somebody killed the process, or it ran out of memory'
    >>> outcome_of_exit(3)
    Outcome(kind='failed', exit_code=3, retryable=False, message='exit code 3', advice='')
    """
    if code in _BY_CODE:
        return _BY_CODE[code]
    number = -code if code < 0 else code - 128
    if number == signal.SIGTERM:
        return PREEMPTED
    if number <= 0 or number not in signal.valid_signals():
        return Outcome("failed", code, False, f"exit code {code}")
    # Real-time signals have no names.
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return Outcome("killed", code, True, f"a process was killed by {name}", _SIGNAL_ADVICE.get(number, ""))


RETRYABLE_CODES = tuple(code for code in range(1, 256) if outcome_of_exit(code).retryable)
"""Exit codes, as a container's, after which another attempt may succeed; in ascending order."""


def outcome_of_job(codes: Iterable[int]) -> Outcome:
    """The outcome that decides about a job whose processes ended with `codes`, of which there is at least one.

    >>> outcome_of_job([1, -15, 68]).kind
    'unreachable'
    """
    return min(map(outcome_of_exit, codes), key=lambda outcome: _CAUSES.index(outcome.kind))


class RunError(RuntimeError):
    """Base of the exceptions that end a process of a run with an outcome of their own."""

    outcome: ClassVar[Outcome]
