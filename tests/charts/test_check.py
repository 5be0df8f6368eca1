"""What `helm test` runs, as far as it needs no cluster."""

import json
import os
import socket
import subprocess
import sys

import pytest

from strata_platform.chart.cluster_test import _connect, _job, run


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def pod(**expected):
    """The check of a tenant's pod, as its container starts it."""
    environment = os.environ | {
        "STRATA_CHECK": json.dumps({"reachable": [], "unreachable": [], "writable": []} | expected)
    }
    command = [sys.executable, "-m", "strata_platform.chart.cluster_test", "pod"]
    return subprocess.run(command, env=environment, text=True, capture_output=True)


def test_a_pod_says_what_it_reaches_and_what_it_can_write(listening, tmp_path):
    gone = str(tmp_path / "gone")
    closed = "127.0.0.1:1"
    done = pod(reachable=[listening, closed], unreachable=[closed, listening], writable=[str(tmp_path), gone])
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == ""
    assert f"ok    can write {tmp_path}" in lines and f"ok    reaches {listening}" in lines
    assert f"ok    does not reach {closed}" in lines and "ok    no token of Kubernetes" in lines
    assert any(line.startswith(f"FAIL  can write {gone}: FileNotFoundError") for line in lines)
    assert any(line.startswith(f"FAIL  reaches {closed}: ") and "network" in line for line in lines)
    assert any(line.startswith(f"FAIL  does not reach {listening}: it answers") for line in lines)


def test_an_ipv6_address_has_brackets(monkeypatch):
    tried = []
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: tried.append(address) or socket.socket())
    assert _connect("[fd00::1]:443") is None and _connect("minio.minio:9000") is None
    assert tried == [("fd00::1", 443), ("minio.minio", 9000)]


def test_a_check_that_breaks_has_failed_and_the_others_are_made(capsys):
    class Refused(Exception):
        body = '{"message": "no such thing"}'

    def broken():
        raise Refused

    assert run(iter([("one", broken), ("two", lambda: None), ("three", lambda: "not so")])) == 2
    assert capsys.readouterr().out == "FAIL  one: Refused: no such thing\nok    two\nFAIL  three: not so\n"


def test_a_job_that_is_to_be_refused_names_no_queue():
    assert _job("n", {}, "q")["metadata"]["labels"] == {}
    template = {"spec": {"containers": []}}
    assert _job("n", template, "q")["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
