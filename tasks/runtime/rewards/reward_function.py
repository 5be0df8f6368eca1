"""A reward function in a process of its own, with a limit of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from strata_platform.spec.sections.objectives import RewardTerm
from tasks.runtime.rewards.process_tree import end_group
from tasks.runtime.rewards.reward_process import GIVEN, is_shipped

# Columns of rows that a function does not get as such: it gets `prompts`.
_NOT_PASSED = frozenset({*GIVEN, "prompt"})

_SCRIPT = Path(__file__).parent / "reward_process.py"
# To import the function: its module may load other libraries.
_START_SECONDS = 120.0
# For the reply of a function that ships with Strata, on a busy machine: it ends by itself when its seconds are over.
_REPLY_SECONDS = 60.0
# Between the end of a connection and that of its process.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Answers:
    """Generated answers as rewards get them, one item for each in every list.

    prompts: texts, or lists of messages. completions: texts. token_ids: of the completions. columns: those of the
    prompt's row. where: the prompt's row, for errors.
    """

    prompts: list[Any]
    completions: list[str]
    token_ids: list[list[int]]
    columns: list[dict[str, Any]]
    where: list[str]

    def __len__(self) -> int:
        return len(self.completions)

    def values(self) -> dict[str, list[Any]]:
        """The arguments of a reward function, as TRL gives them: completions of chats are messages."""
        columns = dict.fromkeys(name for row in self.columns for name in row if name not in _NOT_PASSED)
        return {
            **{name: [row.get(name) for row in self.columns] for name in columns},
            "prompts": self.prompts,
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(self.prompts, self.completions, strict=True)
            ],
            "completion_ids": self.token_ids,
        }


class RewardFunction:
    """Calls the function of one of `objective.rewards`. `begin`, then `finish`: several functions run side by side.

    number: the term's place in the list.

    Raises:
        ValueError: Python cannot import the function, or it does not take the arguments.
    """

    def __init__(self, term: RewardTerm, number: int) -> None:
        assert term.function is not None
        self._term, self._field = term, f"objective.rewards[{number}]"
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._pending: Answers | None = None
        # Of the last request: its reply has the same number.
        self._number = 0
        self._start()

    def require_columns(self, columns: set[str]) -> None:
        """Raises ValueError if the data lacks a column that the function needs."""
        columns = columns - _NOT_PASSED
        missing = [name for name in self._takes["needed"] if name not in columns]
        if missing:
            raise ValueError(
                f"{self._field}: {self._term.function!r} needs the column {missing[0]!r}, but the data has "
                f"{', '.join(map(repr, sorted(columns)))}, beside the prompts; rename one of them, or set "
                f"{self._field}.arguments"
            )

    def begin(self, answers: Answers) -> None:
        """Start to score answers."""
        if self._process is None:
            self._start()
        assert self._connection is not None
        self._pending = answers
        self._send({"count": len(answers), "values": answers.values()})

    def finish(self) -> list[float | None]:
        """The rewards; None where the function has none.

        Raises:
            ValueError: the function raised an error, took too long, or returned something else than numbers.
        """
        assert self._pending is not None
        answers, self._pending = self._pending, None
        late = _REPLY_SECONDS if is_shipped(str(self._term.function)) else 0.0
        reply = self._receive(self._term.seconds + late, f"for {len(answers)} answers")
        if reply["outcome"] == "error":
            row = reply["row"]
            where = "" if row is None else f" for {answers.where[row]}, answer {answers.completions[row][:80]!r}"
            raise ValueError(f"{self._field}: {self._term.function!r} raised an error{where}: {reply['error']}")
        found: list[float | None] = reply["rewards"]
        assert len(found) == len(answers)
        return found

    def close(self) -> None:
        """End the process, and those that the function has started."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            end_group(self._process)
            self._finalizer.detach()
        self._process = self._connection = None

    def _start(self) -> None:
        ours, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # -P: this folder's modules must not shadow installed ones.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._connection = ours
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())
        self._send({
            "load": self._term.function, "arguments": self._term.arguments, "seconds": self._term.seconds,
        })  # fmt: skip
        self._takes = self._receive(_START_SECONDS, "to be imported")
        if self._takes["outcome"] == "error":
            self.close()
            raise ValueError(
                f"{self._field}.function {self._term.function!r} cannot be used here: {self._takes['error']}; its "
                "module must be installed, or in a folder of PYTHONPATH. On a cluster it must be in the image, or in "
                "the folder that --copy all sends"
            )

    def _send(self, request: dict[str, Any]) -> None:
        assert self._connection is not None
        try:
            self._number += 1
            self._connection.send_bytes(json.dumps({**request, "number": self._number}).encode())
        except OSError:
            # The process has ended, which `_receive` tells.
            return

    def _receive(self, seconds: float, what: str) -> dict[str, Any]:
        assert self._connection is not None and self._process is not None
        until = time.monotonic() + seconds
        try:
            while self._connection.poll(max(until - time.monotonic(), 0.0)):
                reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
                if reply["number"] == self._number:
                    return reply
        except (EOFError, OSError):
            process = self._process
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            self.close()
            code = process.returncode
            raise ValueError(
                f"{self._field}: the process of {self._term.function!r} ended with {code}; its output is in the log"
            ) from None
        self.close()
        raise ValueError(
            f"{self._field}: {self._term.function!r} took more than {seconds:g} s {what}; raise {self._field}.seconds, "
            "or make it faster"
        )


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    # A fork of the owner ends, too.
    if os.getpid() == owner:
        end_group(process)
