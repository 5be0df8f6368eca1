"""Nodes for scheduling alone: Kubernetes and Kueue see their labels and GPUs, and that they are ready; no process runs.

A thread does what others wait for a kubelet to do: it renews the leases of the nodes, reports bound pods as running and
ready, and lets go of deleted ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import urllib3

from strata_platform.kubernetes_api import ApiError, KubernetesApi
from tests.e2e.helpers.cluster import until

GPUS = "nvidia.com/gpu"
# As of nodes with GPUs: no other pod of the cluster tolerates it.
TAINT = {"key": GPUS, "value": "present", "effect": "NoSchedule"}
CAPACITY = {"cpu": "64", "memory": "2Ti", "pods": "110", GPUS: "8", "ephemeral-storage": "1Ti"}
NODES, LEASES = "/api/v1/nodes", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
# Where pods are started that no queue knows.
SQUATTERS = "default"
# Kubernetes takes a node for lost after 50 seconds.
RENEWAL = 10


class Nodes:
    """Nodes with these labels, by name, from the start of a `with` block to its end."""

    def __init__(self, api: KubernetesApi, labels: Mapping[str, Mapping[str, str]]) -> None:
        self._api, self.labels = api, labels
        self.silent: set[str] = set()
        """Nodes whose pods never become ready."""
        self._over, self._error = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Nodes:
        try:
            for name, labels in self.labels.items():
                self._create(name, labels)
            self._thread.start()
            until("the nodes are schedulable", self._are_schedulable, 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Without its node, a pod is removed by Kubernetes only after minutes."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(60)
        for pod in self.pods():
            self._delete(_path(pod))
        for name in self.labels:
            self._delete(f"{NODES}/{name}")
            self._delete(f"{LEASES}/{name}")
        if self._error:
            raise self._error[0]

    def pods(self) -> list[dict[str, Any]]:
        """The pods that are bound to these nodes."""
        return [pod for pod in self._api.items("/api/v1/pods") if pod["spec"].get("nodeName") in self.labels]

    def occupy(self, node: str) -> None:
        """A pod that takes all GPUs of a node without Kueue."""
        everything = {GPUS: CAPACITY[GPUS]}
        container = {"name": "c", "image": "none", "resources": {"requests": everything, "limits": everything}}
        pod = {"metadata": {"name": f"on-{node}"}, "spec": {"nodeName": node, "containers": [container]}}
        self._api.request("POST", f"/api/v1/namespaces/{SQUATTERS}/pods", pod)

    def leave(self) -> None:
        """Remove the pods of `occupy`."""
        for pod in self.pods():
            if pod["metadata"]["namespace"] == SQUATTERS:
                self._delete(_path(pod))

    def _create(self, name: str, labels: Mapping[str, str]) -> None:
        own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **labels}
        node = {"metadata": {"name": name, "labels": own}, "spec": {"taints": [TAINT]}}
        self._api.request("POST", NODES, node)
        ready = {"type": "Ready", "status": "True", "reason": "ForTests", "message": "", **_since("lastTransitionTime")}
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [ready | _since("lastHeartbeatTime")]}
        self._api.request("PATCH", f"{NODES}/{name}/status", {"status": status})
        lease = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now("microseconds")}
        self._api.request("POST", LEASES, {"metadata": {"name": name}, "spec": lease})

    def _are_schedulable(self) -> bool:
        """Whether Kubernetes has taken away the taint that it gives every new node."""
        found = [node for node in self._api.items(NODES) if node["metadata"]["name"] in self.labels]
        return all({taint["key"] for taint in node["spec"]["taints"]} == {GPUS} for node in found)

    def _run(self) -> None:
        renewed = time.monotonic()
        while not self._over.wait(0.3):
            try:
                for pod in self.pods():
                    self._tend(pod)
                if time.monotonic() - renewed > RENEWAL:
                    renewed = time.monotonic()
                    for name in self.labels:
                        self._api.request("PATCH", f"{LEASES}/{name}", {"spec": {"renewTime": _now("microseconds")}})
            except urllib3.exceptions.HTTPError:
                # The API server is away for a moment.
                continue
            except BaseException as error:
                self._error.append(error)
                raise

    def _tend(self, pod: dict[str, Any]) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            self._delete(_path(pod))
        elif pod["status"]["phase"] == "Pending" and pod["spec"]["nodeName"] not in self.silent:
            began = _now("seconds")
            states = [
                {
                    "name": each["name"], "image": each["image"], "imageID": "", "ready": True, "started": True,
                    "restartCount": 0, "state": {"running": {"startedAt": began}},
                }
                for each in pod["spec"]["containers"]
            ]  # fmt: skip
            kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            conditions = [{"type": kind, "status": "True", "lastTransitionTime": began} for kind in kinds]
            status = {"phase": "Running", "startTime": began, "conditions": conditions, "containerStatuses": states}
            try:
                self._api.request("PATCH", f"{_path(pod)}/status", {"status": status})
            except ApiError as error:
                if error.status not in (404, 409):
                    raise

    def _delete(self, path: str) -> None:
        try:
            self._api.request("DELETE", path, gracePeriodSeconds="0")
        except ApiError as error:
            if error.status not in (404, 409):
                raise


def _path(pod: Mapping[str, Any]) -> str:
    its = pod["metadata"]
    return f"/api/v1/namespaces/{its['namespace']}/pods/{its['name']}"


def _now(precision: str) -> str:
    return datetime.now(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def _since(field: str) -> dict[str, str]:
    return {field: _now("seconds")}
