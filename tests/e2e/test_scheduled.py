"""A scheduled run that fails, on a cluster: Flyte's failure handler takes the tenant's secret and sends the message."""

import os
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from kubernetes import client

from strata_platform.spec import RunSpec
from tasks.scheduled import WEBHOOK
from tests.e2e.cluster import NAMESPACE, Run, named, until
from workflows.scheduled import scheduled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("STRATA_E2E_UNREACHABLE" in os.environ, reason="the webhook is a pod, which policies shut off"),
]
PORT = 8080
RECEIVER = f"""
import http.server, sys
class Webhook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        print(self.path, self.rfile.read(int(self.headers["Content-Length"])).decode(), flush=True)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("", {PORT}), Webhook).serve_forever()
"""


@contextmanager
def secret(core, url):
    body = client.V1Secret(metadata=client.V1ObjectMeta(name=WEBHOOK.group), string_data={WEBHOOK.key: url})
    core.create_namespaced_secret(NAMESPACE, body)
    try:
        yield
    finally:
        core.delete_namespaced_secret(WEBHOOK.group, NAMESPACE)


def test_a_run_that_fails_is_told_of(cluster):
    spec = named("told", data={"source": "/runs/nowhere.jsonl"})
    with cluster.pod(["python", "-u", "-c", RECEIVER]) as webhook:
        until("the webhook runs", lambda: cluster.is_running(webhook))
        address = cluster.core.read_namespaced_pod(webhook, NAMESPACE).status.pod_ip
        with secret(cluster.core, f"http://{address}:{PORT}/services/very-secret"):
            inputs = {"spec": spec, "kickoff_time": datetime(2026, 3, 1, 2, tzinfo=UTC)}
            hints = {"spec": RunSpec, "kickoff_time": datetime}
            run = Run(cluster, spec, cluster.remote.execute(cluster.register(scheduled), inputs, type_hints=hints))
            until("the end of the run", run.is_done)
            assert run.phase() == "failed"
            # Decoded by the client, it would be the text of bytes.
            printed = cluster.core.read_namespaced_pod_log(webhook, NAMESPACE, _preload_content=False)
    (line,) = printed.data.decode().splitlines()
    assert line.startswith(f'/services/very-secret {{"text": "{spec.name}-20260301-0200 failed. Execution {run.id} in ')
    assert "data.source '/runs/nowhere.jsonl' was not found" in line
