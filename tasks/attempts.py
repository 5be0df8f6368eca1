"""How a Flyte task ends an attempt that another one may mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.user import FlyteRecoverableException

from strata_platform.outcomes import RunError


@contextmanager
def retried_by_flyte() -> Iterator[None]:
    """Raise a retryable `RunError` of the block as recoverable, so that Flyte starts another attempt."""
    try:
        yield
    except RunError as error:
        if not error.outcome.retryable:
            raise
        raise FlyteRecoverableException(str(error)) from error
