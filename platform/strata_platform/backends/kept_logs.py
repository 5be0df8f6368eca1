"""Reads the kept logs of a run: those of pods that are gone, beside the logs of pods that exist.

Where they are read from, in this order: the run's folder, if this machine mounts it at the same path; its copy under
`checkpoint.url`; and what later pods of the run repeat in their own logs, as progress lines.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from strata_platform import kept_log
from strata_platform.backends.backend import Pause
from strata_platform.errors import BackendError, RunNotFound
from strata_platform.file_io import open_store
from strata_platform.kubernetes_api import Object
from strata_platform.redact import redacted
from strata_platform.run_layout import LOGS, RunLayout
from strata_platform.runs import LogLine

log = logging.getLogger(__name__)

Open = Callable[[str], tuple[Any, str]]
"""Opens a URL: fsspec's client of the store, and the path in it."""


class RunAddress(NamedTuple):
    """Where the folder of a run is: its path in the pods, and its copy in a store."""

    folder: Path
    copy: str | None

    @classmethod
    def of(cls, spec: Any) -> RunAddress | None:
        """That of a spec as JSON; None if it is no spec. Without the model of specs, which takes long to import."""
        match spec:
            case {"name": str(name), "output": str(output)}:
                url = (spec.get("checkpoint") or {}).get("url")
                return cls(Path(output) / name, f"{url.rstrip('/')}/{name}" if url else None)
        return None


class KeptLogs:
    """Lines of a run's pods that are gone, each once.

    A pod that exists has them in its own log. Pods of one name follow each other, as after a preemption, so a line is
    of the pod that exists if that one's container had started when it was printed.
    """

    def __init__(self, run: RunAddress | None, open_url: Open | None = None) -> None:
        """run: None for an execution of another workflow than a run's, whose folder is not known."""
        self._run, self._open = run, open_url or open_store
        # Hashes: the lines themselves may be gigabytes.
        self._given: set[int] = set()
        self._since: dict[str, float] = {}

    def exists(self, pod: Object) -> None:
        """Note a pod whose own log is read, as that of each later pod of its name will be."""
        if (since := _started(pod)) is not None:
            for name in _names(pod):
                self._since.setdefault(name, since)

    def is_without_log(self, pod: Object) -> None:
        """Note that nothing could be read of a pod that was said to exist."""
        for name in _names(pod):
            self._since.pop(name, None)
        # It may be younger than the list of kept logs.
        self.__dict__.pop("files", None)

    def stored(self) -> Iterator[LogLine]:
        """The missing lines in the run's folder, or in its copy, by time."""
        return self.missing(self.files.lines())

    @property
    def oldest(self) -> float:
        """When the first of the pods that exist started."""
        return min(self._since.values(), default=float("inf"))

    def missing(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Those of `lines` that no existing pod has, and that were not given before."""
        for line in lines:
            if line.time >= self._since.get(line.source, float("inf")):
                continue
            key = hash((line.kept, line.time, line.rank, line.text))
            if key not in self._given:
                self._given.add(key)
                yield line

    @cached_property
    def files(self) -> KeptFiles:
        """The kept logs that this machine can read."""
        if self._run is None:
            return NO_FILES
        if self._run.folder.is_absolute() and RunLayout(self._run.folder).logs.is_dir():
            return files_at(str(self._run.folder), self._open)
        return files_at(self._run.copy, self._open) if self._run.copy else NO_FILES

    @property
    def why_none(self) -> str:
        """Why there are no `files`, as the end of a sentence."""
        if self._run is None:
            return "and the cluster may archive them"
        if self._run.copy:
            return f"and none are kept in {self._run.copy}"
        where = RunLayout(self._run.folder).logs
        return f"and {where} is not on this machine: mount the run's volume, or set checkpoint.url in its spec"


def kept_lines(address: str, pause: Pause | None, open_url: Open = open_store) -> Iterator[LogLine] | None:
    """All lines of the run whose folder is at `address`, a path or a URL, by time; None for the name of a run.

    pause: as of a backend's `logs`. Raises RunNotFound if the folder has no kept logs, and BackendError to follow them.
    """
    if "/" not in address:
        return None
    files = files_at(address, open_url)
    if not files.names:
        raise RunNotFound(
            f"no kept logs in {redacted(address.rstrip('/'))}/{LOGS}: is it the folder of a run, <output>/<name>?"
        )
    if pause is not None:
        raise BackendError(
            f"{redacted(address)} is the folder of a run, whose logs cannot be followed: leave out --follow, or give "
            "the name of a run that the backend knows",
            status=422,
            reason="Invalid",
        )
    return files.lines()


@dataclass(frozen=True)
class KeptFiles:
    """The kept logs in one folder: their names, and what reads one."""

    where: str
    names: list[str]
    read: Callable[[str], bytes]

    def lines(self) -> Iterator[LogLine]:
        """The lines of all, by time. A file is in memory from the time of its first line to that of its last one."""
        waiting = deque(sorted(self.names, key=kept_log.started))
        heap: list[tuple[float, str, LogLine, Iterator[LogLine]]] = []
        while waiting or heap:
            while waiting and (not heap or kept_log.started(waiting[0]) <= heap[0][0]):
                _push(heap, waiting[0], iter(self._of(waiting[0])))
                waiting.popleft()
            if heap:
                _, name, line, rest = heapq.heappop(heap)
                yield line
                _push(heap, name, rest)

    def _of(self, name: str) -> list[LogLine]:
        try:
            return kept_log.parse(name, self.read(name))
        # Each store's client has exceptions of its own, with no base in common.
        except Exception as error:
            _warn(f"the log {name} of an earlier pod in {self.where}", error)
            return []


NO_FILES = KeptFiles("", [], lambda name: b"")


def _push(heap: list[tuple[float, str, LogLine, Iterator[LogLine]]], name: str, lines: Iterator[LogLine]) -> None:
    # Names differ, so lines are never compared.
    if (line := next(lines, None)) is not None:
        heapq.heappush(heap, (line.time, name, line, lines))


def files_at(address: str, open_url: Open) -> KeptFiles:
    """The kept logs of the run whose folder is at `address`, a path or a URL.

    NO_FILES, with a warning, if they cannot be listed: the logs of pods that exist are shown all the same.
    """
    where = f"{address.rstrip('/')}/{LOGS}"
    try:
        if "://" not in address:
            folder = Path(where)
            names = [path.name for path in folder.iterdir() if kept_log.is_kept_log(path.name)]
            return KeptFiles(where, names, lambda name: (folder / name).read_bytes())
        files, root = open_url(where)
        found = (str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False))
        names = [name for name in found if kept_log.is_kept_log(name)]
        return KeptFiles(where, names, lambda name: bytes(files.cat_file(f"{root}/{name}")))
    except FileNotFoundError:
        return NO_FILES
    except Exception as error:
        _warn(f"the logs of earlier pods in {where}", error)
        return NO_FILES


def _warn(what: str, error: Exception) -> None:
    log.warning("%s cannot be read: %s", redacted(what), redacted(f"{type(error).__name__}: {error}"))


def _names(pod: Object) -> set[str]:
    """The names by which a pod's processes may know it: its own, and its host's where they are not told that."""
    name = str(pod["metadata"]["name"])
    # As Kubernetes cuts long names.
    return {name, str(pod["spec"].get("hostname") or name)[:63].rstrip("-.")}


def _started(pod: Object) -> float | None:
    """When the pod's container started, in whole seconds; None if it did not."""
    for status in pod["status"].get("containerStatuses") or []:
        state = status.get("state") or {}
        at = (state.get("running") or state.get("terminated") or {}).get("startedAt")
        if at:
            return datetime.fromisoformat(at).timestamp()
    return None
