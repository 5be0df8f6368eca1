"""Files between tasks: passed by path on one machine, through the object store on a cluster."""

from __future__ import annotations

from pathlib import Path

from flytekit import FlyteContextManager
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile


def is_local() -> bool:
    """Whether the workflow runs on this machine, without a Flyte cluster."""
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.is_local_execution()


def directory(path: Path | str) -> FlyteDirectory:
    """A folder as a task's output. A local run passes the path: weights are large, and a copy would land in /tmp."""
    return FlyteDirectory(str(path), remote_directory=False if is_local() else None)


def file(path: Path | str) -> FlyteFile:
    """A file as a task's output, in the same way."""
    return FlyteFile(str(path), remote_path=False if is_local() else None)
