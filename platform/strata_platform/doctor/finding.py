"""Checks and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "skipped", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; warnings and problems have advice."""

    status: Status
    message: str
    advice: str = ""


Check = tuple[str, Callable[[], Finding]]
"""Name and function of a check. A check that raises counts as a problem."""


def ok(message: str) -> Finding:
    """The check passed."""
    return Finding("ok", message)


def skipped(message: str) -> Finding:
    """The check does not apply here."""
    return Finding("skipped", message)


def warning(message: str, advice: str) -> Finding:
    """Runs work, but slower than they could, or not always."""
    return Finding("warning", message, advice)


def problem(message: str, advice: str) -> Finding:
    """Runs fail."""
    return Finding("problem", message, advice)


class StopChecking(Exception):
    """No further check is possible; `advice` says what to do first."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


def examine(checks: Iterable[Check]) -> Iterator[tuple[str, Finding]]:
    """Run the checks in order, until one raises StopChecking; yields each name with its finding."""
    for name, check in checks:
        try:
            yield name, check()
        except StopChecking as error:
            yield name, problem(str(error), error.advice)
            return
        except Exception as error:
            message = f"cannot be checked: {type(error).__name__}: {_first_line(error)}"
            yield name, problem(message, "fix what the message names and run the doctor again")


def _first_line(error: Exception) -> str:
    """Kubernetes' own reason, or the first line of the error."""
    reason = getattr(error, "reason", None)
    lines = str(reason or error).strip().splitlines()
    return lines[0] if lines else "no message"
