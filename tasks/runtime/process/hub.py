"""The Hugging Face Hub: that it cannot be reached is told apart from that it has not got what a spec names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants

# HTTPError is that of the package that the Hub's client is built on, whose name changes with the client's version.
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from tasks.runtime.process.errors import Unreachable

# Beside errors of the server: it waited too long for the request, or had too many of them.
_LATER = (408, 429)


@contextmanager
def asking_hub(named: str) -> Iterator[None]:
    """Raises `Unreachable` in place of what the block raises, where that is for want of an answer of the Hub.

    `named` is the field of the spec, and the name that it has on the Hub.
    """
    try:
        yield
    except Exception as error:
        reason = _no_answer(error)
        if reason is None:
            raise
        said = " ".join(str(reason).split()) or type(reason).__name__
        raise Unreachable(
            f"{named}: the Hugging Face Hub at {constants.ENDPOINT} cannot be reached ({said}), and what is needed is "
            "not in the cache; start the run again when the Hub answers, or give a folder"
        ) from error


def _no_answer(error: BaseException | None) -> BaseException | None:
    """What kept the Hub from answering, among an error and those that led to it; None where it was something else."""
    if constants.is_offline_mode():
        return None
    while error is not None:
        if isinstance(error, HTTPError):
            status = getattr(getattr(error, "response", None), "status_code", None)
            return error if status is None or status >= 500 or status in _LATER else None
        if isinstance(error, ConnectionError | TimeoutError):
            # All that is left of the mode where the package `datasets` alone is offline.
            return None if "OfflineModeIsEnabled" in str(error) else error
        error = error.__cause__ or error.__context__
    return None
