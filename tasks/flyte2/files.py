"""Files between tasks of Flyte 2: passed by path on one machine, through the object store on a cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import flyte
from flyte.io import Dir, File

from tasks.steps.retry import Retry, store_pauses

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
    waited = 0.0
    for pause in (*store_pauses(), None):
        try:
            return await kind.from_local(str(path))
        # The stores' clients have errors of their own.
        except Exception as error:
            if not waited:
                log.warning("%s could not be stored (%s); trying again", path, error)
            if pause is None:
                raise Retry(f"{path} could not be stored for {waited:.0f} s: {error}") from error
        await sleep(pause)
        waited += pause
    raise AssertionError("the last attempt returns or raises")
