"""Rewards that can be verified, as functions of `objective.rewards`.

Each is called as TRL calls a reward function: with `prompts`, `completions`, `completion_ids` and the columns of the
rows by name, each a list with one item for each answer. A completion is a text, or where the prompt is a list of
messages, a list with the assistant's message. Each returns 1.0 for a right answer and 0.0 for others, or None where the
row says nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from tasks.runtime.rewards.sandbox import run_tests

# Behind a number, a word or a bracket, a sign is an operator or a dash: `10-3`, `(x)-3`, `pages 3-5`.
_NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# As texts about mathematics have it, and models write it.
_MINUS = "\N{MINUS SIGN}"
_FENCED = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)


def text_of(completion: Any) -> str:
    """The text of an answer: itself, or the contents of its messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


def exact_match(
    completions: Sequence[Any], *, column: str = "answer", ignore_case: bool = False, **columns: Sequence[Any]
) -> list[float | None]:
    """Whether an answer is the text in `column`, but for white space around it."""

    def normal(text: str) -> str:
        return text.strip().lower() if ignore_case else text.strip()

    return [
        None if right is None else float(normal(text_of(answer)) == normal(str(right)))
        for answer, right in zip(completions, columns[column], strict=True)
    ]


def regex(
    completions: Sequence[Any],
    *,
    pattern: str | None = None,
    column: str | None = None,
    full: bool = False,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Whether a regular expression matches somewhere in an answer, or with `full` all of it without the white space
    around it: `pattern`, or that in `column`. `.` matches line breaks, too.
    """
    if (pattern is None) == (column is None):
        raise ValueError("regex takes a pattern, or the column that holds one")
    patterns = columns[column] if column is not None else [pattern] * len(completions)
    found: list[float | None] = []
    for answer, expression in zip(completions, patterns, strict=True):
        if expression is None:
            found.append(None)
            continue
        compiled, text = re.compile(expression, re.DOTALL), text_of(answer)
        found.append(float(bool(compiled.fullmatch(text.strip()) if full else compiled.search(text))))
    return found


def numeric(
    completions: Sequence[Any], *, column: str = "answer", tolerance: float = 1e-6, **columns: Sequence[Any]
) -> list[float | None]:
    """Whether the last number in an answer is the last one in `column`, up to `tolerance`, relative above 1.

    Commas between digits are left out: `1,234.5` is 1234.5. So the result of a worked solution can be read from both.
    """
    found: list[float | None] = []
    for answer, right in zip(completions, columns[column], strict=True):
        expected, given = last_number(str(right)), last_number(text_of(answer))
        if expected is None:
            found.append(None)
        else:
            close = given is not None and abs(given - expected) <= tolerance * max(1.0, abs(expected))
            found.append(float(close))
    return found


def last_number(text: str) -> float | None:
    """The last number in a text; None if it has none, or one that is too large.

    >>> last_number("12 apples and 1,300 pears")
    1300.0
    """
    numbers = _NUMBER.findall(text.replace(_MINUS, "-"))
    value = float(numbers[-1].replace(",", "")) if numbers else math.nan
    return value if math.isfinite(value) else None


def json_schema(
    completions: Sequence[Any],
    *,
    schema: dict[str, Any] | None = None,
    column: str | None = None,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Whether an answer is JSON that a schema allows: `schema`, or that in `column`, an object or its JSON.

    The JSON may be in a fenced block. Needs the package jsonschema.
    """
    try:
        from jsonschema import validators  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("json_schema needs the package jsonschema; install it") from None

    if (schema is None) == (column is None):
        raise ValueError("json_schema takes a schema, or the column that holds one")
    schemas = columns[column] if column is not None else [schema] * len(completions)
    found: list[float | None] = []
    for answer, given in zip(completions, schemas, strict=True):
        if given is None:
            found.append(None)
            continue
        allowed = json.loads(given) if isinstance(given, str) else given
        try:
            value = json.loads(block_of(text_of(answer)))
        except (ValueError, RecursionError):
            found.append(0.0)
            continue
        found.append(float(validators.validator_for(allowed)(allowed).is_valid(value)))
    return found


def unit_tests(
    completions: Sequence[Any],
    *,
    column: str = "tests",
    seconds: float = 5.0,
    memory_mib: int = 512,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Whether the Python code of an answer, followed by the tests in `column`, runs to its end without an error.

    The code is the last fenced block, or the whole answer; tests are Python that asserts. Each answer runs in a process
    of its own with little memory and time; see `sandbox` for what that keeps it from, and what not.
    """
    return [
        None if tests is None else float(run_tests(block_of(text_of(answer)), str(tests), seconds, memory_mib))
        for answer, tests in zip(completions, columns[column], strict=True)
    ]


def block_of(text: str) -> str:
    """The last fenced block of a text, or all of it."""
    blocks: list[str] = _FENCED.findall(text)
    return blocks[-1] if blocks else text


SHIPPED = {function.__name__: function for function in (exact_match, regex, numeric, json_schema, unit_tests)}
"""By the names that `objective.rewards` gives them."""
