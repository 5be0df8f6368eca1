"""How a task of Flyte 1 ends an attempt that another one may mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.user import FlyteRecoverableException

from tasks.steps.retry import Retry


@contextmanager
def retried_by_flyte() -> Iterator[None]:
    """Raise a `Retry` of the block as recoverable, so that Flyte starts another attempt."""
    try:
        yield
    except Retry as error:
        raise FlyteRecoverableException(str(error)) from error.__cause__
