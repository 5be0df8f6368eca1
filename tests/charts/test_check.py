"""What `helm test` runs, as far as it needs no cluster."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kubernetes import client

from strata_platform.chart.cluster_test import AllReduce, Cluster, _connect, _job, _run_job, all_reduce_pod, run


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


ALL_REDUCE = AllReduce(
    namespace="p-d", queue="q", pod_template="strata-rdma", nodes=2, gpus=8, gpu_resource="amd.com/gpu",
    resources={"cpu": "8"}, min_bandwidth=40, largest=256, seconds=60,
)  # fmt: skip


def test_the_pods_that_measure_have_the_devices_of_the_template_and_all_gpus():
    expected = Cluster(
        tenants=[], queue_required=True, kueue_config=("k", "c"), flyte=("f", "f"), image="registry/strata:1",
        python="python3", job_resources={}, job_seconds=0, all_reduce=ALL_REDUCE,
    )  # fmt: skip
    container = {"name": "default", "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}], "resources": {
        "requests": {"rdma/ib": 1}, "limits": {"rdma/ib": 1}}}  # fmt: skip
    template = {"spec": {"containers": [container], "tolerations": [{"key": "team"}]}}
    pod = all_reduce_pod(template, expected, ALL_REDUCE)["spec"]
    (container,) = pod["containers"]
    asked = {"rdma/ib": 1, "cpu": "8", "amd.com/gpu": 8}
    assert container["resources"] == {"requests": asked, "limits": asked}
    assert [item["name"] for item in container["env"]] == ["NCCL_IB_HCA", "NODE_NAME"]
    assert [item["key"] for item in pod["tolerations"]] == ["team", "amd.com/gpu"]
    assert template["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "8Gi"
    assert container["command"][:4] == ["python3", "-m", "torch.distributed.run", "-m"]
    arguments = container["command"][5:]
    assert arguments == ["--min-bandwidth", "40.0", "--largest", "256", "--nodes", "2"]
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == "/dev/shm" and pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
    job = _job("test", {"spec": pod}, "q", 2, 8)["spec"]
    assert job["elasticPolicy"]["nProcPerNode"] == 8 and job["elasticPolicy"]["minReplicas"] == 2


@pytest.fixture
def jobs():
    """An API server with one job, of which one pod has a log that may not be read, and the other never started."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.asked.append((self.command, self.path.rpartition("/")[2]))
            status, body = 200, {"status": {"conditions": server.conditions}}
            if self.path.endswith("worker-0/log"):
                status, body = 403, {"message": "you may not"}
            elif self.path.endswith("worker-1/log"):
                status, body = 400, {"message": "it waits to start"}
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.conditions = [], []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        before = client.Configuration.get_default_copy()
        client.Configuration.set_default(client.Configuration(host=f"http://127.0.0.1:{server.server_port}"))
        yield server
        client.Configuration.set_default(before)
        server.shutdown()


@pytest.mark.parametrize(
    ("kind", "seconds", "said", "stays"),
    [
        ("Succeeded", 60, None, False),
        ("Failed", 60, "worker-1 has ended; see kubectl describe pytorchjob test", True),
        ("Suspended", 0, "not done after 0 s: not seen by the training operator; the job is removed", False),
    ],
)
def test_a_job_that_has_not_ended_does_not_stay(jobs, capsys, kind, seconds, said, stays):
    jobs.conditions = [{"type": kind, "status": "True", "message": "worker-1 has ended"}]
    found = _run_job(_job("test", {"spec": {"containers": []}}, "q"), "p-d", seconds, shown="all-reduce of")
    assert found == said if said is None else said in found
    assert (("DELETE", "test") in jobs.asked) is not stays
    assert capsys.readouterr().out == "      the log of test-worker-0 cannot be read: you may not\n"
