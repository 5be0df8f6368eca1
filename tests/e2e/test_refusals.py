"""What a tenant must not do is tried, and refused for the right reason."""

import json
import os
from contextlib import contextmanager

import pytest
from kubernetes import client
from kubernetes.client import ApiException

from tests.e2e.helpers.cluster import JOBS, NAMESPACE, QUEUES, RIVAL_NAMESPACE, TENANT, until

MEMBER = TENANT["members"][0]["name"]
RUNS = f"system:serviceaccount:{NAMESPACE}:strata"
CONTAINER = {"name": "c", "image": "none", "resources": {"limits": {"cpu": "10m", "memory": "16Mi"}}}
SAFE = {
    "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        CONTAINER | {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
    ],
}


# The account of charts/strata-stack.
FLYTE = "system:serviceaccount:strata-system:flyte-binary"


@contextmanager
def refused(*reasons):
    """The block's request is refused, and told why in these words."""
    with pytest.raises(ApiException) as refusal:
        yield
    assert refusal.value.status in (403, 422), refusal.value
    said = json.loads(refusal.value.body)["message"]
    for reason in reasons:
        assert reason in said


def impersonated(user):
    api = client.ApiClient()
    api.set_default_header("Impersonate-User", user)
    return client.CoreV1Api(api), client.CustomObjectsApi(api)


def pod(spec, **metadata):
    return {"metadata": {"name": "e2e-refused", **metadata}, "spec": SAFE | spec}


def test_the_pod_that_the_others_differ_from_is_taken(cluster):
    cluster.core.create_namespaced_pod(NAMESPACE, pod({}), dry_run="All")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"containers": [CONTAINER | {"securityContext": {"privileged": True}}]}, "privileged"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "hostPath"),
        ({"hostNetwork": True}, "hostNetwork"),
        ({"hostPID": True}, "hostPID"),
        ({"securityContext": {"runAsUser": 0}}, "runAsNonRoot"),
        ({"containers": [CONTAINER | {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]}, "capabilities"),
    ],
    ids=["privileged", "host-path", "host-network", "host-processes", "root", "capability"],
)
def test_a_pod_that_reaches_for_the_machine(cluster, spec, reason):
    with refused('violates PodSecurity "restricted', reason):
        cluster.core.create_namespaced_pod(NAMESPACE, pod(spec), dry_run="All")


QUEUES_OF_OTHERS = pytest.mark.parametrize(
    "labels", [{}, {"kueue.x-k8s.io/queue-name": "rival"}], ids=["none", "of-another-tenant"]
)
NO_QUEUE = ("has to name a queue of its namespace", "set resources.queue in the spec of the run")


@QUEUES_OF_OTHERS
def test_a_job_of_a_queue_that_is_not_the_tenants(cluster, labels):
    worker = {"replicas": 2, "restartPolicy": "Never", "template": {"spec": SAFE}}
    job = {"metadata": {"name": "e2e-refused", "labels": labels}, "spec": {"pytorchReplicaSpecs": {"Worker": worker}}}
    job |= {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}
    with refused(*NO_QUEUE):
        cluster.custom.create_namespaced_custom_object(*JOBS, job, dry_run="All")


def container(name, cpu="10m", memory="16Mi", **more):
    (safe,) = SAFE["containers"]
    devices = more.pop("devices", {})
    return safe | {"name": name, "resources": {"limits": {"cpu": cpu, "memory": memory, **devices}}} | more


CLAIM = {"name": "gpu", "resourceClaimTemplateName": "gpu"}
HAVE_TO_QUEUE = {
    "gpu": {"containers": [container("c", devices={"nvidia.com/gpu": "1"})]},
    "mig-slice": {"containers": [container("c", devices={"nvidia.com/mig-3g.40gb": "1"})]},
    "another-vendor": {"containers": [container("c", devices={"habana.ai/gaudi": "1"})]},
    "amd-partition": {"containers": [container("c", devices={"amd.com/cpx_nps4": "1"})]},
    "device-class": {"containers": [container("c", devices={"deviceclass.resource.kubernetes.io/gpu": "1"})]},
    "device-claim": {"resourceClaims": [CLAIM]},
    "several-containers": {"containers": [container("a", cpu="9"), container("b", cpu="8")]},
    "several-memories": {"containers": [container("a", memory="40Gi"), container("b", memory="40Gi")]},
    "pod-level": {"resources": {"limits": {"cpu": "17", "memory": "1Gi"}}},
    "initial-container": {"initContainers": [container("first", cpu="17")]},
    "sidecars": {"initContainers": [container("s", cpu="9", restartPolicy="Always")],
                 "containers": [container("c", cpu="8")]},
    "device-of-an-initial-container": {"initContainers": [container("first", devices={"nvidia.com/gpu": "1"})]},
}  # fmt: skip


@QUEUES_OF_OTHERS
@pytest.mark.parametrize("spec", HAVE_TO_QUEUE.values(), ids=HAVE_TO_QUEUE)
def test_a_pod_of_a_queue_that_is_not_the_tenants(cluster, spec, labels):
    with refused(*NO_QUEUE):
        cluster.core.create_namespaced_pod(NAMESPACE, pod(spec, labels=labels), dry_run="All")


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [container(str(number), cpu="1600m") for number in range(10)]},
        {"containers": [container("c", cpu="9")], "initContainers": [container("first", cpu="16")]},
        {"containers": [container("c")], "resources": {"limits": {"cpu": "16", "memory": "64Gi"}}},
    ],
    ids=["ten-tenths", "one-after-the-other", "pod-level"],
)
def test_a_pod_that_is_as_large_as_may_be_without_a_queue(cluster, spec):
    cluster.core.create_namespaced_pod(NAMESPACE, pod(spec), dry_run="All")


@pytest.mark.parametrize("user", [MEMBER, RUNS], ids=["member", "run"])
@pytest.mark.parametrize(
    "attempt",
    [
        lambda core, custom: core.list_namespaced_secret(NAMESPACE),
        lambda core, custom: core.list_namespaced_secret(RIVAL_NAMESPACE),
        lambda core, custom: core.list_namespaced_pod(RIVAL_NAMESPACE),
        lambda core, custom: core.read_namespaced_pod_log("any", RIVAL_NAMESPACE),
        lambda core, custom: core.connect_get_namespaced_pod_exec("any", RIVAL_NAMESPACE, command="id"),
        lambda core, custom: core.create_namespaced_pod(NAMESPACE, pod({}), dry_run="All"),
        lambda core, custom: core.create_namespaced_pod(RIVAL_NAMESPACE, pod({}), dry_run="All"),
        lambda core, custom: custom.patch_namespaced_custom_object(
            *QUEUES, "research", {"spec": {"stopPolicy": "Hold"}}, dry_run="All"
        ),
        lambda core, custom: custom.list_namespaced_custom_object("kubeflow.org", "v1", RIVAL_NAMESPACE, "pytorchjobs"),
        lambda core, custom: core.list_node(),
    ],
    ids=[
        "own-secrets",
        "their-secrets",
        "their-pods",
        "their-logs",
        "a-shell-in-their-pod",
        "a-pod",
        "a-pod-of-theirs",
        "a-queue-held",
        "their-jobs",
        "machines",
    ],
)
def test_what_members_and_runs_ask_of_kubernetes(user, attempt):
    with refused("forbidden", user):
        attempt(*impersonated(user))


def test_what_flyte_may_do_in_a_namespace_of_a_tenant(cluster):
    core, _ = impersonated(FLYTE)
    core.create_namespaced_pod(NAMESPACE, pod({}), dry_run="All")
    core.list_pod_for_all_namespaces(limit=1)
    with refused("forbidden", FLYTE):
        core.list_namespaced_secret(NAMESPACE)
    with refused("forbidden", FLYTE):
        core.connect_get_namespaced_pod_exec("any", NAMESPACE, command="id")


@pytest.mark.parametrize("namespace", ["kube-system", "default", "strata-system"])
@pytest.mark.parametrize(
    "attempt",
    [
        lambda core, custom, namespace: core.create_namespaced_pod(namespace, pod({}), dry_run="All"),
        lambda core, custom, namespace: core.delete_namespaced_pod("any", namespace, dry_run="All"),
        lambda core, custom, namespace: core.list_namespaced_secret(namespace),
        # Of its own namespace it may read the Secrets of its names.
        lambda core, custom, namespace: core.read_namespaced_secret("any", namespace),
        lambda core, custom, namespace: custom.create_namespaced_custom_object(
            *JOBS[:2], namespace, JOBS[3], {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}, dry_run="All"
        ),
    ],
    ids=["a-pod", "a-pod-removed", "all-secrets", "a-secret", "a-job"],
)
def test_what_flyte_may_not_do_where_no_tenant_is(attempt, namespace):
    with refused("forbidden", FLYTE):
        attempt(*impersonated(FLYTE), namespace)


def test_a_pod_cannot_have_a_secret_of_another_tenant(cluster):
    secret = client.V1Secret(metadata={"name": "e2e-theirs"}, string_data={"key": "theirs"})
    cluster.core.create_namespaced_secret(RIVAL_NAMESPACE, secret)
    (container,) = SAFE["containers"]
    asking = container | {
        "image": cluster.image,
        "command": ["true"],
        "envFrom": [{"secretRef": {"name": "e2e-theirs"}}],
    }
    wanted = pod({"containers": [asking], "restartPolicy": "Never"}, name="e2e-thief")

    def waiting():
        found = cluster.core.read_namespaced_pod("e2e-thief", NAMESPACE).status.container_statuses or []
        return found and found[0].state.waiting and found[0].state.waiting.message

    try:
        cluster.core.create_namespaced_pod(NAMESPACE, wanted)
        assert 'secret "e2e-theirs" not found' in until("the pod waits", waiting, 30)
    finally:
        cluster.core.delete_namespaced_pod("e2e-thief", NAMESPACE, grace_period_seconds=0)
        cluster.core.delete_namespaced_secret("e2e-theirs", RIVAL_NAMESPACE)


def test_a_run_has_no_token_of_kubernetes_and_no_root(cluster):
    assert "No such file" in cluster.window("ls", "/var/run/secrets/kubernetes.io/serviceaccount/token")
    assert "uid=1000" in cluster.window("id")
    assert "CapEff:\t0000000000000000" in cluster.window("cat", "/proc/self/status")


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3); print('connected')"


@pytest.mark.skipif("STRATA_E2E_UNREACHABLE" not in os.environ, reason="STRATA_E2E_UNREACHABLE names no address")
def test_an_address_outside_of_the_list_does_not_answer(cluster):
    for address in os.environ["STRATA_E2E_UNREACHABLE"].split(","):
        host, _, port = address.rpartition(":")
        assert "connected" not in cluster.window("python", "-c", CONNECT, host, port), address


BUCKET = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"


@pytest.mark.skipif("FLYTE_AWS_ENDPOINT" not in os.environ, reason="FLYTE_AWS_ENDPOINT names no object store")
def test_the_object_store_asks_who_it_is(cluster):
    said = cluster.window("python", "-c", BUCKET, f"{os.environ['FLYTE_AWS_ENDPOINT']}/flyte?list-type=2")
    assert "HTTP Error 403" in said


WRITE = """import sys, s3fs
endpoint, tenant, bucket = sys.argv[1:]
store = s3fs.S3FileSystem(key=tenant, secret=f"{tenant}-secret", endpoint_url=endpoint)
for attempt in (lambda: store.pipe(f"{bucket}/file", b"data"), lambda: store.cat(f"{bucket}/file")):
    try:
        attempt()
        print("done")
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif("STRATA_E2E_ACCOUNTS" not in os.environ, reason="STRATA_E2E_ACCOUNTS names no object store")
def test_a_bucket_of_another_tenant(cluster):
    """With the key that a tenant has in a store with accounts; the other tenant's is a secret of the other's."""
    own, others = (
        cluster.window("python", "-c", WRITE, os.environ["STRATA_E2E_ACCOUNTS"], NAMESPACE, bucket)
        for bucket in (NAMESPACE, RIVAL_NAMESPACE)
    )
    assert own.splitlines() == ["done"] * 2
    assert others.splitlines() == ["refused"] * 2
