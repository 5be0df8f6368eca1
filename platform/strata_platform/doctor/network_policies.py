"""What a tenant's network policies let pods of one training job do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata_platform.doctor.finding import Finding, ok, problem, warning


def rendezvous(policies: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether pods of one job reach each other on any port: out of one, and into the other."""
    if not policies:
        return warning("there is none: whatever runs here is reached by every pod of the cluster", "see the chart's")
    of_jobs = [policy for policy in policies if _selects_jobs(policy["spec"].get("podSelector"))]
    closed: list[str] = []
    opening: list[str] = []
    for direction, peers in (("Ingress", "from"), ("Egress", "to")):
        concerned = [policy for policy in of_jobs if _concerns(policy, direction)]
        rules = [(policy, rule) for policy in concerned for rule in policy["spec"].get(direction.lower()) or []]
        opened = [policy["metadata"]["name"] for policy, rule in rules if _lets_peers(rule, peers)]
        opening += opened
        if not opened:
            closed += [policy["metadata"]["name"] for policy in concerned]
    if closed:
        return problem(
            f"{', '.join(dict.fromkeys(closed))} keep pods of a job apart: they wait for each other and time out "
            "(rendezvous is on port 23456, NCCL's ports are any)",
            "add a policy that lets pods with the label training.kubeflow.org/job-name reach each other on all ports, "
            "in and out",
        )
    if not opening:
        return ok("none keeps pods of a job apart")
    return ok(f"pods of a job reach each other ({', '.join(dict.fromkeys(opening))})")


def _concerns(policy: Mapping[str, Any], direction: str) -> bool:
    """Whether it restricts that direction; as Kubernetes has it, a policy that does not say concerns what it has."""
    spec = policy["spec"]
    return direction in (spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])])


def _selects_jobs(selector: Mapping[str, Any] | None) -> bool:
    """Whether the pods of a selector are all, as those of none are, or those of training jobs."""
    found = selector or {}
    keys = {*(found.get("matchLabels") or {}), *(e["key"] for e in found.get("matchExpressions") or [])}
    return not keys or any(key.startswith("training.kubeflow.org/") for key in keys)


def _lets_peers(rule: Mapping[str, Any], peers: str) -> bool:
    """Whether a rule is for pods of jobs in this namespace, on any port; `peers` is its field of who they are."""
    if rule.get("ports"):
        return False
    return not rule.get(peers) or any(map(_is_of_jobs, rule[peers]))


def _is_of_jobs(peer: Mapping[str, Any]) -> bool:
    """Whether pods of jobs in this namespace are among them; of namespaces by their labels nothing is known."""
    if "ipBlock" in peer:
        return bool(peer["ipBlock"].get("cidr") == "0.0.0.0/0")
    return not peer.get("namespaceSelector") and _selects_jobs(peer.get("podSelector"))
