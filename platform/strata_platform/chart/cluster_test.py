"""The program of `helm test`, in the training image: `python -m strata_platform.chart.cluster_test cluster | pod`.

`cluster` checks every object of the chart, tries what the cluster must refuse, and runs a job of two pods through each
tenant's queue, and one over several nodes if asked for. `pod` runs as a tenant's pod does and checks what it can reach
and write. The chart passes the expected values as JSON in the variable STRATA_CHECK. The program prints a line per
check; exit code 1 means that one failed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from strata_platform.flyte_rights import WATCHED, WRITTEN
from strata_platform.kubernetes_answers import PYTORCHJOB, access_review, frameworks, why_inactive
from strata_platform.pod_settings import QUEUE, add_shared_memory, gpu_tolerations

_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_KUEUE, _KUBEFLOW = ("kueue.x-k8s.io", "v1beta2"), ("kubeflow.org", "v1")
# An all-reduce over two pods tests rendezvous, name resolution, network policies and torch at once.
_ALL_REDUCE = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2, total
dist.destroy_process_group()
"""


class Tenant(BaseModel):
    """The objects that the chart created for a tenant."""

    namespace: str
    pod_security: str
    service_account: str
    pod_template: str
    queues: dict[str, str]
    objects: dict[str, list[str]]


class AllReduce(BaseModel):
    """A test of the bandwidth between nodes, as in the values."""

    namespace: str
    queue: str
    pod_template: str
    nodes: int
    gpus: int
    gpu_resource: str
    resources: dict[str, str | int]
    min_bandwidth: float
    largest: int
    seconds: int

    @property
    def program(self) -> list[str]:
        """The arguments of -m for each process."""
        numbers = {"--min-bandwidth": self.min_bandwidth, "--largest": self.largest, "--nodes": self.nodes}
        flags = [text for flag, number in numbers.items() for text in (flag, str(number))]
        return ["tasks.runtime.faults.all_reduce_test", *flags]


class Cluster(BaseModel):
    """What `cluster` expects. `job_seconds` limits a job of two pods; 0 runs none."""

    tenants: list[Tenant]
    queue_required: bool
    kueue_config: tuple[str, str]
    flyte: tuple[str, str]
    image: str
    python: str
    job_resources: dict[str, str | int]
    job_seconds: int
    all_reduce: AllReduce | None = None


class Pod(BaseModel):
    """What `pod` expects."""

    reachable: list[str]
    unreachable: list[str]
    writable: list[str]


Check = tuple[str, Callable[[], str | None]]
"""Name of a check, and a function that returns what is wrong and what to do, or None."""


def run(checks: Iterator[Check]) -> int:
    """Run all `checks`, print a line for each, and return the number of those that failed."""
    failed = 0
    for what, problem in checks:
        try:
            found = problem()
        except Exception as error:  # A check that raises has failed; the others still run.
            found = f"{type(error).__name__}: {_words(error)}"
        failed += found is not None
        print(f"ok    {what}" if found is None else f"FAIL  {what}: {found}", flush=True)
    return failed


def _words(error: Exception) -> str:
    body = getattr(error, "body", None)
    if not body:
        return str(error)
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(body)


def pod_checks(expected: Pod) -> Iterator[Check]:
    """Checks of what a tenant's pod can and cannot do."""
    yield "not root", lambda: None if os.getuid() else "the pod runs as root; the pod template is not applied"
    yield "no token of Kubernetes", lambda: f"{_TOKEN} is mounted" if _TOKEN.exists() else None
    for folder in expected.writable:
        yield f"can write {folder}", partial(_write, folder)
    for address in expected.reachable:
        yield f"reaches {address}", partial(_connect, address)
    for address in expected.unreachable:
        yield f"does not reach {address}", partial(_refuse, address)


def _write(folder: str) -> str | None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
    return None


def _connect(address: str, seconds: float = 5.0) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        return f"{error}; allow it in tenantDefaults.network, or check the name"
    return None


def _refuse(address: str) -> str | None:
    if _connect(address, seconds=3.0) is None:
        return "it answers; the network plugin ignores network policies, or a policy allows it"
    return None


def cluster_checks(expected: Cluster) -> Iterator[Check]:
    """Checks of the chart's objects, of rights, and of what the cluster refuses."""
    from kubernetes import config

    config.load_incluster_config()
    yield f"Kueue's integration {PYTORCHJOB} is on", partial(_integrated, *expected.kueue_config)
    for tenant in expected.tenants:
        yield from _object_checks(tenant)
        yield from _right_checks(tenant, expected.flyte)
        yield from _refusal_checks(tenant, expected.queue_required)
        if expected.job_seconds and tenant.queues:
            yield f"{tenant.namespace}: two pods through a queue find each other", partial(_two_pods, expected, tenant)
    if (test := expected.all_reduce) is not None:
        yield f"{test.namespace}: all-reduces between {test.nodes} nodes", partial(_all_reduce, expected, test)


def _integrated(namespace: str, name: str) -> str | None:
    import yaml
    from kubernetes import client

    found = client.CoreV1Api().read_namespaced_config_map(name, namespace).data or {}
    if PYTORCHJOB in frameworks(yaml.safe_load(text) or {} for text in found.values()):
        return None
    return "add it to integrations.frameworks in Kueue's configuration and restart Kueue"


def _object_checks(tenant: Tenant) -> Iterator[Check]:
    from kubernetes import client

    core, custom, place = client.CoreV1Api(), client.CustomObjectsApi(), tenant.namespace
    readers = {
        "PodTemplate": core.read_namespaced_pod_template,
        "ResourceQuota": core.read_namespaced_resource_quota,
        "LimitRange": core.read_namespaced_limit_range,
        "ServiceAccount": core.read_namespaced_service_account,
        "NetworkPolicy": client.NetworkingV1Api().read_namespaced_network_policy,
    }
    for kind, names in tenant.objects.items():
        for name in names:
            yield f"{place}: {kind} {name}", partial(_exists, readers[kind], name, place)
    for queue, cluster_queue in tenant.queues.items():
        local = partial(custom.get_namespaced_custom_object, *_KUEUE, place, "localqueues", queue)
        yield f"{place}: queue {queue} is active", partial(_active, local)
        shared = partial(custom.get_cluster_custom_object, *_KUEUE, "clusterqueues", cluster_queue)
        yield f"{place}: cluster queue {cluster_queue} is active", partial(_active, shared)


def _right_checks(tenant: Tenant, flyte: tuple[str, str]) -> Iterator[Check]:
    runs = (tenant.namespace, tenant.service_account)
    for verb, resource in (("get", "secrets"), ("create", "pods"), ("list", "pods")):
        may = partial(_may, runs, verb, "", resource, tenant.namespace)
        yield f"{tenant.namespace}: a run may not {verb} {resource}", partial(_if, may, "it may; remove the binding")
    way = (
        f"{'/'.join(flyte)} may not; name Flyte's service account in flyte.namespace and flyte.serviceAccount, and see "
        "that it may list and watch in the whole cluster what docs/cluster.md names"
    )
    needed = [(verb, group, resource) for group, resource, verbs in WRITTEN for verb in verbs]
    needed += [("list", group, resource) for group, resource in WATCHED]
    for verb, group, resource in needed:
        may = partial(_may, flyte, verb, group, resource, tenant.namespace)
        yield f"{tenant.namespace}: Flyte may {verb} {resource}", partial(_unless, may, way)


def _may(account: tuple[str, str], verb: str, group: str, resource: str, namespace: str) -> bool:
    """Whether a service account (namespace, name) has a right."""
    from kubernetes import client

    review = access_review(account, verb, group, resource, namespace)
    return bool(client.AuthorizationV1Api().create_subject_access_review(review).status.allowed)


def _refusal_checks(tenant: Tenant, queue_required: bool) -> Iterator[Check]:
    from kubernetes import client

    place, core = tenant.namespace, client.CoreV1Api()
    if tenant.pod_security != "privileged":
        privileged = partial(core.create_namespaced_pod, place, _privileged(), dry_run="All")
        yield f"{place}: a privileged pod is refused", partial(_refused, privileged)
    # Kueue assigns jobs without a queue to the queue called default, if it exists.
    if queue_required and "default" not in tenant.queues:
        unqueued = partial(_create, place, _job("strata-test-no-queue", {}, ""), dry_run="All")
        yield f"{place}: a training job without a queue is refused", partial(_refused, unqueued)


def _exists(read: Callable[[str, str], Any], name: str, namespace: str) -> str | None:
    read(name, namespace)
    return None


def _active(read: Callable[[], dict[str, Any]]) -> str | None:
    return why_inactive(read())


def _if(is_so: Callable[[], bool], problem: str) -> str | None:
    return problem if is_so() else None


def _unless(is_so: Callable[[], bool], problem: str) -> str | None:
    return None if is_so() else problem


def _refused(attempt: Callable[[], object]) -> str | None:
    from kubernetes.client import ApiException

    try:
        attempt()
    except ApiException as error:
        return None if error.status in (403, 422) else f"{error.status}: {_words(error)}"
    return "the cluster accepts it"


def _privileged() -> dict[str, Any]:
    container = {"name": "c", "image": "none", "securityContext": {"privileged": True}}
    return {"metadata": {"name": "strata-test-privileged"}, "spec": {"containers": [container]}}


def _job(name: str, template: dict[str, Any], queue: str, pods: int = 2, processes: int = 1) -> dict[str, Any]:
    """A job of workers. Without a template it has no queue and serves only to be refused."""
    labels = {QUEUE: queue} if template else {}
    pod = template or {"spec": {"containers": [{"name": "pytorch", "image": "none"}]}}
    return {
        "apiVersion": "/".join(_KUBEFLOW),
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "elasticPolicy": {
                "minReplicas": pods,
                "maxReplicas": pods,
                "nProcPerNode": processes,
                "rdzvBackend": "c10d",
            },
            # Failed pods stay for their logs; running ones release their resources.
            "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {"Worker": {"replicas": pods, "restartPolicy": "Never", "template": pod}},
        },
    }


def _create(namespace: str, job: dict[str, Any], **options: Any) -> None:
    from kubernetes import client

    client.CustomObjectsApi().create_namespaced_custom_object(*_KUBEFLOW, namespace, "pytorchjobs", job, **options)


def _two_pods(expected: Cluster, tenant: Tenant) -> str | None:
    template = _template(tenant.pod_template, tenant.namespace)
    container = template["spec"]["containers"][0]
    launch = ["-m", "torch.distributed.run", "--no-python", expected.python, "-c", _ALL_REDUCE]
    container |= {"name": "pytorch", "image": expected.image, "command": [expected.python, *launch]}
    container["resources"] = {"requests": expected.job_resources, "limits": expected.job_resources}
    job = _job(_new_name(), template, next(iter(tenant.queues)))
    return _run_job(job, tenant.namespace, expected.job_seconds)


def _all_reduce(expected: Cluster, test: AllReduce) -> str | None:
    template = all_reduce_pod(_template(test.pod_template, test.namespace), expected, test)
    job = _job(_new_name(), template, test.queue, test.nodes, max(test.gpus, 1))
    return _run_job(job, test.namespace, test.seconds, shown="all-reduce of")


def all_reduce_pod(template: dict[str, Any], expected: Cluster, test: AllReduce) -> dict[str, Any]:
    """The pods of the test, from a template of the tenant with its devices."""
    inner = template["spec"]
    container = inner["containers"][0]
    gpus = {test.gpu_resource: test.gpus} if test.gpus else {}
    asked = (container.get("resources") or {}).get("limits", {}) | test.resources | gpus
    node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    container |= {
        "name": "pytorch",
        "image": expected.image,
        "command": [expected.python, "-m", "torch.distributed.run", "-m", *test.program],
        "resources": {"requests": asked, "limits": asked},
        "env": [*(container.get("env") or []), node],
    }
    add_shared_memory(inner, "8Gi")
    if test.gpus:
        inner["tolerations"] = [*(inner.get("tolerations") or []), *gpu_tolerations(test.gpu_resource)]
    labels = template.setdefault("metadata", {}).setdefault("labels", {})
    labels["strata/test"] = "all-reduce"
    inner["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"strata/test": "all-reduce"}},
        }
    ]
    return template


def _template(name: str, namespace: str) -> dict[str, Any]:
    from kubernetes import client

    core = client.CoreV1Api()
    found = core.read_namespaced_pod_template(name, namespace)
    template: dict[str, Any] = core.api_client.sanitize_for_serialization(found.template)
    template["metadata"].pop("creationTimestamp", None)
    return template


def _new_name() -> str:
    # The digits distinguish this job from an earlier one that is still being deleted.
    return f"strata-test-{time.time_ns() // 10**6 % 10**8}"


def _run_job(job: dict[str, Any], namespace: str, seconds: int, shown: str | None = None) -> str | None:
    """Run a job to its end. Prints the log that begins with `shown`, if that is given.

    The job stays for its pods' logs if it has failed. One that has not ended would hold machines, or start later.
    """
    from kubernetes import client

    custom, name = client.CustomObjectsApi(), job["metadata"]["name"]
    _create(namespace, job)
    address = (*_KUBEFLOW, namespace, "pytorchjobs", name)
    failed = False
    try:
        try:
            problem = _failure(partial(custom.get_namespaced_custom_object, *address), seconds)
            failed = problem is not None
        finally:
            if shown is not None:
                for index in range(job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]):
                    _print_log(f"{name}-worker-{index}", namespace, shown)
    except TimeoutError as error:
        return f"{error}; the job is removed, and kubectl get events --namespace {namespace} says what it waited for"
    finally:
        if not failed:
            custom.delete_namespaced_custom_object(*address)
    if problem is None:
        return None
    return f"{problem}; see kubectl describe pytorchjob {name} and the logs of its pods, then delete it"


def _print_log(pod: str, namespace: str, shown: str) -> None:
    from kubernetes import client

    try:
        log = str(client.CoreV1Api().read_namespaced_pod_log(pod, namespace))
    except client.ApiException as error:
        # A pod that never started has none.
        if error.status not in (400, 404):
            print(f"      the log of {pod} cannot be read: {_words(error)}", flush=True)
        return
    start = log.find(shown)
    if start >= 0:
        print("\n".join(f"      {line}" for line in log[start:].splitlines()), flush=True)


def _failure(read: Callable[[], dict[str, Any]], seconds: int) -> str | None:
    """Why a job has failed; None if it has succeeded. Raises TimeoutError if it has not ended."""
    end, state = time.monotonic() + seconds, "not seen by the training operator"
    while time.monotonic() < end:
        conditions = [c for c in read().get("status", {}).get("conditions", []) if c["status"] == "True"]
        state = ", ".join(condition["type"] for condition in conditions) or state
        if "Succeeded" in state:
            return None
        if "Failed" in state:
            return str(conditions[-1].get("message"))
        time.sleep(1)
    raise TimeoutError(f"not done after {seconds} s: {state}")


if __name__ == "__main__":
    given = os.environ["STRATA_CHECK"]
    if sys.argv[1:] == ["pod"]:
        failures = run(pod_checks(Pod.model_validate_json(given)))
    else:
        assert sys.argv[1:] == ["cluster"], sys.argv
        failures = run(cluster_checks(Cluster.model_validate_json(given)))
    sys.exit(1 if failures else 0)
