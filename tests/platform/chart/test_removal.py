"""The steps before `helm uninstall`, against a cluster in memory whose Kueue evicts and removes finalizers or not."""

import json

import pytest

from strata_platform.chart.removal import CannotRemove, Release, Removal
from strata_platform.kubernetes_api import ApiError

MINE = {"meta.helm.sh/release-name": "strata", "meta.helm.sh/release-namespace": "strata-system"}
KUEUE, HOOKS = "/apis/kueue.x-k8s.io/v1beta2", "/apis/admissionregistration.k8s.io/v1"
KIND = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/workloads.kueue.x-k8s.io"
SYSTEM = "strata-system"
RELEASE = Release(
    name="strata", namespace=SYSTEM, kueue_namespace=SYSTEM, local_queues=[("team-a", "research")],
    cluster_queues=["shared"], flavors=["h100"], topologies=[],
    cohorts=["research"], admission_checks=["make-nodes"], seconds=3,
)  # fmt: skip


def item(name, namespace="", notes=MINE, **more):
    return {"metadata": {"name": name, "namespace": namespace, "annotations": notes}, **more}


class Cluster:
    """Objects by path. Kueue evicts what a drained queue admitted, unless it is `stuck`."""

    def __init__(self, kueue_is_ours=True, stuck=False):
        self.stuck, self.log = stuck, []
        self.objects = {
            KIND: item("workloads", notes=MINE if kueue_is_ours else {}),
            f"{KUEUE}/clusterqueues/shared": item("shared"),
            f"{KUEUE}/resourceflavors/h100": item("h100"),
            f"{KUEUE}/cohorts/research": item("research"),
            f"{KUEUE}/admissionchecks/make-nodes": item("make-nodes"),
            f"{KUEUE}/namespaces/team-a/localqueues/research": item("research", "team-a"),
            f"{KUEUE}/namespaces/team-a/workloads/run": item(
                "run",
                "team-a",
                notes={},
                spec={"queueName": "research"},
                status={"admission": {"clusterQueue": "shared"}},
            ),
            f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/kueue": item("kueue", SYSTEM, spec={}),
            f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/flyte-binary": item(
                "flyte-binary", SYSTEM, spec={"replicas": 2}
            ),
            f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/other": item("other", SYSTEM, notes={}),
            "/api/v1/namespaces/team-a/pods/done": item("done", "team-a", status={"phase": "Succeeded"}),
            f"/api/v1/namespaces/{SYSTEM}/pods/kueue-0": item("kueue-0", SYSTEM),
            f"{HOOKS}/mutatingwebhookconfigurations/kueue": item("kueue"),
            f"{HOOKS}/mutatingwebhookconfigurations/istio": item("istio", notes={}),
        }

    def get(self, path, **query):
        if path not in self.objects:
            raise ApiError(404, "NotFound", path)
        return self.objects[path]

    def items(self, path, labelSelector="", **query):  # as Kubernetes spells it
        kind, plural = path.rsplit("/", 1)
        # A selector of a set picks pods of queues, which all of team-a are.
        wanted = "" if " in " in labelSelector else labelSelector.rpartition("=")[2]
        return [
            found for at, found in list(self.objects.items())
            if at.startswith(kind) and at.split("/")[-2] == plural and found["metadata"]["name"].startswith(wanted)
        ]  # fmt: skip

    def request(self, method, path, body=None):
        self.get(path)
        self.log.append((method, path.rpartition("/")[2], json.dumps(body) if body else ""))
        if method == "DELETE":
            del self.objects[path]
        elif body == {"spec": {"stopPolicy": "HoldAndDrain"}} and not self.stuck:
            self.objects[f"{KUEUE}/namespaces/team-a/workloads/run"]["status"] = {}
        elif body == {"spec": {"replicas": 0}}:
            self.objects.pop(f"/api/v1/namespaces/{SYSTEM}/pods/{path.rpartition('/')[2]}-0", None)


def remove(cluster):
    Removal(cluster, RELEASE, sleep=lambda seconds: None).run()


def test_each_wait_has_the_whole_time():
    """Runs take all but the last second to stop, and objects two seconds to go."""
    cluster, seconds = Cluster(stuck=True), []
    request, get = cluster.request, cluster.get

    def sleep(_):
        seconds.append(1)
        if len(seconds) == 3:
            cluster.objects[f"{KUEUE}/namespaces/team-a/workloads/run"]["status"] = {}

    def slow(method, path, body=None):
        if method == "DELETE" and path.endswith("flavors/h100"):
            cluster.going = len(seconds) + 2
            return
        request(method, path, body)

    def gone(path, **query):
        if path.endswith("flavors/h100") and len(seconds) >= cluster.going:
            cluster.objects.pop(path, None)
        return get(path, **query)

    cluster.request, cluster.get = slow, gone
    Removal(cluster, RELEASE, sleep=sleep).run()
    assert len(seconds) == 5
    assert f"{KUEUE}/resourceflavors/h100" not in cluster.objects


def test_pods_that_are_ending_are_waited_for_while_kueue_runs():
    """Kueue has taken the quota back, but the pods of the run have their grace period."""
    cluster, seconds = Cluster(), []
    pod = "/api/v1/namespaces/team-a/pods/run-worker-0"
    cluster.objects[pod] = item("run-worker-0", "team-a", status={"phase": "Running"})

    def sleep(_):
        seconds.append(1)
        if len(seconds) == 2:
            del cluster.objects[pod]

    Removal(cluster, RELEASE, sleep=sleep).run()
    assert [name for _, name, _ in cluster.log][:3] == ["flyte-binary", "shared", "research"] and len(seconds) == 2
    cluster = Cluster()
    cluster.objects[pod] = item("run-worker-0", "team-a", status={"phase": "Failed"})
    cluster.objects[pod]["metadata"]["deletionTimestamp"] = "now"
    with pytest.raises(CannotRemove, match="have not stopped: team-a/run-worker-0"):
        remove(cluster)
    assert [body for *_, body in cluster.log[-2:]] == ['{"spec": {"stopPolicy": "None"}}', '{"spec": {"replicas": 2}}']


def test_runs_are_suspended_before_queues_go_and_kueue_is_stopped_before_its_workloads_are_freed():
    cluster = Cluster()
    remove(cluster)
    done = [(method, name) for method, name, _ in cluster.log]
    assert done == [
        ("PATCH", "flyte-binary"), ("PATCH", "shared"), ("DELETE", "research"), ("DELETE", "shared"),
        ("DELETE", "h100"), ("DELETE", "research"), ("DELETE", "make-nodes"),
        ("PATCH", "kueue"), ("DELETE", "kueue"), ("PATCH", "run"), ("DELETE", "run"),
    ]  # fmt: skip
    assert any(path.endswith("istio") for path in cluster.objects)


def test_a_kueue_of_another_release_goes_on_with_its_workloads():
    cluster = Cluster(kueue_is_ours=False)
    remove(cluster)
    assert [name for _, name, _ in cluster.log] == [
        "flyte-binary", "shared", "research", "shared", "h100", "research", "make-nodes",
    ]  # fmt: skip
    assert f"{KUEUE}/namespaces/team-a/workloads/run" in cluster.objects


def test_runs_that_do_not_stop_keep_everything_and_flyte_and_their_queue_go_on():
    cluster = Cluster(stuck=True)
    with pytest.raises(CannotRemove, match="after 3 s these have not stopped: team-a/run"):
        remove(cluster)
    assert [(method, body) for method, _, body in cluster.log] == [
        ("PATCH", '{"spec": {"replicas": 0}}'), ("PATCH", '{"spec": {"stopPolicy": "HoldAndDrain"}}'),
        ("PATCH", '{"spec": {"stopPolicy": "None"}}'), ("PATCH", '{"spec": {"replicas": 2}}'),
    ]  # fmt: skip


def test_objects_that_would_go_with_kueues_kinds_are_named_and_nothing_is_touched():
    cluster = Cluster()
    cluster.objects[f"{KUEUE}/clusterqueues/theirs"] = item("theirs", notes={})
    with pytest.raises(CannotRemove, match="clusterqueues/theirs"):
        remove(cluster)
    assert cluster.log == []


def test_objects_of_others_stay_with_kinds_that_are_kept():
    cluster = Cluster()
    cluster.objects[KIND]["metadata"]["annotations"] = MINE | {"helm.sh/resource-policy": "keep"}
    theirs = f"{KUEUE}/namespaces/team-b/workloads/theirs"
    cluster.objects[theirs] = item("theirs", "team-b", notes={}, spec={"queueName": "research"})
    cluster.objects[f"{KUEUE}/clusterqueues/theirs"] = item("theirs", notes={})
    canceled = f"{KUEUE}/namespaces/team-a/workloads/canceled"
    inactive = {"queueName": "research", "active": False}
    cluster.objects[canceled] = item("canceled", "team-a", notes={}, spec=inactive)
    remove(cluster)
    assert {f"{KUEUE}/clusterqueues/theirs", theirs} <= cluster.objects.keys()
    # Its own are gone all the same: Kueue makes them anew. That of a canceled run would be an active one.
    assert (
        canceled in cluster.objects
        and ("PATCH", "canceled", json.dumps({"metadata": {"finalizers": None}})) in cluster.log
    )
    assert f"{KUEUE}/namespaces/team-a/workloads/run" not in cluster.objects
