"""Values of a tenant: a namespace `<project>-<domain>`, in which Flyte runs that project's tasks."""

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
    QuotaKey,
    UserId,
    Values,
    VariableName,
)
from strata_platform.kubernetes_answers import TASK_LIMITS


class Member(Values):
    """A group or user of a tenant."""

    kind: Literal["Group", "User"] = Field(description="Kind of identity.")
    name: Annotated[str, Field(min_length=1)] = Field(description="Name of the group or user.")


class ServiceAccount(Values):
    """The identity of a run's pods, without rights in the cluster and without a token."""

    name: DnsName = Field("strata", description="Name. Select this account in Flyte if you choose one for a run.")
    annotations: Annotations = Field({}, description="Annotations, such as those that bind a cloud identity.")


class TenantQueue(Values):
    """A Kueue LocalQueue, named by a run's `resources.queue`."""

    name: DnsLabel = Field(description="Name. A run without a queue goes to the queue `default`, if the tenant has it.")
    cluster_queue: DnsName = Field(description="ClusterQueue whose quota its runs use.")


class Limits(Values):
    """A LimitRange for containers that set no resources. Flyte's own containers set theirs."""

    default: Quantities = Field({"cpu": "2", "memory": "4Gi"}, description="Limits of a container that sets none.")
    default_request: Quantities = Field(
        {"cpu": "500m", "memory": "1Gi"}, description="Requests of a container that sets none."
    )
    max: Quantities = Field(
        {},
        description="Maximum limits of a container. Lower values than "
        f"{TASK_LIMITS['cpu']} CPUs and {TASK_LIMITS['memory']}, the limits of tasks that prepare data, are rejected.",
    )


class Port(Values):
    """A port of a destination."""

    port: PortNumber = Field(description="Port number.")
    protocol: Literal["TCP", "UDP"] = Field("TCP", description="Protocol.")


class Destination(Values):
    """A destination that pods may connect to: addresses, or pods of this cluster."""

    cidr: Cidr = Field(
        "",
        description="Address range, such as `10.0.0.0/8` or `fd00::/64`; leave it empty for pods of this cluster.",
    )
    namespace: OptionalDnsName = Field("", description="Namespace of the pods; leave it empty for an address range.")
    pod_labels: Labels = Field({}, description="Labels of the pods; empty: all pods of the namespace.")
    ports: tuple[Port, ...] = Field((), description="Ports; empty: all.")


_DNS = Destination(
    namespace="kube-system", pod_labels={"k8s-app": "kube-dns"}, ports=(Port(port=53), Port(port=53, protocol="UDP"))
)


class Network(Values):
    """Network policies: the pods of a job can reach only each other and these destinations."""

    enabled: bool = Field(True, description="Create network policies. They need a network plugin that enforces them.")
    dns: tuple[Destination, ...] = Field((_DNS,), description="DNS servers.")
    flyte: tuple[Destination, ...] = Field(
        (),
        description="Flyte's control plane, for your own tasks that call it; Strata's tasks do not. Unless Flyte has "
        "authentication, a pod that can reach it can see, start and stop the runs of all tenants.",
    )
    object_store: tuple[Destination, ...] = Field((), description="Object store of inputs, outputs and code.")
    others: tuple[Destination, ...] = Field((), description="Other destinations that runs need, such as a Hub mirror.")


class Toleration(Values):
    """A toleration of pods."""

    key: str = Field(description="Key of the taint.")
    operator: Literal["", "Exists", "Equal"] = Field(
        "", description="Operator; empty means `Equal` with a value, and `Exists` without one."
    )
    value: str = Field("", description="Value of the taint.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "", description="Effect of the taint; empty: all effects."
    )


class Volume(Values):
    """A claim that pods mount. Host paths are not supported: the restricted pod security standard rejects them."""

    name: DnsLabel = Field(description="Name.")
    claim: DnsName = Field(description="PersistentVolumeClaim in the namespace of the pods.")
    mount_path: Path = Field(
        description="Mount path. Not in `/dev`, `/proc` or `/sys`, and not `/opt/strata`, which has the image's "
        "packages."
    )
    read_only: bool = Field(False, description="Mount it read-only.")


class TritonCache(Values):
    """Compiled kernels; TRITON_CACHE_DIR."""

    path: Path = Field(
        "/var/cache/strata/triton",
        description="Mount path. Use the same path everywhere, because cache entries contain absolute paths.",
    )
    size_limit: Quantity = Field("10Gi", description="Maximum size. A pod that writes more is evicted.")


class HuggingFaceCache(Values):
    """Downloaded models and data sets; HF_HOME."""

    path: Path = Field("/var/cache/strata/huggingface", description="Mount path.")
    size_limit: Quantity = Field("200Gi", description="Maximum size. A pod that writes more is evicted.")


class Caches(Values):
    """Cache directories of a pod, deleted with it."""

    triton: TritonCache = Field(TritonCache(), description="Compiled kernels; TRITON_CACHE_DIR.")
    hugging_face: HuggingFaceCache = Field(HuggingFaceCache(), description="Models and data sets; HF_HOME.")


class PodVariant(Values):
    """A further PodTemplate, with changes to the tenant's; a run names it in `resources.pod_template`."""

    name: DnsName = Field(description="Name.")
    annotations: Annotations = Field(
        {}, description="Additional annotations, such as Kueue's topology requests or networks that Multus attaches."
    )
    env: dict[VariableName, str] = Field({}, description="Additional environment variables, such as NCCL's.")
    node_selector: Labels = Field({}, description="Additional labels of the nodes to run on.")
    tolerations: tuple[Toleration, ...] = Field((), description="Additional tolerations.")
    resources: Quantities = Field(
        {}, description="Devices of each pod, such as `rdma/ib: 8`, and `hugepages-2Mi` if the network needs them."
    )


class PodTemplate(Values):
    """The PodTemplate of the tenant's pods; set Flyte's `k8s.default-pod-template-name` to its name."""

    name: DnsName = Field("strata", description="Name.")
    labels: Labels = Field(
        {}, description="Labels of the pods, such as `azure.workload.identity/use` for Azure's workload identity."
    )
    annotations: Annotations = Field({}, description="Annotations of the pods.")
    env: dict[VariableName, str] = Field({}, description="Environment variables. Do not put secrets here.")
    env_secrets: tuple[DnsName, ...] = Field(
        (), description="Secrets in the tenant's namespace that become environment variables."
    )
    run_as_user: UserId = Field(1000, description="User id of the processes; 1000 is the image's user.")
    run_as_group: UserId = Field(1000, description="Group id of the processes.")
    fs_group: UserId = Field(1000, description="Group id of mounted volumes.")
    working_dir: OptionalPath = Field(
        "", description="Working directory, into which code is unpacked; must be writable. Empty: the image's own."
    )
    termination_grace_period_seconds: Annotated[int, Field(ge=30, le=3600)] = Field(
        120, description="Seconds from SIGTERM to SIGKILL. Training tasks set 120 themselves."
    )
    node_selector: Labels = Field({}, description="Labels of the nodes on which all pods of the tenant run.")
    tolerations: tuple[Toleration, ...] = Field(
        (), description="Tolerations of all pods of the tenant, also of those without a GPU. Flavors add their own."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent",
        description="Image pull policy. Kubernetes would default to Always, because of the template's placeholder "
        "image.",
    )
    image_pull_secrets: tuple[DnsName, ...] = Field((), description="Image pull secrets of the tenant.")
    caches: Caches = Field(Caches(), description="Caches.")
    volumes: tuple[Volume, ...] = Field(
        (), description="Claims to mount, such as that of a run's `output`. The run's spec sets the size of /dev/shm."
    )
    variants: tuple[PodVariant, ...] = Field((), description="Additional templates, for example for RDMA networks.")


class TenantSettings(Values):
    """Settings of a tenant."""

    create_namespace: bool = Field(
        True,
        description="Create the namespace. If you create it yourself, set the labels of pod security, and "
        "`strata/tenant`, by which Kueue's configuration selects namespaces.",
    )
    pod_security: Literal["restricted", "baseline", "privileged"] = Field(
        "restricted", description="Pod security standard that the namespace enforces."
    )
    labels: Labels = Field(
        {},
        description="Additional labels of the namespace. Not those of pod security, of the chart, of "
        "`app.kubernetes.io/` and of `helm.sh/`.",
    )
    members: tuple[Member, ...] = Field(
        (), description="Groups and users that may read pods, logs, events, jobs and queues."
    )
    submitters: tuple[Member, ...] = Field(
        (),
        description="Groups and users that may also submit and cancel runs without Flyte, as JobSets. The pods of such "
        "a run can read every Secret and claim of the namespace.",
    )
    service_account: ServiceAccount = Field(ServiceAccount(), description="Service account of the pods.")
    queues: tuple[TenantQueue, ...] = Field((), description="Queues that the tenant's runs may name.")
    quota: dict[QuotaKey, Quantity] = Field(
        {}, description="ResourceQuota of the namespace, such as `requests.nvidia.com/gpu: 64`."
    )
    limits: Limits = Field(Limits(), description="LimitRange of the namespace.")
    network: Network = Field(Network(), description="Network policies.")
    pod_template: PodTemplate = Field(PodTemplate(), description="PodTemplate of the tenant's pods.")


class Tenant(TenantSettings):
    """A project and its domains. The other keys override those of `tenantDefaults`."""

    project: DnsLabel = Field(description="Flyte project.")
    domains: Annotated[tuple[DnsLabel, ...], Field(min_length=1)] = Field(
        description="Flyte domains. Each has a namespace `<project>-<domain>`."
    )
