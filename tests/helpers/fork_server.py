"""Start programs of tests as forks of a process that has imported torch already.

`run` and `Popen` take what those of `subprocess` do. `python -m MODULE` and `python -c CODE` become forks, which spares
the ten to twenty seconds of CPU time of an import of torch, transformers and the runtime: each has the environment,
arguments, working directory and pipes that were asked for, a pid, signals and an exit code, and ends as an interpreter
does. All else is started as `subprocess` starts it, and so is a program on another system than Linux, or one with an
environment other than `clean_environment`, the server's: libraries read it when they are imported.

A test of what happens at a start, of imports or of hash seeds, which forks share, belongs to `subprocess`.

The first launch starts the server, which all workers of pytest-xdist share; it ends with the last of them.

    python -m tests.helpers.fork_server FD MODULE:FUNCTION
"""

import atexit
import errno
import gc
import hashlib
import inspect
import json
import logging
import os
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tests.helpers.process_cost import collect_seldom, leave

ROOT = Path(__file__).parents[2]
# What is read when it is needed, and by no import.
MAY_DIFFER = re.compile(
    r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|PYTEST_CURRENT_TEST"
    r"|PYTEST_XDIST_WORKER|STRATA_MOMENTS|NODE_NAME"
)
# pyarrow's allocator, which has the handlers that let it be forked.
OWN_FORK_HANDLERS = {"jemalloc_bg_thd"}
NUMBER = struct.Struct("i")

# Test modules are imported before the first test.
BEFORE_TESTS = dict(os.environ)

log = logging.getLogger("tests.fork_server")


def clean_environment(**changes):
    """That of pytest before its tests, whose runs change it, with these changes; the project is on the path."""
    changed = {**BEFORE_TESTS, **changes}
    return changed | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), changed.get("PYTHONPATH"))))}


def read_at_import(environment):
    return {name: value for name, value in environment.items() if not MAY_DIFFER.fullmatch(name)}


class Server:
    """The server of this process, as its client sees it."""

    running = None

    def __init__(self, preload=None):
        """preload: of a server for this process alone."""
        self.lock = threading.Lock()
        self.process = None
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
        shared = run, sorted(read_at_import(clean_environment()).items())
        name = hashlib.sha256(repr((os.getpid(), id(self)) if preload else shared).encode()).hexdigest()
        # Of Linux's abstract names, which are gone with the last socket that has them.
        address = f"\0strata-tests-{name}"
        while not self._connected(address):
            self._start(address, preload or "tests.runtime.helpers.all_imports:import_everything")
        atexit.register(self.close)

    def _connected(self, address):
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(address)
        except ConnectionRefusedError:
            self.socket.close()
            return False
        return True

    def _start(self, address, preload):
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # Another process is starting it, whose socket listens at once.
                return
            listening.listen()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.fork_server", str(listening.fileno()), preload],
                cwd=ROOT, env=read_at_import(clean_environment()), stdin=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
            )  # fmt: skip

    def close(self):
        self.socket.close()
        if self.process:
            self.process.wait()

    def fork(self, request, files):
        """Returns the new process's pid, and a file that has its wait status when it has ended."""
        payload = os.memfd_create("request")
        ended, report = os.pipe()
        try:
            os.write(payload, json.dumps(request).encode())
            with self.lock:
                socket.send_fds(self.socket, [b"!"], [payload, report, *files])
        finally:
            os.close(payload)
            os.close(report)
        return read_number(ended), ended


def read_number(file):
    found = os.read(file, NUMBER.size)
    if not found:
        raise RuntimeError("the fork server of the tests has ended; its error is above")
    return NUMBER.unpack(found)[0]


def server_for(command, environment):
    """The server that may start this; None if it is left to `subprocess`."""
    if sys.platform != "linux" or command[0] != sys.executable or command[1:2] not in (["-m"], ["-c"]):
        return None
    wanted, own = read_at_import(environment), read_at_import(clean_environment())
    if differing := sorted(name for name in own.keys() | wanted if own.get(name) != wanted.get(name)):
        log.warning("%s is imported anew, because the environment differs in %s", command[2][:80], differing)
        return None
    if Server.running is None:
        Server.running = Server()
    return Server.running


class Popen(subprocess.Popen):
    """As `subprocess.Popen`, which does all but start and wait for the process."""

    server = None

    def __init__(self, command, *, env=None, **options):
        command = [os.fspath(word) for word in command]
        env = dict(os.environ if env is None else env)
        # What a fork does not get.
        if options.keys() <= {"cwd", "stdin", "stdout", "stderr", "text", "start_new_session"}:
            self.server = server_for(command, env)
        super().__init__(command, env=env, **options)

    def _execute_child(self, *arguments):
        if self.server is None:
            return super()._execute_child(*arguments)
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        pipes = {name: given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")}
        theirs = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        request = {
            "command": given["args"],
            "environment": given["env"],
            "folder": os.path.abspath(given["cwd"] or "."),
            "new_session": bool(given["start_new_session"]),
        }
        try:
            files = [own if file == -1 else file for own, file in enumerate(theirs)]
            self.pid, self._ended = self.server.fork(request, files)
            self._child_created = True
        finally:
            self._close_pipe_fds(**pipes)

    def _try_wait(self, wait_flags):
        if self.server is None:
            return super()._try_wait(wait_flags)
        if not select.select([self._ended], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = read_number(self._ended)
        os.close(self._ended)
        return self.pid, status

    def _internal_poll(self, *arguments, **options):
        if self.server is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(command, *, capture_output=False, timeout=None, check=False, **options):
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def serve(listening):
    """Fork for each request until all clients are gone. Returns the request in each fork, and None at the end."""
    # Of Ctrl-C, clients tell by their end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients, children, waiting = {}, {}, select.poll()
    waiting.register(listening, select.POLLIN)
    while True:
        for file, _ in waiting.poll():
            if file == listening.fileno():
                client, _ = listening.accept()
                clients[client.fileno()] = client
                waiting.register(client, select.POLLIN)
                continue
            if file in children:
                waiting.unregister(file)
                pid, report = children.pop(file)
                end(report, os.waitpid(pid, 0)[1])
                os.close(file)
                continue
            message, files, *_ = socket.recv_fds(clients[file], 1, 5)
            if not message:
                waiting.unregister(file)
                clients.pop(file).close()
                if not clients:
                    return None
                continue
            payload, report, *standard = files
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for connection in (listening, *clients.values()):
                    connection.close()
                for descriptor, (_, others) in children.items():
                    os.close(descriptor)
                    os.close(others)
                os.close(report)
                return payload, standard
            for file in (payload, *standard):
                os.close(file)
            os.write(report, NUMBER.pack(pid))
            children[descriptor := os.pidfd_open(pid)] = pid, report
            waiting.register(descriptor, select.POLLIN)


def end(report, status):
    """Tell the client of an exit; one that no longer wants to know has closed the pipe."""
    with suppress(BrokenPipeError):
        os.write(report, NUMBER.pack(status))
    os.close(report)


def become(payload, standard):
    """Run what was asked for, in this fork, as the interpreter does when it is started with it."""
    with open(payload, "rb") as file:
        file.seek(0)
        request = json.load(file)
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    if request["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.orig_argv[:] = request["command"]
    _, how, what, *arguments = request["command"]
    if "numpy" in sys.modules:
        # The standard library's generator takes a new seed after a fork, and torch's begins with a fixed one.
        sys.modules["numpy"].random.seed()
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__builtins__ = __builtins__
    if how == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = ["-m", *arguments], os.getcwd()
        # Others of the server's modules may have imported it.
        sys.modules.pop(what, None)
        runpy._run_module_as_main(what)


def exit_code(function, *arguments):
    """Call `function` as a program; returns the exit code, and prints an error as the interpreter does."""
    try:
        function(*arguments)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    # Ends the process by SIGINT, as in any program.
    except KeyboardInterrupt:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def preload(module, function):
    """Import what most of the programs do."""
    gc.disable()
    getattr(import_module(module), function)()
    collect_seldom()
    gc.enable()
    gc.collect()
    # The collector of a fork would walk and thereby copy all that is loaded by now, at the end for three seconds.
    gc.freeze()
    tasks = Path("/proc/self/task")
    threads = {(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())}
    assert threads <= OWN_FORK_HANDLERS, f"imports have started threads, which forks would not have: {threads}"


if __name__ == "__main__":
    # Kept, because a fork has another module of this name.
    this = sys.modules["__main__"]
    preload(*sys.argv[2].split(":"))
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    leave(exit_code(become, *request) if request else 0)
