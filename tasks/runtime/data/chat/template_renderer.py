"""Render templates of chats and prompts in a process of its own, with limits of time and memory.

A template is a program that comes with a model or a data set. It may loop without end, double a text forty times, or
compute a power of ten that takes hours within one operation, which no signal and no other thread can interrupt. A
process can be killed, from any thread of any process.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Seconds for one chat or prompt, and for the process to start.
SECONDS = 30.0
# Bytes for a template, in addition to those of the process; and characters that it may render.
MEMORY = 4 << 30
LONGEST = 1 << 28
_START_SECONDS = 300.0
_SCRIPT = Path(__file__).with_name("template_process.py")

Span = tuple[int, int]


class TemplateLimit(ValueError):
    """A template takes too long or too much memory, or is not one; the message says which."""


class TemplateRejection(ValueError):
    """A template rejects the messages of one chat, or the columns of one row, with this message."""


class _Renderer:
    """A rendering process, started by the first request and after each that was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._owner = 0

    def request(self, kind: str, *arguments: Any, one: str = "row") -> Any:
        """The answer to a request of this kind, see `template_process`. one: what the limit of time is for."""
        with self._lock:
            if self._process is not None and self._owner != os.getpid():
                # A fork has its parent's process, which is neither its to use nor to wait for.
                self._process.returncode = 0
                self._process = None
            if self._process is None:
                self._start()
            assert self._connection is not None
            try:
                self._connection.send((kind, *arguments))
                if not self._connection.poll(SECONDS):
                    self._stop()
                    raise TemplateLimit(f"takes more than {SECONDS:g} s for one {one}")
                outcome, answer = self._connection.recv()
            except (EOFError, OSError) as error:
                self._stop()
                raise TemplateLimit("ended its process, probably for lack of memory") from error
            if outcome == "limit":
                # The process may hold on to memory.
                self._stop()
            if outcome in ("limit", "syntax"):
                raise TemplateLimit(answer if outcome == "limit" else f"is not a Jinja template: {answer}")
            if outcome == "rejected":
                raise TemplateRejection(answer)
            return answer

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        ours, theirs = Pipe()
        # Without torch it starts in a second.
        environment = {**os.environ, "USE_TORCH": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # -P: this folder's modules must not shadow installed ones.
        command = [sys.executable, "-P", str(_SCRIPT), *map(str, (theirs.fileno(), MEMORY, LONGEST))]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        self._connection, self._owner = ours, os.getpid()
        try:
            is_ready = ours.poll(_START_SECONDS) and ours.recv() == "ready"
        except EOFError:
            is_ready = False
        if not is_ready:
            self._stop()
            raise RuntimeError("the process that renders chat templates did not start; its log is above")

    def _stop(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()


_renderer = _Renderer()
atexit.register(_renderer.close)


def render_templates(common: dict[str, Any], chats: list[dict[str, Any]]) -> list[tuple[str, list[Span]]]:
    """The text of each chat, and the spans that the template marks.

    common: arguments of transformers' `render_jinja_template` for all of them; `chats` has those of each.

    Raises:
        TemplateLimit: the template takes more than 30 s for all chats or 4 GiB, renders more than 2^28 characters, or
            is no template.
        TemplateRejection: the template raises an error for a chat.
    """
    found: list[tuple[str, list[Span]]] = _renderer.request("chats", common, chats, one="chat")
    return found


def render_prompt(source: str, columns: dict[str, Any]) -> str:
    """The text that a Jinja template renders with the columns of a row. Errors as in `render_templates`."""
    return str(_renderer.request("prompt", source, columns))


def template_columns(source: str) -> tuple[str, ...]:
    """Names of the columns that a Jinja template reads, sorted. Raises TemplateLimit if it is no template."""
    return tuple(_renderer.request("columns", source))


def chat_variables(source: str) -> frozenset[str]:
    """Names of the variables that a chat template reads and does not set. Raises TemplateLimit if it is none."""
    return frozenset(_renderer.request("variables", source))


def stop_rendering() -> None:
    """End the process that renders; the next chat starts another."""
    _renderer.close()
