"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "skipped", "warning", "problem"]


@dataclass(frozen=True)
class Outcome:
    """What one check says: how it is, and for what is not well the way out."""

    verdict: Verdict
    said: str
    way_out: str = ""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check, by the check's name."""

    check: str
    verdict: Verdict
    said: str
    way_out: str


Check = tuple[str, Callable[[], Outcome]]
"""What is looked at, and what looks. A look that raises is a problem: of what cannot be seen nothing good is known."""


def ok(said: str) -> Outcome:
    """It is well."""
    return Outcome("ok", said)


def skipped(said: str) -> Outcome:
    """It does not matter here."""
    return Outcome("skipped", said)


def warning(said: str, way_out: str) -> Outcome:
    """Runs work, and will not do so well as they could, or not always."""
    return Outcome("warning", said, way_out)


def problem(said: str, way_out: str) -> Outcome:
    """Runs fail."""
    return Outcome("problem", said, way_out)


class Nothing(Exception):
    """Nothing more can be looked at: `way_out` says what to do first."""

    def __init__(self, said: str, way_out: str) -> None:
        super().__init__(said)
        self.way_out = way_out


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Make each of `checks` in turn, up to one that finds that no further one can be made."""
    for name, look in checks:
        try:
            outcome = look()
        except Nothing as error:
            yield Finding(name, "problem", str(error), error.way_out)
            return
        except Exception as error:
            said = f"cannot be looked at: {type(error).__name__}: {_words(error)}"
            outcome = problem(said, "mend what the message names, and look again")
        yield Finding(name, outcome.verdict, outcome.said, outcome.way_out)


def _words(error: Exception) -> str:
    """The message of Kubernetes' own answer, or the first line of another."""
    reason = getattr(error, "reason", None)
    lines = str(reason or error).strip().splitlines()
    return lines[0] if lines else "no message"
