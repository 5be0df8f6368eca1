"""Largest magnitudes that a kernel found on its way: a cast to FP8 of its result need not look for them.

Within `finding_largest()` an activation also notes the largest magnitude of its result, and its backward pass those of
its gradients. They hang on the tensors, for the layers that multiply these next. A tensor that was written to since has
none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Numbers among which programs spread their magnitudes, the bits of |x| as int32; a power of two.
PARTS = 512
_NAME = "_strata_largest"


class _State(threading.local):
    on = False


_state = _State()


@contextmanager
def finding_largest() -> Iterator[None]:
    """Within the block, activations of this thread note largest magnitudes."""
    before, _state.on = _state.on, True
    try:
        yield
    finally:
        _state.on = before


def is_finding_largest() -> bool:
    """Whether an activation is to note them."""
    return _state.on


def note_largest(x: Tensor, amax: Tensor) -> Tensor:
    """Returns x with its largest magnitudes, [512] int32."""
    noted: Any = x
    setattr(noted, _NAME, (amax, x._version))
    return x


def largest_of(x: Tensor) -> Tensor | None:
    """The largest magnitudes of x, if a kernel noted them."""
    if torch.compiler.is_compiling():
        return None
    amax, version = getattr(x, _NAME, (None, 0))
    return amax if version == x._version else None
