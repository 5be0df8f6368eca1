"""The exceptions of this package.

    StrataError             has `status`, `reason`
    ├── SpecError           a spec, or a part of one, has problems; holds all of them
    │                       (also a ValueError and a click.ClickException: see there)
    ├── DoesNotFit          the estimate exceeds the memory of the run's GPUs
    ├── RunNotFound         404: no run has this name
    ├── RunExists           409: the run of this name has not ended
    ├── NotReady            the run has no outputs yet, or never will have
    ├── WaitTimeout         the run has not ended within the time to wait
    └── BackendError        a backend failed, or could not do what it was asked
        ├── Refused         401, 403: not logged in, or without the right
        └── Unreachable     503: no answer; another try may succeed

Problems of the machine (a full disk) keep their own exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from click import ClickException


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec, and what to do.

    `path` is the field as a person writes it, `optimizer.betas[1]`; empty for the spec as a whole. `given`, `allowed`
    and `suggestion` (the closest valid name) are texts to print, None where they do not apply. `line` counts from 1, in
    the spec's own file or in `origin`: an included file, or an override such as `--set seed=x`, which has no line.
    """

    path: str
    message: str
    given: str | None = None
    allowed: str | None = None
    suggestion: str | None = None
    line: int | None = None
    origin: str | None = None

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.origin, f"line {self.line}" if self.line else None) if part)
        where = f"{self.path} ({place})" if self.path and place else self.path or place
        parts = [f"{where}: {self.message}" if where else self.message]
        if self.given is not None:
            parts.append(f"given: {self.given}")
        if self.suggestion is not None:
            parts.append(f"did you mean '{self.suggestion}'?")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        return "; ".join(parts).replace("?; ", "? ")


class Place(NamedTuple):
    """Where a value was written; see `Problem`."""

    line: int | None = None
    origin: str | None = None


class StrataError(Exception):
    """Base of the exceptions of this package.

    `status` is an HTTP status where one fits. `reason` is a short word for programs: that of Kubernetes where
    Kubernetes refused, the name of the gRPC code where Flyte did.
    """

    status: int | None = None
    reason: str = "Error"

    def __init__(self, message: str, *, status: int | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.status = self.status if status is None else status
        self.reason = type(self).reason if reason is None else reason


class DoesNotFit(StrataError):
    """The estimate exceeds the memory of the run's GPUs."""

    status, reason = 422, "DoesNotFit"


class RunNotFound(StrataError):
    """No run has this name."""

    status, reason = 404, "NotFound"


class RunExists(StrataError):
    """The run of this name has not ended."""

    status, reason = 409, "AlreadyExists"


class NotReady(StrataError):
    """The run has no outputs yet, or never will have."""

    status, reason = 425, "NotReady"


class WaitTimeout(StrataError):
    """The run has not ended within the time to wait."""

    status, reason = 408, "Timeout"


class BackendError(StrataError):
    """A backend failed, or could not do what it was asked."""

    status, reason = 500, "BackendError"


class Refused(BackendError):
    """The user is not logged in, or lacks a right."""

    status, reason = 403, "Forbidden"


class Unreachable(BackendError):
    """The backend does not answer; another try may succeed."""

    status, reason = 503, "Unavailable"


class SpecError(StrataError, ClickException, ValueError):
    """A spec has problems; `problems` lists them all, and `str()` has a line for each.

    It is a `ClickException` because `pyflyte run --spec my.yaml` builds the spec inside click: click prints the list
    and exits with 2, where any other exception would end in a traceback and exit code 1.
    """

    exit_code = 2
    status, reason = 422, "Invalid"

    def __init__(self, problems: Iterable[Problem], source: str = "spec") -> None:
        self.problems = tuple(problems)
        self.source = source
        assert self.problems, "a SpecError without problems"
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        text = "\n".join([f"{source} has {count}:", *(f"  {problem}" for problem in self.problems)])
        ClickException.__init__(self, text)

    def __reduce__(self) -> tuple[Callable[..., SpecError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.source)

    def with_places(self, source: str, places: Mapping[str, Place]) -> SpecError:
        """The same problems in the file `source`, each with the place of its field, in the order of the file."""
        placed = [
            problem
            if problem.line or problem.origin
            else replace(problem, **places.get(problem.path, Place())._asdict())
            for problem in self.problems
        ]
        return SpecError(sorted(placed, key=_order), source)


def _order(problem: Problem) -> tuple[Any, ...]:
    """Lines of the file come first, then included files and overrides, then fields that are written nowhere."""
    return (
        problem.origin is not None or problem.line is None,
        problem.origin is None,
        problem.origin or "",
        problem.line or 0,
    )
