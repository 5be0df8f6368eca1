"""Runs code that a model has written, against tests.

In a process of its own, as the same user: with limits of processor time, memory and file sizes, an empty environment,
an empty folder that is removed afterwards, no input, and, where the system lets users make namespaces, no network and a
limit of processes. What the code has started ends with it. What it has not: another root, so it can read what the user
can read, and write where the user can write up to the limit of a file's size; nor is the proof that tests have passed
hidden from code that looks for it in its own process. It guards against accidents, not against an attacker: for models
that you do not trust, run the whole training in a container without secrets.

`run_tests` starts this file as a supervisor. The supervisor makes the namespaces and forks an init, the first process
in them, which forks the answer. When the init ends, the kernel ends all processes of its namespace. Where there is
none, the init ends them itself.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# The supervisor has no path to the packages of this repository: it takes nothing from its surroundings.
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from process_tree import adopt_orphans, die_with_parent, end_descendants  # type: ignore[import-not-found]

    del sys.path[0]
else:
    from tasks.runtime.rewards.process_tree import adopt_orphans, die_with_parent, end_descendants

_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_FILE_BYTES = 16 << 20
_PROCESSES = 64
# The clock goes on while others use the processors, or the code waits.
_CLOCK_PER_PROCESSOR_SECOND = 3.0
# For the supervisor to start and to end, on a busy machine.
_START_SECONDS = 60.0
# How the supervisor ends.
_PASSED, _FAILED, _TOO_LATE = 0, 1, 2
# What it writes.
_ALONE, _WITH_NETWORK = b"+", b"-"


def run_tests(code: str, tests: str, seconds: float, memory_mib: int, until: float = math.inf) -> bool | None:
    """Whether `code`, then `tests`, runs to its end as Python in time. None if that is not known.

    seconds: of processor time; the clock may show three times as many from when the code begins. until: on the
    monotonic clock, when the code is ended in any case; then nothing is known.
    """
    began = time.monotonic()
    if began >= until:
        return None
    folder = tempfile.mkdtemp(prefix="strata-tests-")
    try:
        try:
            Path(folder, "answer.py").write_text(code, encoding="utf-8")
        except UnicodeEncodeError:
            return False
        job = {"code": code, "tests": tests, "seconds": seconds, "memory_mib": memory_mib}
        process = subprocess.Popen(
            # -I: nothing of the environment or of this folder.
            [sys.executable, "-I", "-B", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            cwd=folder,
            start_new_session=True,
        )
        longest = _CLOCK_PER_PROCESSOR_SECOND * seconds + _START_SECONDS
        limit = min(began + longest, until)
        request = json.dumps(job | {"until": None if until == math.inf else until}).encode()
        try:
            written, _ = process.communicate(request, timeout=max(limit - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            # The supervisor's end is the init's, too.
            process.kill()
            # Closes the pipes, also that of a request which was not read, and waits.
            with process:
                pass
    finally:
        _remove(folder)
    if written == _WITH_NETWORK:
        _warn_of_network()
    if process.returncode == _TOO_LATE:
        return None
    return process.returncode == _PASSED


def _remove(folder: str) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        # Of code that has made folders within folders.
        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)  # noqa: S607


@functools.cache
def _warn_of_network() -> None:
    print("unit_tests: this machine lets users make no namespaces, so code of answers has network", file=sys.stderr)


def _supervise() -> int:
    """Run the request on standard input; how it ended."""
    die_with_parent()
    request = json.loads(sys.stdin.buffer.read())
    alone = _separate()
    os.write(1, _ALONE if alone else _WITH_NETWORK)
    init = os.fork()
    if init == 0:
        os._exit(_init(request, alone))
    return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])


def _separate() -> bool:
    """Leave the network, and let children have process numbers of their own; whether the network is gone."""
    if sys.platform != "linux":
        return False
    unshare = ctypes.CDLL(None).unshare
    return any(unshare(_NEW_USER | _NEW_NETWORK | more) == 0 for more in (_NEW_PROCESSES, 0))


def _init(request: dict[str, Any], alone: bool) -> int:
    """Run the answer in a process, and end all that it has started; how it ended."""
    die_with_parent()
    adopt_orphans()
    # A signal's handler writes to a pipe, which ends the wait below.
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reader, writer = os.pipe()
    # Written behind the tests: code that ends its process early does not.
    proof = secrets.token_bytes(16)
    answer = os.fork()
    if answer == 0:
        _answer(request, alone, proof, writer)
    os.close(writer)
    own = time.monotonic() + _CLOCK_PER_PROCESSOR_SECOND * request["seconds"]
    most = math.inf if request["until"] is None else request["until"]
    status, used = None, 0.0
    while status is None and (left := min(own, most) - time.monotonic()) > 0:
        select.select([woken], [], [], left)
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        while (ended := os.wait4(-1, os.WNOHANG))[0]:
            if ended[0] == answer:
                status, used = ended[1], ended[2].ru_utime + ended[2].ru_stime
                break
    if os.getpid() != 1:
        end_descendants(os.getpid())
    if status is None:
        return _TOO_LATE if most < own else _FAILED
    os.set_blocking(reader, False)
    try:
        proven = os.read(reader, 4096) == proof
    except BlockingIOError:
        proven = False
    return _PASSED if status == 0 and proven and used <= request["seconds"] else _FAILED


def _answer(request: dict[str, Any], alone: bool, proof: bytes, writer: int) -> NoReturn:
    """Run the code and the tests in this process, limited, and end it."""
    # Code may replace what modules hold.
    write, leave, number = os.write, os._exit, os.getpid
    own = number()
    try:
        die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        os.closerange(3, writer)
        os.closerange(writer + 1, 256)
        code_file, tests_file = str(Path("answer.py").absolute()), "<tests>"
        main = types.ModuleType("__main__")
        main.__file__ = code_file
        sys.modules["__main__"], sys.argv = main, [code_file]
        _limit(request["seconds"], request["memory_mib"], alone)
        exec(compile(request["code"], code_file, "exec", dont_inherit=True), main.__dict__)  # noqa: S102
        try:
            exec(compile(request["tests"], tests_file, "exec", dont_inherit=True), main.__dict__)  # noqa: S102
        except SystemExit as end:
            # As `unittest.main()` ends. What the code ends is no success of the tests.
            if end.code not in (None, 0) or _passed_through(end.__traceback__, code_file):
                leave(1)
    except BaseException:
        leave(1)
    if number() == own:
        write(writer, proof)
    leave(0)


def _passed_through(trace: types.TracebackType | None, file: str) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            return True
        trace = trace.tb_next
    return False


def _limit(seconds: float, memory_mib: int, alone: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: max(math.ceil(seconds), 1),
        resource.RLIMIT_AS: memory_mib << 20,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if alone:
        # A user's other processes count, too; in a namespace of its own only those of the sandbox.
        limits[resource.RLIMIT_NPROC] = _PROCESSES
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    sys.exit(_supervise())
