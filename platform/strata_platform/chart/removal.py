"""The hook before `helm uninstall`, in the training image: `python -m strata_platform.chart.removal`.

Kueue's objects have finalizers that only a running Kueue removes, and Helm deletes objects and Kueue in one go. So
the hook empties the release's queues while Kueue runs, and stops Kueue if it goes with the release. Runs are
suspended as by a preemption, and keep their jobs and checkpoints, from which a new installation can continue them.

The chart passes what the release has as JSON in the variable STRATA_REMOVAL. Exit code 1 ends the removal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, Field

from strata_platform.chart.keep_kinds import KEEP
from strata_platform.kubernetes_answers import is_true
from strata_platform.kubernetes_api import Access, ApiError, KubernetesApi, Object, items_if_installed

VARIABLE = "STRATA_REMOVAL"
_KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
_KINDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_WEBHOOKS = "/apis/admissionregistration.k8s.io/v1"
# A kind's objects go with a kind that is not kept. Those of other releases must not.
_CLUSTER_WIDE = ("clusterqueues", "resourceflavors", "topologies", "cohorts", "admissionchecks")
_SECONDS = 1.0


class Release(BaseModel):
    """What the chart knows of the release."""

    name: str
    namespace: str
    kueue_namespace: str
    local_queues: Annotated[list[tuple[str, str]], Field(description="Namespace and name.")]
    cluster_queues: list[str]
    flavors: list[str]
    topologies: list[str]
    cohorts: list[str] = []
    admission_checks: list[str] = []
    seconds: float


class CannotRemove(Exception):
    """The release cannot be removed; says why, and the way out."""


class Removal:
    """The steps of a removal, in their order."""

    def __init__(self, api: KubernetesApi, release: Release, sleep: Callable[[float], object] = time.sleep) -> None:
        self.api, self.release, self._sleep = api, release, sleep

    def run(self) -> None:
        """Do all of it.

        Raises:
            CannotRemove: runs did not stop, and Flyte and the queues go on with them; or a later step takes too long.
        """
        kind = self._get(f"{_KINDS}/workloads.kueue.x-k8s.io")
        with_kueue, kinds_stay = self._is_mine(kind), KEEP.items() <= _annotations(kind).items()
        if with_kueue and not kinds_stay:
            self._require_no_other_release()
        # Flyte first. It would make a pod in place of each one that ends, and spend all attempts of a run.
        stopped = self._stop("flyte-binary")
        try:
            self._suspend_runs()
        except BaseException:
            self._set_policy("None")
            self._scale(stopped)
            raise
        self._delete_queues()
        if with_kueue:
            self._stop("kueue")
            self._delete_webhooks()
            self._release_workloads(of_others=not kinds_stay)

    def _is_mine(self, item: Object | None) -> bool:
        notes = _annotations(item)
        owner = (notes.get("meta.helm.sh/release-name"), notes.get("meta.helm.sh/release-namespace"))
        return owner == (self.release.name, self.release.namespace)

    def _require_no_other_release(self) -> None:
        others = [
            f"{kind}/{item['metadata']['name']}"
            for kind in _CLUSTER_WIDE
            for item in self._items(f"{_KUEUE}/{kind}")
            if not self._is_mine(item)
        ]
        if others:
            raise CannotRemove(
                f"Kueue's kinds go with this release, and with them objects that are not of it: {', '.join(others)}; "
                "keep the kinds (python -m strata_platform.chart.keep_kinds charts/strata-stack, then helm upgrade), "
                "delete these objects first, or let Kueue be another release's"
            )

    def _suspend_runs(self) -> None:
        self._set_policy("HoldAndDrain")
        mine = set(self.release.cluster_queues)

        def held() -> list[str]:
            found = self._items(f"{_KUEUE}/workloads")
            return [_name(item) for item in found if _admitted_by(item) in mine]

        def run() -> list[str]:
            """Pods have their grace period, and some a finalizer that Kueue removes when they have ended."""
            labels = {"labelSelector": f"kueue.x-k8s.io/cluster-queue-name in ({','.join(sorted(mine))})"}
            found = [
                pod
                for place in sorted({place for place, _ in self.release.local_queues})
                for pod in self._items(f"/api/v1/namespaces/{place}/pods", **labels)
            ]
            return [_name(pod) for pod in found if not _has_ended(pod)]

        way = "end them with 'strata cancel NAME', or raise removal.seconds"
        self._until_none(held, "have not stopped", way)
        self._until_none(run, "have not stopped", way)
        print("every run of the queues is suspended", flush=True)

    def _set_policy(self, policy: str) -> None:
        for name in self.release.cluster_queues:
            self._change("PATCH", f"{_KUEUE}/clusterqueues/{name}", {"spec": {"stopPolicy": policy}})

    def _delete_queues(self) -> None:
        paths = [f"{_KUEUE}/namespaces/{place}/localqueues/{name}" for place, name in self.release.local_queues]
        for kind, names in (
            ("clusterqueues", self.release.cluster_queues),
            ("resourceflavors", self.release.flavors),
            ("topologies", self.release.topologies),
            ("cohorts", self.release.cohorts),
            ("admissionchecks", self.release.admission_checks),
        ):
            paths += [f"{_KUEUE}/{kind}/{name}" for name in names]
        for path in paths:
            self._change("DELETE", path)

        def left() -> list[str]:
            return [path.rpartition(f"{_KUEUE}/")[2] for path in paths if self._get(path) is not None]

        self._until_none(left, "are still there", "see the log of Kueue, which removes their finalizers")
        print("the queues are removed", flush=True)

    def _stop(self, program: str) -> dict[str, int]:
        """Stop the deployments of a program that are of the release; returns how many pods each of them had."""
        place, labels = self.release.kueue_namespace, {"labelSelector": f"app.kubernetes.io/name={program}"}
        deployments = f"/apis/apps/v1/namespaces/{place}/deployments"
        found = {
            f"{deployments}/{item['metadata']['name']}": item["spec"].get("replicas", 1)
            for item in self._items(deployments, **labels)
            if self._is_mine(item)
        }
        self._scale(dict.fromkeys(found, 0))
        if found:
            pods = partial(self._items, f"/api/v1/namespaces/{place}/pods", **labels)
            try:
                self._until_none(lambda: [_name(pod) for pod in pods()], "have not ended", "delete these pods")
            except BaseException:
                self._scale(found)
                raise
            print(f"{program} is stopped", flush=True)
        return found

    def _scale(self, deployments: dict[str, int]) -> None:
        for path, replicas in deployments.items():
            self._change("PATCH", path, {"spec": {"replicas": replicas}})

    def _delete_webhooks(self) -> None:
        """They would reject every pod of a tenant once nobody answers for them."""
        for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
            for item in self._items(f"{_WEBHOOKS}/{kind}"):
                if self._is_mine(item) and "kueue" in item["metadata"]["name"]:
                    self._change("DELETE", f"{_WEBHOOKS}/{kind}/{item['metadata']['name']}")

    def _release_workloads(self, *, of_others: bool) -> None:
        """Kueue makes workloads anew for the jobs that it finds. If their kind stays, so do those of other queues, and
        inactive ones: a canceled run, whose job is merely suspended, would start again.
        """
        mine = set(self.release.local_queues)
        for item in self._items(f"{_KUEUE}/workloads"):
            metadata = item["metadata"]
            if not of_others and (metadata["namespace"], item["spec"].get("queueName")) not in mine:
                continue
            path = f"{_KUEUE}/namespaces/{metadata['namespace']}/workloads/{metadata['name']}"
            self._change("PATCH", path, {"metadata": {"finalizers": None}})
            if of_others or item["spec"].get("active") is not False:
                self._change("DELETE", path)

    def _until_none(self, found: Callable[[], list[str]], problem: str, way: str) -> None:
        left = self.release.seconds
        while names := found():
            if left <= 0:
                raise CannotRemove(f"after {self.release.seconds:g} s these {problem}: {', '.join(names)}; {way}")
            self._sleep(_SECONDS)
            left -= _SECONDS

    def _get(self, path: str) -> Object | None:
        try:
            return self.api.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def _items(self, path: str, **query: Any) -> Iterable[Object]:
        return items_if_installed(self.api, path, **query)

    def _change(self, method: str, path: str, body: Any = None) -> None:
        """Change or delete an object, unless it is gone."""
        try:
            self.api.request(method, path, body)
        except ApiError as error:
            if error.status != 404:
                raise


def _annotations(item: Object | None) -> Object:
    found: Object = (item or {}).get("metadata", {}).get("annotations") or {}
    return found


def _name(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _has_ended(pod: Object) -> bool:
    over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return over and "deletionTimestamp" not in pod["metadata"]


def _admitted_by(workload: Object) -> str | None:
    """The cluster queue whose quota a workload holds."""
    found: str | None = (workload.get("status", {}).get("admission") or {}).get("clusterQueue")
    return None if is_true(workload, "Finished") else found


if __name__ == "__main__":
    try:
        Removal(KubernetesApi(Access.of_environment()), Release.model_validate_json(os.environ[VARIABLE])).run()
    except (CannotRemove, ApiError) as error:
        print(f"the release is not removed: {error}. 'helm uninstall --no-hooks' skips these steps", flush=True)
        sys.exit(1)
