"""Programs that tests start as forks are started, told, signalled and ended as those of `subprocess` are."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers import fork_server
from tests.helpers.fork_server import ROOT, Server

PROGRAMS = {
    "arguments": "import os, sys; print(sys.argv, sys.path[0], __name__, os.getcwd(), sys.stdin.read())",
    "environment": "import os; print(sorted(os.environ.items()))",
    "exit code": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('what is wrong')",
    "error": "print('before'); 1 / 0",
    "wrong syntax": "1 +",
    "end": "import atexit; atexit.register(print, 'at the end'); print('first')",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.01), print('last'))).start()",
    "standard error": "import os, sys; print('1', file=sys.stderr); os.write(2, b'2'); print(3)",
    "no more files": "import os; print(sorted(os.listdir('/proc/self/fd'))[:4])",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not reached')",
    "SIGPIPE": "import signal; print(signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGCHLD))",
    "abort": "import os; os.abort()",
    "spawned": "from concurrent.futures import ProcessPoolExecutor as Pool\nfrom multiprocessing import get_context\n"
    "with Pool(1, get_context('spawn')) as pool: print(pool.submit(abs, -4).result())",
}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they are forks on Linux alone")


@pytest.fixture(scope="module")
def environment():
    """That of the server, and of programs which it starts. It has imported nothing, so that it starts at once."""
    before, Server.running = Server.running, Server("gc:collect")
    yield fork_server.clean_environment()
    Server.running.close()
    assert Server.running.process.returncode == 0
    Server.running = before


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_what_a_process_of_its_own_does(environment, tmp_path, name):
    told = {"cwd": tmp_path, "env": environment | {"RANK": "1"}, "stdin": subprocess.DEVNULL}
    told |= {"text": True, "capture_output": True, "timeout": 300}
    command = [sys.executable, "-c", PROGRAMS[name], "one", "two words"]
    expected, found = subprocess.run(command, **told), fork_server.run(command, **told)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    # Of a traceback, what is above the program is the server's.
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_a_module_is_the_main_one(environment, tmp_path):
    (tmp_path / "program.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv, sys.path[0])\n")
    command = [sys.executable, "-m", "program", "--flag"]
    expected = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = fork_server.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "__main__ program" in expected.stdout and found.stdout == expected.stdout
    missing = fork_server.run([sys.executable, "-m", "no.such"], env=environment, capture_output=True, text=True)
    assert missing.returncode == 1 and "No module named 'no'" in missing.stderr


def test_it_is_signalled_and_waited_for(environment):
    code = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    with fork_server.Popen(command, **options) as first, fork_server.Popen(command, **options) as second:
        assert first.stdout.readline().split() == [str(first.pid), str(Server.running.process.pid)]
        assert first.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0.01)
        first.terminate()
        assert first.wait(300) == first.poll() == -signal.SIGTERM
        assert second.poll() is None
        second.kill()
    assert second.returncode == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=0.01)


@pytest.mark.parametrize("own", [False, True])
def test_it_has_a_session_of_its_own_where_that_is_asked_for(environment, own):
    code = "import os; print(os.getsid(0) == os.getpid())"
    ended = fork_server.run([sys.executable, "-c", code], env=environment, capture_output=True, start_new_session=own)
    assert ended.stdout == f"{own}\n".encode()


def test_forks_draw_numbers_of_their_own(environment):
    command = [sys.executable, "-c", "import random, uuid; print(random.random(), uuid.uuid4())"]
    numbers = {fork_server.run(command, env=environment, capture_output=True).stdout for _ in range(2)}
    assert len(numbers) == 2


@pytest.mark.parametrize(
    ("options", "changes", "forked"),
    [
        ([], {}, True),
        ([], {"LOCAL_RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}, True),
        ([], {"TRITON_INTERPRET": "1"}, False),
        (["-W", "ignore"], {}, False),
    ],
    ids=["as the server", "places", "read at import", "options of the interpreter"],
)
def test_what_an_import_may_read_is_the_same_or_it_is_no_fork(environment, caplog, options, changes, forked):
    command = [sys.executable, *options, "-c", "import os; print(os.getppid())"]
    ended = fork_server.run(command, env=environment | changes, capture_output=True)
    assert int(ended.stdout) == (Server.running.process.pid if forked else os.getpid())
    assert ("differs in ['TRITON_INTERPRET']" in caplog.text) == ("TRITON_INTERPRET" in changes)


def test_what_tests_leave_in_the_environment_does_not_matter(environment, monkeypatch):
    monkeypatch.setenv("LEFT_BY_A_RUN", "1")
    assert fork_server.clean_environment(PYTHONPATH="/else") == environment | {"PYTHONPATH": f"{ROOT}:/else"}


def test_it_goes_on_when_the_server_ends_and_others_are_told(environment):
    server = Server("gc:collect")
    before, Server.running = Server.running, server
    try:
        command = [sys.executable, "-c", "import sys; print('on', flush=True); sys.stdin.read(); print('done')"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with fork_server.Popen(command, env=environment, **pipes) as process:
            assert process.stdout.readline() == "on\n"
            server.close()
            process.stdin.close()
            assert process.stdout.read() == "done\n"
            with pytest.raises(RuntimeError, match="the fork server of the tests has ended"):
                process.wait(60)
            process.returncode = 0
    finally:
        Server.running = before


def test_an_import_may_start_no_thread(tmp_path):
    (tmp_path / "with_thread.py").write_text(
        "import threading\ndef start():\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "tests.helpers.fork_server", "0", "with_thread:start"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1 and "imports have started threads" in ended.stderr
