"""Files between tasks of Flyte 2: passed by path on one machine, through the object store on a cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import flyte
from flyte.io import Dir, File

from tasks.steps.retry import Retry, store_pauses

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[object]]

log = logging.getLogger(__name__)


def is_local() -> bool:
    """Whether the tasks run on this machine, without a cluster."""
    return not flyte.ctx().is_in_cluster()


async def stored(path: Path, sleep: Sleep = asyncio.sleep) -> Dir | File:
    """A folder or a file as a task's output. Without a cluster, Flyte passes the path.

    While the store is away it is tried again, as long as `store_pauses` says. Raises Retry after that, and
    FileNotFoundError if `path` is not there.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} was to be stored, and is not there")
    kind = Dir if path.is_dir() else File
    return await _patiently(lambda: kind.from_local(str(path)), f"{path} could not be stored", sleep)


async def fetched(folder: Dir, sleep: Sleep = asyncio.sleep) -> Path:
    """A copy on this machine of a folder that another task stored. Waits for the store in the same way."""
    return Path(await _patiently(folder.download, f"{folder.path} could not be read", sleep))


async def _patiently(call: Callable[[], Awaitable[T]], problem: str, sleep: Sleep) -> T:
    """The result of `call`, which is tried again while the store is away, as long as `store_pauses` says."""
    waited = 0.0
    for pause in (*store_pauses(), None):
        try:
            return await call()
        except FileNotFoundError:
            raise
        # The stores' clients have errors of their own.
        except Exception as error:
            if not waited:
                log.warning("%s (%s); trying again", problem, error)
            if pause is None:
                raise Retry(f"{problem} for {waited:.0f} s: {error}") from error
        await sleep(pause)
        waited += pause
    raise AssertionError("the last attempt returns or raises")
