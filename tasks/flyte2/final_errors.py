"""How a task of Flyte 2 ends an attempt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flyte.errors import NonRecoverableError, RuntimeSystemError

from strata_platform.outcomes import RunError
from tasks.steps.retry import Retry


@contextmanager
def final_unless_retried() -> Iterator[None]:
    """End the attempt for good after an error that no other attempt can mend.

    Flyte 2 repeats a task after any error but `NonRecoverableError`; Flyte 1 after none but its recoverable one.
    """
    try:
        yield
    except (Retry, RuntimeSystemError):
        raise
    except Exception as error:
        if isinstance(error, RunError) and error.outcome.retryable:
            raise
        raise NonRecoverableError(_message(error), code=type(error).__name__) from error


def _message(error: BaseException) -> str:
    """The text of an error. That of a group is only how many errors it has."""
    return "; ".join(map(_message, error.exceptions)) if isinstance(error, BaseExceptionGroup) else str(error)
