"""Files between tasks: passed by path on one machine, through the object store on a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from flytekit import FlyteContextManager
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

Sleep = Callable[[float], object]

log = logging.getLogger(__name__)

# Seconds for which a store may be away when a task hands over a folder, and between two attempts.
STORE_SECONDS = 900.0
INITIAL_PAUSE, LONGEST_PAUSE = 1.0, 30.0


def is_local() -> bool:
    """Whether the workflow runs on this machine, without a Flyte cluster."""
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.is_local_execution()


def directory(path: Path | str, sleep: Sleep = time.sleep) -> FlyteDirectory:
    """A folder as a task's output. A local run passes the path: weights are large, and a copy would land in /tmp.

    On a cluster it is uploaded now. While the store is away it is tried again, for `STORE_SECONDS`: another attempt of
    the task would queue all its pods again, behind others, for a copy. Raises FlyteRecoverableException after that.
    """
    if is_local():
        return FlyteDirectory(str(path), remote_directory=False)
    return FlyteDirectory.from_source(_stored(path, True, sleep))


def file(path: Path | str, sleep: Sleep = time.sleep) -> FlyteFile:
    """A file as a task's output, in the same way."""
    if is_local():
        return FlyteFile(str(path), remote_path=False)
    return FlyteFile.from_source(_stored(path, False, sleep))


def _stored(path: Path | str, is_folder: bool, sleep: Sleep) -> str:
    """The address of a copy in the object store."""
    access = FlyteContextManager.current_context().file_access
    waited, pause = 0.0, INITIAL_PAUSE
    while True:
        # A new address each time: a folder that is half there would get the next copy inside.
        url = access.get_random_remote_directory() if is_folder else access.get_random_remote_path(str(path))
        try:
            access.put_data(str(path), url, is_multipart=is_folder)
            return url
        except (FlyteException, OSError) as error:
            if not waited:
                log.warning("%s could not be stored (%s); trying again", path, error)
            if waited + pause > STORE_SECONDS:
                raise FlyteRecoverableException(f"{path} could not be stored for {waited:.0f} s: {error}") from error
        sleep(pause)
        waited += pause
        pause = min(2 * pause, LONGEST_PAUSE)


def is_stored(url: str) -> bool:
    """Whether there is a file or folder at an address of the object store. False if the store does not answer."""
    try:
        return bool(FlyteContextManager.current_context().file_access.exists(url))
    except (FlyteException, OSError) as error:
        log.warning("whether %s is still stored is not known: %s", url, error)
        return False
