"""What this package raises on purpose.

    ValueError
    └── SpecError       a spec, or a part of one, has problems; holds all of them
                        (also a click.ClickException: see there)

Problems of the machine (a full disk, a lost network) keep their own exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from click import ClickException


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec, and the way out.

    `path` is the field as a person writes it, `optimizer.betas[1]`; empty for the spec as a whole. `given`, `allowed`
    and `suggestion` (the closest valid name) are ready to print, None where they make no sense. `line` counts from 1.
    """

    path: str
    message: str
    given: str | None = None
    allowed: str | None = None
    suggestion: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        line = f"line {self.line}" if self.line else ""
        where = f"{self.path} ({line})" if self.path and line else self.path or line
        parts = [f"{where}: {self.message}" if where else self.message]
        if self.given is not None:
            parts.append(f"given: {self.given}")
        if self.suggestion is not None:
            parts.append(f"did you mean '{self.suggestion}'?")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        return "; ".join(parts).replace("?; ", "? ")


class SpecError(ClickException, ValueError):
    """A spec has problems; `problems` has every one of them, `str()` a line for each.

    It is a `ClickException` because `pyflyte run --spec my.yaml` builds the spec inside click: click then prints the
    list and ends with exit code 2, where any other exception would end in a traceback and exit code 1.
    """

    exit_code = 2

    def __init__(self, problems: Iterable[Problem], source: str = "spec") -> None:
        self.problems = tuple(problems)
        self.source = source
        assert self.problems, "a SpecError without problems"
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source} has {count}:", *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[Callable[..., SpecError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.source)

    def located(self, source: str, lines: Mapping[str, int]) -> SpecError:
        """The same problems, said of the file `source`, with the line of each field and in the file's order."""
        found = [replace(problem, line=problem.line or lines.get(problem.path)) for problem in self.problems]
        return SpecError(sorted(found, key=lambda problem: (problem.line is None, problem.line or 0)), source)
