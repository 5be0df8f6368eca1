"""Counts the kernels that Triton compiles, and those that it reads from its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton import knobs


@dataclass
class CompileCount:
    """Names of the kernels compiled and of those read from Triton's cache directory, in order."""

    compiled: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of kernels compiled."""
        return len(self.compiled)


@contextmanager
def count_compiles() -> Iterator[CompileCount]:
    """Count the compilations of any Triton kernel in this process, by any thread, while the context is open.

    A kernel that this process has loaded before is neither compiled nor read again, so it is not counted. Other
    listeners are still called.

    Example:
        >>> with count_compiles() as compiles:
        ...     train()
        >>> print(f"{compiles.count} kernels were missing from the warm-up: {compiles.compiled}")
    """
    counter = CompileCount()

    def count(**event: Any) -> None:
        (counter.cached if event["cache_hit"] else counter.compiled).append(event["src"].name)

    with compile_listener(count):
        yield counter


@contextmanager
def compile_listener(listener: Callable[..., None]) -> Iterator[None]:
    """Call `listener` with Triton's event for each kernel that it compiles or reads; other listeners are still called.

    An event has the keyword arguments `cache_hit`, `src` and `metadata`, among others.
    """
    previous = knobs.compilation.listener

    def call_both(**event: Any) -> None:
        listener(**event)
        if previous is not None:
            previous(**event)

    knobs.compilation.listener = call_both
    try:
        yield
    finally:
        knobs.compilation.listener = previous
