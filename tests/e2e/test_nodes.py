"""The health check of GPU nodes on a node, with GPUs that a file describes; presets by the cluster's own validation."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from strata_platform.chart.node_health import RECOVERY_ROUNDS, TAINT
from strata_platform.doctor.gpu_health import CONDITION
from strata_platform.kubernetes_api import Access, ApiError, KubernetesApi
from tests.e2e.helpers.cluster import ROOT, until
from tests.platform.helpers.fake_nvml import describe

HELM = os.environ.get("HELM") or shutil.which("helm")
CHART, NAMESPACE = ROOT / "charts" / "strata", "strata-system"
NVML = os.environ.get("STRATA_E2E_NVML")
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm on the PATH or in HELM")


def run(*command, text=None, seconds=120):
    ended = subprocess.run(list(map(str, command)), input=text, text=True, capture_output=True, timeout=seconds)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def api():
    return KubernetesApi(Access.of_environment())


@pytest.fixture(scope="module")
def node(api):
    """The node's name; the health check watches it as a release of its own, which knows no tenant and no queue."""
    if NVML is None:
        pytest.skip("STRATA_E2E_NVML names no folder with a library, which pods see at the same path")
    gpus = Path(NVML, "gpus")
    describe(gpus)
    mine = json.loads(run(HELM, "get", "values", "strata", "--namespace", NAMESPACE, "--output", "json"))["strata"]
    tests = mine["tests"]
    values = {
        "image": mine["image"],
        "nodeHealth": {
            "enabled": True, "interval": "1s", "runtimeClass": "", "nodeSelector": {"nvidia.com/gpu.present": None},
        },
        "tests": {
            "env": tests["env"] | {"LD_LIBRARY_PATH": NVML, "FAKE_NVML": str(gpus)},
            "volumes": [*tests["volumes"], *({"name": "nvml", "claim": "nvml", "mountPath": NVML, "readOnly": True}
                        for _ in range("nvml" not in str(tests["volumes"])))],
        },
    }  # fmt: skip
    (found,) = api.items("/api/v1/nodes")
    name = found["metadata"]["name"]
    run(HELM, "install", "nodes", CHART, "--namespace", NAMESPACE, "--values", "-", text=yaml.safe_dump(values))
    try:
        yield name
    finally:
        run(HELM, "uninstall", "nodes", "--namespace", NAMESPACE, "--no-hooks")
        subprocess.run(["kubectl", "taint", "node", name, f"{TAINT}-"], capture_output=True)


def state(api, node):
    """The value of the taint, or None, and the condition."""
    found = api.get(f"/api/v1/nodes/{node}")
    taint = next((each["value"] for each in found["spec"].get("taints") or [] if each["key"] == TAINT), None)
    conditions = {each["type"]: each for each in found["status"]["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    return taint, conditions.get(CONDITION, {}).get("status")


def test_a_node_is_tainted_while_a_gpu_of_it_is_broken(api, node):
    gpus = Path(NVML, "gpus")
    until("the GPUs were looked at", lambda: state(api, node) == (None, "False"), 180)
    describe(gpus, ecc__1=2)
    until("the node is tainted", lambda: state(api, node) == ("gpu-1.ecc", "True"), 60)

    def told():
        """Not each event of a node has a message; this one comes after the condition."""
        events = api.items("/api/v1/namespaces/default/events", fieldSelector=f"involvedObject.name={node}")
        return any("GPU 1: 2 uncorrectable memory errors" in event.get("message", "") for event in events)

    until("an event tells of it", told, 60)
    describe(gpus)
    until("it is well again", lambda: state(api, node) == (None, "False"), 30 + 5 * RECOVERY_ROUNDS)
    describe(gpus, xid__0=79)
    until("the XID is seen", lambda: (state(api, node)[0] or "").startswith("gpu-0.xid-79.boot-"), 60)
    run("kubectl", "taint", "node", node, f"{TAINT}-")
    until("somebody has looked after it", lambda: state(api, node) == (None, "False"), 60)


def tainted(key, effect="NoSchedule"):
    return {"spec": {"taints": [{"key": key, "value": "x", "effect": effect}]}}


@pytest.mark.parametrize(
    ("part", "patch", "of", "said"),
    [
        ("", {"metadata": {"labels": {"pool": "mine"}}}, None, "may change the taint"),
        ("", {"metadata": {"finalizers": ["strata/mine"]}}, None, "may change the taint"),
        ("/status", {"status": {"images": []}}, None, "may change the condition"),
        (
            "/status",
            {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}},
            None,
            "may change the condition",
        ),
        ("", {"spec": {"unschedulable": True}}, None, "may change the taint"),
        ("", tainted(TAINT, "NoExecute"), None, "may change the taint"),
        ("", tainted("other"), None, "may change the taint"),
        ("/status", {"status": {"capacity": {"nvidia.com/gpu": "64"}}}, None, "may change the condition"),
        ("", tainted(TAINT), "another", "may change the node alone"),
    ],
)
def test_its_account_may_change_nothing_else(api, node, part, patch, of, said):
    headers = {
        "Impersonate-User": f"system:serviceaccount:{NAMESPACE}:nodes-node-health",
        "Impersonate-Extra-Authentication.kubernetes.io%2Fnode-name": of or node,
    }
    pod = KubernetesApi(replace(api.access, headers={**api.access.headers, **headers}))
    with pytest.raises(ApiError, match=said):
        pod.request("PATCH", f"/api/v1/nodes/{node}{part}", patch, dryRun="All")


@pytest.mark.parametrize("preset", sorted(CHART.glob("ci/*-values.yaml")), ids=lambda path: path.stem)
def test_the_cluster_takes_the_objects_of_every_preset(preset):
    rendered = run(HELM, "template", "preset", CHART, "--namespace", NAMESPACE, "--values", preset, "--no-hooks")
    kept = []
    for item in yaml.safe_load_all(rendered):
        # Kinds of the Prometheus Operator are not there, nor are the namespaces of the tenants.
        if item and item["kind"] not in ("Namespace", "PodMonitor", "PrometheusRule"):
            if "namespace" in item["metadata"]:
                item["metadata"]["namespace"] = NAMESPACE
            kept.append(item)
    done = run("kubectl", "apply", "--dry-run=server", "-f", "-", text=yaml.safe_dump_all(kept))
    assert done.count("server dry run") == len(kept)
