"""Counting what Triton compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton import knobs


@dataclass
class CompileCount:
    """Kernels compiled and kernels read from Triton's cache directory, by name, in order; it grows while counting."""

    compiled: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many kernels were compiled."""
        return len(self.compiled)


@contextmanager
def count_compiles() -> Iterator[CompileCount]:
    """Count the compilations of any Triton kernel in this process, by any thread, while the context is open.

    A kernel that this process has used before is neither compiled nor read again. Other listeners are still told.

    Example:
        >>> with count_compiles() as compiles:
        ...     train()
        >>> print(f"{compiles.count} kernels were missing from the warm-up: {compiles.compiled}")
    """
    counter = CompileCount()

    def count(**event: Any) -> None:
        (counter.cached if event["cache_hit"] else counter.compiled).append(event["src"].name)

    with listening(count):
        yield counter


@contextmanager
def listening(heard: Callable[..., None]) -> Iterator[None]:
    """Call `heard` with what Triton says of each kernel that it compiles or reads; other listeners are still told."""
    previous = knobs.compilation.listener

    def listen(**event: Any) -> None:
        heard(**event)
        if previous is not None:
            previous(**event)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = previous
