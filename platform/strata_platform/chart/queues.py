"""Values of what the cluster's machines are and how runs share them: Kueue's cluster-wide objects."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strata_platform.chart.tenants import Toleration
from strata_platform.chart.value_fields import (
    DnsName,
    LabelKey,
    Labels,
    OptionalDnsName,
    OptionalQuantity,
    Quantity,
    ResourceName,
    Values,
)


class Topology(Values):
    """How nodes are near to each other, for pods of a run to be put close together."""

    name: DnsName = Field(description="Name.")
    levels: Annotated[tuple[LabelKey, ...], Field(min_length=1, max_length=16)] = Field(
        description="Labels of nodes, the widest first, such as block, rack, kubernetes.io/hostname."
    )


class Taint(Values):
    """A taint of nodes."""

    key: LabelKey = Field(description="Key.")
    value: str = Field("", description="Value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = Field("NoSchedule", description="Effect.")


class Flavor(Values):
    """A kind of machine."""

    name: DnsName = Field(description="Name.")
    node_labels: Labels = Field({}, description="Labels that its nodes carry; admitted pods are sent to those.")
    node_taints: tuple[Taint, ...] = Field((), description="Taints of its nodes; runs have to tolerate these.")
    tolerations: tuple[Toleration, ...] = Field((), description="Given to admitted pods.")
    topology: OptionalDnsName = Field("", description="Name of a topology; its nodes carry those labels.")


class QuotaOf(Values):
    """How much of one resource."""

    nominal: Quantity = Field(description="What is the queue's own.")
    borrowing_limit: OptionalQuantity = Field(
        "", description="At most this much more of its cohort's; empty: no limit."
    )
    lending_limit: OptionalQuantity = Field("", description="At most this much for its cohort; empty: all of it.")


class FlavorQuota(Values):
    """What a queue has of one flavor."""

    flavor: DnsName = Field(description="Name of a flavor.")
    resources: Annotated[dict[ResourceName, QuotaOf], Field(min_length=1)] = Field(
        description="Quota of each resource; all flavors of a queue name the same ones."
    )


class Preemption(Values):
    """Whose runs are suspended when another has to start. They resume from their checkpoints by themselves."""

    within_cluster_queue: Literal["Never", "LowerPriority", "LowerOrNewerEqualPriority"] = Field(
        "LowerPriority", description="Runs of the same queue."
    )
    reclaim_within_cohort: Literal["Never", "LowerPriority", "Any"] = Field(
        "Any", description="Runs of other queues that use what is this queue's own."
    )
    borrow_within_cohort: Literal["Never", "LowerPriority"] = Field(
        "Never", description="Runs of other queues, to borrow more."
    )


class ClusterQueue(Values):
    """A share of the cluster."""

    name: DnsName = Field(description="Name.")
    cohort: OptionalDnsName = Field("", description="Queues of one cohort lend each other what they do not use.")
    strategy: Literal["BestEffortFIFO", "StrictFIFO"] = Field(
        "BestEffortFIFO", description="Whether smaller runs may overtake one that has to wait."
    )
    quotas: Annotated[tuple[FlavorQuota, ...], Field(min_length=1)] = Field(
        description="Flavors in the order in which they are tried."
    )
    preemption: Preemption = Field(Preemption(), description="Whose runs give way.")


class Priority(Values):
    """A priority class: the name that a run's `resources.priority` gives."""

    name: DnsName = Field(description="Name.")
    value: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(description="Higher goes first.")
    description: str = Field("", description="What it is for.")


class Kueue(Values):
    """Where Kueue is."""

    check: bool = Field(
        True,
        description="Refuse to install while Kueue's configuration lacks the integration `kubeflow.org/pytorchjob`.",
    )
    namespace: DnsName = Field("kueue-system", description="Its namespace.")
    config_map: DnsName = Field("kueue-manager-config", description="Its configuration.")


class Queues(Values):
    """Kueue's cluster-wide objects, and who has to queue."""

    enabled: bool = Field(True, description="Create the objects of this section.")
    required: bool = Field(
        True, description="Refuse training jobs, and pods with GPUs, that name none of their tenant's queues."
    )
    gpu_resources: tuple[ResourceName, ...] = Field(
        ("nvidia.com/gpu", "amd.com/gpu"), description="Resources that only queued pods may have."
    )
    topologies: tuple[Topology, ...] = Field((), description="Topologies of nodes.")
    flavors: tuple[Flavor, ...] = Field((), description="Kinds of machines.")
    cluster_queues: tuple[ClusterQueue, ...] = Field((), description="Shares of the cluster.")
    priorities: tuple[Priority, ...] = Field((), description="Priority classes.")
    kueue: Kueue = Field(Kueue(), description="Where Kueue is.")
