"""Checks whether a tenant's network policies let the pods of one training job reach each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata_platform.doctor.finding import Finding, ok, problem, warning

JOB_LABEL, JOB_SET_LABEL = "training.kubeflow.org/job-name", "jobset.sigs.k8s.io/jobset-name"
"""Labels of the pods of training jobs, and of JobSets."""


def rendezvous(policies: Sequence[Mapping[str, Any]], label: str) -> Finding:
    """Check that pods of one job, which have this label, reach each other on any port, in both directions."""
    if not policies:
        return warning(
            "there is none: every pod of the cluster can reach the tenant's pods", "use the chart's policies"
        )
    of_jobs = [policy for policy in policies if _selects_jobs(policy["spec"].get("podSelector"), label)]
    closed: list[str] = []
    opening: list[str] = []
    for direction, peers in (("Ingress", "from"), ("Egress", "to")):
        concerned = [policy for policy in of_jobs if _concerns(policy, direction)]
        rules = [(policy, rule) for policy in concerned for rule in policy["spec"].get(direction.lower()) or []]
        opened = [policy["metadata"]["name"] for policy, rule in rules if _lets_peers(rule, peers, label)]
        opening += opened
        if not opened:
            closed += [policy["metadata"]["name"] for policy in concerned]
    if closed:
        return problem(
            f"{', '.join(dict.fromkeys(closed))} keep pods of a job apart: they wait for each other and time out "
            "(rendezvous uses port 23456, NCCL any port)",
            f"add a policy that lets pods with the label {label} reach each other on all ports, in and out",
        )
    if not opening:
        return ok("no policy keeps pods of a job apart")
    return ok(f"pods of a job reach each other ({', '.join(dict.fromkeys(opening))})")


def _concerns(policy: Mapping[str, Any], direction: str) -> bool:
    """Whether the policy restricts that direction. Without policyTypes, Kubernetes goes by the rules that it has."""
    spec = policy["spec"]
    return direction in (spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])])


def _selects_jobs(selector: Mapping[str, Any] | None, label: str) -> bool:
    """Whether a selector matches all pods, as an empty one does, or those of training jobs."""
    found = selector or {}
    keys = {*(found.get("matchLabels") or {}), *(e["key"] for e in found.get("matchExpressions") or [])}
    return not keys or any(key.partition("/")[0] == label.partition("/")[0] for key in keys)


def _lets_peers(rule: Mapping[str, Any], peers: str, label: str) -> bool:
    """Whether a rule admits pods of this namespace's jobs on any port; `peers` is the rule's field for them."""
    if rule.get("ports"):
        return False
    return not rule.get(peers) or any(_is_of_jobs(peer, label) for peer in rule[peers])


def _is_of_jobs(peer: Mapping[str, Any], label: str) -> bool:
    """Whether a peer matches pods of this namespace's jobs. Namespace selectors by label do not count."""
    if "ipBlock" in peer:
        return bool(peer["ipBlock"].get("cidr") == "0.0.0.0/0")
    return not peer.get("namespaceSelector") and _selects_jobs(peer.get("podSelector"), label)
