"""Merges the logs of a run's pods: all ranks in the order of time, over restarts and preemptions."""

from __future__ import annotations

import contextlib
import heapq
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count

from urllib3.exceptions import HTTPError

from strata_platform import kept_log, progress_line
from strata_platform.backends.api_errors import translated_errors
from strata_platform.backends.backend import Pause, Retry
from strata_platform.backends.kept_logs import KeptLogs
from strata_platform.backends.kubernetes_objects import FINISH, Namespace, attempt_of, index_of, shape_of, task_of
from strata_platform.errors import Unreachable
from strata_platform.kubernetes_api import ApiError, Object
from strata_platform.runs import LogLine

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""Seconds to wait for the end of a pod's log after its run has ended."""

_OF_RANK = re.compile(r"\[rank (\d+)\] ?")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


@dataclass(frozen=True, order=True)
class _Stamped:
    """A line with the node's timestamp: fixed-width text, UTC, nanoseconds."""

    stamp: str
    number: int
    line: LogLine


def line_of(pod: Object, raw: str) -> tuple[str, LogLine] | None:
    """Timestamp and line of `raw`, as Kubernetes returns it from a pod's log; None without a timestamp.

    The kubelet mixes messages of its own into a log, and those have none. Processes of other ranks than the pod's first
    begin their lines with the rank; a line without one is the first process's.
    """
    given, _, text = raw.partition(" ")
    stamp = _utc(given)
    if stamp is None:
        return None
    text = text.rstrip("\r\n").rpartition("\r")[2]
    shape, rank = shape_of(pod), None
    if shape is not None:
        rank = index_of(pod) * shape[1]
        if found := _OF_RANK.match(text):
            rank, text = int(found[1]), text[found.end() :]
    return stamp, LogLine(_seconds(stamp), rank, text, pod["metadata"]["name"], attempt_of(pod))


def _utc(stamp: str) -> str | None:
    """The timestamp in UTC and of fixed width, so that timestamps sort as text: nodes write their own time zone."""
    if (found := _STAMP.fullmatch(stamp)) is None:
        return None
    whole, fraction, zone = found.groups()
    moment = datetime.fromisoformat(whole + zone.replace("Z", "+00:00")).astimezone(UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{fraction or '':0<9}Z"


def _stamp(seconds: float) -> str:
    whole, nanoseconds = divmod(round(seconds * 1e9), 10**9)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"


def _seconds(stamp: str) -> float:
    # datetime reads microseconds.
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp() + float(f"0.{fraction}")


class TimeOrderedLines:
    """Sorts lines of several pods, which arrive in any order, by their time.

    A line is held back for one round: lines that another pod printed earlier have arrived by the next one.
    """

    def __init__(self) -> None:
        self._held: list[_Stamped] = []
        self._newest = ""
        self._number = count()

    def add(self, stamp: str, line: LogLine) -> None:
        """Add a line."""
        heapq.heappush(self._held, _Stamped(stamp, next(self._number), line))

    def release(self, last: bool = False) -> Iterator[LogLine]:
        """The lines up to the newest one of the previous round; with `last`, all lines."""
        until, self._newest = self._newest, max((held.stamp for held in self._held), default=self._newest)
        while self._held and (last or self._held[0].stamp <= until):
            yield heapq.heappop(self._held).line


class PodLogs:
    """Reads the logs of an execution's pods; while they are followed, with one thread for each pod."""

    def __init__(self, namespace: Namespace, execution: str, kept: KeptLogs | None = None) -> None:
        """kept: the logs of pods that are gone, to be merged with those of pods that exist."""
        self._namespace, self._execution, self._kept = namespace, execution, kept
        self._arrived: queue.SimpleQueue[tuple[str, LogLine]] = queue.SimpleQueue()
        self._silent: queue.SimpleQueue[Object] = queue.SimpleQueue()
        self._readers: dict[str, threading.Thread] = {}
        self._closed = threading.Event()
        self._warned: set[tuple[str, str]] = set()

    def so_far(self) -> Iterator[LogLine]:
        """The lines of the pods that still exist, and of those that are gone."""
        merged, live = TimeOrderedLines(), list[tuple[str, LogLine]]()
        for pod in filter(has_begun, self._namespace.pods(self._execution)):
            with translated_errors(f"to read the log of {pod['metadata']['name']}"):
                try:
                    lines = list(self._lines(pod, follow=False))
                except ApiError as error:
                    if self._kept is None or error.status < 500:
                        raise
                    # As of a node that is gone or drained: what was kept of the pod is shown.
                    log.warning("log of %s: %s", pod["metadata"]["name"], error)
                    continue
            live += lines
            # The node has removed the containers of a pod that was evicted, and with them its log.
            if self._kept is not None and lines:
                self._kept.exists(pod)
        for found in live:
            self._add(merged, *found)
        stored = iter(()) if self._kept is None else self._kept.stored()
        return heapq.merge(stored, merged.release(last=True), key=lambda line: line.time)

    def _add(self, merged: TimeOrderedLines, stamp: str, line: LogLine) -> None:
        """Add a line of a pod, or the line of an earlier pod that it repeats."""
        values = None if self._kept is None else progress_line.decode(line.text)
        if self._kept is None or values is None or (repeated := kept_log.original(values)) is None:
            merged.add(stamp, line)
            return
        for found in self._kept.missing([repeated]):
            merged.add(_stamp(found.time), found)

    def _stored(self, merged: TimeOrderedLines) -> Iterator[LogLine]:
        """The lines of pods that are gone: those before any pod that exists at once, the others by `merged`."""
        if self._kept is None:
            return
        oldest = self._kept.oldest
        for line in self._kept.stored():
            if line.time < oldest:
                yield line
            else:
                merged.add(_stamp(line.time), line)

    def follow(self, is_over: Callable[[], bool], pause: Pause) -> Iterator[LogLine]:
        """Lines of present and later pods, until the run `is_over` and everything is read."""
        merged, retry = TimeOrderedLines(), Retry()
        is_first = True
        try:
            while True:
                try:
                    over = is_over()
                    self._start_readers(self._namespace.pods(self._execution))
                    retry.succeeded()
                    if is_first:
                        # Once it is known which pods exist. Those that go from now on have been read.
                        yield from self._stored(merged)
                        is_first = False
                except Unreachable as error:
                    retry.failed(error)
                    over = False
                if over:
                    self._join_readers()
                while self._kept is not None and not self._silent.empty():
                    self._kept.is_without_log(self._silent.get_nowait())
                    yield from self._stored(merged)
                while not self._arrived.empty():
                    self._add(merged, *self._arrived.get_nowait())
                yield from merged.release(last=over)
                if over:
                    return
                pause()
        finally:
            self._closed.set()

    def _start_readers(self, pods: list[Object]) -> None:
        """Start a reader for every pod that has a log and no reader."""
        for pod in pods:
            if has_begun(pod) and pod["metadata"]["uid"] not in self._readers:
                reader = threading.Thread(
                    target=self._read_to_end, args=(pod,), daemon=True, name=pod["metadata"]["name"]
                )
                self._readers[pod["metadata"]["uid"]] = reader
                if self._kept is not None:
                    self._kept.exists(pod)
                reader.start()

    def _join_readers(self) -> None:
        """Wait for the readers, but not without end for a pod whose node is gone."""
        end = time.monotonic() + DRAIN_SECONDS
        for reader in self._readers.values():
            reader.join(max(0.0, end - time.monotonic()))

    def _read_to_end(self, pod: Object) -> None:
        """Read until the pod ends. After a lost connection, lines that were read before are skipped."""
        last = ""
        while not self._closed.is_set():
            with contextlib.suppress(HTTPError, ApiError):
                for stamp, line in self._lines(pod, follow=True):
                    if stamp > last:
                        self._arrived.put((stamp, line))
                        last = stamp
            if has_ended(self._namespace, pod):
                if not last:
                    self._silent.put(pod)
                return
            self._closed.wait(1.0)

    def _lines(self, pod: Object, *, follow: bool) -> Iterator[tuple[str, LogLine]]:
        """The pod's lines with their timestamps. A message of the kubelet is logged as a warning, once for each pod."""
        for raw in read_log(self._namespace, pod, follow=follow):
            if (found := line_of(pod, raw)) is not None:
                yield found
            elif (warning := (pod["metadata"]["name"], raw.strip())) not in self._warned:
                self._warned.add(warning)
                log.warning("log of %s: %s", *warning)


def read_log(namespace: Namespace, pod: Object, *, follow: bool, last: int | None = None) -> Iterator[str]:
    """A pod's log, each line with its timestamp; with `last`, only that many lines of its end."""
    metadata = pod["metadata"]
    try:
        lines = namespace.api.lines(
            f"{namespace.core}/pods/{metadata['name']}/log",
            follow=follow,
            container=pod["spec"]["containers"][0]["name"],
            timestamps="true",
            tailLines=last,
        )
        for raw in lines:
            yield raw.decode(errors="replace")
    except ApiError as error:
        # The pod or its container was deleted after it was listed.
        if error.status not in (400, 404):
            raise


def main_pods(pods: Iterable[Object]) -> list[Object]:
    """The pod that reports progress now, of rank 0 or of the evaluation, as a list of at most one."""
    return [
        pod
        for pod in pods
        if (shape_of(pod) is not None or task_of(pod) == FINISH)
        and index_of(pod) == 0
        and pod["status"].get("phase") == "Running"
        and has_begun(pod)
        and "deletionTimestamp" not in pod["metadata"]
    ]


def has_begun(pod: Object) -> bool:
    """Whether the pod has a log to read."""
    states = [status.get("state") or {} for status in pod["status"].get("containerStatuses") or []]
    return any("running" in state or "terminated" in state for state in states)


def has_ended(namespace: Namespace, pod: Object) -> bool:
    """Whether the pod has printed its last line; False while Kubernetes does not answer."""
    try:
        now = namespace.api.get(f"{namespace.core}/pods/{pod['metadata']['name']}")
    except ApiError as error:
        return bool(error.status == 404)
    except HTTPError:
        return False
    return now["metadata"]["uid"] != pod["metadata"]["uid"] or now["status"].get("phase") in ("Succeeded", "Failed")
