"""The process of one reward function: a script that `RewardFunction` starts.

Its argument is the number of a socket. Over it the process gets requests as JSON and answers each with JSON, too: the
function is other people's code, and nothing that its process sends is unpickled.
"""

import asyncio
import inspect
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

GIVEN = ("prompts", "completions", "completion_ids")
"""What a function is called with beside columns."""
# Of a call, to find the answer that a function raised an error for. Functions have a second at least.
_SEARCH_UNTIL = 0.5


class NoRewardsError(TypeError):
    """A function returned something else than a list of numbers, whatever the answers are."""


def is_shipped(name: str) -> bool:
    """Whether it is the name of a function of ours: others have a module."""
    return ":" not in name


def load(name: str) -> Callable[..., Any]:
    """The function of that name: one that ships with Strata, or `module:function`."""
    if is_shipped(name):
        from tasks.runtime.rewards.functions import SHIPPED

        return SHIPPED[name]
    module, _, attribute = name.partition(":")
    found = getattr(import_module(module), attribute, None)
    if found is None:
        raise AttributeError(f"{module} has no {attribute!r}")
    if not callable(found):
        raise TypeError(f"{attribute!r} is not a function")
    return found  # type: ignore[no-any-return]


def parameters(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What the function takes by name beside `arguments`: `needed`, and whether it takes `all` columns."""
    signature = inspect.signature(function)
    kinds = inspect.Parameter
    named = {name: each for name, each in signature.parameters.items() if each.kind in (
        kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}  # fmt: skip
    takes_all = any(each.kind is kinds.VAR_KEYWORD for each in signature.parameters.values())
    unknown = [name for name in arguments if name not in named]
    if unknown and not takes_all:
        raise TypeError(f"it takes no argument {unknown[0]!r}; it takes: {', '.join(named)}")
    # An argument may name the column that it reads.
    columns = [arguments.get(name, each.default) for name, each in named.items() if name == "column"]
    needed = [name for name, each in named.items() if each.default is kinds.empty and name not in (*GIVEN, *arguments)]
    needed += [column for column in columns if isinstance(column, str)]
    return {"needed": needed, "all": takes_all, "names": list(named)}


def call(function: Callable[..., Any], values: dict[str, Any], arguments: dict[str, Any], count: int) -> list[Any]:
    """The rewards of `count` answers, each a finite number or None. Raises what the function raises."""
    rewards = function(**values, **arguments)
    if inspect.isawaitable(rewards):
        rewards = _loop().run(_result(rewards))
    if isinstance(rewards, str | bytes | Mapping | Set):
        # Their items can be read as numbers, or are in another order than the answers.
        raise NoRewardsError(f"it returned {type(rewards).__name__} {rewards!r:.80}, not a list of numbers")
    try:
        found = [None if each is None else _number(each) for each in rewards]
    except TypeError as error:
        raise NoRewardsError(f"it returned {type(rewards).__name__}, not a list of numbers: {error}") from error
    if len(found) != count:
        raise ValueError(f"it returned {len(found)} rewards for {count} answers")
    bad = [each for each in found if each is not None and not math.isfinite(each)]
    if bad:
        raise ValueError(f"it returned {bad[0]}, which is not a finite number")
    return found


@cache
def _loop() -> asyncio.Runner:
    """One event loop for all calls, as in TRL: a client that a module keeps belongs to the loop of its first call."""
    return asyncio.Runner()


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _number(reward: Any) -> float:
    if isinstance(reward, str | bytes):
        raise TypeError(f"{reward!r:.80} is {type(reward).__name__}")
    return float(reward)


def culprit(
    function: Callable[..., Any],
    values: dict[str, Any],
    arguments: dict[str, Any],
    count: int,
    error: Exception,
    seconds: float,
) -> int | None:
    """The first answer for which alone the function raises the same kind of error; None if a short search finds none.

    The search must not hide the error: it ends before the time for the answers is over, whatever the function does.
    """

    def stop(*_: Any) -> None:
        raise _Over

    if seconds <= 0:
        return None
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        for index in range(count):
            try:
                call(function, {name: [each[index]] for name, each in values.items()}, arguments, 1)
            except Exception as alone:
                if type(alone) is type(error):
                    return index
    except _Over:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


class _Over(BaseException):
    """The search has taken too long. No `Exception`, which a function may catch."""


def message_of(error: BaseException) -> str:
    """An error in one line, with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f", in line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{at}"


def main() -> None:
    """Answer requests until the other end is closed."""
    from tasks.runtime.rewards.process_tree import adopt_orphans, die_with_parent

    die_with_parent()
    # So that what a function starts can be found, and ended with this process.
    adopt_orphans()
    own = os.getpid()
    connection = Connection(int(sys.argv[1]))
    function: Callable[..., Any] | None = None
    arguments: dict[str, Any] = {}
    takes: dict[str, Any] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal function, arguments, takes
        if "load" in request:
            arguments = request["arguments"]
            function = load(request["load"])
            takes = parameters(function, arguments)
            if is_shipped(request["load"]) and "total_seconds" in takes["names"]:
                arguments = {"total_seconds": request["seconds"], **arguments}
            return takes
        assert function is not None
        count = request["count"]
        given = request["values"]
        values = {
            name: given[name] for name in given if (takes["all"] or name in takes["names"]) and name not in arguments
        }
        began = time.monotonic()
        try:
            return {"rewards": call(function, values, arguments, count)}
        except Exception as error:
            row = getattr(error, "row", None)
            if isinstance(error, NoRewardsError):
                row = None
            elif not isinstance(row, int) or not 0 <= row < count:
                left = _SEARCH_UNTIL - (time.monotonic() - began)
                row = 0 if count == 1 else culprit(function, values, arguments, count, error, left)
            return {"outcome": "error", "row": row, "error": message_of(error)}

    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            reply = {"outcome": "done", **answer(request)}
        except Exception as error:
            reply = {"outcome": "error", "row": None, "error": message_of(error)}
        if os.getpid() != own:
            # A copy that the function has forked, and in which it has returned, too.
            os._exit(0)
        connection.send_bytes(json.dumps({**reply, "number": request["number"]}).encode())


if __name__ == "__main__":
    main()
