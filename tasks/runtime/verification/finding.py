"""The result of a check, and its forms for people and for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["pass", "fail", "n/a"]

_COLORS = {"pass": "\x1b[32m", "fail": "\x1b[31m", "n/a": "\x1b[2m"}
_LEARNED, _RESET = "\x1b[30;42m", "\x1b[0m"
# Mark targets in output without colors.
_MARKS = ("⟦", "⟧")

Piece = tuple[str, bool]
"""A piece of text, and whether its tokens are targets."""


@dataclass(frozen=True)
class Measured:
    """The result of a check. It passes if `figure` is at most `limit` and there is no `problem`."""

    figure: float
    limit: float
    detail: str
    """The meaning of the figure, and the name of the worst case."""
    problem: str | None = None
    """Another reason to fail."""
    shown: tuple[Piece, ...] = ()

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.figure <= self.limit and self.problem is None


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    seconds: float
    detail: str
    figure: float | None = None
    limit: float | None = None
    shown: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, name: str, measured: Measured, seconds: float) -> Finding:
        """The line for the result of a check."""
        detail = f"{measured.problem}; {measured.detail}" if measured.problem else measured.detail
        status: Status = "pass" if measured.passed else "fail"
        return cls(name, status, seconds, detail, measured.figure, measured.limit, measured.shown)

    def line(self, *, color: bool) -> str:
        """The finding as text for people, followed by the text that was checked, if any."""
        figures = "" if self.figure is None else f"{self.figure:.3g} (limit {self.limit:.3g})"
        status = f"{_COLORS[self.status]}{self.status:<4}{_RESET}" if color else f"{self.status:<4}"
        lines = [f"{status}  {self.name:<12} {figures:<24} {self.seconds:5.1f} s  {self.detail}"]
        if self.shown:
            begin, end = (_LEARNED, _RESET) if color else _MARKS
            text = "".join(f"{begin}{text}{end}" if learned else text for text, learned in self.shown)
            lines += [f"      | {line}" for line in text.splitlines()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON values; a figure that is not finite is null."""
        values: dict[str, Any] = {
            "name": self.name,
            "status": self.status,
            "figure": self.figure if self.figure is None or math.isfinite(self.figure) else None,
            "limit": self.limit,
            "seconds": round(self.seconds, 2),
            "detail": self.detail,
        }
        if self.shown:
            values["shown"] = [{"text": text, "learned": learned} for text, learned in self.shown]
        return values
