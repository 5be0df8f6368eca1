"""Scheduled runs on a cluster: Flyte starts them; when one fails, the message is sent with the tenant's secret."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kubernetes import client

from strata_platform.spec import RunSpec, dump_spec
from tasks.scheduled import WEBHOOK
from tests.e2e.helpers import upstream_flyte
from tests.e2e.helpers.cluster import DOMAIN, NAMESPACE, PROJECT, ROOT, Run, named, until
from workflows.scheduled import scheduled

pytestmark = pytest.mark.slow
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


@pytest.mark.skipif("STRATA_E2E_UNREACHABLE" in os.environ, reason="the webhook is a pod, which policies shut off")
def test_a_run_that_fails_is_told_of(cluster):
    spec = named("told", data={"source": "/runs/nowhere.jsonl"})
    with cluster.pod(["python", "-u", "-c", RECEIVER]) as webhook:
        until("the webhook runs", lambda: cluster.is_running(webhook))
        address = cluster.core.read_namespaced_pod(webhook, NAMESPACE).status.pod_ip
        with secret(cluster.core, f"http://{address}:{PORT}/services/very-secret"):
            inputs = {"spec": spec, "kickoff_time": datetime(2026, 3, 1, 2, tzinfo=UTC)}
            hints = {"spec": RunSpec, "kickoff_time": datetime}
            run = Run(cluster, spec, cluster.remote.execute(cluster.register(scheduled), inputs, type_hints=hints))
            # Flyte's API says so before the workflow's own state does.
            assert until("the end of the run", run.phase) == "failed"
            # Decoded by the client, it would be the text of bytes.
            printed = cluster.core.read_namespaced_pod_log(webhook, NAMESPACE, _preload_content=False)
    (line,) = printed.data.decode().splitlines()
    assert line.startswith(f'/services/very-secret {{"text": "{spec.name}-20260301-0200 failed. Execution {run.id} in ')
    assert "data.source '/runs/nowhere.jsonl' was not found" in line


@pytest.mark.skipif(not upstream_flyte.PROGRAM, reason="the stand-in for flyteadmin has no scheduler")
def test_flyte_starts_runs_at_their_times(cluster, tmp_path):
    """The example, copied and registered as its first lines say, with another spec and for every minute."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "out", "__pycache__"))
    spec = named("nightly", data={"source": "/runs/nowhere.jsonl"})
    (folder / "my.yaml").write_text(dump_spec(spec))
    example = (ROOT / "examples/nightly.py").read_text()
    changed = example.replace("examples/llama-3.1-8b-lora.yaml", "my.yaml").replace("0 2 * * *", "* * * * *")
    (folder / "nightly.py").write_text(changed)
    pyflyte = [str(Path(sys.executable).with_name("pyflyte"))]
    place = ["--project", PROJECT, "--domain", DOMAIN]
    register = ["register", *place, "--copy", "all", "--destination-dir", ".", "--image", cluster.image, "nightly.py"]
    subprocess.run(pyflyte + register, cwd=folder, check=True, timeout=300)
    try:
        (started, *_) = until("a run that Flyte starts", lambda: of_schedule(cluster.remote), 300)
    finally:
        subprocess.run([*pyflyte, "launchplan", *place, "--deactivate", "nightly"], cwd=folder, check=True, timeout=60)
    # Only Flyte is asked: the workflow's own state has the end later.
    run = Run(cluster, spec, started)
    run.until_done()
    assert "data.source '/runs/nowhere.jsonl' was not found" in run.error()


def of_schedule(remote):
    """Executions of the launch plan, the newest first."""
    found = remote.recent_executions(PROJECT, DOMAIN)
    return [execution for execution in found if execution.spec.launch_plan.name == "nightly"]
