"""When a node with a broken GPU is tainted, and when no more: GPUs as a file describes them, a node in memory."""

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from strata_platform.chart.node_health import PATIENCE, RECOVERY_ROUNDS, TAINT, Metrics, Node, Settings, Watch
from strata_platform.doctor.gpu_health import CONDITION
from strata_platform.doctor.nvml import Nvml
from strata_platform.kubernetes_api import ApiError
from tests.platform.helpers.fake_nvml import build, describe
from tests.platform.helpers.servers import kubeconfig

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build NVML with")
OTHERS = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
READY = {"type": "Ready", "status": "True"}
BOOT, NEXT_BOOT = "1f2e3d4c-0000", "aaaabbbb-0000"


class Api:
    """An API server with one node. Others change it now and then."""

    def __init__(self, taints=OTHERS, labels=None):
        self.node = {
            "metadata": {"name": "n", "resourceVersion": "1", "labels": labels or {}},
            "spec": {"taints": list(taints)},
            "status": {"conditions": [READY]},
        }
        self.events, self.overtaken, self.refuses = [], 0, False

    def get(self, path):
        if self.refuses:
            raise ApiError(403, "Forbidden", "the health check may not")
        assert path == "/api/v1/nodes/n"
        return copy.deepcopy(self.node)

    def request(self, method, path, body):
        if method == "POST":
            assert path == "/api/v1/namespaces/default/events"
            self.events.append((body["type"], body["reason"], body["message"]))
            return
        assert method == "PATCH" and path in ("/api/v1/nodes/n", "/api/v1/nodes/n/status")
        if self.overtaken:
            self.overtaken -= 1
            self.touch()
        if body["metadata"]["resourceVersion"] != self.node["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        part = "status" if path.endswith("status") else "spec"
        self.node[part] |= {key: value or [] for key, value in body[part].items()}
        self.touch()

    def touch(self):
        self.node["metadata"]["resourceVersion"] += "1"

    @property
    def taint(self):
        """The value of the taint; None without."""
        return next((taint["value"] for taint in self.node["spec"]["taints"] if taint["key"] == TAINT), None)

    @property
    def condition(self):
        found = [each for each in self.node["status"]["conditions"] if each["type"] == CONDITION]
        return (found[0]["status"], found[0]["reason"]) if found else None


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def watched(library, tmp_path, monkeypatch):
    """Starts the program's rounds, again after a restart of its pod, on GPUs that the file describes."""
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus"))

    def start(api, *, taint=True, boot=BOOT, **changes):
        describe(tmp_path / "gpus", **changes)
        settings = Settings(taint=taint, interval="1s", port=1)
        registry = CollectorRegistry()
        watch = Watch(lambda: Node(api, "n", boot), lambda: Nvml(str(library)), settings, Metrics("n", registry))
        watch.value = lambda name, **labels: registry.get_sample_value(name, {"node": "n", **labels})
        return watch

    start.change = lambda **changes: describe(tmp_path / "gpus", **changes)
    return start


def test_a_healthy_node_is_told_of_once_and_left_alone(watched):
    api = Api()
    watch = watched(api)
    for _ in range(3):
        watch.round()
    assert api.taint is None and api.condition == ("False", "GpusHealthy") and len(api.events) == 1
    assert api.node["spec"]["taints"] == OTHERS and READY in api.node["status"]["conditions"]


def test_a_broken_gpu_taints_its_node_at_once_and_until_it_has_been_well_for_a_while(watched):
    api = Api()
    watch = watched(api, ecc__1=2)
    watch.round()
    assert api.taint == "gpu-1.ecc" and api.condition == ("True", "Ecc")
    assert api.node["spec"]["taints"][:-1] == OTHERS
    (event,) = api.events
    assert event[:2] == ("Warning", "GpuUnhealthy") and "GPU 1: 2 uncorrectable" in event[2] and "reboot it" in event[2]
    watched.change()
    for _ in range(RECOVERY_ROUNDS - 1):
        watch.round()
        assert api.taint == "gpu-1.ecc"
    watch.round()
    assert api.taint is None and api.condition == ("False", "GpusHealthy") and api.node["spec"]["taints"] == OTHERS
    assert [kind for kind, _, _ in api.events] == ["Warning", "Normal"]


def test_what_may_pass_has_to_last(watched):
    api = Api()
    watch = watched(api, slowdown__0=0x40)
    for _ in range(PATIENCE - 1):
        watch.round()
    watched.change()
    watch.round()
    watched.change(slowdown__0=0x40)
    for _ in range(PATIENCE - 1):
        watch.round()
        assert api.taint is None
    watch.round()
    assert api.taint == "gpu-0.slowdown"


def test_an_xid_ends_with_the_boot(watched):
    api = Api()
    watch = watched(api, xid__1=79, xid__0=31)
    watch.round()
    watch.wait(0.05)
    watch.round()
    assert api.taint == "gpu-1.xid-79.boot-1f2e3d4c"
    # The pod is started again, and NVML knows of no XID any more.
    watch = watched(api)
    for _ in range(RECOVERY_ROUNDS + 1):
        watch.round()
    assert api.taint == "gpu-1.xid-79.boot-1f2e3d4c"
    # Nothing new is told, and the advice is still there.
    (_, event) = api.events
    assert "XID 79, the GPU has fallen off the bus. Drain the node" in event[2]
    watched(api, boot=NEXT_BOOT).round()
    assert api.taint is None


def test_who_removes_the_taint_has_looked_after_an_xid(watched):
    api = Api()
    watch = watched(api, xid__0=31, xid__1=74)
    watch.round()
    watch.wait(0.05)
    # Of several in the time of a round, each is waited for.
    watch.wait(0.05)
    watch.round()
    assert api.taint
    api.node["spec"]["taints"] = list(OTHERS)
    watch.round()
    assert api.taint is None and api.condition == ("False", "GpusHealthy")


def test_who_removes_the_taint_has_not_looked_after_an_xid_that_came_since(watched):
    api = Api()
    watch = watched(api, xid__0=74)
    watch.round()
    watch.wait(0.05)
    watch.round()
    assert api.taint.startswith("gpu-0.xid-74")
    watched.change(xid__0=74, xid__1=79)
    watch.wait(0.05)
    # Neither has who removes it while the node cannot be told of the new one.
    api.refuses = True
    with pytest.raises(ApiError):
        watch.round()
    api.refuses = False
    api.node["spec"]["taints"] = list(OTHERS)
    watch.round()
    assert api.taint.startswith("gpu-1.xid-79")


def test_a_state_taints_again_whoever_removes_it(watched):
    api = Api()
    watch = watched(api, pending__0=1)
    watch.round()
    api.node["spec"]["taints"] = list(OTHERS)
    watch.round()
    assert api.taint == "gpu-0.row-remapping"


def test_without_taint_it_is_only_told_of_and_an_earlier_taint_goes(watched):
    api = Api([*OTHERS, {"key": TAINT, "value": "gpu-1.ecc", "effect": "NoSchedule"}])
    watched(api, taint=False, ecc__1=2).round()
    assert api.node["spec"]["taints"] == OTHERS and api.condition == ("True", "Ecc") and len(api.events) == 1


def test_changes_of_others_are_kept(watched):
    api = Api()
    api.overtaken = 2
    watched(api, ecc__0=1).round()
    assert api.taint and api.condition == ("True", "Ecc")
    api.overtaken = 100
    with pytest.raises(ApiError, match="has been modified"):
        watched(api, ecc__0=0, links__0=1, error__1=15).round()


@pytest.mark.parametrize(
    ("labels", "taint"),
    [
        ({"nvidia.com/gpu.count": "2"}, None),
        ({"nvidia.com/gpu.count": "8"}, "gpu-2.missing-8"),
        # Then it counts slices.
        ({"nvidia.com/gpu.count": "14", "nvidia.com/mig.strategy": "single"}, None),
    ],
)
def test_the_number_of_gpus_is_that_of_feature_discovery(watched, labels, taint):
    api = Api(labels=labels)
    watched(api).round()
    assert api.taint == taint


def test_a_missing_gpu_is_missed_until_it_is_back_whatever_feature_discovery_counts_then(watched):
    api = Api(labels={"nvidia.com/gpu.count": "4"})
    watched(api).round()
    assert api.taint == "gpu-2.missing-4"
    # After a reboot one of them is back, and the label says what is there.
    api.node["metadata"]["labels"]["nvidia.com/gpu.count"] = "3"
    watch = watched(api, gpus=3, boot=NEXT_BOOT)
    for _ in range(RECOVERY_ROUNDS + 1):
        watch.round()
    assert api.taint == "gpu-3.missing-4"
    api.node["spec"]["taints"] = list(OTHERS)
    watch.round()
    assert api.taint is None
    api.node["spec"]["taints"] = [*OTHERS, {"key": TAINT, "value": "gpu-3.missing-4", "effect": "NoSchedule"}]
    watch = watched(api, gpus=4, boot=NEXT_BOOT)
    for _ in range(RECOVERY_ROUNDS):
        watch.round()
    assert api.taint is None


def test_a_driver_that_does_not_work_is_a_fault_until_it_does_and_xids_stay(watched):
    api = Api()
    watch = watched(api, xid__1=79)
    watch.round()
    watch.wait(0.05)
    watch.round()
    # The pod is started anew, and the driver with it.
    watch = watched(api, init=9)
    watch.round()
    watch.wait(0.01)
    watch.round()
    assert watch.blind_rounds == 2 and api.taint.startswith("gpu-1.xid-79") and "Driver Not Loaded" in api.events[-1][2]
    assert watch.value("strata_node_gpu_faults", gpu="0", kind="lost") == 1
    assert watch.value("strata_node_gpus_healthy") == 0 and watch.value("strata_node_gpus_checked_timestamp_seconds")
    watched.change()
    watch.round()
    assert watch.blind_rounds == 0 and "Driver" not in api.events[-1][2] and api.taint.startswith("gpu-1.xid-79")


def test_a_driver_that_fails_while_it_is_waited_for_is_opened_anew(watched, capsys):
    api = Api()
    watch = watched(api)
    watch.round()
    watched.change(wait=999, init=9)
    watch.wait(0.01)
    assert "XIDs cannot be waited for: nvmlEventSetWait_v2: Unknown Error" in capsys.readouterr().out
    watch.round()
    assert api.taint == "gpu-0.lost"


def test_a_gpu_whose_xids_are_not_seen_is_named(watched, capsys):
    watched(Api(), register__1=3).round()
    assert "GPU 1: XIDs are not seen: nvmlDeviceRegisterEvents" in capsys.readouterr().out


def test_what_is_seen_is_in_the_metrics_though_the_node_cannot_be_told(watched):
    api = Api()
    api.refuses = True
    watch = watched(api, ecc__1=2)
    with pytest.raises(ApiError, match="may not"):
        watch.round()
    assert watch.value("strata_node_gpu_faults", gpu="1", kind="ecc") == 1
    assert watch.value("strata_node_gpus_checked_timestamp_seconds") == 0
    api.refuses = False
    watch.round()
    assert watch.value("strata_node_gpus_checked_timestamp_seconds") > 0 and api.taint == "gpu-1.ecc"


def test_the_program_serves_what_it_sees_before_anything_else_works(library, tmp_path):
    """Here neither the driver works, nor does an API server answer."""
    describe(tmp_path / "gpus", init=9)
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig(1)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "STRATA_NODE_HEALTH": json.dumps({"taint": True, "interval": "60s", "port": port}), "NODE_NAME": "n",
        "KUBECONFIG": str(tmp_path / "kubeconfig"), "FAKE_NVML": str(tmp_path / "gpus"),
        "LD_LIBRARY_PATH": str(library.parent),
    }  # fmt: skip
    command = [sys.executable, "-m", "strata_platform.chart.node_health"]
    with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout.readline().startswith("the node cannot be changed: ")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                served = answer.read().decode()
        finally:
            program.terminate()
    assert program.returncode == 0
    assert 'strata_node_gpu_faults{gpu="0",kind="lost",node="n"} 1.0' in served
    assert 'strata_node_gpus_checked_timestamp_seconds{node="n"} 0.0' in served
