"""Runs code that a model has written, against tests.

A process of its own, as the same user: with limits of processor time, memory and file sizes, an empty environment, an
empty folder that is removed afterwards, no input, and, where the system lets users make namespaces, no network and a
limit of processes. What it has not: another root, so it can read what the user can read, its own script with the proof
that tests have passed among it, and write where the user can write up to the limit of a file's size. It guards against
accidents, not against an attacker: for models that you do not trust, run the whole training in a container without
secrets.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_FILE_BYTES = 16 << 20
_PROCESSES = 64
# What the process writes of itself before the code's proof.
_ALONE, _WITH_NETWORK = b"+", b"-"


def run_tests(code: str, tests: str, seconds: float, memory_mib: int) -> bool:
    """Whether `code`, then `tests`, runs to its end as Python in time."""
    # Written behind the tests: code that ends its process early does not, unless it reads it from its own script.
    proof = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="strata-tests-") as folder:
        script = Path(folder, "answer.py")
        reader, writer = os.pipe()
        end = f"\n__import__('os').write({writer}, {proof.encode()!r})\n"
        try:
            script.write_text(f"{code}\n{tests}{end}", encoding="utf-8")
        except UnicodeEncodeError:
            os.close(reader)
            os.close(writer)
            return False
        process = subprocess.Popen(
            # This file, below `__main__`: it limits itself, then becomes the code. A fork of this process would do so
            # with its memory and the locks of its threads. -I: nothing of the environment or of this folder.
            [sys.executable, "-I", "-S", "-B", __file__, str(writer), str(seconds), str(memory_mib), str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            cwd=folder,
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # With what it has started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.set_blocking(reader, False)
        try:
            written = os.read(reader, 4096)
        except BlockingIOError:
            written = b""
        os.close(reader)
    if written.startswith(_WITH_NETWORK):
        _tell_of_network()
    return process.returncode == 0 and written[1:] == proof.encode()


@functools.cache
def _tell_of_network() -> None:
    print("unit_tests: this machine lets users make no namespaces, so code of answers has network", file=sys.stderr)


def _limit(seconds: float, memory_mib: int) -> bool:
    """Limit the process that calls it, and take its network; whether that is gone."""
    alone = False
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory_mib << 20,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":
        # A user's other processes count, too; in a namespace of its own only those of the sandbox.
        alone = ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK) == 0
        if alone:
            limits[resource.RLIMIT_NPROC] = _PROCESSES
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    return alone


def main(writer: str, seconds: str, memory_mib: str, script: str) -> None:
    """Become the Python program `script`, limited."""
    alone = _limit(float(seconds), int(memory_mib))
    os.write(int(writer), _ALONE if alone else _WITH_NETWORK)
    os.execv(sys.executable, [sys.executable, "-I", "-B", script])  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
