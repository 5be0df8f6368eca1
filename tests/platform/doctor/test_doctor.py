"""What the doctor finds: on machines made of folders and small programs, and in a cluster of plain answers."""

import json
import os
import subprocess
import sys
import threading
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from strata_platform.cli import app
from strata_platform.doctor import TARGETS, examine
from strata_platform.doctor.cluster_checks import checks
from strata_platform.doctor.machine_checks import CHECKS, Machine
from strata_platform.doctor.targets import checks_of


def program(folder, name, *lines):
    """A program that prints `lines`."""
    path = folder / name
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    path.chmod(0o755)


def machine(folder, torch=None, **environment):
    """With its own PATH and home, and a torch that sees what is said."""
    (folder / "bin").mkdir(exist_ok=True)
    probe = f"print({json.dumps(json.dumps(torch or {'missing': 'no torch'}))})"
    paths = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    return Machine(paths | environment, folder, 1000, probe=probe)


def look(name, target, at):
    """The finding of one check."""
    ((_, finding),) = examine([(name, lambda: dict(CHECKS[target])[name](at))])
    return finding


def seen(torch="2.15.0", cuda="13.2", gpus=(), archs=("sm_90",), error=None):
    return {"torch": torch, "cuda": cuda, "hip": None, "gpus": gpus, "archs": archs, "error": error}


H200 = ["NVIDIA H200", 9, 0]


@pytest.mark.parametrize(
    ("torch", "driver", "status", "message"),
    [
        (None, None, "skipped", "torch is not installed"),
        (seen(), None, "skipped", "no GPU: runs train on the CPU"),
        (seen(gpus=[H200]), ["580.65.06"], "ok", "1 x NVIDIA H200, driver 580.65.06"),
        (seen(error="no driver"), ["535.1"], "problem", "driver 535.1 is too old for torch 2.15.0, which is built for"),
        (seen(error="unknown"), ["580.65.06"], "problem", "has 1 GPUs, and torch 2.15.0 sees none: unknown"),
        (seen(cuda=None), ["580.65.06"], "problem", "built for the CPU alone"),
        (seen(gpus=[["NVIDIA B200", 10, 0]]), ["580.1"], "problem", "no code for NVIDIA B200 (sm_100), only sm_90"),
        (seen(gpus=[["NVIDIA B200", 10, 0]], archs=["compute_90"]), ["580.1"], "ok", "NVIDIA B200"),
        (seen(gpus=[["NVIDIA L40S", 8, 9]], archs=["sm_80"]), ["580.1"], "ok", "NVIDIA L40S"),
        (seen(gpus=[H200]), ["580.1", "580.1"], "warning", "the driver has 2 GPUs and torch sees 1"),
    ],
)
def test_gpu_driver_and_torch_go_together(tmp_path, torch, driver, status, message):
    at = machine(tmp_path, torch)
    if driver:
        program(tmp_path / "bin", "nvidia-smi", *driver)
    found = look("GPU, driver and torch", "node", at)
    assert (found.status, message in found.message) == (status, True), found
    assert bool(found.advice) == (status in ("warning", "problem"))


def test_a_torch_that_does_not_start_is_a_finding(tmp_path):
    at = Machine({"PATH": "", "HOME": str(tmp_path)}, tmp_path, 0, probe="raise SystemExit('broken wheel')")
    found = look("GPU, driver and torch", "laptop", at)
    assert found.status == "problem" and "broken wheel" in found.message


def test_the_real_torch_is_asked():
    found = look("GPU, driver and torch", "laptop", Machine(dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}, None, 0))
    assert found.status in ("skipped", "problem") and "torch 2." in found.message


@pytest.mark.parametrize("name", ["platform", "kernels"])
def test_hidden_modules_are_named(tmp_path, name):
    assert look("hidden modules", "laptop", machine(tmp_path)).status == "ok"
    (tmp_path / name).mkdir()
    assert look("hidden modules", "laptop", machine(tmp_path)).status == "ok"
    (tmp_path / name / "__init__.py").touch()
    found = look("hidden modules", "laptop", machine(tmp_path))
    assert found.status == "problem" and f"remove {name}/__init__.py" in found.advice


def test_flytes_endpoint_is_tried(tmp_path, listening):
    assert "runs stay on this machine" in look("Flyte", "laptop", machine(tmp_path)).message
    file = tmp_path / ".flyte" / "config.yaml"
    file.parent.mkdir()
    for endpoint, status in ((f"dns:///{listening}", "ok"), ("dns:///127.0.0.1:1", "problem"), ("", "problem")):
        file.write_text(f"admin: {{endpoint: '{endpoint}'}}")
        assert look("Flyte", "laptop", machine(tmp_path)).status == status
    other = tmp_path / "other.yaml"
    file.rename(other)
    assert "names no admin.endpoint" in look("Flyte", "laptop", machine(tmp_path, FLYTECTL_CONFIG=str(other))).message


@pytest.fixture
def listening():
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        yield f"127.0.0.1:{server.server_port}"


def test_a_compiler_is_needed_for_what_is_not_baked(tmp_path):
    assert "set CC" in look("C compiler", "node", machine(tmp_path)).advice
    assert look("C compiler", "node", machine(tmp_path, STRATA_BAKED_KERNELS="/opt")).status == "warning"
    program(tmp_path / "bin", "my-cc")
    assert "my-cc" in look("C compiler", "node", machine(tmp_path, CC="my-cc")).message
    program(tmp_path / "bin", "tar")
    assert look("tar", "image", machine(tmp_path)).status == "ok"


def test_tritons_cache_is_of_the_node_and_can_be_written(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"none / overlay rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    at = machine(tmp_path, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert look("Triton's cache", "node", at).status == "ok"
    shared = Machine(at.environment, at.folder, 0, mounts=mounts)
    assert "is on nfs4" in look("Triton's cache", "node", shared).message
    unset = Machine({"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, at.folder, 0)
    assert "one path on all nodes" in look("Triton's cache", "node", unset).advice
    # Root may write everywhere, but not into a file.
    (tmp_path / "file").touch()
    unwritable = machine(tmp_path, TRITON_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert "cannot be written" in look("Triton's cache", "node", unwritable).message


def test_shared_memory_is_measured(tmp_path, monkeypatch):
    at = machine(tmp_path, seen(gpus=[H200] * 4))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"total": 64 * 2**20}))
    found = look("shared memory", "node", Machine(at.environment, tmp_path, 0, tmp_path, probe=at.probe))
    assert "64 MiB" in found.message and "resources.shared_memory of the spec to 4Gi" in found.advice
    assert look("shared memory", "node", Machine({}, tmp_path, 0, tmp_path / "gone")).status == "skipped"


def test_an_image_is_not_root_and_brings_kernels(tmp_path):
    assert look("user", "image", machine(tmp_path)).status == "ok"
    assert look("user", "image", Machine({}, tmp_path, 0)).status == "warning"
    assert look("baked kernels", "image", machine(tmp_path)).status == "warning"
    at = machine(tmp_path, STRATA_BAKED_KERNELS=str(tmp_path))
    assert look("baked kernels", "image", at).status == "problem"
    (tmp_path / "sm_90").mkdir()
    (tmp_path / "sm_90" / "manifest.json").touch()
    assert "kernels of 1 bakes" in look("baked kernels", "image", at).message


def test_packages_here_are_those_of_the_lock(tmp_path):
    for name in ("Python", "packages"):
        assert look(name, "laptop", machine(tmp_path)).status == "ok"


def named(name, **more):
    return {"metadata": {"name": name, "namespace": more.pop("namespace", "n")}, **more}


def deployment(image, namespace, account="a", available=1):
    pod = {"containers": [{"image": image}], "serviceAccountName": account}
    return named(image, namespace=namespace, spec={"template": {"spec": pod}}, status={"availableReplicas": available})


def tenant(project, domain):
    """Its namespace, as the chart labels it; the answers here are of the namespace `team`."""
    labels = {"strata/tenant": "team", "strata/project": project, "strata/domain": domain}
    return {"metadata": {"name": "team", "labels": labels}}


ACTIVE = {"conditions": [{"type": "Active", "status": "True"}]}
FLYTE = {
    "tasks.yaml": """\
tasks: {task-plugins: {enabled-plugins: [container, sidecar, k8s-array, pytorch],
  default-for-task-types: {pytorch: pytorch}}}""",
    "k8s.yaml": "plugins: {k8s: {default-pod-template-name: strata, gpu-device-node-label: gpu}}",
    "core.yaml": "flyte: {admin: {seedProjects: [team], seedProjectsWithDetails: [{name: flytesnacks}]}}",
    "auth.yaml": "server: {security: {useAuth: true}}",
    "limits.yaml": "task_resources: {limits: {cpu: '0', memory: 0, gpu: '0'}}",
}
KUEUE = "kind: Configuration\nintegrations: {frameworks: [kubeflow.org/pytorchjob, jobset.x-k8s.io/jobset, pod]}"
TEMPLATE = {"spec": {"containers": [{"env": [{"name": "TRITON_CACHE_DIR"}]}]}}
CLOSED = {"podSelector": {}, "policyTypes": ["Ingress"]}
OPEN = {
    "podSelector": {"matchExpressions": [{"key": "training.kubeflow.org/job-name", "operator": "Exists"}]},
    "ingress": [{"from": [{"podSelector": {}}]}],
}
SCRAPER = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
QUEUES = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/localqueues"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies"
TEMPLATES = "/api/v1/namespaces/team/podtemplates"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEPLOYMENTS = "/apis/apps/v1/deployments"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


def rights(verb, resource, namespace=None):
    """What the charts give Flyte: to read in all namespaces, to write in a tenant's."""
    return verb in ("list", "watch") or namespace == "team"


def without(*denied):
    """The same but for these."""
    return lambda verb, resource, namespace=None: (verb, resource) not in denied and rights(verb, resource, namespace)


HEALTHY = {
    "/version": {"major": "1", "minor": "36+", "gitVersion": "v1.36.3"},
    DEPLOYMENTS: {
        "items": [
            deployment("cr.flyte.org/flyteorg/flyte-binary-release:v1.16.8", "flyte"),
            deployment("kubeflow/training-operator:v1-9d3e5ad", "kubeflow"),
            deployment("registry.k8s.io/kueue/kueue:v0.19.0", "kueue-system"),
        ]
    },
    "/api/v1/namespaces/flyte/configmaps": {"items": [{"data": FLYTE}, {"data": {"other": "{{ no yaml"}}, {}]},
    "/api/v1/namespaces/kueue-system/configmaps": {"items": [{"data": {"config.yaml": KUEUE}}]},
    REVIEWS: rights,
    DEFINITIONS: {
        "items": [
            named("pytorchjobs.kubeflow.org", spec={"versions": [{"schema": "managedBy"}]}),
            named("jobsets.jobset.x-k8s.io", spec={"versions": [{"name": "v1alpha2", "served": True}]}),
        ]
    },
    "/api/v1/nodes": {
        "items": [
            {"metadata": {"name": "a", "labels": {"gpu": "H200"}}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}},
            {"metadata": {"name": "cpu"}, "status": {"allocatable": {"cpu": "8"}}},
        ]
    },
    "/api/v1/namespaces": {"items": [tenant("team", "development")]},
    QUEUES: {"items": [named("default", status=ACTIVE)]},
    TEMPLATES: {"items": [named("strata", template=TEMPLATE)]},
    POLICIES: {"items": [named("closed", spec=CLOSED), named("open", spec=OPEN)]},
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A server of plain answers, which the kubeconfig names; `answers` may be changed, `off` is its clock's error."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(answers.get(urlsplit(self.path).path))

        def answer(self, body):
            self.send_response_only(404 if body is None else 200)
            self.send_header("Date", format_datetime(datetime.now(UTC) + server.off, usegmt=True))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_POST(self):
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = review["spec"]["resourceAttributes"]
            del asked["group"]
            self.answer({"status": {"allowed": answers[self.path](**asked)}})

        def log_message(self, *_):
            pass

    answers = deepcopy(HEALTHY)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answers, server.off = answers, timedelta()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        file = tmp_path / "kubeconfig"
        address = f"http://127.0.0.1:{server.server_port}"
        file.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": {"server": address}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "users": [{"name": "u", "user": {}}],
                    "current-context": "x",
                }
            )
        )
        monkeypatch.setenv("KUBECONFIG", str(file))
        yield server
        server.shutdown()


def findings(**settings):
    return dict(examine(checks(**settings)))


def test_a_healthy_cluster_is_well(cluster):
    found = findings()
    assert {finding.status for finding in found.values()} == {"ok"}, found
    assert len(found) == 16


@pytest.fixture
def alone(cluster):
    """A cluster for runs without Flyte."""
    images = ("registry.k8s.io/kueue/kueue:v0.19.0", "registry.k8s.io/jobset/jobset:v0.12.0")
    kueue = {"items": [{"data": {"x": "kind: Configuration\nintegrations: {frameworks: [jobset.x-k8s.io/jobset]}"}}]}
    nodes = deepcopy(HEALTHY["/api/v1/nodes"])
    nodes["items"][0]["metadata"]["labels"] = {"nvidia.com/gpu.product": "NVIDIA-H200"}
    policy = {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "x"}}, "ingress": [{}]}
    cluster.answers |= {
        DEPLOYMENTS: {"items": [deployment(image, "kueue-system") for image in images]},
        KUEUE_MAPS: kueue,
        DEFINITIONS: {"items": HEALTHY[DEFINITIONS]["items"][1:]},
        "/api/v1/nodes": nodes,
        POLICIES: {"items": [named("closed", spec=CLOSED), named("open", spec=policy)]},
    }
    return cluster


@pytest.mark.parametrize(
    ("allocatable", "labels", "status", "message"),
    [
        ({"nvidia.com/gpu": "0", "nvidia.com/mig-3g.40gb": "2"}, {"nvidia.com/gpu.product": "H100"}, "ok", "1 nodes"),
        ({"amd.com/gpu": "8"}, {"amd.com/gpu.product-name": "MI300X"}, "ok", "labelled amd.com/gpu.product-name"),
        ({"amd.com/cpx_nps4": "64"}, {}, "warning", "1 of 1 GPU nodes have no label amd.com/gpu.product-name, such as"),
        ({"nvidia.com/gpu": "0", "nvidia.com/mig-3g.40gb": "0"}, {}, "problem", "have no allocatable GPU"),
        ({"nvidia.com/fabric0": "8"}, {}, "warning", "no node has allocatable GPUs"),
    ],
)
def test_gpus_of_another_vendor_and_slices_are_gpus(alone, allocatable, labels, status, message):
    node = {"metadata": {"name": "n", "labels": labels}, "status": {"allocatable": allocatable}}
    alone.answers["/api/v1/nodes"] = {"items": [node]}
    found = findings(with_flyte=False)["GPU nodes"]
    assert (found.status, message in found.message) == (status, True), found


def test_a_cluster_without_flyte_is_well_for_runs_without_it(alone, monkeypatch):
    found = findings(with_flyte=False)
    assert {finding.status for finding in found.values()} == {"ok"}, found
    assert "Flyte" not in str(found) and found["JobSet"].message == "registry.k8s.io/jobset/jobset:v0.12.0"
    assert CliRunner().invoke(app, ["doctor", "cluster"]).exit_code == 1
    monkeypatch.setenv("STRATA_BACKEND", "kubernetes")
    assert CliRunner().invoke(app, ["doctor", "cluster"]).exit_code == 0
    for name in ("packages", "Flyte"):
        assert name not in [check for check, _ in examine(checks_of("laptop", with_flyte=False))]


@pytest.mark.parametrize(
    ("path", "answer", "check", "said"),
    [
        (DEFINITIONS, {"items": []}, "JobSet", "there are no JobSets"),
        (
            DEFINITIONS,
            {"items": [named("jobsets.jobset.x-k8s.io", spec={"versions": [{"name": "v1", "served": True}]})]},
            "JobSet",
            "JobSets have the versions v1, and runs are of v1alpha2",
        ),
        (DEPLOYMENTS, {"items": []}, "JobSet", "no controller runs them"),
        (
            DEPLOYMENTS,
            {"items": [deployment("jobset:1", "j", available=None)]},
            "JobSet",
            "jobset:1 is not available",
        ),
        (TEMPLATES, {"items": []}, "team: pod template", "there is no pod template strata"),
        (POLICIES, HEALTHY[POLICIES], "team: network policies", "closed keep pods of a job apart"),
    ],
)
def test_what_a_cluster_without_flyte_lacks_is_said(alone, path, answer, check, said):
    alone.answers[path] = answer
    found = findings(with_flyte=False)[check]
    assert found.status == "problem" and said in found.message and found.advice


def limits(cpu, memory, gpu="0"):
    """Flyte's configuration with these limits for tasks."""
    text = json.dumps({"task_resources": {"limits": {"cpu": cpu, "memory": memory, "gpu": gpu}}})
    return {"items": [{"data": {"x": text}}]}


FLYTE_MAPS, KUEUE_MAPS = (f"/api/v1/namespaces/{name}/configmaps" for name in ("flyte", "kueue-system"))
ILL = {
    "an old Kubernetes": ("/version", {"major": "1", "minor": "29", "gitVersion": "v1.29"}, "API server", "1.30"),
    "no Flyte": (DEPLOYMENTS, {"items": []}, "Flyte's version", "no deployment runs Flyte"),
    "Flyte 2": (DEPLOYMENTS, {"items": [deployment("flyte:v2.0.1", "flyte")]}, "Flyte's version", "is Flyte 2"),
    "an old Flyte": (DEPLOYMENTS, {"items": [deployment("flyte:v1.16.1", "f")]}, "Flyte's version", "suspends"),
    "any Flyte": (DEPLOYMENTS, {"items": [deployment("flyte:latest", "f")]}, "Flyte's version", "names no version"),
    "no plugin": (FLYTE_MAPS, {"items": []}, "Flyte's plugins", "pytorch is off"),
    "a plugin less": (
        FLYTE_MAPS,
        {"items": [{"data": {"x": "tasks: {task-plugins: {enabled-plugins: [container]}}"}}]},
        "Flyte's plugins",
        "lacks sidecar, k8s-array, pytorch",
    ),
    "Flyte's limits as shipped": (
        FLYTE_MAPS,
        {"items": []},
        "Flyte's limits",
        "cpu 2, memory 1Gi, gpu 1: Flyte refuses the workflows, whose tasks have limits of cpu 8, memory 32Gi",
    ),
    "limits with room for the tasks alone": (FLYTE_MAPS, limits("8", "32Gi"), "Flyte's limits", "requests more"),
    "limits with too little memory": (FLYTE_MAPS, limits("64", "31Gi"), "Flyte's limits", "refuses the workflows"),
    "limited GPUs": (FLYTE_MAPS, limits(0, 0, 8), "Flyte's limits", "more GPUs silently gets 8 in each pod"),
    "no authentication": (
        FLYTE_MAPS,
        {"items": []},
        "Flyte's authentication",
        "off: anyone who reaches flyteadmin can",
    ),
    "no view": (REVIEWS, without(("watch", "pods")), "Flyte's rights", "may not watch pods in all namespaces"),
    "too many rights": (
        REVIEWS,
        lambda **_: True,
        "Flyte's rights",
        "may get secrets and create pods in all namespaces, which Flyte does not need",
    ),
    "no right": (
        REVIEWS,
        without(("create", "pytorchjobs")),
        "team: Flyte's rights",
        "may not create pytorchjobs here",
    ),
    "no operator": (DEPLOYMENTS, {"items": []}, "training operator", "no training operator runs"),
    "no jobs": (DEFINITIONS, {"items": []}, "training operator", "there are no PyTorchJobs"),
    "Trainer 2": (
        DEFINITIONS,
        {"items": [named("trainjobs.trainer.kubeflow.org")]},
        "training operator",
        "Kubeflow Trainer 2",
    ),
    "an old operator": (
        DEFINITIONS,
        {"items": [named("pytorchjobs.kubeflow.org", spec={"versions": []})]},
        "training operator",
        "older than 1.9",
    ),
    "an operator that is down": (
        DEPLOYMENTS,
        {"items": [deployment("training-operator:1", "k", available=None)]},
        "training operator",
        "is not available",
    ),
    "no Kueue": (KUEUE_MAPS, {"items": []}, "Kueue's integration", "no configuration of Kueue"),
    "Kueue as shipped": (
        KUEUE_MAPS,
        {"items": [{"data": {"x": "kind: Configuration\nintegrations: {frameworks: [batch/job]}"}}]},
        "Kueue's integration",
        "lacks kubeflow.org/pytorchjob",
    ),
    "Kueue without JobSet": (
        KUEUE_MAPS,
        {"items": [{"data": {"x": KUEUE.replace("jobset.x-k8s.io/jobset, ", "")}}]},
        "Kueue's integration",
        "lacks jobset.x-k8s.io/jobset: runs without Flyte start without queueing",
    ),
    "no GPU": ("/api/v1/nodes", {"items": []}, "GPU nodes", "train on CPUs"),
    "no label": (
        "/api/v1/nodes",
        {"items": [{"metadata": {"name": "bare"}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}]},
        "GPU nodes",
        "1 of 1 GPU nodes have no label gpu, such as bare",
    ),
    "no tenant": ("/api/v1/namespaces", {"items": []}, "tenants", "no project can run anything"),
    "a project that Flyte does not make": (
        "/api/v1/namespaces",
        {"items": [tenant("other", "development")]},
        "team: project",
        "creates the projects flytesnacks, team when it starts; unless somebody has created other, it refuses",
    ),
    "a domain that Flyte does not have": (
        "/api/v1/namespaces",
        {"items": [tenant("team", "research")]},
        "team: project",
        "Flyte has no domain research, only development, staging, production",
    ),
    "a domain that Flyte's configuration leaves out": (
        FLYTE_MAPS,
        {"items": [{"data": {"x": "domains: [{id: research, name: research}]"}}]},
        "team: project",
        "Flyte has no domain development, only research",
    ),
    "no queue": (QUEUES, {"items": []}, "team: queues", "there is no queue"),
    "a queue that is off": (QUEUES, {"items": [named("default")]}, "team: queues", "default is not active"),
    "no default queue": (QUEUES, {"items": [named("q", status=ACTIVE)]}, "team: queues", "must name one"),
    "no template": (TEMPLATES, {"items": []}, "team: pod template", "which this namespace lacks"),
    "no cache": (
        TEMPLATES,
        {"items": [named("strata", template={"spec": {"containers": [{}]}})]},
        "team: pod template",
        "TRITON_CACHE_DIR",
    ),
    "no rendezvous": (POLICIES, {"items": [named("deny", spec=CLOSED)]}, "team: network policies", "deny keep pods"),
    "one port": (
        POLICIES,
        {"items": [named("deny", spec=CLOSED), named("o", spec=OPEN | {"ingress": [{"ports": [{"port": 23456}]}]})]},
        "team: network policies",
        "time out",
    ),
    "no way out": (
        POLICIES,
        {"items": [named("deny", spec=CLOSED | {"policyTypes": ["Ingress", "Egress"]}), named("open", spec=OPEN)]},
        "team: network policies",
        "deny keep pods",
    ),
    "a way in for others": (
        POLICIES,
        {"items": [named("deny", spec=CLOSED), named("o", spec=OPEN | {"ingress": [{"from": [SCRAPER]}]})]},
        "team: network policies",
        "time out",
    ),
    "a broken GPU": (
        "/api/v1/nodes",
        {
            "items": [
                {
                    "metadata": {"name": "a", "labels": {"gpu": "H200"}},
                    "status": {
                        "allocatable": {"nvidia.com/gpu": "8"},
                        "conditions": [{"type": "GpuUnhealthy", "status": "True", "message": "GPU 3: XID 79"}],
                    },
                }
            ]
        },
        "GPU nodes",
        "1 of 1 GPU nodes have a GPU with a fault, such as a: GPU 3: XID 79",
    ),
    "no GPU to give": (
        "/api/v1/nodes",
        {"items": [{"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "0"}}}]},
        "GPU nodes",
        "1 of 1 GPU nodes have no allocatable GPU, such as a",
    ),
    "no policy": (POLICIES, {"items": []}, "team: network policies", "every pod of the cluster can reach"),
}


@pytest.mark.parametrize(
    "peer",
    [
        {"podSelector": {}},
        {"podSelector": OPEN["podSelector"]},
        {"namespaceSelector": {}},
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}},
    ],
    ids=["all pods", "pods of jobs", "all namespaces", "all addresses"],
)
def test_pods_of_a_job_reach_each_other(cluster, peer):
    both = {"policyTypes": ["Ingress", "Egress"], "ingress": [{"from": [peer]}], "egress": [{"to": [peer]}]}
    closed = named("closed", spec=CLOSED | {"policyTypes": ["Ingress", "Egress"]})
    cluster.answers[POLICIES] = {"items": [closed, named("o", spec=OPEN | both)]}
    assert (findings()["team: network policies"].status) == "ok"


@pytest.mark.parametrize("ill", ILL)
def test_what_a_cluster_lacks_is_said_with_the_way_out(cluster, ill):
    path, answer, check, said = ILL[ill]
    cluster.answers[path] = answer
    found = findings()[check]
    assert found.status in ("warning", "problem") and found.advice
    assert said in found.message


def test_what_cannot_be_read_is_a_problem_and_the_rest_is_looked_at(cluster):
    del cluster.answers[QUEUES]
    found = findings()
    assert found["team: queues"].status == "problem" and "cannot be checked" in found["team: queues"].message
    assert found["team: network policies"].status == "ok"


def test_a_namespace_that_others_made_says_no_project(cluster):
    cluster.answers["/api/v1/namespaces"] = {"items": [named("team")]}
    assert findings()["team: project"].status == "skipped"


def test_a_clock_that_is_off_is_reported(cluster):
    cluster.off = timedelta(minutes=-3)
    assert findings()["clocks"].status == "problem" and "18" in findings()["clocks"].message


def test_without_a_cluster_there_is_one_finding(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (found,) = findings().values()
    assert found.status == "problem" and "no cluster answers" in found.message and "KUBECONFIG" in found.advice


def test_the_command_prints_a_table_or_json():
    done = CliRunner().invoke(app, ["doctor", "image", "--format", "json"])
    found = json.loads(done.stdout)
    assert [finding["check"] for finding in found] == [name for name, _ in CHECKS["image"]]
    assert done.exit_code == any(finding["status"] == "problem" for finding in found)


def test_the_command_ends_with_1_for_a_problem(cluster):
    assert CliRunner().invoke(app, ["doctor", "cluster"]).exit_code == 0
    cluster.answers["/api/v1/namespaces"] = {"items": []}
    done = CliRunner().invoke(app, ["doctor", "cluster"])
    assert done.exit_code == 1 and "PROBLEM   tenants" in done.stdout and "-> install charts/strata" in done.stdout
    wrong = CliRunner().invoke(app, ["doctor", "phone"])
    assert wrong.exit_code == 2 and all(target in wrong.output for target in TARGETS)


def test_the_client_of_kubernetes_is_loaded_for_a_cluster_alone():
    said = "import sys, strata_platform.cli; print([m for m in ('kubernetes', 'urllib3', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", said], text=True, capture_output=True).stdout == "[]\n"
