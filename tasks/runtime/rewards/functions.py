"""Rewards that can be verified, as functions of `objective.rewards`.

Each is called as TRL calls a reward function: with `prompts`, `completions`, `completion_ids` and the columns of the
rows by name, each a list with one item for each answer. A completion is a text, or where the prompt is a list of
messages, a list with the assistant's message. Each returns 1.0 for a right answer and 0.0 for others, or None where the
row says nothing.

What a model writes never raises an error here, nor takes for ever: `total_seconds`, which a run sets, is what all
answers of a call may take. An answer that had no turn until then has no value, and the log says how many had none.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tasks.runtime.process.cpus import available_cpus
from tasks.runtime.rewards.sandbox import run_tests

# Behind a number, a word or a bracket, a sign is an operator or a dash: `10-3`, `(x)-3`, `pages 3-5`.
_NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# As texts about mathematics have it, and models write it.
_MINUS = "\N{MINUS SIGN}"
_FENCE = "```"
# Of processor time, to match an answer or compare it with a schema.
_SECONDS = 1.0


class ColumnError(ValueError):
    """A row has a value in a column that a reward cannot use. row: its index among the answers."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def text_of(completion: Any) -> str:
    """The text of an answer: itself, or the contents of its messages, of which those in parts may have other media."""
    if isinstance(completion, str):
        return completion
    return "".join(_content(message.get("content")) for message in completion)


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def exact_match(
    completions: Sequence[Any], *, column: str = "answer", ignore_case: bool = False, **columns: Sequence[Any]
) -> list[float | None]:
    """Whether an answer equals the text in `column`, ignoring white space around it."""

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
    total_seconds: float | None = None,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Whether a regular expression matches somewhere in an answer, or with `full` all of it without the white space
    around it: `pattern`, or that in `column`. `.` matches line breaks, too. What takes a second to match does not.
    """
    if (pattern is None) == (column is None):
        raise ValueError("regex takes a pattern, or the column that holds one")
    patterns = columns[column] if column is not None else [pattern] * len(completions)
    compiled = [None if each is None else re.compile(each, re.DOTALL) for each in patterns]

    def matches(index: int) -> bool | None:
        expression, text = compiled[index], text_of(completions[index])
        if expression is None:
            return None
        return bool(expression.fullmatch(text.strip()) if full else expression.search(text))

    return _each("regex", len(completions), matches, total_seconds)


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
    total_seconds: float | None = None,
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
    given = columns[column] if column is not None else [schema] * len(completions)
    schemas = [json.loads(each) if isinstance(each, str) else each for each in given]

    def is_allowed(index: int) -> bool | None:
        allowed = schemas[index]
        if allowed is None:
            return None
        try:
            value = json.loads(block_of(text_of(completions[index])))
            return bool(validators.validator_for(allowed)(allowed).is_valid(value))
        except (ValueError, RecursionError, ArithmeticError, MemoryError):
            # No JSON, deeper than Python goes, or a number that cannot be divided.
            return False

    return _each("json_schema", len(completions), is_allowed, total_seconds)


def unit_tests(
    completions: Sequence[Any],
    *,
    column: str = "tests",
    seconds: float = 5.0,
    memory_mib: int = 512,
    total_seconds: float | None = None,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Whether the Python code of an answer, followed by the tests in `column`, runs to its end without an error.

    The code is the last fenced block, or the whole answer; tests are Python that asserts, or a list of such texts. Each
    answer runs in a process of its own with little memory and `seconds` of processor time, as many at once as there
    are processors; see `sandbox` for what that keeps it from, and what not.
    """
    tests = [tests_of(value, column, row) for row, value in enumerate(columns[column])]
    until = math.inf if total_seconds is None else time.monotonic() + total_seconds

    def passes(answer: Any, tests: str | None) -> bool | None:
        if tests is None:
            return None
        return run_tests(block_of(text_of(answer)), tests, seconds, memory_mib, until)

    with ThreadPoolExecutor(_share_of_cpus()) as pool:
        found = list(pool.map(passes, completions, tests))
    late = sum(each is None and there is not None for each, there in zip(found, tests, strict=True))
    _warn_of_late_answers("unit_tests", late, len(found), total_seconds)
    return [None if each is None else float(each) for each in found]


def tests_of(value: Any, column: str, row: int) -> str | None:
    """What the tests of a row run; None if it has none.

    Raises:
        ColumnError: it is neither text nor a list of texts, or would let every answer pass.
    """
    parts = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(part, str) for part in parts):
        raise ColumnError(
            row,
            f"the column {column!r} holds {_short(value)}; unit_tests takes Python as text, or a list of texts",
        )
    tests = "" if value is None else "\n".join(parts)
    if not tests.strip():
        return None
    try:
        statements = ast.parse(tests).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ColumnError(
            row, f"the column {column!r} holds {_short(tests)}, which is not valid Python: {error}; correct the row"
        ) from None
    if not any(map(_runs, statements)):
        raise ColumnError(
            row,
            f"the column {column!r} holds {_short(tests)}, which calls nothing and asserts nothing, so that any answer "
            "would pass; add a line that runs it, such as `check(NAME)` with the function's name, or `unittest.main()`",
        )
    return tests


def _runs(statement: ast.stmt) -> bool:
    """Whether a statement of tests can fail: no definition, import or constant."""
    if isinstance(
        statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Pass
    ):
        return False
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(statement))
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _share_of_cpus() -> int:
    """Processors for each of the pod's processes that train."""
    return max(1, available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _each(name: str, count: int, of: Callable[[int], bool | None], total_seconds: float | None) -> list[float | None]:
    """A reward's value for each answer by `of`: 0.0 for one that takes too long."""
    until = math.inf if total_seconds is None else time.monotonic() + total_seconds
    found: list[float | None] = []
    slow = late = 0
    for index in range(count):
        if time.monotonic() >= until:
            found.append(None)
            late += 1
            continue
        try:
            with _limited(_SECONDS):
                value = of(index)
        except _TooSlow:
            value, slow = False, slow + 1
        found.append(None if value is None else float(value))
    if slow:
        print(f"{name}: {slow} of {count} answers took more than {_SECONDS:g} s and have 0", file=sys.stderr)
    _warn_of_late_answers(name, late, count, total_seconds)
    return found


def _warn_of_late_answers(name: str, late: int, count: int, seconds: float | None) -> None:
    if late:
        print(
            f"{name}: {late} of {count} answers had no turn within {seconds:g} s and have no value; raise `seconds` of "
            "the reward",
            file=sys.stderr,
        )


class _TooSlow(BaseException):
    """Not an `Exception`, because libraries may catch those."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _TooSlow in the block after a limit of CPU time. Matching checks for signals, which threads do not get."""

    def stop(*_: Any) -> None:
        raise _TooSlow

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    # Again and again: an error that is raised while an object is removed is lost.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def block_of(text: str) -> str:
    """The last fenced block of a text, or all of it."""
    found, at = text, 0
    # By hand: a regular expression takes the square of the length for many backticks.
    while (fence := text.find(_FENCE, at)) >= 0:
        begin = text.find("\n", fence + len(_FENCE)) + 1
        end = text.find(_FENCE, begin) if begin else -1
        if end < 0:
            break
        found, at = text[begin:end], end + len(_FENCE)
    return found


SHIPPED = {function.__name__: function for function in (exact_match, regex, numeric, json_schema, unit_tests)}
"""By the names that `objective.rewards` gives them."""
