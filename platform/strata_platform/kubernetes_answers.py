"""What a cluster's answers say, for those who check one: the doctor, and the tests of the chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PYTORCHJOB = "kubeflow.org/pytorchjob"
"""Kueue's integration that has jobs of several pods wait in queues. It is off as Kueue is shipped."""

TASK_LIMITS: Mapping[str, str] = {"cpu": "8", "memory": "32Gi"}
"""What a container of Strata's own tasks may use, whatever the spec asks for: the most that tasks/resources.py says."""


def frameworks(configurations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The integrations that are on in Kueue's configuration files."""
    return [name for found in configurations for name in (found.get("integrations") or {}).get("frameworks") or []]


def why_inactive(queue: Mapping[str, Any]) -> str | None:
    """Of a LocalQueue or ClusterQueue why it admits nothing; None when it is active."""
    conditions: Sequence[Mapping[str, Any]] = (queue.get("status") or {}).get("conditions") or []
    active = next((condition for condition in conditions if condition["type"] == "Active"), None)
    if active is None:
        return "Kueue says nothing of it; is Kueue running?"
    return None if active["status"] == "True" else f"{active.get('reason')}: {active.get('message')}"


def access_review(
    account: tuple[str, str], verb: str, group: str, resource: str, namespace: str | None = None
) -> dict[str, Any]:
    """A SubjectAccessReview: may a service account, by its namespace and name, do that in a namespace, or in all?"""
    asked = {"verb": verb, "group": group, "resource": resource}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{':'.join(account)}",
            "resourceAttributes": asked if namespace is None else {**asked, "namespace": namespace},
        },
    }
