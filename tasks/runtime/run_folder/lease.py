"""A lock that holds between machines and survives none of them: a file that its holder renews every few seconds.

`flock` keeps out the processes of one machine, and those of others where the file system passes it on; an object store
has none. A lease is a file in the folder `.lease` of the run, on disk or in the store, `lease-000001.json` and so on.
Whoever creates the next number has the lease: creation fails if the file exists (O_EXCL; If-None-Match in S3). The
holder rewrites its file; one that stays the same for EXPIRY seconds belongs to a process that is gone. Readers measure
that by their own clock, so clocks need not agree.

A holder that was away for so long that another one came learns it when it renews, and may not write any more.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from fsspec.implementations.local import LocalFileSystem

from strata_platform.run_layout import LEASE
from tasks.runtime.process.object_store_url import open_url

log = logging.getLogger(__name__)

# Seconds between two renewals, and without one until the holder counts as gone.
RENEWAL, EXPIRY = 10.0, 45.0

# Owners in this process that have not released their lease.
_HERE: set[str] = set()


class Lease:
    """The lease of the run whose folder, on disk or in a store, is `url`. Methods raise the errors of its client."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self._clock = url, clock
        self._files, root = open_url(url, "checkpoint.url")
        self._root = f"{root.rstrip('/')}/{LEASE}"
        self._me = {"owner": uuid4().hex, "holder": f"process {os.getpid()} on {socket.gethostname()}", **_process()}
        self._renewals, self._number = 0, 0
        self._seen: tuple[Any, float] = (None, 0.0)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost_to = ""

    def try_to_take(self) -> str | None:
        """Take the lease if it is free. Returns None, or who holds it."""
        number, content = self._newest()
        if content is not None and not self._is_free(content):
            return str(content.get("holder", "another process"))
        if not self._create(number + 1):
            return "another process that started at the same moment"
        self._number = number + 1
        _HERE.add(self._me["owner"])
        for old in range(max(1, number - 1), number + 1):
            self._delete(old)
        return None

    def _is_free(self, content: dict[str, Any]) -> bool:
        if content.get("released") or _has_exited(content):
            return True
        if content != self._seen[0]:
            self._seen = (content, self._clock())
        return self._clock() - self._seen[1] >= EXPIRY

    def renew(self) -> None:
        """Show that this process lives, or learn that another one has the lease."""
        number, content = self._newest()
        if content is not None and (number > self._number or content.get("owner") != self._me["owner"]):
            self._lost_to = str(content.get("holder", "another process"))
            return
        self._renewals += 1
        self._write(self._number, {})

    def start_renewing(self) -> None:
        """Renew in a thread until `release`."""
        self._thread = threading.Thread(target=self._renew_for_ever, name="lease", daemon=True)
        self._thread.start()

    def _renew_for_ever(self) -> None:
        failed = False
        while not self._lost_to and not self._ended.wait(RENEWAL):
            try:
                self.renew()
                failed = False
            # The clients' errors have no common base class. While the store is away, nobody else can take the lease.
            except Exception as error:
                if not failed:
                    log.warning("the lease of %s could not be renewed: %s: %s", self._url, type(error).__name__, error)
                failed = True

    def require_held(self) -> None:
        """Raises ValueError if another process has taken the lease: this one may write no more."""
        if self._lost_to:
            raise ValueError(
                f"{self._url} is being trained by {self._lost_to}, which took over because this process "
                f"did not renew its lease for {EXPIRY:.0f} s; end one of them, or choose another name"
            )

    def release(self) -> None:
        """Let the next process in at once. Never raises."""
        self._ended.set()
        _HERE.discard(self._me["owner"])
        if self._thread is not None:
            self._thread.join(RENEWAL)
        if self._lost_to:
            return
        try:
            self._write(self._number, {"released": True})
        except Exception as error:
            log.warning("the lease of %s could not be released: %s: %s", self._url, type(error).__name__, error)

    def _newest(self) -> tuple[int, dict[str, Any] | None]:
        """Number and content of the newest lease; an unreadable one, half written, has none of the fields."""
        self._files.invalidate_cache()
        try:
            names = [path.rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(self._root, detail=False)]
        except FileNotFoundError:
            return 0, None
        numbers = [int(name[6:-5]) for name in names if name.startswith("lease-") and name[6:-5].isdigit()]
        if not numbers:
            return 0, None
        newest = max(numbers)
        try:
            content = json.loads(self._files.cat_file(self._path(newest)))
        except FileNotFoundError:
            # Deleted meanwhile, because there is a newer one.
            return self._newest()
        except ValueError:
            content = {}
        return newest, content if isinstance(content, dict) else {}

    def _path(self, number: int) -> str:
        return f"{self._root}/lease-{number:06d}.json"

    def _content(self, more: dict[str, Any]) -> bytes:
        return json.dumps({**self._me, "renewals": self._renewals, **more}).encode()

    def _create(self, number: int) -> bool:
        path = self._path(number)
        try:
            if isinstance(self._files, LocalFileSystem):
                # fsspec asks first and writes then.
                self._files.makedirs(self._root, exist_ok=True)
                with Path(path).open("xb") as file:
                    file.write(self._content({}))
            else:
                self._files.pipe_file(path, self._content({}), mode="create")
        except FileExistsError:
            return False
        return True

    def _write(self, number: int, more: dict[str, Any]) -> None:
        if not isinstance(self._files, LocalFileSystem):
            self._files.pipe_file(self._path(number), self._content(more))
            return
        # In one piece, as a store replaces objects.
        temporary = Path(f"{self._path(number)}.part")
        temporary.write_bytes(self._content(more))
        temporary.replace(self._path(number))

    def _delete(self, number: int) -> None:
        try:
            self._files.rm_file(self._path(number))
        except FileNotFoundError:
            return


def _process() -> dict[str, Any]:
    """What tells this process from every other one, of this machine and since its start."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "namespace": os.readlink("/proc/self/ns/pid"), "pid": pid, "started": _started(pid)}
    except OSError:
        return {}


def _started(pid: int) -> str:
    """When a process started, in ticks since the machine did; its name, in parentheses, may contain blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _has_exited(content: dict[str, Any]) -> bool:
    """Whether the holder was a process that this one would see, and does not."""
    me = _process()
    if not me or any(content.get(name) != me[name] for name in ("boot", "namespace")):
        return False
    if (content.get("pid"), content.get("started")) == (me["pid"], me["started"]):
        return content.get("owner") not in _HERE
    try:
        return _started(int(content["pid"])) != content["started"]
    except (FileNotFoundError, ProcessLookupError):
        return True
