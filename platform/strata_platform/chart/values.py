"""The values of charts/strata. Every key has a default; with the defaults the chart creates almost nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from strata_platform.chart.kernel_cache import Kernels
from strata_platform.chart.observability import Observability
from strata_platform.chart.queues import Queues
from strata_platform.chart.tenants import Tenant, TenantSettings, Toleration, Volume
from strata_platform.chart.value_fields import (
    Address,
    DnsName,
    ImageTag,
    Labels,
    OptionalDnsName,
    OptionalDuration,
    Path,
    Quantities,
    Repository,
    ResourceName,
    Values,
    VariableName,
)
from strata_platform.estimate.prices import Prices


class Image(Values):
    """The training image, which the chart's own pods run."""

    repository: Repository = Field(
        "", description="Repository, without a tag. The chart's test pods, Jobs and DaemonSets need it."
    )
    tag: ImageTag = Field("", description="Tag or `sha256:` digest; by default the chart's appVersion.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="Image pull policy.")
    pull_secrets: tuple[DnsName, ...] = Field((), description="Image pull secrets of the release's namespace.")


class Flyte(Values):
    """Flyte's service account, and its rights in the tenants' namespaces."""

    namespace: DnsName = Field("flyte", description="Namespace of the service account.")
    service_account: DnsName = Field("flyte-binary", description="Name of the service account.")
    rights: bool = Field(
        True,
        description="Create a role for this account in each tenant's namespace: for workflows, pods, training jobs and "
        "events. Without these roles, Flyte can start runs only with a role in the whole cluster.",
    )


class TestJob(Values):
    """A job of two pods through each tenant's first queue."""

    seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        240,
        description="Maximum seconds, the wait in the queue included; 0: no test job. `helm test` itself waits 300 "
        "seconds by default.",
    )
    resources: Quantities = Field({"cpu": "1", "memory": "2Gi"}, description="Requests and limits of each pod.")


class AllReduceTest(Values):
    """A job through the first tenant's first queue that measures all-reduces between nodes: NCCL on GPUs."""

    nodes: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Number of pods, at least 2, spread over nodes; 0: no test."
    )
    gpus: Annotated[int, Field(ge=0, le=64)] = Field(
        8,
        description="GPUs of each pod: all of the node's. 0 runs one process per pod on CPUs, to try the test itself.",
    )
    gpu_resource: ResourceName = Field(
        "nvidia.com/gpu", description="Kubernetes resource of the GPUs, such as `amd.com/gpu`."
    )
    pod_template: OptionalDnsName = Field(
        "", description="Name of the pod template, such as a variant with RDMA devices; empty: the tenant's own."
    )
    min_bandwidth: Annotated[float, Field(ge=0)] = Field(
        0, description="Minimum bus bandwidth for the largest tensor, in GB/s. The test fails below it; 0: no limit."
    )
    largest: Annotated[int, Field(ge=1, le=65536)] = Field(1024, description="Size of the largest tensor, in MiB.")
    seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        900, description="Maximum seconds, the wait in the queue included. Run `helm test` with a longer `--timeout`."
    )
    resources: Quantities = Field(
        {"cpu": "8", "memory": "32Gi"}, description="Requests and limits of each pod, besides the GPUs."
    )


class Tests(Values):
    """What `helm test` runs: checks of every object, a pod, and a job of two pods in each tenant's namespace."""

    enabled: bool = Field(True, description="Create the test pods when `helm test` is run.")
    python: str = Field(
        "python", description="Python interpreter in the image, for all pods of the chart that run Strata's code."
    )
    resources: Quantities = Field(
        {"cpu": "500m", "memory": "512Mi"},
        description="Requests and limits of a test pod, and of the Job of `queues.timeout`.",
    )
    env: dict[VariableName, str] = Field(
        {},
        description="Environment variables of the chart's pods in the release's namespace. Variables of caches are not "
        "allowed, because only runs have caches.",
    )
    volumes: tuple[Volume, ...] = Field(
        (), description="Claims of the release's namespace that the chart's pods there mount."
    )
    reachable: tuple[Address, ...] = Field((), description="`host:port` that a tenant's pods must reach.")
    unreachable: tuple[Address, ...] = Field(
        (),
        description="`host:port` that a tenant's pods must not reach. Set it if the network plugin enforces policies.",
    )
    job: TestJob = Field(TestJob(), description="A job of two pods through each tenant's first queue.")
    all_reduce: AllReduceTest = Field(AllReduceTest(), description="Bandwidth of all-reduces between nodes.")


# The alert StrataGpusNotChecked comes 15 minutes after a look.
HealthInterval = Annotated[str, Field(pattern=r"^(([1-9][0-9]?|[1-5][0-9]{2}|600)s|([1-9]|10)m)$")]


class NodeHealth(Values):
    """A DaemonSet that watches NVIDIA GPUs with NVML, and taints a node `strata/gpu-unhealthy` if a GPU has a fault."""

    enabled: bool = Field(False, description="Create the DaemonSet.")
    taint: bool = Field(
        True,
        description="Taint a node with a fault. Without this, a fault only sets the condition, and shows in events and "
        "metrics.",
    )
    interval: HealthInterval = Field(
        "60s", description="Time between two checks, at most 10m. XIDs are read as soon as they occur."
    )
    runtime_class: OptionalDnsName = Field(
        "nvidia", description="Runtime class whose containers have NVML; empty if the default runtime class has it."
    )
    node_selector: Labels = Field(
        {"nvidia.com/gpu.present": "true"},
        description="Labels of the GPU nodes. To use other labels instead, also set this one to null.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        (Toleration(key="nvidia.com/gpu"),),
        description="Tolerations of the pods, in addition to the chart's own taint.",
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(9401, description="Port of the metrics.")
    resources: Quantities = Field({"cpu": "50m", "memory": "128Mi"}, description="Requests and limits of each pod.")


class Removal(Values):
    """A Job before `helm uninstall` that suspends runs and empties the queues while Kueue is still running."""

    enabled: bool = Field(
        True, description="Run the Job. It uses the interpreter, environment variables and claims of `tests`."
    )
    seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        240, description="Maximum seconds until runs have stopped. Run `helm uninstall` with a longer `--timeout`."
    )
    # It has to be scheduled while runs fill the nodes.
    resources: Quantities = Field({"cpu": "100m", "memory": "256Mi"}, description="Requests and limits of the pod.")


class Retention(Values):
    """CronJobs that remove old runs, jobs and pods. Ages are times such as `30d`."""

    schedule: str = Field("0 3 * * *", min_length=1, description="When the CronJobs run, in cron's format, UTC.")
    dry_run: bool = Field(True, description="Remove nothing, and only list in the Jobs' logs what would be removed.")
    objects: OptionalDuration = Field(
        "",
        description="Age at which finished pods and training jobs are removed, counted from their end; empty: never.",
    )
    checkpoints: OptionalDuration = Field(
        "",
        description="Age at which the checkpoints of complete runs are removed, counted from the run's last change; "
        "empty: never.",
    )
    runs: OptionalDuration = Field(
        "",
        description="Age at which folders of runs are removed, complete or not, counted from the run's last change; "
        "empty: never.",
    )
    folders: tuple[Path, ...] = Field(
        (), description="Mount paths of the tenants' claims in which run folders are searched."
    )
    depth: Annotated[int, Field(ge=1, le=6)] = Field(
        3, description="Maximum depth of run folders below these paths: 2 for the spec's `output: /runs/team` in /runs."
    )
    resources: Quantities = Field({"cpu": "100m", "memory": "256Mi"}, description="Requests and limits of each pod.")


class ChartValues(Values):
    """Values of the chart."""

    image: Image = Field(Image(), description="The project's image.")
    tenants: tuple[Tenant, ...] = Field((), description="Projects and their domains. Each domain has a namespace.")
    tenant_defaults: TenantSettings = Field(
        TenantSettings(), description="Settings of all tenants; a tenant can override them."
    )
    flyte: Flyte = Field(Flyte(), description="Flyte's service account.")
    queues: Queues = Field(Queues(), description="Kinds of nodes, and how runs share them.")
    kernels: Kernels = Field(Kernels(), description="Compiled kernels and pulled images, for fast pod starts.")
    observability: Observability = Field(Observability(), description="Metrics, alerts and dashboards.")
    prices: Prices = Field(Prices(), description="Prices for the costs of `strata estimate` and `strata costs`.")
    node_health: NodeHealth = Field(NodeHealth(), description="Health of GPU nodes.")
    tests: Tests = Field(Tests(), description="Checks of `helm test`.")
    retention: Retention = Field(Retention(), description="Removal of old runs, jobs and pods.")
    removal: Removal = Field(Removal(), description="Steps before `helm uninstall`.")
    global_: dict[str, Any] = Field({}, alias="global", description="Helm passes this to every subchart; ignored.")
