"""Files between tasks of Flyte 2: passed by path on one machine, through the object store on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import flyte
from flyte.io import Dir, File
from flyte.storage._parallel_reader import DownloadQueueEmpty
from obstore.exceptions import NotFoundError, PermissionDeniedError, UnauthenticatedError

from tasks.steps.retry import Patience

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[object]]

# Those of its client that are no OSError. The last one says that a folder has no file.
_FINAL_ERRORS = (NotFoundError, PermissionDeniedError, UnauthenticatedError, DownloadQueueEmpty)


def is_local() -> bool:
    """Whether the tasks run on this machine, without a cluster."""
    return not flyte.ctx().is_in_cluster()


async def stored(path: Path, sleep: Sleep = asyncio.sleep) -> Dir | File:
    """A folder or a file as a task's output. Without a cluster, Flyte passes the path.

    While the store is away it is tried again, as long as `Patience` says. Raises Retry after that, an error that no
    other call mends at once, and FileNotFoundError if `path` is not there.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is to be stored, but does not exist")
    kind = Dir if path.is_dir() else File
    return await _patiently(lambda: kind.from_local(str(path)), f"{path} could not be stored", sleep)


async def fetched(folder: Dir, sleep: Sleep = asyncio.sleep) -> Path:
    """A copy on this machine of a folder that another task stored. Waits for the store in the same way."""
    return Path(await _patiently(folder.download, f"{folder.path} could not be read", sleep))


async def _patiently(call: Callable[[], Awaitable[T]], problem: str, sleep: Sleep) -> T:
    """The result of `call`, which is tried again while the store is away, as long as `Patience` says."""
    patience = Patience(problem, _FINAL_ERRORS)
    while True:
        try:
            return await call()
        except Exception as error:
            pause = patience.pause_after(error)
        await sleep(pause)
