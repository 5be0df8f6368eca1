"""Whether a tenant's queues can ever admit a run, by what the chart publishes in each namespace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from strata_platform.quantity import parse_quantity

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Resources, Topology

CONFIG_MAP, KEY = "strata-queues", "shares.json"
"""The config map of the namespace, which members may read, and its key."""
VARIABLE = "STRATA_QUEUES"
"""The same text in the environment of pods."""

_DEFAULT = "default"
# The end of the names of GPUs' resources, where it is Flyte's configuration that names it.
_GPU = "/gpu"
_UNITS = {"cpu": "CPUs", _GPU: "GPUs"}
# What Kueue counts without a container that asks for it.
_PODS = "pods"


@dataclass(frozen=True)
class Shares:
    """The queues of a tenant, and the quotas behind them."""

    required: bool
    """Whether training jobs, and pods with GPUs or more than `unqueued`, are rejected without a queue."""
    unqueued: Mapping[str, Any]
    """The maximum of a pod without a queue; empty if the chart is too old to publish it."""
    queues: Mapping[str, str]
    """The cluster queue of each queue."""
    cluster_queues: Mapping[str, Mapping[str, Any]]
    """Cohort and quotas by name, as in the chart's values; without those that the chart did not make."""
    templates: Mapping[str, Mapping[str, Any]]
    """What the variants of the pod template add to a pod's resources; empty if the chart is too old to publish it."""

    @classmethod
    def parse(cls, text: str) -> Shares:
        """What the chart published."""
        values = json.loads(text)
        behind = {item["name"]: item for item in values["clusterQueues"]}
        added = values.get("podTemplates", {})
        return cls(values["required"], values.get("unqueuedLimits", {}), values["queues"], behind, added)

    def problem(self, resources: Resources, topology: Topology, *, is_job: bool) -> str | None:
        """Why no queue will ever admit a run, and the way out; None if one may.

        `is_job`: whether Kubernetes sees a training job: always without Flyte, whose runs of one pod are plain pods.
        """
        asked = resources.queue
        known = ", ".join(self.queues) or "none"
        if asked is not None and asked not in self.queues:
            return f"resources.queue: there is no queue {asked!r}, only: {known}"
        if asked is None and _DEFAULT not in self.queues:
            if self.required and (is_job or self._has_to_queue(resources)):
                return f"resources.queue: unset, and runs have to name one of the queues: {known}"
            return None
        name = asked or _DEFAULT
        need = list(_needs(resources, topology, self.templates.get(resources.pod_template or "", {})))
        why = self._refusal(self.queues[name], need)
        if why is None:
            return None
        others = [other for other, behind in self.queues.items() if other != name and self._fits(behind, need)]
        way = f"queue {', '.join(others)} can" if others else "no other queue of the tenant can either"
        return (
            f"resources: {why}, so queue {name!r} would never admit the run; {way}. Ask for less, or for a larger quota"
        )

    def _has_to_queue(self, asked: Resources) -> bool:
        """Whether the chart's policy rejects such a pod without a queue."""
        own = {"cpu": asked.cpu, "memory": asked.memory}
        most = ((own[name], limit) for name, limit in self.unqueued.items() if name in own)
        return bool(asked.gpu) or any(parse_quantity(value) > parse_quantity(limit) for value, limit in most)

    def _fits(self, cluster_queue: str, need: Sequence[_Need]) -> bool:
        return cluster_queue in self.cluster_queues and self._refusal(cluster_queue, need) is None

    def _refusal(self, cluster_queue: str, need: Sequence[_Need]) -> str | None:
        """What is too much for every flavor; None for a cluster queue that the chart does not know."""
        behind = self.cluster_queues.get(cluster_queue)
        if behind is None:
            return None
        reasons = []
        for quota in behind["quotas"]:
            most = {name: self._largest(cluster_queue, quota["flavor"], name) for name in quota["resources"]}
            found = next(_too_much(need, most), None)
            if found is None:
                return None
            reasons.append(f"{found} in flavor {quota['flavor']}")
        return "; ".join(reasons)

    def _largest(self, cluster_queue: str, flavor: str, resource: str) -> Decimal:
        """The largest admission of one resource: the queue's own quota, and what others of its cohort may lend it."""
        behind = self.cluster_queues[cluster_queue]
        own = _quota(behind, flavor, resource)
        nominal = parse_quantity(own["nominal"])
        if not behind.get("cohort"):
            return nominal
        lent = sum(
            (_lendable(_quota(other, flavor, resource)) for name, other in self.cluster_queues.items()
             if name != cluster_queue and other.get("cohort") == behind["cohort"]),
            Decimal(0),
        )  # fmt: skip
        limit = own.get("borrowingLimit", "")
        return nominal + (lent if limit == "" else min(lent, parse_quantity(limit)))


def _quota(behind: Mapping[str, Any], flavor: str, resource: str) -> Mapping[str, Any]:
    for quota in behind["quotas"]:
        if quota["flavor"] == flavor and resource in quota["resources"]:
            found: Mapping[str, Any] = quota["resources"][resource]
            return found
    return {"nominal": 0}


def _lendable(quota: Mapping[str, Any]) -> Decimal:
    nominal = parse_quantity(quota["nominal"])
    limit = quota.get("lendingLimit", "")
    return nominal if limit == "" else min(nominal, parse_quantity(limit))


class _Need(NamedTuple):
    """What all pods of the training job request together of one resource."""

    resource: str
    amount: Decimal
    without_quota: bool
    """Whether it may be admitted by a queue that has no quota of it."""


def _needs(asked: Resources, topology: Topology, template: Mapping[str, Any]) -> Iterator[_Need]:
    """GPUs of Flyte's configuration are under the end of their name."""
    pods = topology.nnodes
    # Kueue counts pods where there is a quota of them, and may be configured to ignore what has none.
    yield _Need(_PODS, Decimal(pods), without_quota=True)
    own = {"cpu": asked.cpu, "memory": asked.memory}
    gpu = (asked.gpu_resource or _GPU) if asked.gpu else ""
    for name, value in {**template, **own}.items():
        if not gpu or not name.endswith(gpu):
            yield _Need(name, pods * parse_quantity(value), without_quota=True)
    if gpu:
        yield _Need(gpu, Decimal(pods * asked.gpu), without_quota=False)


def _too_much(need: Sequence[_Need], most: Mapping[str, Decimal]) -> Iterator[str]:
    """What exceeds a flavor's largest admission, in words."""
    for name, wanted, without_quota in need:
        named = [resource for resource in most if resource == name or (name == _GPU and resource.endswith(name))]
        room = max((most[resource] for resource in named), default=Decimal(0))
        if (named or not without_quota) and wanted > room:
            yield f"all pods together ask for {_shown(name, wanted)} and at most {_shown(name, room)} can be had"


def _shown(name: str, value: Decimal) -> str:
    if name == "memory":
        return f"{value / 2**30:.4g} GiB of memory"
    return f"{value.normalize():f} {_UNITS.get(name, name)}"
