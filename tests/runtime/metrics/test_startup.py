"""Phases of a start are those between real processes: an agent that a shell started, and its training processes."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

AGENT = """
import subprocess, sys, time
from tasks.runtime.metrics import startup
startup.mark_pod()
time.sleep(0.2)
startup.mark("imports")
for restarts in ("0", "1"):
    import os
    os.environ["TORCHELASTIC_RESTART_COUNT"] = restarts
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
WORKER = """
import json, time
from types import SimpleNamespace
from tasks.runtime.metrics import startup
startup.mark_process()
time.sleep(0.1)
startup.mark("model")
startup.mark("model")
points = [SimpleNamespace(step_seconds=2.0), SimpleNamespace(step_seconds=1.0), SimpleNamespace(step_seconds=9.0)]
print(json.dumps([startup.begun(), startup.seconds(points)]))
"""


def test_processes_go_on_with_the_moments_of_their_pod_and_those_of_a_restart_begin_anew():
    begin = time.time()
    ended = subprocess.run(
        [sys.executable, "-c", AGENT, WORKER], text=True, capture_output=True, check=True, start_new_session=True
    )
    (begun, first), (again, restarted) = map(json.loads, ended.stdout.splitlines())
    # The pod's first process is the one that runs the tests, or one of its ancestors.
    assert begun < begin + 1 and list(first) == ["code", "imports", "processes", "model", "first step", "second step"]
    assert 0.2 <= first["imports"] < 5 and first["model"] >= 0.1 and first["processes"] >= -0.02
    assert (first["first step"], first["second step"]) == (2.0, 1.0)
    # Until the first process of the pod was started again, the start before it ran.
    assert again > begin and list(restarted) == ["model", "first step", "second step"]


def test_nothing_is_said_where_nothing_was_noted(monkeypatch):
    from tasks.runtime.metrics import startup

    monkeypatch.delenv(startup.VARIABLE, raising=False)
    assert startup.begun() is None and startup.seconds([SimpleNamespace(step_seconds=1.0)]) == {}
