"""Files between tasks: passed by path on one machine, through the object store on a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flytekit import FlyteContextManager
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.system import FlyteDownloadDataException, FlyteUploadDataException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

# Registers the type with flytekit, before the tasks are made.
from tasks import spec_type  # noqa: F401
from tasks.attempts import retried_by_flyte
from tasks.steps.retry import Patience

T = TypeVar("T")
Sleep = Callable[[float], object]

log = logging.getLogger(__name__)


def is_local() -> bool:
    """Whether the workflow runs on this machine, without a Flyte cluster."""
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.is_local_execution()


def directory(path: Path | str, sleep: Sleep = time.sleep) -> FlyteDirectory:
    """A folder as a task's output. A local run passes the path: weights are large, and a copy would land in /tmp.

    On a cluster it is uploaded now. While the store is away it is tried again, as long as `Patience` says. Raises
    FlyteRecoverableException after that, and an error that no other call mends at once.
    """
    if is_local():
        return FlyteDirectory(str(path), remote_directory=False)
    return FlyteDirectory.from_source(_stored(path, True, sleep))


def file(path: Path | str, sleep: Sleep = time.sleep) -> FlyteFile:
    """A file as a task's output, in the same way."""
    if is_local():
        return FlyteFile(str(path), remote_path=False)
    return FlyteFile.from_source(_stored(path, False, sleep))


def fetched(stored: FlyteDirectory | FlyteFile, sleep: Sleep = time.sleep) -> Path:
    """A copy on this machine of what another task stored, or its path in a local run. Waits for the store likewise.

    Raises FlyteDataNotFoundException at once if the store answers that it is not there.
    """
    problem = f"{stored.remote_source or stored.path} could not be read"
    return Path(_patiently(stored.download, problem, sleep))


def _stored(path: Path | str, is_folder: bool, sleep: Sleep) -> str:
    """The address of a copy in the object store."""
    access = FlyteContextManager.current_context().file_access

    def store() -> str:
        # A new address each time: a folder that is half there would get the next copy inside.
        url = access.get_random_remote_directory() if is_folder else access.get_random_remote_path(str(path))
        access.put_data(str(path), url, is_multipart=is_folder)
        return url

    return _patiently(store, f"{path} could not be stored", sleep)


def _patiently(call: Callable[[], T], problem: str, sleep: Sleep) -> T:
    """The result of `call`, which is tried again while the store is away, as long as `Patience` says."""
    patience = Patience(problem)
    with retried_by_flyte():
        while True:
            try:
                return call()
            except Exception as error:
                # flytekit wraps every error of the store's client.
                wraps = isinstance(error, FlyteDownloadDataException | FlyteUploadDataException)
                inner = error.__context__ if wraps else None
                pause = patience.pause_after(inner if isinstance(inner, Exception) else error)
            sleep(pause)


def is_stored(url: str) -> bool:
    """Whether there is a file or folder at an address of the object store. False if the store does not answer."""
    try:
        return bool(FlyteContextManager.current_context().file_access.exists(url))
    except (FlyteException, OSError) as error:
        log.warning("cannot check whether %s is still stored: %s", url, error)
        return False
