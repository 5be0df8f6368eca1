"""Reads the kept logs of a run: those of pods that are gone, beside the logs of pods that exist.

Where they are read from, in this order: the run's folder, if this machine mounts it at the same path; its copy under
`checkpoint.url`; and what later pods of the run repeat in their own logs, as progress lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from strata_platform import kept_log
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
        self._run, self._open = run, open_url or fsspec_client
        self._given: set[tuple[str, float, int | None, str]] = set()
        self._since: dict[str, float] = {}

    def exists(self, pod: Object) -> None:
        """Note a pod whose own log is read, as that of each later pod of its name will be."""
        if (since := _started(pod)) is not None:
            self._since.setdefault(_host(pod), since)

    def is_without_log(self, pod: Object) -> None:
        """Note that nothing could be read of a pod that was said to exist."""
        self._since.pop(_host(pod), None)

    def stored(self) -> Iterator[LogLine]:
        """The lines in the run's folder, or in its copy."""
        for name, content in self.files.items():
            yield from self.missing(kept_log.parse(name, content))

    def missing(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Those of `lines` that no existing pod has, and that were not given before."""
        for line in lines:
            if line.time >= self._since.get(line.source, float("inf")):
                continue
            key = (line.kept, line.time, line.rank, line.text)
            if key not in self._given:
                self._given.add(key)
                yield line

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Names and contents of the kept logs that this machine can read."""
        if self._run is None:
            return {}
        if self._run.folder.is_absolute() and RunLayout(self._run.folder).logs.is_dir():
            return files_at(str(self._run.folder), self._open)
        return files_at(self._run.copy, self._open) if self._run.copy else {}

    @property
    def why_none(self) -> str:
        """Why there are no `files`, as the end of a sentence."""
        if self._run is None:
            return "and the cluster may archive them"
        if self._run.copy:
            return f"and none are kept in {self._run.copy}"
        where = RunLayout(self._run.folder).logs
        return f"and {where} is not on this machine: mount the run's volume, or set checkpoint.url in its spec"


def fsspec_client(url: str) -> tuple[Any, str]:
    """`fsspec.url_to_fs`, with this machine's own access to the store."""
    # Imported here: most commands read no file, and the clients of stores take long to import.
    import fsspec

    files, path = fsspec.url_to_fs(url)
    return files, path


def kept_lines(address: str, open_url: Open = fsspec_client) -> Iterator[LogLine] | None:
    """All lines of the run whose folder is at `address`, a path or a URL, by time; None if it has no kept logs."""
    files = files_at(address, open_url) if "/" in address else {}
    if not files:
        return None
    lines = (line for name, content in files.items() for line in kept_log.parse(name, content))
    return iter(sorted(lines, key=lambda line: line.time))


def files_at(address: str, open_url: Open) -> dict[str, bytes]:
    """Names and contents of the kept logs of the run whose folder is at `address`, a path or a URL.

    {} with a warning if they cannot be read: the logs of pods that exist are shown all the same.
    """
    where = f"{address.rstrip('/')}/{LOGS}"
    try:
        if "://" not in address:
            paths = sorted(path for path in Path(where).iterdir() if kept_log.is_kept_log(path.name))
            found = {path.name: path.read_bytes() for path in paths}
        else:
            files, root = open_url(where)
            names = sorted(str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False))
            found = {name: files.cat_file(f"{root}/{name}") for name in names if kept_log.is_kept_log(name)}
    except FileNotFoundError:
        return {}
    # Each store's client has exceptions of its own, with no base in common.
    except Exception as error:
        why = redacted(f"{type(error).__name__}: {error}")
        log.warning("the logs of earlier pods in %s cannot be read: %s", where, why)
        return {}
    return found


def _host(pod: Object) -> str:
    """The name of a pod's host, by which its processes know it."""
    # As Kubernetes cuts long names.
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63].rstrip("-.")


def _started(pod: Object) -> float | None:
    """When the pod's container started, in whole seconds; None if it did not."""
    for status in pod["status"].get("containerStatuses") or []:
        state = status.get("state") or {}
        at = (state.get("running") or state.get("terminated") or {}).get("startedAt")
        if at:
            return datetime.fromisoformat(at).timestamp()
    return None
