"""Errors of calls to services that a run needs: those that another call may mend, and those that none can."""

from __future__ import annotations

from strata_platform.outcomes import UNREACHABLE, RunError


class Unreachable(RunError):
    """The Hugging Face Hub, the object store, or the network to them, is down; another attempt may find it up."""

    outcome = UNREACHABLE


FINAL_ERRORS = (
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    ImportError,
    # Mistakes in code or in what it was given, under Python's names for them.
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    NotImplementedError,
)
"""Errors that another call would raise again. Others are retried: clients have many for a service that is away."""


def is_final(error: BaseException, more: tuple[type[BaseException], ...] = ()) -> bool:
    """Whether another call would raise the error again: one of `FINAL_ERRORS` or `more`, or a group with one of them.

    >>> is_final(KeyError("ETag")), is_final(ConnectionError("no route"))
    (True, False)
    >>> is_final(ExceptionGroup("two transfers", [ConnectionError("no route"), PermissionError("denied")]))
    True
    """
    if isinstance(error, BaseExceptionGroup):
        return any(is_final(inner, more) for inner in error.exceptions)
    return isinstance(error, (*FINAL_ERRORS, *more))
