"""The values of charts/strata. Every key has a default; with the defaults alone the chart creates almost nothing."""

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
    """The training image, for the chart's own tests and Jobs."""

    repository: Repository = Field("", description="Repository, without a tag; tests and Jobs need it.")
    tag: ImageTag = Field("", description="Tag or `sha256:` digest; by default the chart's appVersion.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="Image pull policy.")
    pull_secrets: tuple[DnsName, ...] = Field((), description="Image pull secrets of the release's namespace.")


class Flyte(Values):
    """Flyte's service account, and what it may do to the tenants' objects."""

    namespace: DnsName = Field("flyte", description="Namespace of the service account.")
    service_account: DnsName = Field("flyte-binary", description="Name of the service account.")
    rights: bool = Field(
        True,
        description="Give it a role in each tenant's namespace, for workflows, pods, training jobs and events. Without "
        "it, only a role in the whole cluster lets Flyte start runs.",
    )


class TestJob(Values):
    """A job of two pods through each tenant's first queue."""

    seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        240, description="Maximum seconds, including the wait in the queue; 0 runs none. Helm itself waits for 300."
    )
    resources: Quantities = Field({"cpu": "1", "memory": "2Gi"}, description="Requests and limits of each pod.")


class AllReduceTest(Values):
    """A job through the first tenant's first queue that measures all-reduces between nodes: NCCL on GPUs."""

    nodes: Annotated[int, Field(ge=0, le=1024)] = Field(0, description="Pods, each on a node of its own; 0 runs none.")
    gpus: Annotated[int, Field(ge=0, le=64)] = Field(
        8, description="GPUs of each pod, all of the node; 0 tries the test itself with a process on CPUs."
    )
    gpu_resource: ResourceName = Field("nvidia.com/gpu", description="Resource of the GPUs, such as `amd.com/gpu`.")
    pod_template: OptionalDnsName = Field(
        "", description="Pod template, such as a variant with RDMA devices; empty for the tenant's own."
    )
    min_bandwidth: Annotated[float, Field(ge=0)] = Field(
        0, description="Bus bandwidth of the largest tensor below which the test fails, in GB/s."
    )
    largest: Annotated[int, Field(ge=1, le=65536)] = Field(1024, description="Size of the largest tensor in MiB.")
    seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        900, description="Maximum seconds, including the wait in the queue; give `helm test` a longer `--timeout`."
    )
    resources: Quantities = Field({"cpu": "8", "memory": "32Gi"}, description="Other requests and limits of each pod.")


class Tests(Values):
    """What `helm test` runs: checks of every object, a pod, and a job of two pods in each tenant's namespace."""

    enabled: bool = Field(True, description="Create the test pods when `helm test` is run.")
    python: str = Field("python", description="Interpreter of the image.")
    resources: Quantities = Field({"cpu": "500m", "memory": "512Mi"}, description="Requests and limits of a test pod.")
    env: dict[VariableName, str] = Field(
        {}, description="Environment of the pods in the release's namespace, without the variables of caches."
    )
    volumes: tuple[Volume, ...] = Field((), description="Claims of the release's namespace for the pods there.")
    reachable: tuple[Address, ...] = Field((), description="`host:port` that a tenant's pods must reach.")
    unreachable: tuple[Address, ...] = Field(
        (), description="`host:port` that they must not reach; set it if the network plugin enforces policies."
    )
    job: TestJob = Field(TestJob(), description="A job of two pods through each tenant's first queue.")
    all_reduce: AllReduceTest = Field(AllReduceTest(), description="Bandwidth between nodes.")


# The alert StrataGpusNotChecked comes 15 minutes after a look.
HealthInterval = Annotated[str, Field(pattern=r"^(([1-9][0-9]?|[1-5][0-9]{2}|600)s|([1-9]|10)m)$")]


class NodeHealth(Values):
    """A DaemonSet that watches NVIDIA GPUs by NVML, and taints nodes `strata/gpu-unhealthy` if one has a fault."""

    enabled: bool = Field(False, description="Create the DaemonSet.")
    taint: bool = Field(True, description="Taint; else only the condition, events and metrics tell of a fault.")
    interval: HealthInterval = Field(
        "60s", description="Time from one look to the next, at most 10m. XIDs are seen when they come."
    )
    runtime_class: OptionalDnsName = Field(
        "nvidia", description="Runtime class that gives containers NVML; empty if the default one does."
    )
    node_selector: Labels = Field(
        {"nvidia.com/gpu.present": "true"},
        description="Labels of the GPU nodes. To name others alone, set this one to null.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        (Toleration(key="nvidia.com/gpu"),), description="Taints of those nodes, besides the chart's own."
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(9401, description="Port of the metrics.")
    resources: Quantities = Field({"cpu": "50m", "memory": "128Mi"}, description="Requests and limits of each pod.")


class Removal(Values):
    """A Job before `helm uninstall`, which suspends runs and empties the queues while Kueue can still do it."""

    enabled: bool = Field(True, description="Run the Job. It has the interpreter, variables and claims of `tests`.")
    seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        240, description="Maximum seconds until runs have stopped; give `helm uninstall` a longer `--timeout`."
    )
    # It has to be scheduled while runs fill the nodes.
    resources: Quantities = Field({"cpu": "100m", "memory": "256Mi"}, description="Requests and limits of its pod.")


class Retention(Values):
    """CronJobs that remove what is old. Each age is a time such as `30d`; without one, that is kept."""

    schedule: str = Field("0 3 * * *", min_length=1, description="When, in cron's format, UTC.")
    dry_run: bool = Field(True, description="Only name what would be removed, in the log of the Jobs.")
    objects: OptionalDuration = Field("", description="Age of finished pods and training jobs, since their end.")
    checkpoints: OptionalDuration = Field(
        "", description="Age of complete runs, since their last change, at which their checkpoints are removed."
    )
    runs: OptionalDuration = Field("", description="Age of run folders, complete or not, since their last change.")
    folders: tuple[Path, ...] = Field((), description="Mount paths of the tenants' claims that runs are looked for in.")
    depth: Annotated[int, Field(ge=1, le=6)] = Field(
        3, description="How deep below these run folders lie; 2 for the spec's `output: /runs/team` in /runs."
    )
    resources: Quantities = Field({"cpu": "100m", "memory": "256Mi"}, description="Requests and limits of each pod.")


class ChartValues(Values):
    """Values of the chart."""

    image: Image = Field(Image(), description="The project's image.")
    tenants: tuple[Tenant, ...] = Field((), description="Projects and domains; each has a namespace.")
    tenant_defaults: TenantSettings = Field(
        TenantSettings(), description="Settings of every tenant, unless it overrides them."
    )
    flyte: Flyte = Field(Flyte(), description="Flyte's service account.")
    queues: Queues = Field(Queues(), description="Kinds of nodes, and how runs share them.")
    kernels: Kernels = Field(Kernels(), description="Compiled kernels and pulled images, for fast pod starts.")
    observability: Observability = Field(Observability(), description="Metrics, alerts and dashboards.")
    prices: Prices = Field(Prices(), description="Prices that `strata estimate` computes costs with.")
    node_health: NodeHealth = Field(NodeHealth(), description="Health of GPU nodes.")
    tests: Tests = Field(Tests(), description="Checks of `helm test`.")
    retention: Retention = Field(Retention(), description="What is removed when it is old.")
    removal: Removal = Field(Removal(), description="What `helm uninstall` does first.")
    global_: dict[str, Any] = Field({}, alias="global", description="Helm passes this to every subchart; ignored.")
