"""Import large packages in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off in the block.

    Modules are made of objects that stay. While thousands of them are loaded, the collector walks all that are there
    again and again: a fifth of the CPU time of importing torch and transformers.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
