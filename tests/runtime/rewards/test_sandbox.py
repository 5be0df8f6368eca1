"""What code under test cannot do, and that it does not pass by just ending early."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tasks.runtime.rewards import process_tree, sandbox
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


@pytest.fixture
def without_namespaces(monkeypatch, tmp_path):
    """The sandbox where the kernel lets users make no namespaces: it refuses an unknown flag, too."""
    flags = "_NEW_USER | _NEW_NETWORK | more"
    assert flags in Path(sandbox.__file__).read_text()
    for module in (sandbox, process_tree):
        text = Path(module.__file__).read_text()
        (tmp_path / Path(module.__file__).name).write_text(text.replace(flags, "1"))
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))
    sandbox._warn_of_network.cache_clear()


def test_that_code_has_network_is_told_once(without_namespaces, capfd):
    assert passes("x = 1") and not passes("1 / 0")
    assert capfd.readouterr().err.count("code of answers has network") == 1


# A process that leaves the session, and one that loses its parent, too.
ESCAPES = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({file!r}, "w").write("begun")
        time.sleep({seconds})
    time.sleep({seconds} if {stays} else 0)
    os._exit(0)
while not os.path.exists({file!r}):
    pass
"""


def running(mark):
    """The processes that work in the folder of that mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"strata-escape-{mark}" in os.readlink(folder / "cwd"):
                found.append(folder.name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("stays", [True, False], ids=["session", "orphan"])
@pytest.mark.parametrize("spaces", [True, False], ids=["namespaces", "none"])
def test_what_code_has_started_ends_with_it(spaces, stays, tmp_path, request):
    if not spaces:
        request.getfixturevalue("without_namespaces")
    mark = f"{os.getpid()}-{spaces}-{stays}"
    place = tmp_path / f"strata-escape-{mark}"
    place.mkdir()
    code = f"import os\nos.chdir({str(place)!r})\n" + ESCAPES.format(file="begun", seconds=600, stays=stays)
    assert passes(code, "assert True")
    assert (place / "begun").exists() and running(mark) == []


def test_tests_may_end_as_unittest_does_but_code_may_not():
    case = "import unittest\nclass Case(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(), 1)\n"
    assert passes("def f(): return 1", f"{case}unittest.main()")
    assert not passes("def f(): return 2", f"{case}unittest.main()")
    assert not passes("import sys\ndef f(): sys.exit(0)", "assert f() == 1")


def test_tests_may_begin_with_an_import_of_the_future():
    assert passes("x = 1", "from __future__ import annotations\nassert x == 1")


def test_only_processor_time_of_the_code_counts():
    """Not how long the interpreter takes to start, nor what else the machine does."""
    assert passes("import time\ntime.sleep(1.1)", seconds=1.0)
    busy = "import time\nwhile time.process_time() < 0.4:\n    pass"
    assert not passes(busy, seconds=0.2)
    assert not passes("import time\ntime.sleep(600)", seconds=0.1)


def test_nothing_is_known_of_code_that_had_no_turn():
    assert run_tests("x = 1", "", 5.0, 256, until=time.monotonic()) is None
    assert run_tests("import time\ntime.sleep(600)", "", 60.0, 256, until=time.monotonic() + 0.5) is None
