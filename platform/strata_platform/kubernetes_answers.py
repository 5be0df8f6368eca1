"""Interprets answers of the Kubernetes API, for the doctor and for the tests of the chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PYTORCHJOB = "kubeflow.org/pytorchjob"
"""Kueue's integration that queues jobs of several pods. Kueue's default configuration does not enable it."""

JOBSET = "jobset.x-k8s.io/jobset"
"""Kueue's integration that queues runs without Flyte."""

TASK_LIMITS: Mapping[str, str] = {"cpu": "8", "memory": "32Gi"}
"""Limits of Strata's own tasks, whatever the spec requests; the largest ones in tasks/resources.py."""


def frameworks(configurations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The integrations that Kueue's configuration files enable."""
    return [name for found in configurations for name in (found.get("integrations") or {}).get("frameworks") or []]


def condition_of(item: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """The condition of this type, if the object has it."""
    conditions: Sequence[dict[str, Any]] = (item.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), None)


def is_true(item: Mapping[str, Any], kind: str) -> bool:
    """Whether the object has the condition of this type, and it is true."""
    return (condition_of(item, kind) or {}).get("status") == "True"


def why_inactive(queue: Mapping[str, Any]) -> str | None:
    """Why a LocalQueue or ClusterQueue admits nothing; None if it is active."""
    active = condition_of(queue, "Active")
    if active is None:
        return "Kueue has not reported its status; is Kueue running?"
    return None if active["status"] == "True" else f"{active.get('reason')}: {active.get('message')}"


def access_review(
    account: tuple[str, str], verb: str, group: str, resource: str, namespace: str | None = None
) -> dict[str, Any]:
    """A SubjectAccessReview of a service account (namespace, name), in one namespace or in all."""
    asked = {"verb": verb, "group": group, "resource": resource}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{':'.join(account)}",
            "resourceAttributes": asked if namespace is None else {**asked, "namespace": namespace},
        },
    }
