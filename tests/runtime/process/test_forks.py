"""Modules are run in forks of a process that has imported large packages, and has computed nothing."""

import ast
import sys
from pathlib import Path

import pytest

from tests.helpers import fork_server

ROOT = Path(__file__).parents[3]
PROGRAM = """
import multiprocessing, os, signal, sys
from tasks.runtime.process import forks
sys.noted = "before"
with forks.fork_server("readers"):
    sys.noted = "after"
    if sys.argv[1] == "server gone":
        server, = multiprocessing.active_children()
        os.kill(server.pid, signal.SIGKILL)
        server.join()
    ended = forks.run_module("tests.runtime.helpers.print_what_it_is", sys.argv[1:])
    again = forks.run_module("tests.runtime.helpers.print_what_it_is", ["", "again"])
assert not multiprocessing.active_children()
print([ended.returncode, ended.stdout, ended.stderr.splitlines()[-1:], again.stdout])
"""


@pytest.mark.parametrize(
    ("how", "code", "said", "noted"),
    [
        ("", 0, [], "before"),
        ("fail", 1, ["ValueError: no such folder"], "before"),
        ("kill", -9, [], "before"),
        ("server gone", 0, [], None),
    ],
)
def test_a_fork_has_what_was_there_when_the_server_was_started(how, code, said, noted):
    command = [sys.executable, "-c", PROGRAM, how, "a b"]
    ended = fork_server.run(
        command, cwd=ROOT, env=fork_server.clean_environment(), text=True, capture_output=True, timeout=600
    )
    assert not ended.returncode, ended.stderr
    *_, found = ended.stdout.splitlines()
    # Output that a process had not written when it was killed is lost.
    printed = "" if how == "kill" else f"noted {noted} ['a b']\n"
    assert ast.literal_eval(found) == [code, printed, said, f"noted {noted} ['again']\n"]
    assert ("the process that forks has ended" in ended.stderr) == (how == "server gone")
