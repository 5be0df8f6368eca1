"""Distinguishes a Hugging Face Hub that cannot be reached from one that lacks what a spec names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants

# HTTPError is that of the package that the Hub's client is built on, whose name changes with the client's version.
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from tasks.runtime.process.errors import Unreachable

# Client errors that may pass: request timeout, too many requests.
_LATER = (408, 429)


@contextmanager
def asking_hub(named: str) -> Iterator[None]:
    """Raise `Unreachable` in place of an exception of the block that a Hub without an answer caused.

    `named` is the spec's field and its value on the Hub.
    """
    try:
        yield
    except Exception as error:
        reason = _no_answer(error)
        if reason is None:
            raise
        message = " ".join(str(reason).split()) or type(reason).__name__
        raise Unreachable(
            f"{named}: the Hugging Face Hub at {constants.ENDPOINT} cannot be reached ({message}), and the cache "
            "lacks a file that the run needs; start the run again when the Hub answers, or give a folder"
        ) from error


def _no_answer(error: BaseException | None) -> BaseException | None:
    """The exception, among an error and its causes, that shows that the Hub did not answer; None if there is none."""
    if constants.is_offline_mode():
        return None
    while error is not None:
        if isinstance(error, HTTPError):
            status = getattr(getattr(error, "response", None), "status_code", None)
            return error if status is None or status >= 500 or status in _LATER else None
        if isinstance(error, ConnectionError | TimeoutError):
            # The only trace of a mode in which the package `datasets` alone is offline.
            return None if "OfflineModeIsEnabled" in str(error) else error
        error = error.__cause__ or error.__context__
    return None
