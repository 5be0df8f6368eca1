"""Values of Kueue's cluster-wide objects: kinds of nodes, and how runs share them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strata_platform.chart.tenants import Toleration
from strata_platform.chart.value_fields import (
    DnsLabel,
    DnsName,
    LabelKey,
    Labels,
    OptionalAddress,
    OptionalDnsName,
    OptionalDuration,
    OptionalQuantity,
    Quantities,
    Quantity,
    ResourceName,
    ResourcePattern,
    Values,
)
from strata_platform.kubernetes_answers import TASK_LIMITS


class Topology(Values):
    """Network topology of the nodes, so that Kueue places the pods of a run close together."""

    name: DnsName = Field(description="Name.")
    levels: Annotated[tuple[LabelKey, ...], Field(min_length=1, max_length=16)] = Field(
        description="Node labels, the widest level first, such as block, rack, kubernetes.io/hostname."
    )


class Taint(Values):
    """A taint of nodes."""

    key: LabelKey = Field(description="Key.")
    value: str = Field("", description="Value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = Field("NoSchedule", description="Effect.")


class Flavor(Values):
    """A kind of node."""

    name: DnsName = Field(description="Name.")
    node_labels: Labels = Field(
        {}, description="Labels of its nodes. Admitted pods are scheduled to nodes with these labels."
    )
    node_taints: tuple[Taint, ...] = Field((), description="Taints of its nodes. Runs must tolerate them.")
    tolerations: tuple[Toleration, ...] = Field((), description="Tolerations added to admitted pods.")
    topology: OptionalDnsName = Field(
        "", description="Name of an entry of `queues.topologies` whose labels the nodes have."
    )


class QuotaOf(Values):
    """Quota of one resource."""

    nominal: Quantity = Field(description="The queue's own quota.")
    borrowing_limit: OptionalQuantity = Field("", description="Maximum to borrow from the cohort; empty: no limit.")
    lending_limit: OptionalQuantity = Field("", description="Maximum to lend to the cohort; empty: all of it.")


class FlavorQuota(Values):
    """Quota of a queue in one flavor."""

    flavor: DnsName = Field(description="Name of a flavor.")
    resources: Annotated[dict[ResourceName, QuotaOf], Field(min_length=1)] = Field(
        description="Quota of each resource: `cpu`, `memory`, `pods`, and devices such as `nvidia.com/gpu`. All "
        "flavors of a queue name the same resources."
    )


class Preemption(Values):
    """Which runs are suspended so that another run can start. They resume from their checkpoints."""

    within_cluster_queue: Literal["Never", "LowerPriority", "LowerOrNewerEqualPriority"] = Field(
        "LowerPriority", description="Which runs of the same queue."
    )
    reclaim_within_cohort: Literal["Never", "LowerPriority", "Any"] = Field(
        "Any", description="Which runs of other queues that borrow this queue's quota."
    )
    borrow_within_cohort: Literal["Never", "LowerPriority"] = Field(
        "Never", description="Which runs of other queues, so that this queue can borrow more."
    )


class FlavorFungibility(Values):
    """Whether a run tries the next flavor of its queue before it borrows or preempts in this one."""

    when_can_borrow: Literal["MayStopSearch", "TryNextFlavor"] = Field(
        "MayStopSearch", description="What a run does that would have to borrow quota in this flavor."
    )
    when_can_preempt: Literal["MayStopSearch", "TryNextFlavor"] = Field(
        "TryNextFlavor", description="What a run does that would have to preempt others in this flavor."
    )


class QueueCheck(Values):
    """A condition that a run must meet after it has quota and before it starts."""

    name: DnsLabel = Field(description="Name of an entry of `queues.provisioning` or `queues.multiKueue`.")
    flavors: tuple[DnsName, ...] = Field(
        (), description="Flavors that the check applies to; empty: all flavors of the queue."
    )


class ClusterQueue(Values):
    """A ClusterQueue: a share of the cluster."""

    name: DnsName = Field(description="Name.")
    cohort: OptionalDnsName = Field("", description="Cohort. Queues of one cohort lend each other unused quota.")
    weight: OptionalQuantity = Field(
        "",
        description="Weight of the queue's share of the cohort's unused quota, if Kueue's configuration has "
        "`fairSharing`; empty: 1.",
    )
    strategy: Literal["BestEffortFIFO", "StrictFIFO"] = Field(
        "BestEffortFIFO", description="Whether smaller runs may overtake a waiting one."
    )
    quotas: Annotated[tuple[FlavorQuota, ...], Field(min_length=1)] = Field(
        description="Quotas by flavor, in the order in which Kueue tries the flavors."
    )
    preemption: Preemption = Field(Preemption(), description="Which runs may be preempted.")
    flavor_fungibility: FlavorFungibility = Field(
        FlavorFungibility(), description="When a run tries the next flavor, such as one of preemptible nodes."
    )
    admission_checks: tuple[QueueCheck, ...] = Field((), description="Further conditions for an admission.")


class Cohort(Values):
    """A cohort with a parent or a weight. Other cohorts need no entry."""

    name: DnsName = Field(description="Name, as in `clusterQueues`.")
    parent: OptionalDnsName = Field(
        "", description="Parent cohort, with whose queues this cohort's queues also share unused quota."
    )
    weight: OptionalQuantity = Field(
        "", description="Like a ClusterQueue's `weight`, among the children of one parent."
    )


class Provisioning(Values):
    """An admission check that requests nodes for the whole run from the cluster autoscaler before its pods start."""

    name: DnsLabel = Field(description="Name.")
    class_name: DnsName = Field(
        description="Class of the ProvisioningRequest, such as `check-capacity.autoscaling.x-k8s.io`."
    )
    parameters: dict[LabelKey, Annotated[str, Field(max_length=255)]] = Field(
        {}, description="Parameters of the class."
    )
    managed_resources: tuple[ResourceName, ...] = Field(
        (),
        description="Resources such as `nvidia.com/gpu`: only runs that request one of them are checked. Empty: all "
        "runs.",
    )
    retries: Annotated[int, Field(ge=0)] = Field(
        3, description="Maximum number of requests after a failed one, with growing intervals."
    )


class WorkerCluster(Values):
    """A cluster that runs are sent to."""

    name: DnsName = Field(description="Name.")
    secret: DnsName = Field(description="Secret of Kueue's namespace with the key `kubeconfig`.")


class MultiKueue(Values):
    """An admission check that sends a run to another cluster with the same namespaces and queues."""

    name: DnsLabel = Field(description="Name.")
    clusters: Annotated[tuple[WorkerCluster, ...], Field(min_length=1, max_length=20)] = Field(
        description="Clusters. The first one that admits the run runs it."
    )


class Priority(Values):
    """A priority class, named by a run's `resources.priority`."""

    name: DnsName = Field(description="Name.")
    value: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        description="Priority; a run with a higher value starts first."
    )
    description: str = Field("", description="Purpose of the class.")


class Kueue(Values):
    """Namespace and configuration of Kueue."""

    check: bool = Field(
        True,
        description="Fail the installation if Kueue's configuration lacks the integration `kubeflow.org/pytorchjob`, "
        "or, with submitters, `jobset.x-k8s.io/jobset`.",
    )
    namespace: DnsName = Field("kueue-system", description="Kueue's namespace.")
    config_map: DnsName = Field("kueue-manager-config", description="Kueue's config map.")


class QueueTimeout(Values):
    """A CronJob that ends waiting runs that can never be admitted, for example after a quota became smaller."""

    after: OptionalDuration = Field(
        "", description="Maximum time that such a run may wait, such as `1h`; empty: no limit."
    )
    flyte: OptionalAddress = Field(
        "", description="`host:port` of Flyte's gRPC service in the cluster, without TLS; empty without Flyte."
    )
    secret: OptionalDnsName = Field(
        "",
        description="Secret in the release's namespace with the keys `client_id` and `client_secret`, if Flyte has "
        "authentication.",
    )


class Queues(Values):
    """Kueue's cluster-wide objects, and which pods must be in a queue."""

    enabled: bool = Field(True, description="Create the objects of this section.")
    required: bool = Field(
        True,
        description="Reject training jobs, pods with accelerators or device claims, and large pods, unless they name a "
        "queue of their tenant.",
    )
    gpu_resources: tuple[ResourcePattern, ...] = Field(
        (
            "nvidia.com/gpu*",
            "nvidia.com/mig-*",
            "amd.com/*",
            "gpu.intel.com/*",
            "habana.ai/*",
            "google.com/tpu",
            "aws.amazon.com/neuron*",
            "deviceclass.resource.kubernetes.io/*",
        ),
        description="Resources that only pods in a queue may request; `*` at the end matches any rest.",
    )
    unqueued_limits: Quantities = Field(
        {"cpu": "16", "memory": "64Gi"},
        description="Maximum limits of a pod without a queue, summed over its containers. Strata's own tasks have up "
        f"to {TASK_LIMITS['cpu']} CPUs and {TASK_LIMITS['memory']}.",
    )
    timeout: QueueTimeout = Field(QueueTimeout(), description="End waiting runs that can never be admitted.")
    topologies: tuple[Topology, ...] = Field((), description="Network topologies of nodes.")
    flavors: tuple[Flavor, ...] = Field((), description="Kinds of nodes.")
    cluster_queues: tuple[ClusterQueue, ...] = Field((), description="Shares of the cluster.")
    cohorts: tuple[Cohort, ...] = Field((), description="Cohorts that have a parent or a weight.")
    provisioning: tuple[Provisioning, ...] = Field(
        (), description="Admission checks that request nodes from an autoscaler."
    )
    multi_kueue: tuple[MultiKueue, ...] = Field((), description="Admission checks that send runs to other clusters.")
    priorities: tuple[Priority, ...] = Field((), description="Priority classes.")
    kueue: Kueue = Field(Kueue(), description="Namespace and configuration of Kueue.")
