"""What code under test cannot do, and that it does not pass by just ending early."""

import os
import sys

import pytest

from tasks.runtime.rewards import sandbox
from tasks.runtime.rewards.sandbox import run_tests


def passes(code, tests="", seconds=5.0, memory_mib=256):
    return run_tests(code, tests, seconds, memory_mib)


def test_code_passes_if_it_runs_to_its_end():
    assert passes("x = 1", "assert x == 1")
    assert not passes("x = 1", "assert x == 2")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "x = bytearray(1 << 30)",
        "raise SystemExit",
    ],
    ids=["exit", "_exit", "loop", "memory", "SystemExit"],
)
def test_code_that_ends_early_or_takes_too_much_fails(code):
    assert not passes(code, seconds=1.0)


def test_code_has_neither_environment_nor_this_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert passes("import os", "assert 'SECRET_TOKEN' not in os.environ and os.listdir('.') == ['answer.py']")
    assert passes("import sys", f"assert {str(tmp_path)!r} not in sys.path")


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are of Linux")
def test_code_has_no_network_where_namespaces_can_be_made():
    if os.system("unshare --user --net true 2> /dev/null") != 0:
        pytest.skip("users cannot make namespaces here")
    connect = "socket.create_connection(('127.0.0.1', 9), 1)"
    code = f"import socket\ntry:\n    {connect}\nexcept OSError as error:\n    found = error.errno"
    # In a network of its own not even the loopback device is up.
    assert passes(code, "import errno\nassert found == errno.ENETUNREACH")


def test_that_code_has_network_is_told_once(monkeypatch, tmp_path, capfd):
    # A process that could not make a namespace.
    start = "import os, sys\nos.write(int(sys.argv[1]), b'-')\nos.execv(sys.executable, [sys.executable, sys.argv[4]])"
    (tmp_path / "start.py").write_text(start)
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "start.py"))
    sandbox._tell_of_network.cache_clear()
    assert passes("x = 1") and not passes("1 / 0")
    assert capfd.readouterr().err.count("code of answers has network") == 1
