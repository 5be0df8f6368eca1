"""Maxima |x| (amax) that the producing kernel computes, so that a cast to FP8 needs no pass for them.

Inside `finding_largest()`, an activation also computes amax of its result, and its backward pass amax of its gradients.
They are stored as attributes of the tensors, for the next FP8 linear layer. An in-place write invalidates them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Number of partial maxima (int32 bits of |x|), over which programs spread their atomics; a power of two.
PARTS = 512
_NAME = "_strata_largest"


class _State(threading.local):
    on = False


_state = _State()


@contextmanager
def finding_largest() -> Iterator[None]:
    """Context manager inside which activations of this thread compute amax."""
    before, _state.on = _state.on, True
    try:
        yield
    finally:
        _state.on = before


def is_finding_largest() -> bool:
    """Whether `finding_largest()` is active in this thread."""
    return _state.on


def note_largest(x: Tensor, amax: Tensor) -> Tensor:
    """Attach amax, [PARTS] int32, to x; returns x."""
    noted: Any = x
    setattr(noted, _NAME, (amax, x._version))
    return x


def largest_of(x: Tensor) -> Tensor | None:
    """amax attached to x, or None."""
    if torch.compiler.is_compiling():
        return None
    amax, version = getattr(x, _NAME, (None, 0))
    return amax if version == x._version else None
