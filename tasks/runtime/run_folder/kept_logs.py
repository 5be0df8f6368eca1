"""Copies the output of a pod's processes to the run's folder, because Kubernetes removes a pod's log with it.

The first process of a pod copies the files that `process.kept_output` writes, in a thread: every `VOLUME_SECONDS` to
`logs/` of the run's folder, every `STORE_SECONDS` to `<checkpoint.url>/<name>/logs/`, and to both at its end. Of a pod
that prints much, the first HEAD_BYTES and the newest TAIL_BYTES are kept. Nothing here ends a run: what cannot be kept
is named once in the log.

The log of a pod that prepares data is also kept beside them, because later runs read them without such a pod.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import shutil
import socket
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from strata_platform import kept_log
from strata_platform.file_io import write_atomic
from strata_platform.pod_settings import ATTEMPT_VARIABLES, POD_NAME
from strata_platform.redact import redacted
from strata_platform.run_layout import LOGS
from strata_platform.runs import LogLine
from strata_platform.spec import RunSpec
from tasks.runtime.process.kept_output import VARIABLE, keep_output, note
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.object_store_url import open_url
from tasks.runtime.process.signals import ignore_sigterm
from tasks.runtime.run_folder.folder import RunFolder

log = logging.getLogger(__name__)

VOLUME_SECONDS, STORE_SECONDS = 10.0, 60.0
# After the first copy. The pauses double up to those above: a pod may be killed in its first seconds, as for memory.
FIRST_SECONDS = 1.0
# Of each start of a pod.
HEAD_BYTES, TAIL_BYTES = 1 << 20, 3 << 20
# Seconds that the end of a pod waits for its last copy.
LAST_SECONDS = 15.0
# Newest lines that a new pod repeats of each earlier one, and of all; how many pods it looks at, and bytes of each.
REPEATED_EACH, REPEATED = 200, 1000
REPEATED_PODS, REPEATED_BYTES = 100, 1 << 18
# Newest logs of the preparation of its data that a run copies: of failed attempts, and of two pods at once.
PREPARATION_LOGS = 10
# More than the first line of a file has.
HEADER_BYTES = 1 << 10

_SEGMENT = re.compile(r"(\d+-\d+)-(\d+)\.jsonl")

_UNKNOWN = kept_log.dropped(None)


class Excerpt:
    """The first and the newest lines of a log, each up to a size; lines between them are dropped and counted."""

    def __init__(self, head: int, tail: int) -> None:
        self._left, self._tail_bytes = head, tail
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._size, self._dropped, self._more = 0, 0, False

    def add(self, line: bytes) -> None:
        """Append a line."""
        if not self._tail and len(line) <= self._left:
            self._head.append(line)
            self._left -= len(line)
            return
        self._tail.append(line)
        self._size += len(line)
        while self._size > self._tail_bytes:
            first = self._tail.popleft()
            self._size -= len(first)
            if first == _UNKNOWN:
                # No line: a place at which an unknown number of them is missing already.
                self._more = True
            else:
                self._dropped += 1

    def content(self) -> bytes:
        """The first lines, how many were dropped, and the newest lines."""
        between = [kept_log.dropped(self._dropped)] if self._dropped else []
        return b"".join([*self._head, *between, *[_UNKNOWN] * self._more, *self._tail])


class OutputReader:
    """Reads the files that the processes of this pod write, also those of ended processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._expected: dict[str, int] = {}

    def lines(self) -> Iterator[bytes]:
        """The complete lines since the last call. A file that its process has left behind is deleted after it."""
        files = sorted((path, found) for path in self._folder.iterdir() if (found := _SEGMENT.fullmatch(path.name)))
        newest = {found[1]: path for path, found in files}
        for path, found in files:
            process, number = found[1], int(found[2])
            if number > self._expected.get(process, 0):
                # It printed faster than it was read.
                yield _UNKNOWN
            self._expected[process] = number
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    content = file.read()
            except FileNotFoundError:
                # Its process has deleted it meanwhile.
                continue
            *lines, rest = content.split(b"\n")
            self._read[path] = self._read.get(path, 0) + len(content) - len(rest)
            yield from (line + b"\n" for line in lines)
            if newest[process] != path:
                path.unlink(missing_ok=True)
                del self._read[path]
                self._expected[process] = number + 1


class _Place:
    """Where the log is copied to. An error is logged once, and the next copy is tried anyway."""

    def __init__(self, where: str, seconds: float, write: Callable[[bytes], object]) -> None:
        self._where, self._seconds, self._write = where, seconds, write
        self._due, self._pause, self._failed, self._written = 0.0, FIRST_SECONDS, False, b""

    def copy(self, content: bytes, *, now: bool) -> None:
        if content == self._written or not (now or time.monotonic() >= self._due):
            return
        self._due = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, self._seconds)
        try:
            self._write(content)
            self._written, self._failed = content, False
        # The errors of stores' clients have no common base class.
        except Exception as error:
            if not self._failed:
                why = redacted(f"{type(error).__name__}: {error}")
                log.warning("this pod's log cannot be copied to %s and will be lost with the pod: %s", self._where, why)
            self._failed = True


class LogKeeper:
    """Copies the output of the processes of this pod, in a thread, until `close`."""

    def __init__(self, folder: Path, places: list[_Place], header: bytes) -> None:
        self._reader, self._places, self._header = OutputReader(folder), places, header
        self._excerpt = Excerpt(HEAD_BYTES, TAIL_BYTES)
        # Not an Event, whose lock is not reentrant: a handler of SIGTERM may call `close` while `close` runs.
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy_until_the_end, name="kept-log", daemon=True)

    def start(self) -> None:
        """Start the thread. Without one, as under a limit of processes, only `close` copies."""
        try:
            self._thread.start()
        except RuntimeError as error:
            log.warning("this pod's log is copied only when the pod ends: %s", error)

    def _copy_until_the_end(self) -> None:
        pause = FIRST_SECONDS
        while True:
            try:
                self._ended.get(timeout=pause)
            except queue.Empty:
                self._copy(now=False)
                pause = min(2 * pause, VOLUME_SECONDS)
            else:
                self._copy(now=True)
                return

    def _copy(self, *, now: bool) -> None:
        try:
            for line in self._reader.lines():
                self._excerpt.add(line)
        except OSError as error:
            log.warning("the output of this pod's processes cannot be read and will be lost with the pod: %s", error)
        for place in self._places:
            place.copy(self._header + self._excerpt.content(), now=now)

    def close(self) -> None:
        """Copy the remaining lines; gives up after LAST_SECONDS, because the pod must end. May be called again."""
        self._ended.put(None)
        if self._thread.ident is None:
            self._copy(now=True)
            return
        self._thread.join(LAST_SECONDS)
        if self._thread.is_alive():
            log.warning("the end of this pod's log is not kept: copying takes longer than %.0f s", LAST_SECONDS)


@contextmanager
def kept_logs(
    spec: RunSpec, rank: int | None = None, *, task: str = kept_log.TRAIN, data: Path | None = None
) -> Iterator[Callable[[], object]]:
    """Keep what this process and those that it starts print, until the end of the block, with its exception.

    Yields a function that ends it earlier, for a process that ends without the end of the block.

    Args:
        spec: The run of which this is a pod.
        rank: Which process of the run this one's own lines count as; None for none.
        task: What the pod does, for the name of the file.
        data: The folder of the data that this pod prepares, beside which its log is kept, too.
    """
    configure_logging()
    pod = os.environ.get(POD_NAME) or socket.gethostname()
    name = kept_log.file_name(time.time(), pod, task)
    try:
        temporary = tempfile.mkdtemp(prefix="strata-output-")
        # The pod's processes read the name of the kept log from its name.
        folder = Path(temporary, name)
        folder.mkdir()
    except OSError as error:
        log.warning("this pod's log will be lost with the pod: no folder for a copy can be created: %s", error)
        yield _nothing
        return
    os.environ[VARIABLE] = str(folder)
    end = keep_output(lambda: rank)
    attempt = next((int(value) for key in ATTEMPT_VARIABLES if (value := os.environ.get(key, "")).isdigit()), 0)
    places = _places(spec, name)
    if data is not None:
        beside = _logs_of(data)
        places.append(_Place(str(beside), VOLUME_SECONDS, lambda content: _write(beside / name, content)))
    keeper = LogKeeper(folder, places, kept_log.header(pod, attempt))
    keeper.start()
    try:
        yield keeper.close
    except Exception:
        # The caller that catches it prints it after this has ended.
        note(traceback.format_exc())
        raise
    finally:
        # What the block did is done. A handler that raises, as torch's agent leaves one behind, would undo it.
        with ignore_sigterm():
            try:
                keeper.close()
            finally:
                end()
                del os.environ[VARIABLE]
                shutil.rmtree(temporary, ignore_errors=True)


def _nothing() -> None:
    return


class _Folder(NamedTuple):
    """A folder with the logs of a run: where, how often a log is copied to it, how, and the sizes of those in it."""

    where: str
    seconds: float
    write: Callable[[str, bytes], object]
    sizes: Callable[[], dict[str, int]]


def _folders(spec: RunSpec) -> list[_Folder]:
    folder = RunFolder.of(spec).logs
    folders = [
        _Folder(
            str(folder),
            VOLUME_SECONDS,
            lambda name, content: _write(folder / name, content),
            lambda: {path.name: path.stat().st_size for path in folder.glob("*.jsonl")},
        )
    ]
    if spec.checkpoint.url:
        url = f"{spec.checkpoint.url.rstrip('/')}/{spec.name}/{LOGS}"
        folders.append(
            _Folder(url, STORE_SECONDS, lambda name, content: _store(url, name, content), lambda: _stored_sizes(url))
        )
    return folders


def _places(spec: RunSpec, name: str) -> list[_Place]:
    if not spec.checkpoint.url and _is_of_the_pod(Path(spec.output)):
        log.warning(
            "this pod's log will be lost with the pod: output %s is on the pod's own disk; set output to a folder on a "
            "volume, or checkpoint.url",
            spec.output,
        )
    return [_Place(folder.where, folder.seconds, partial(folder.write, name)) for folder in _folders(spec)]


def _is_of_the_pod(output: Path) -> bool:
    """Whether a folder is on the file system of the pod's root."""
    path = output.absolute()
    try:
        while not path.exists():
            path = path.parent
        return path.stat().st_dev == Path("/").stat().st_dev
    except OSError:
        # The copy says what is wrong with it.
        return False


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content, durable=False)


def _store(url: str, name: str, content: bytes) -> None:
    files, root = open_url(url, "checkpoint.url")
    files.makedirs(root, exist_ok=True)
    files.pipe_file(f"{root.rstrip('/')}/{name}", content)


def _stored_sizes(url: str) -> dict[str, int]:
    files, root = open_url(url, "checkpoint.url")
    try:
        return {str(found["name"]).rpartition("/")[2]: int(found["size"]) for found in files.ls(root, detail=True)}
    except FileNotFoundError:
        return {}


def _logs_of(data: Path) -> Path:
    """Where the logs of pods that prepared data are kept; beside the folder, so that the data stay as they are."""
    return data.with_name(f"{data.name}.{LOGS}")


def copy_preparation_logs(spec: RunSpec, data: Path) -> None:
    """Copy the logs of the pods that prepared `data`, for another run, to where this run's are kept.

    Never raises, and gives up after LAST_SECONDS, because training waits for it.
    """
    source, problems = _logs_of(data), list[str]()

    def copy() -> None:
        for folder in _folders(spec):
            try:
                _copy_missing(source, folder)
            # The errors of stores' clients have no common base class.
            except Exception as error:
                problems.append(redacted(f"to {folder.where}: {type(error).__name__}: {error}"))

    thread = threading.Thread(target=copy, name="preparation-logs", daemon=True)
    try:
        thread.start()
        thread.join(LAST_SECONDS)
    except RuntimeError as error:
        problems.append(str(error))
    found = [*problems, f"copying takes longer than {LAST_SECONDS:.0f} s"] if thread.is_alive() else problems
    if found:
        log.warning(
            "the earlier log of the preparation of the data is not copied, and still is in %s: %s",
            source,
            "; ".join(found),
        )


def _copy_missing(source: Path, folder: _Folder) -> None:
    """Copy the newest logs in `source` that a folder of a run does not have, or has only the beginning of."""
    paths = sorted(path for path in source.glob("*.jsonl") if kept_log.is_kept_log(path.name))[-PREPARATION_LOGS:]
    kept = folder.sizes() if paths else {}
    for path in paths:
        content = path.read_bytes()
        if kept.get(path.name) != len(content):
            folder.write(path.name, content)


def repeated_lines(spec: RunSpec) -> list[LogLine]:
    """The last lines of the pods in which this run trained before, by time; [] if their logs cannot be read.

    A pod that lives prints them for readers who have nothing but the logs of pods. Raises no error.
    """
    if VARIABLE not in os.environ:
        return []
    try:
        folder = RunFolder.of(spec).logs
        found = {name: _ends(folder / name) for name in _earlier(path.name for path in folder.glob("*.jsonl"))}
        if not found and spec.checkpoint.url:
            files, root = open_url(f"{spec.checkpoint.url.rstrip('/')}/{spec.name}/{LOGS}", "checkpoint.url")
            names = _earlier(str(path).rpartition("/")[2] for path in files.ls(root, detail=False))
            found = {name: _stored_ends(files, f"{root.rstrip('/')}/{name}") for name in names}
    except FileNotFoundError:
        return []
    except Exception as error:
        log.warning("the logs of this run's earlier pods cannot be read: %s: %s", type(error).__name__, error)
        return []
    lines = sorted(
        (line for name, content in found.items() for line in kept_log.parse(name, content)[-REPEATED_EACH:]),
        key=lambda line: line.time,
    )
    return lines[-REPEATED:]


def _earlier(names: Iterable[str]) -> list[str]:
    """Of these files, the logs of the newest pods that trained before this one."""
    own = Path(os.environ[VARIABLE]).name
    return sorted(name for name in names if kept_log.is_of_training(name) and name != own)[-REPEATED_PODS:]


def _stored_ends(files: Any, path: str) -> bytes:
    """As `_ends`, of a file in a store: the run's start waits for it, and may have to read those of a hundred pods."""
    # Not every store's client counts from the end of a file.
    size = int(files.size(path))
    first, newline, _ = files.cat_file(path, 0, min(HEADER_BYTES, size)).partition(b"\n")
    return bytes(first + newline + files.cat_file(path, max(0, size - REPEATED_BYTES), size))


def _ends(path: Path) -> bytes:
    """The first line of a file and its end; the line between them may be cut."""
    with path.open("rb") as file:
        first = file.readline()
        file.seek(max(len(first), path.stat().st_size - REPEATED_BYTES))
        return first + file.read()
