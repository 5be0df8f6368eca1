"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "skipped", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What one check says: how it is, and for what is not well the way out."""

    status: Status
    message: str
    advice: str = ""


Check = tuple[str, Callable[[], Finding]]
"""What is looked at, and what looks. A look that raises is a problem: of what cannot be seen nothing good is known."""


def ok(message: str) -> Finding:
    """It is well."""
    return Finding("ok", message)


def skipped(message: str) -> Finding:
    """It does not matter here."""
    return Finding("skipped", message)


def warning(message: str, advice: str) -> Finding:
    """Runs work, and will not do so well as they could, or not always."""
    return Finding("warning", message, advice)


def problem(message: str, advice: str) -> Finding:
    """Runs fail."""
    return Finding("problem", message, advice)


class StopChecking(Exception):
    """Nothing more can be looked at: `advice` says what to do first."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


def examine(checks: Iterable[Check]) -> Iterator[tuple[str, Finding]]:
    """Make each of `checks` in turn, up to one that finds that no further one can be made; names, and what is found."""
    for name, look in checks:
        try:
            yield name, look()
        except StopChecking as error:
            yield name, problem(str(error), error.advice)
            return
        except Exception as error:
            message = f"cannot be looked at: {type(error).__name__}: {_words(error)}"
            yield name, problem(message, "mend what the message names, and look again")


def _words(error: Exception) -> str:
    """The message of Kubernetes' own answer, or the first line of another."""
    reason = getattr(error, "reason", None)
    lines = str(reason or error).strip().splitlines()
    return lines[0] if lines else "no message"
