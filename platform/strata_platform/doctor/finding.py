"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "skipped", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What one check says: how it is, and for what is not well the way out."""

    verdict: Verdict
    said: str
    way_out: str = ""


Check = tuple[str, Callable[[], Finding]]
"""What is looked at, and what looks. A look that raises is a problem: of what cannot be seen nothing good is known."""


def ok(said: str) -> Finding:
    """It is well."""
    return Finding("ok", said)


def skipped(said: str) -> Finding:
    """It does not matter here."""
    return Finding("skipped", said)


def warning(said: str, way_out: str) -> Finding:
    """Runs work, and will not do so well as they could, or not always."""
    return Finding("warning", said, way_out)


def problem(said: str, way_out: str) -> Finding:
    """Runs fail."""
    return Finding("problem", said, way_out)


class Nothing(Exception):
    """Nothing more can be looked at: `way_out` says what to do first."""

    def __init__(self, said: str, way_out: str) -> None:
        super().__init__(said)
        self.way_out = way_out


def examine(checks: Iterable[Check]) -> Iterator[tuple[str, Finding]]:
    """Make each of `checks` in turn, up to one that finds that no further one can be made; names, and what is found."""
    for name, look in checks:
        try:
            yield name, look()
        except Nothing as error:
            yield name, problem(str(error), error.way_out)
            return
        except Exception as error:
            said = f"cannot be looked at: {type(error).__name__}: {_words(error)}"
            yield name, problem(said, "mend what the message names, and look again")


def _words(error: Exception) -> str:
    """The message of Kubernetes' own answer, or the first line of another."""
    reason = getattr(error, "reason", None)
    lines = str(reason or error).strip().splitlines()
    return lines[0] if lines else "no message"
