"""Processes that are forks of one that has imported large packages already: a fork starts in milliseconds."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from tasks.runtime.process.imports import uncollected
from tasks.runtime.process.signals import die_with_parent, keep_sigterm_from_forks

log = logging.getLogger(__name__)

# Most of what training and reading a model import, but nothing that asks for GPUs when it is imported, as torchao does.
_PRELOADED = ("torch._dynamo", "transformers", "accelerate", "strata_kernels")
ENVIRONMENT = {
    # What is preloaded asks whether there are GPUs. After it has asked the driver, no fork could use them.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def prepare_to_fork(what: str) -> bool:
    """Import what `what`, named in a warning, will, and return whether it may be forks of this process then.

    A fork shares the memory of what is imported, and an interpreter would import for many seconds of a core. The
    process must have used neither a GPU nor threads of torch, which a fork lacks.
    """
    with uncollected():
        for module in _PRELOADED:
            import_module(module)
    if not _forks_may_use_gpus():
        log.warning("%s import everything again: this process has opened a GPU, so they cannot be its forks", what)
        return False
    keep_sigterm_from_forks()
    return True


def _forks_may_use_gpus() -> bool:
    """Whether a fork of this process can start the GPUs' driver, if there is one; not after this process has."""
    pid = os.fork()
    if pid == 0:
        usable = False
        try:
            usable = _driver_starts()
        finally:
            os._exit(0 if usable else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _driver_starts() -> bool:
    import torch

    asked = torch.cuda._is_in_bad_fork()
    if torch.version.hip:
        return not asked
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    # CUDA_ERROR_NOT_INITIALIZED. That there is no GPU is another error.
    return not asked and driver.cuInit(0) != 3


class _Server:
    """A fork of this process as it is now, which runs modules in forks of its own. It ends with this process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        # A daemon is stopped when this process exits.
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        # So that its end is the end of the pipe.
        theirs.close()

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            printed = [str(Path(folder, name)) for name in ("output", "errors")]
            self._connection.send((command, printed))
            status = self._connection.recv()
            output, errors = (Path(file).read_text(encoding="utf-8", errors="replace") for file in printed)
        return subprocess.CompletedProcess(command, status, output, errors)

    def close(self) -> None:
        # It holds nothing, and its forks end with it.
        self._process.kill()
        self._process.join()


_SERVER: list[_Server] = []


@contextmanager
def fork_server(what: str) -> Iterator[None]:
    """Have `run_module` in the block fork from this process as it is now; `what` names what it runs, in a warning."""
    if prepare_to_fork(what):
        _SERVER.append(_Server())
    try:
        yield
    finally:
        while _SERVER:
            _SERVER.pop().close()


def run_module(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """`python -m module` with these arguments, in a process that has nothing of what this one has computed.

    It is a fork of the server, if one was started, or else a new interpreter.
    """
    if _SERVER:
        try:
            return _SERVER[0].run([module, *arguments])
        except (EOFError, OSError) as error:
            log.warning("the process that forks has ended (%r), perhaps because memory ran out", error)
            _SERVER.pop().close()
    return subprocess.run([sys.executable, "-m", module, *arguments], text=True, capture_output=True)


def _serve(connection: Connection) -> None:
    die_with_parent()
    while True:
        command, printed = connection.recv()
        pid = os.fork()
        if pid == 0:
            _become(command, printed)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _become(command: list[str], printed: list[str]) -> None:
    """Run a module in this fork, which ends with it, as an interpreter does."""
    status = 1
    try:
        die_with_parent()
        for number, file in enumerate(printed, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
        # The objects of the process that was forked may be locked, or copy what they write.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        sys.argv = list(command)
        # The process that was forked may have imported it.
        sys.modules.pop(command[0], None)
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
