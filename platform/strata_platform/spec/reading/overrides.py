"""Overrides of a spec's fields, as on a command line: `optimizer.lr=1e-5`.

A value is YAML, as in the file: `data.source=[a.jsonl, b.jsonl]`, `training.steps=null`, `adapter={type: lora, r: 8}`.
It replaces what the field had; other fields of its section stay. The last override of a field wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from strata_platform.errors import Place, Problem, SpecError
from strata_platform.spec.yaml_core import read_yaml

OPTION = "--set"


class Override(NamedTuple):
    """A field's path, its new value, and the override as it was written."""

    path: str
    value: Any
    place: Place


def parse_overrides(texts: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    """The overrides in the order in which they apply, and a problem for each text that is none."""
    found: list[Override] = []
    problems: list[Problem] = []
    for text in texts:
        origin = f"{OPTION} {text}"
        path, equals, value = (part.strip() for part in text.partition("="))
        if problem := _problem_of(path, equals, text):
            problems.append(Problem("", problem, origin=origin))
            continue
        try:
            document = read_yaml(value, origin)
        except SpecError as error:
            problems += [Problem(path, _advice(problem.message), origin=origin) for problem in error.problems]
            continue
        problems += [
            Problem(f"{path}.{twice.path}", "given twice; keep one", origin=origin) for twice in document.duplicates
        ]
        found.append(Override(path, document.value, Place(origin=origin)))
    # A `type` decides which other fields its section has, so it comes first.
    return sorted(found, key=lambda override: not override.path.endswith(".type")), problems


def _problem_of(path: str, equals: str, text: str) -> str | None:
    if not equals:
        return "no =; write FIELD=VALUE, such as optimizer.lr=1e-5"
    if not all(path.split(".")):
        return "the field has an empty part; write a path such as optimizer.lr"
    if "[" in path:
        return f"an item of a list cannot be set; set the whole list: {path.partition('[')[0]}=[...]"
    if path == "include":
        return "only files include others; name a file that does"
    return None


def _advice(message: str) -> str:
    return message if "quotes" in message else f"{message}; put it in quotes if it is text"
