"""Values of what each tenant gets: a namespace `<project>-<domain>`, which is where Flyte runs that project's tasks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strata_platform.chart.value_fields import (
    Annotations,
    Cidr,
    DnsLabel,
    DnsName,
    Labels,
    OptionalDnsName,
    OptionalPath,
    Path,
    PortNumber,
    Quantities,
    Quantity,
    UserId,
    Values,
    VariableName,
)
from strata_platform.kubernetes_answers import TASK_LIMITS


class Member(Values):
    """Who may look at a tenant's runs."""

    kind: Literal["Group", "User"] = Field(description="What the identity provider calls it.")
    name: Annotated[str, Field(min_length=1)] = Field(description="Name of the group or user.")


class ServiceAccount(Values):
    """The identity of a run's pods. It has no rights in the cluster and no token."""

    name: DnsName = Field("strata", description="Name, also to be given to Flyte where it chooses one.")
    annotations: Annotations = Field({}, description="Bind a cloud identity here: that is what object stores ask for.")


class TenantQueue(Values):
    """A Kueue LocalQueue: the name that a run's `resources.queue` gives."""

    name: DnsLabel = Field(description="Name; runs that name no queue go to the one called `default`, if there is one.")
    cluster_queue: DnsName = Field(description="ClusterQueue that it draws on.")


class Limits(Values):
    """A LimitRange for each container. Flyte's own containers ask for what they need."""

    default: Quantities = Field({"cpu": "2", "memory": "4Gi"}, description="Limits of a container that sets none.")
    default_request: Quantities = Field(
        {"cpu": "500m", "memory": "1Gi"}, description="Requests of a container that sets none."
    )
    max: Quantities = Field(
        {},
        description="No container may have limits above these. Tasks that prepare data may use "
        f"{TASK_LIMITS['cpu']} CPUs and {TASK_LIMITS['memory']}, so less is refused.",
    )


class Port(Values):
    """A port of a destination."""

    port: PortNumber = Field(description="Number.")
    protocol: Literal["TCP", "UDP"] = Field("TCP", description="Protocol.")


class Destination(Values):
    """Somewhere that pods may connect to: addresses, or pods of this cluster."""

    cidr: Cidr = Field("", description="Range of addresses; leave it out for pods of this cluster.")
    namespace: OptionalDnsName = Field("", description="Namespace of the pods; leave it out for addresses.")
    pod_labels: Labels = Field({}, description="Labels of the pods; empty for all of the namespace.")
    ports: tuple[Port, ...] = Field((), description="Ports; empty for all.")


_DNS = Destination(
    namespace="kube-system", pod_labels={"k8s-app": "kube-dns"}, ports=(Port(port=53), Port(port=53, protocol="UDP"))
)


class Network(Values):
    """Network policies: pods of a tenant's jobs reach each other and these destinations, and nothing else."""

    enabled: bool = Field(True, description="Create them. They do nothing where the network plugin ignores them.")
    dns: tuple[Destination, ...] = Field((_DNS,), description="Name servers.")
    flyte: tuple[Destination, ...] = Field(
        (),
        description="Flyte's control plane, for tasks of your own that call it; Strata's do not. Unless its "
        "authentication is on, whoever reaches it may see, start and stop the runs of all tenants.",
    )
    object_store: tuple[Destination, ...] = Field((), description="The object store of inputs, outputs and code.")
    others: tuple[Destination, ...] = Field((), description="Whatever else runs need, such as a model hub's mirror.")


class Toleration(Values):
    """A taint that pods tolerate."""

    key: str = Field(description="Key of the taint.")
    operator: Literal["", "Exists", "Equal"] = Field(
        "", description="How it is compared; empty is `Equal` where there is a value, and `Exists` where there is none."
    )
    value: str = Field("", description="Value of the taint.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field("", description="Empty for all effects.")


class Volume(Values):
    """A claim that pods mount. Host paths are not offered: the restricted pod security level refuses them."""

    name: DnsLabel = Field(description="Name.")
    claim: DnsName = Field(description="PersistentVolumeClaim in the namespace of the pods.")
    mount_path: Path = Field(description="Where it is mounted.")
    read_only: bool = Field(False, description="Mount it for reading alone.")


class TritonCache(Values):
    """Compiled kernels; TRITON_CACHE_DIR."""

    path: Path = Field(
        "/var/cache/strata/triton",
        description="Where it is mounted. The same absolute path everywhere: entries hold absolute paths.",
    )
    size_limit: Quantity = Field("10Gi", description="A pod that writes more is evicted.")


class HuggingFaceCache(Values):
    """Downloaded models and data sets; HF_HOME."""

    path: Path = Field("/var/cache/strata/huggingface", description="Where it is mounted.")
    size_limit: Quantity = Field("200Gi", description="A pod that writes more is evicted.")


class Caches(Values):
    """Directories of a pod's own, gone with the pod."""

    triton: TritonCache = Field(TritonCache(), description="Compiled kernels; TRITON_CACHE_DIR.")
    hugging_face: HuggingFaceCache = Field(HuggingFaceCache(), description="Models and data sets; HF_HOME.")


class PodVariant(Values):
    """A further PodTemplate, which differs from the tenant's in what is said here; a run's `resources.pod_template`."""

    name: DnsName = Field(description="Name.")
    annotations: Annotations = Field({}, description="For example, Kueue's topology requests.")
    node_selector: Labels = Field({}, description="Labels of nodes.")
    tolerations: tuple[Toleration, ...] = Field((), description="Further tolerations.")
    resources: Quantities = Field({}, description="Devices of each pod, such as `rdma/ib: 8`.")


class PodTemplate(Values):
    """What Flyte starts every pod of the tenant from; its `k8s.default-pod-template-name` has to be this name."""

    name: DnsName = Field("strata", description="Name.")
    labels: Labels = Field(
        {}, description="Labels of the pods, such as `azure.workload.identity/use`, which Azure's identities ask for."
    )
    annotations: Annotations = Field({}, description="Annotations of the pods.")
    env: dict[VariableName, str] = Field({}, description="Environment. Secrets do not belong here.")
    env_secrets: tuple[DnsName, ...] = Field((), description="Secrets of the tenant that become environment variables.")
    run_as_user: UserId = Field(1000, description="User of the processes; the image's own.")
    run_as_group: UserId = Field(1000, description="Group of the processes.")
    fs_group: UserId = Field(1000, description="Group that mounted volumes belong to.")
    working_dir: OptionalPath = Field(
        "", description="Where code is unpacked and run; must be writable. Empty for the image's own."
    )
    termination_grace_period_seconds: Annotated[int, Field(ge=30, le=3600)] = Field(
        120, description="From SIGTERM to SIGKILL; training tasks ask for as much themselves."
    )
    node_selector: Labels = Field({}, description="Labels of nodes for all pods of the tenant.")
    tolerations: tuple[Toleration, ...] = Field(
        (), description="For all pods of the tenant, also those without a GPU; flavors of a queue have their own."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="When images are pulled; Kubernetes' own default for what Flyte fills in is Always."
    )
    image_pull_secrets: tuple[DnsName, ...] = Field((), description="Secrets of the tenant to pull images with.")
    caches: Caches = Field(Caches(), description="Caches.")
    volumes: tuple[Volume, ...] = Field(
        (), description="Claims to mount, such as the one that a run's `output` lies on. /dev/shm comes from the run."
    )
    variants: tuple[PodVariant, ...] = Field((), description="Further templates, for fast networks and the like.")


class TenantSettings(Values):
    """What a tenant gets."""

    create_namespace: bool = Field(
        True,
        description="Create the namespace. Whoever does it instead puts the labels of pod security on it, and "
        "strata/tenant, which Kueue's configuration selects by.",
    )
    pod_security: Literal["restricted", "baseline", "privileged"] = Field(
        "restricted", description="Pod security level that the namespace enforces."
    )
    labels: Labels = Field({}, description="Further labels of the namespace.")
    members: tuple[Member, ...] = Field((), description="Who may read pods, logs, events, jobs and queues.")
    service_account: ServiceAccount = Field(ServiceAccount(), description="Identity of the pods.")
    queues: tuple[TenantQueue, ...] = Field((), description="Queues that the tenant's runs may name.")
    quota: Quantities = Field({}, description="ResourceQuota of the namespace, such as `requests.nvidia.com/gpu: 64`.")
    limits: Limits = Field(Limits(), description="LimitRange of the namespace.")
    network: Network = Field(Network(), description="Network policies.")
    pod_template: PodTemplate = Field(PodTemplate(), description="What pods are started from.")


class Tenant(TenantSettings):
    """A project and its domains; whatever else is said here differs from `tenantDefaults`, key by key."""

    project: DnsLabel = Field(description="Flyte project.")
    domains: Annotated[tuple[DnsLabel, ...], Field(min_length=1)] = Field(
        description="Flyte domains; each is a namespace `<project>-<domain>`."
    )
