"""Placement of whole runs by Kueue, with what the chart renders, on nodes of several racks that have no kubelet.

No pod of these nodes runs a process; helpers/nodes.py says that it is ready. Kubernetes' scheduler and controllers,
JobSet and Kueue are real.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from contextlib import contextmanager
from datetime import datetime

import pytest
import yaml

from strata_platform.backends.kubernetes import KubernetesBackend
from strata_platform.backends.kubernetes_objects import JOB_SET, WORKLOADS, is_given_up, is_of
from strata_platform.client import Client
from strata_platform.kubernetes_answers import condition_of, is_true
from strata_platform.kubernetes_api import Access, ApiError, KubernetesApi
from strata_platform.runs import Phase, Stage
from tests.e2e.helpers.cluster import ROOT, named, until
from tests.e2e.helpers.nodes import Nodes

HELM = os.environ.get("HELM") or shutil.which("helm")
CHART, VALUES = ROOT / "charts" / "strata", ROOT / "tests" / "e2e" / "gang-values.yaml"
SYSTEM, NAMESPACE, RELEASE = "strata-system", "gang-development", "gang"
KUEUE, CONFIG = "kueue-controller-manager", f"/api/v1/namespaces/{SYSTEM}/configmaps/kueue-manager-config"
CLUSTER_QUEUES = "/apis/kueue.x-k8s.io/v1beta2/clusterqueues"
JOB_SETS = "/apis/{}/{}/namespaces/{}/{}".format(*JOB_SET.jobs[:2], NAMESPACE, JOB_SET.jobs[2])
RACKS = {"rack-1": "block-1", "rack-2": "block-1", "rack-3": "block-2"}
# Seconds for whatever these tests wait for; what the timeout of Kueue is about takes longer.
SOON, READY_TIMEOUT, BACKOFF = 90, 20, 5
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm on the PATH or in HELM")


def hosts(rack):
    return [f"{rack}-host-{number}" for number in range(1, 5)]


def labels(rack):
    place = {"cloud.example/block": RACKS[rack], "cloud.example/rack": rack}
    return place | {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.present": "true"}


def run(*command, text=None):
    ended = subprocess.run([*map(str, command)], input=text, text=True, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@contextmanager
def configured_kueue(api, cluster):
    """Kueue with fair sharing, as docs/kueue.md says, and less patience with pods than the stack's own."""
    before = api.get(CONFIG)["data"]
    ((key, text),) = before.items()
    config = yaml.safe_load(text)
    config["fairSharing"] = {"preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]}
    config["waitForPodsReady"]["timeout"] = f"{READY_TIMEOUT}s"
    config["waitForPodsReady"]["requeuingStrategy"] |= {"backoffBaseSeconds": BACKOFF, "backoffLimitCount": 1}

    def restarted(data):
        api.request("PATCH", CONFIG, {"data": data})
        cluster.restart(SYSTEM, KUEUE)
        until("Kueue answers", answers, SOON)

    def answers():
        """Its webhook is asked about the change, which changes nothing."""
        (queue, *_) = api.items(CLUSTER_QUEUES)
        try:
            api.request("PATCH", f"{CLUSTER_QUEUES}/{queue['metadata']['name']}", {"spec": {}}, dryRun="All")
        except ApiError as error:
            return "failed calling webhook" not in str(error)
        return True

    try:
        restarted({key: yaml.safe_dump(config)})
        yield
    finally:
        restarted(before)


def is_gone(api, namespace):
    """Whether a namespace that was deleted is gone."""
    try:
        found = api.get(namespace)
    except ApiError as error:
        assert error.status == 404
        return True
    # A deletion asks every API, and Kueue's own one refuses the API server of local_cluster, which has no certificate.
    if is_true(found, "NamespaceDeletionDiscoveryFailure"):
        remaining = condition_of(found, "NamespaceContentRemaining")
        if remaining and remaining["status"] == "False":
            found["spec"]["finalizers"] = []
            api.request("PUT", f"{namespace}/finalize", found)
    return False


@contextmanager
def installed(api, image):
    """The chart's objects, and nothing of them after the block."""
    repository, _, tag = image.rpartition(":")
    values = yaml.safe_load(VALUES.read_text()) | {"image": {"repository": repository, "tag": tag}}
    try:
        run(HELM, "install", RELEASE, CHART, "--namespace", SYSTEM, "--values", "-", text=yaml.safe_dump(values))
        for queue in values["queues"]["clusterQueues"]:
            path = f"{CLUSTER_QUEUES}/{queue['name']}"
            until(f"{queue['name']} is active", lambda path=path: is_true(api.get(path), "Active"), SOON)
        yield
    finally:
        run(HELM, "uninstall", RELEASE, "--namespace", SYSTEM, "--no-hooks", "--wait", "--timeout", "60s")
        # Uninstalling keeps it.
        run("kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")
        until("the namespace is gone", lambda: is_gone(api, f"/api/v1/namespaces/{NAMESPACE}"), SOON)


@pytest.fixture(scope="module")
def nodes(cluster):
    api = KubernetesApi(Access.of_environment())
    try:
        api.get("/apis/{}/{}".format(*JOB_SET.jobs[:2]))
    except ApiError as error:
        assert error.status == 404
        pytest.skip("the cluster has no JobSet; docs/cluster-tests.md")
    places = {host: labels(rack) for rack in RACKS for host in hosts(rack)}
    with configured_kueue(api, cluster), Nodes(api, places) as made, installed(api, cluster.image):
        yield made


class Gang:
    """Runs of the tenant, as `strata submit --backend kubernetes` starts them: each pod takes a node."""

    def __init__(self, nodes, image):
        self.nodes, self.api = nodes, KubernetesApi(Access.of_environment())
        self.runs = Client(KubernetesBackend(NAMESPACE, image=image), poll=0.5)

    def submit(self, name, queue="fabric", pods=1, template=None):
        """The run's name."""
        asked = {
            "cpu": "8", "memory": "64Gi", "gpu": 8, "queue": queue, "priority": None, "pod_template": template,
        }  # fmt: skip
        spec = named(name, topology={"nnodes": pods, "nproc_per_node": 8}, resources=asked)
        self.runs.submit(spec)
        return spec.name

    def job_set(self, name):
        (job,) = self.api.items(JOB_SETS, labelSelector=f"strata/run={name}")
        return job

    def workload(self, name):
        """Kueue's object of a run; None until there is one."""
        uid = self.job_set(name)["metadata"]["uid"]
        group, version, plural = WORKLOADS
        found = self.api.items(f"/apis/{group}/{version}/namespaces/{NAMESPACE}/{plural}")
        return next((each for each in found if is_of(each, {uid})), None)

    def pods(self, name):
        return self.api.items(f"/api/v1/namespaces/{NAMESPACE}/pods", labelSelector=f"strata/run={name}")

    def places(self, name, count):
        """The nodes of a run's pods, as soon as all of them are ready on one."""

        def ready():
            pods = [pod for pod in self.pods(name) if is_true(pod, "Ready")]
            return len(pods) == count and [pod["spec"]["nodeName"] for pod in pods]

        found = until(f"{count} pods of {name} are ready", ready, SOON)
        # One of them has all GPUs of a node.
        assert len(set(found)) == count
        return found

    def racks(self, name, count):
        """How many of a run's pods are in each rack."""
        return Counter(self.nodes.labels[node]["cloud.example/rack"] for node in self.places(name, count))

    def waits(self, name, reason):
        """Return when a run waits, and `strata get` has Kueue's reason."""

        def told():
            run = self.runs.get(name)
            return run.stage is Stage.WAITING and reason in run.message

        until(f"{name} waits: {reason}", told, SOON)
        assert self.runs.get(name).phase is Phase.QUEUED

    def has_not_begun(self, name):
        """Whether it holds nothing, with no pod of it made."""
        workload = self.workload(name)
        return not self.pods(name) and self.job_set(name)["spec"]["suspend"] and not is_true(workload, "QuotaReserved")

    def end_all(self):
        """Remove all runs; their nodes are free again."""
        self.nodes.silent.clear()
        self.nodes.leave()
        self.api.request("DELETE", JOB_SETS)
        until("the nodes are free", lambda: not self.nodes.pods(), SOON)
        group, version, plural = WORKLOADS
        every = f"/apis/{group}/{version}/namespaces/{NAMESPACE}/{plural}"
        until("the queues are empty", lambda: not self.api.items(every), SOON)


@pytest.fixture
def gang(nodes, cluster):
    found = Gang(nodes, cluster.image)
    yield found
    found.end_all()


def test_a_run_gets_the_one_rack_with_room_for_all_of_it(gang):
    # Others have a node of each of the first two racks, where three more are free.
    for rack in ("rack-1", "rack-2"):
        gang.nodes.occupy(hosts(rack)[3])
    # Asked for nothing, Kueue fills up what is begun.
    anywhere = gang.submit("anywhere", pods=4)
    assert len(gang.racks(anywhere, 4)) > 1
    gang.runs.cancel(anywhere)
    until("its nodes are free", lambda: not gang.pods(anywhere), SOON)
    whole = gang.submit("whole", pods=4, template="one-rack")
    assert gang.racks(whole, 4) == {"rack-3": 4}
    # Rank by rank as Kueue has assigned them: its gates and selectors, and no accident of the scheduler.
    for pod in gang.pods(whole):
        assert pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] == pod["spec"]["nodeName"]


def test_all_or_nothing_in_one_rack_and_the_nearest_racks_where_that_is_preferred(gang):
    required = gang.submit("required", pods=5, template="one-rack")
    gang.waits(required, 'topology "gang-fabric" allows to fit only 4 out of 5 pod(s)')
    assert gang.has_not_begun(required)
    # It does not stand in the way of the next one, which takes two racks of one block.
    preferred = gang.submit("preferred", pods=5, template="close-together")
    assert gang.racks(preferred, 5) == {"rack-1": 4, "rack-2": 1}
    assert gang.has_not_begun(required)


def test_a_cohort_lends_by_weight_and_takes_back_what_is_above_it(gang):
    speech = [gang.submit(f"speech-{number}", "speech") for number in range(4)]
    for name in speech:
        gang.places(name, 1)
    # All that is lent is in use. By weight three of the four nodes are language's.
    language = [gang.submit(f"language-{number}", "language") for number in range(4)]

    def running():
        def is_admitted(name):
            return is_true(gang.workload(name) or {}, "Admitted")

        return [*filter(is_admitted, language)], [*filter(is_admitted, speech)]

    until("three are language's and one is speech's", lambda: list(map(len, running())) == [3, 1], SOON)
    mine, theirs = running()
    for name in (*mine, *theirs):
        gang.places(name, 1)
    preempted = [gang.workload(name) for name in speech if name not in theirs]
    assert {condition_of(each, "Evicted")["reason"] for each in preempted} == {"Preempted"}
    assert {condition_of(each, "Preempted")["reason"] for each in preempted} == {"InCohortFairSharing"}
    # Who waits gets nothing more: each has what its weight says.
    (last,) = set(language) - set(mine)
    gang.waits(last, "insufficient unused quota")
    assert list(map(len, running())) == [3, 1]
    # What language gives back goes to speech.
    for name in (last, *mine):
        gang.runs.cancel(name)
    until("speech has all of it again", lambda: list(map(len, running())) == [0, 4], SOON)
    for name in speech:
        gang.places(name, 1)


def evicted(gang, name):
    """When Kueue will try a run again whose pods did not become ready."""
    workload = gang.workload(name) or {}
    condition = condition_of(workload, "Evicted") or {}
    if condition.get("status") == "True" and condition["reason"] == "PodsReadyTimeout":
        return workload["status"].get("requeueState", {}).get("requeueAt")
    return None


def begun(gang, name):
    """The run's pods, when all are bound and those of silent nodes alone are not ready."""
    pods = gang.pods(name)
    ready = [pod for pod in pods if is_true(pod, "Ready")]
    return len([pod for pod in pods if "nodeName" in pod["spec"]]) == 4 and len(ready) == 3 and pods


def test_a_run_with_a_pod_that_does_not_start_gives_its_nodes_back_and_comes_again(gang):
    gang.nodes.silent |= {hosts(rack)[1] for rack in RACKS}
    name = gang.submit("late", pods=4, template="one-rack")
    first = {pod["metadata"]["uid"] for pod in until("three of four are ready", lambda: begun(gang, name), SOON)}
    again = until("it is evicted", lambda: evicted(gang, name), SOON)
    gang.nodes.silent.clear()
    until("all four are gone", lambda: not first & {pod["metadata"]["uid"] for pod in gang.pods(name)}, SOON)
    assert len(set(gang.racks(name, 4))) == 1
    workload = gang.workload(name)
    assert workload["status"]["requeueState"]["count"] == 1
    # Not before the backoff was over.
    reserved = condition_of(workload, "QuotaReserved")["lastTransitionTime"]
    assert datetime.fromisoformat(reserved) >= datetime.fromisoformat(again)
    until("Kueue knows that it runs", lambda: is_true(gang.workload(name), "PodsReady"), SOON)
    # As far as it can be seen: there is no log of rank 0.
    run = gang.runs.get(name)
    assert run.phase is Phase.RUNNING and "refused to read the log" in run.message


def test_a_run_that_never_starts_is_given_up_after_the_last_attempt(gang):
    gang.nodes.silent |= {hosts(rack)[1] for rack in RACKS}
    name = gang.submit("never", pods=4, template="one-rack")
    until("it is evicted", lambda: evicted(gang, name), SOON)
    until("it begins again", lambda: begun(gang, name), SOON)
    until("it is given up", lambda: is_given_up(gang.workload(name)), SOON)
    until("its nodes are free", lambda: not gang.pods(name), SOON)
    ended = gang.runs.get(name)
    assert ended.phase is Phase.FAILED, ended.message
    assert re.search(r"Kueue has given it up .*maximum number of re-queuing retries", ended.message)
