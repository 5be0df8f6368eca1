"""How a task ends that asks the Hugging Face Hub: as one that Flyte tries again, when there is no answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.user import FlyteRecoverableException


@contextmanager
def awaiting_hub() -> Iterator[None]:
    """The block's `Unreachable` ends the attempt, and not the run."""
    from tasks.runtime.process.errors import Unreachable

    try:
        yield
    except Unreachable as error:
        raise FlyteRecoverableException(str(error)) from error
