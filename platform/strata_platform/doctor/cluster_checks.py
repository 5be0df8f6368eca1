"""The doctor's checks of a cluster, from a kubeconfig or from inside a pod. They only read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from strata_platform.backends.job_set import GPU_MODELS
from strata_platform.backends.kubernetes import POD_TEMPLATE
from strata_platform.backends.kubernetes_objects import JOB_SET
from strata_platform.doctor.cluster_reader import TENANT, ClusterReader, images_of
from strata_platform.doctor.finding import Check, Finding, StopChecking, ok, problem, skipped, warning
from strata_platform.doctor.gpu_health import CONDITION
from strata_platform.doctor.network_policies import JOB_LABEL, JOB_SET_LABEL, rendezvous
from strata_platform.flyte_rights import WATCHED, WRITTEN
from strata_platform.kubernetes_answers import (
    JOBSET,
    PYTORCHJOB,
    TASK_LIMITS,
    access_review,
    condition_of,
    frameworks,
    why_inactive,
)
from strata_platform.quantity import parse_quantity

_PROJECT, _DOMAIN = "strata/project", "strata/domain"
_DOCS = "docs/cluster.md has the values"
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
# Object stores refuse requests whose signed time is minutes off.
_SKEW_SECONDS = 30.0
# Devices of NVIDIA's and AMD's plugins: whole GPUs, shared ones, and slices. Not nvidia.com/fabric0, a network card.
_GPUS = re.compile(r"gpu$|gpu\.shared$|mig-|(spx|dpx|tpx|qpx|cpx)_nps\d$")
_OLDEST_FLYTE, _OLDEST_KUBERNETES = (1, 16, 6), (1, 30)
# task_resources.limits of flyteadmin 1.16, where its configuration does not set them; "0" is no limit.
_SHIPPED_LIMITS = {"cpu": "2", "memory": "1Gi", "gpu": "1"}
_SHIPPED_DOMAINS = ["development", "staging", "production"]
# Rights in all namespaces that Flyte's own chart gives, and nothing needs.
_TOO_MUCH = (("get", "", "secrets"), ("create", "", "pods"))


def checks(*, with_flyte: bool = True) -> Iterator[Check]:
    """All checks, from the API server down to the objects of each tenant; those of JobSet in place of Flyte's."""
    cluster = ClusterReader(with_flyte)
    yield "API server", partial(_api_server, cluster)
    yield "clocks", partial(_clocks, cluster)
    if with_flyte:
        yield "Flyte's version", partial(_flyte_version, cluster)
        yield "Flyte's plugins", partial(_flyte_plugins, cluster)
        yield "Flyte's limits", partial(_flyte_limits, cluster)
        yield "Flyte's rights", partial(_flyte_rights, cluster)
        yield "Flyte's authentication", partial(_flyte_authentication, cluster)
        yield "training operator", partial(_training_operator, cluster)
    else:
        yield "JobSet", partial(_job_set, cluster)
    yield "Kueue's integration", partial(_kueue, cluster)
    yield "GPU nodes", partial(_gpu_nodes, cluster)
    yield "tenants", partial(_tenants, cluster)
    for namespace in _names(cluster):
        if with_flyte:
            yield f"{namespace}: project", partial(_project, cluster, namespace)
            yield f"{namespace}: Flyte's rights", partial(_rights_in, cluster, namespace)
        yield f"{namespace}: queues", partial(_queues, cluster, namespace)
        yield f"{namespace}: pod template", partial(_pod_template, cluster, namespace)
        yield f"{namespace}: network policies", partial(_network_policies, cluster, namespace)


def _names(cluster: ClusterReader) -> list[str]:
    try:
        return list(cluster.tenants)
    except Exception:
        # The check of the tenants reports it.
        return []


def _api_server(cluster: ClusterReader) -> Finding:
    try:
        version = cluster.get("/version")
    except ImportError as error:
        raise StopChecking(
            f"a client of Kubernetes is not installed: {error}", "install strata-platform[cluster]"
        ) from None
    except Exception as error:
        raise StopChecking(
            f"no cluster answers: {type(error).__name__}: {str(error).splitlines()[0]}",
            "set KUBECONFIG, choose a context with kubectl config use-context, and check that kubectl get nodes works",
        ) from None
    found = tuple(int(re.sub(r"\D", "", version[part])) for part in ("major", "minor"))
    if found < _OLDEST_KUBERNETES:
        return problem(f"Kubernetes {version['gitVersion']}; the chart needs 1.30 or newer", "upgrade the cluster")
    return ok(f"Kubernetes {version['gitVersion']}")


def _clocks(cluster: ClusterReader) -> Finding:
    date = cluster.api.request("GET", "/version").headers.get("Date")
    if date is None:
        return skipped("the API server sends no date")
    off = abs((datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds())
    if off > _SKEW_SECONDS:
        return problem(
            f"this clock and the API server's differ by {off:.0f} s: object stores refuse requests signed with a wrong "
            "time, and tokens are not yet or no longer valid",
            "run an NTP client (chrony) here and on the nodes",
        )
    return ok("this clock agrees with the API server's")


def _flyte_version(cluster: ClusterReader) -> Finding:
    images = [
        image
        for deployment in cluster.deployments_running("flyte")
        for image in images_of(deployment)
        if "flyte" in image
    ]
    if not images:
        return problem("no deployment runs Flyte", "install charts/strata-stack, or Flyte 1.16.8; docs/cluster.md")
    advice = "pin flyte-binary v1.16.8: its chart and deployment.image.tag"
    for image in images:
        match = re.search(r":v?(\d+)\.(\d+)\.(\d+)", image)
        if match is None:
            return warning(f"{image} names no version; Flyte 2 has another interface", advice)
        found = (int(match[1]), int(match[2]), int(match[3]))
        if found[0] != 1:
            return problem(
                f"{image} is Flyte {found[0]}, with another interface; the workflows are written for 1.16", advice
            )
        if found < _OLDEST_FLYTE:
            return problem(f"{image} fails a run that Kueue suspends; 1.16.6 and newer do not", advice)
    return ok(", ".join(dict.fromkeys(images)))


def _flyte_plugins(cluster: ClusterReader) -> Finding:
    plugins = (cluster.flyte.get("tasks") or {}).get("task-plugins") or {}
    enabled = plugins.get("enabled-plugins") or []
    if not enabled:
        return problem("no configuration of Flyte names enabled-plugins, so pytorch is off", _DOCS)
    missing = [name for name in ("container", "sidecar", "k8s-array", "pytorch") if name not in enabled]
    if missing:
        return problem(f"enabled-plugins lacks {', '.join(missing)}: Flyte refuses runs of several pods", _DOCS)
    if (plugins.get("default-for-task-types") or {}).get("pytorch") != "pytorch":
        return problem("default-for-task-types does not map pytorch to the plugin pytorch", _DOCS)
    return ok(", ".join(enabled))


def _flyte_limits(cluster: ClusterReader) -> Finding:
    """Whether Flyte's limits leave tasks what they request.

    Flyte refuses to register a task that exceeds its limits. In a dynamic workflow, as training is, it silently lowers
    the task's resources to them.
    """
    if not cluster.deployments_running("flyte"):
        return skipped("no deployment of Flyte was found")
    given = (cluster.flyte.get("task_resources") or {}).get("limits") or {}
    limits = {name: limit for name, limit in (_SHIPPED_LIMITS | given).items() if parse_quantity(limit)}
    if not limits:
        return ok("Flyte sets no limits")
    shown = ", ".join(f"{name} {limit}" for name, limit in limits.items())
    advice = f'set task_resources.limits of Flyte to "0", which means no limit; {_DOCS}'
    if any(
        name in limits and parse_quantity(limits[name]) < parse_quantity(most) for name, most in TASK_LIMITS.items()
    ):
        needed = ", ".join(f"{name} {most}" for name, most in TASK_LIMITS.items())
        return problem(f"{shown}: Flyte refuses the workflows, whose tasks have limits of {needed}", advice)
    if "gpu" in limits:
        return problem(f"{shown}: a run that requests more GPUs silently gets {limits['gpu']} in each pod", advice)
    return warning(f"{shown}: a run that requests more silently gets that", advice)


def _flyte_rights(cluster: ClusterReader) -> Finding:
    """Whether Flyte may read what it has to in all namespaces, and nothing more."""
    accounts = _flyte_accounts(cluster)
    for account in accounts:
        for group, resource in WATCHED:
            for verb in ("list", "watch"):
                if not _may(cluster, account, verb, group, resource):
                    return problem(
                        f"service account {account[1]} may not {verb} {resource} in all namespaces, as Flyte does",
                        f"give it the rights of charts/strata-stack/templates/flyte_rights.yaml; {_DOCS}",
                    )
        held = [
            f"{verb} {resource}" for verb, group, resource in _TOO_MUCH if _may(cluster, account, verb, group, resource)
        ]
        if held:
            return warning(
                f"service account {account[1]} may {' and '.join(held)} in all namespaces, which Flyte does not need",
                f"set rbac.create of Flyte's chart to false, and give it the rights that it needs; {_DOCS}",
            )
    return ok("Flyte watches all namespaces") if accounts else skipped("no deployment of Flyte was found")


def _rights_in(cluster: ClusterReader, namespace: str) -> Finding:
    """Whether Flyte may do in a tenant's namespace what runs need."""
    accounts = _flyte_accounts(cluster)
    for account in accounts:
        for group, resource, verbs in WRITTEN:
            for verb in verbs:
                if not _may(cluster, account, verb, group, resource, namespace):
                    return problem(
                        f"service account {account[1]} may not {verb} {resource} here: Flyte cannot start runs",
                        f"set flyte.namespace of the chart to {account[0]}, flyte.serviceAccount to {account[1]}, and "
                        "flyte.rights to true",
                    )
    return ok("Flyte may start runs here") if accounts else skipped("no deployment of Flyte was found")


def _flyte_accounts(cluster: ClusterReader) -> list[tuple[str, str]]:
    return sorted(
        {
            (d["metadata"]["namespace"], d["spec"]["template"]["spec"].get("serviceAccountName", "default"))
            for d in cluster.deployments_running("flyte")
        }
    )


def _may(
    cluster: ClusterReader, account: tuple[str, str], verb: str, group: str, resource: str, namespace: str | None = None
) -> bool:
    """Whether a service account (namespace, name) has a right, in one namespace or in all."""
    review = access_review(account, verb, group, resource, namespace)
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(json.loads(cluster.api.request("POST", path, review).data)["status"]["allowed"])


def _flyte_authentication(cluster: ClusterReader) -> Finding:
    if not cluster.deployments_running("flyte"):
        return skipped("no deployment of Flyte was found")
    if ((cluster.flyte.get("server") or {}).get("security") or {}).get("useAuth"):
        return ok("on")
    return warning(
        "off: anyone who reaches flyteadmin can see, start and stop the runs of all tenants",
        f"set configuration.auth of Flyte's chart; {_DOCS}",
    )


def _training_operator(cluster: ClusterReader) -> Finding:
    kinds = {item["metadata"]["name"]: item for item in cluster.items(_DEFINITIONS)}
    advice = "apply the training operator's manifests of v1.9.3; docs/cluster.md has the command"
    jobs = kinds.get("pytorchjobs.kubeflow.org")
    if jobs is None:
        if "trainjobs.trainer.kubeflow.org" in kinds:
            return problem("this is Kubeflow Trainer 2, whose jobs Flyte does not create", advice)
        return problem("there are no PyTorchJobs: their custom resource definition is missing", advice)
    operators = cluster.deployments_running("training-operator")
    if not operators:
        return problem(
            "the custom resource definition of PyTorchJobs exists, but no training operator runs them", advice
        )
    found = _running(operators[0])
    # The operator's images are named by commits. The field managedBy came with version 1.9.
    if found.status == "ok" and "managedBy" not in str(jobs["spec"]["versions"]):
        return warning(f"{found.message} is older than 1.9, the version that was tested", advice)
    return found


def _running(deployment: Mapping[str, Any]) -> Finding:
    image = images_of(deployment)[0]
    if not (deployment.get("status") or {}).get("availableReplicas"):
        return problem(f"{image} is not available", "kubectl describe its pod shows the reason")
    return ok(image)


def _job_set(cluster: ClusterReader) -> Finding:
    group, version, plural = JOB_SET.jobs
    advice = "install JobSet; docs/backends.md has the command"
    kinds = {item["metadata"]["name"]: item for item in cluster.items(_DEFINITIONS)}
    if (kind := kinds.get(f"{plural}.{group}")) is None:
        return problem("there are no JobSets: their custom resource definition is missing", advice)
    if version not in (served := [each["name"] for each in kind["spec"]["versions"] if each["served"]]):
        return problem(f"JobSets have the versions {', '.join(served)}, and runs are of {version}", advice)
    controllers = cluster.deployments_running("jobset")
    if not controllers:
        return problem("the custom resource definition of JobSets exists, but no controller runs them", advice)
    return _running(controllers[0])


def _kueue(cluster: ClusterReader) -> Finding:
    configurations = [found for found in cluster.configurations("kueue") if found.get("kind") == "Configuration"]
    if not configurations:
        return problem("no configuration of Kueue was found", "install Kueue 0.19; docs/cluster.md")
    found = frameworks(configurations)
    if cluster.with_flyte and PYTORCHJOB not in found:
        return problem(
            f"integrations.frameworks lacks {PYTORCHJOB}, as in Kueue's defaults: jobs start without queueing",
            f"add it and restart Kueue; {_DOCS}",
        )
    kinds = {item["metadata"]["name"] for item in cluster.items(_DEFINITIONS)}
    if "jobsets.jobset.x-k8s.io" in kinds and JOBSET not in found:
        return problem(
            f"integrations.frameworks lacks {JOBSET}: runs without Flyte start without queueing",
            f"add it and restart Kueue; {_DOCS}",
        )
    if cluster.with_flyte and "pod" not in found:
        return warning("integrations.frameworks lacks pod: runs of one pod do not queue", _DOCS)
    return ok(", ".join(found))


def _gpu_nodes(cluster: ClusterReader) -> Finding:
    numbers = [(node, _gpus_of(node)) for node in cluster.items("/api/v1/nodes")]
    nodes = [node for node, gpus in numbers if any(gpus.values())]
    dead = [node["metadata"]["name"] for node, gpus in numbers if gpus and not any(gpus.values())]
    if dead:
        return problem(
            f"{len(dead)} of {len(dead) + len(nodes)} GPU nodes have no allocatable GPU, such as {dead[0]}: the device "
            "plugin does not run, or the driver has lost them",
            "look at the device plugin's pod there, and at nvidia-smi or rocm-smi",
        )
    if not nodes:
        return warning("no node has allocatable GPUs: runs train on CPUs", "install the GPU operator, or add nodes")
    sick = [
        (node["metadata"]["name"], condition["message"])
        for node in nodes
        if (condition := condition_of(node, CONDITION)) is not None and condition["status"] == "True"
    ]
    if sick:
        return problem(
            f"{len(sick)} of {len(nodes)} GPU nodes have a GPU with a fault, such as {sick[0][0]}: {sick[0][1]}",
            "kubectl describe node has each; docs/gpu-nodes.md says what follows",
        )
    label = cluster.kubernetes_plugin.get("gpu-device-node-label")
    if cluster.with_flyte and not label:
        return warning(
            f"{len(nodes)} nodes have GPUs, but Flyte's configuration names no label for their model: "
            "resources.gpu_type selects nothing",
            "set plugins.k8s.gpu-device-node-label of Flyte, for example to nvidia.com/gpu.product",
        )
    # Runs without Flyte take the label of the vendor.
    labels = [str(label) if cluster.with_flyte else GPU_MODELS[next(iter(_gpus_of(node)))] for node in nodes]
    bare = [
        (node["metadata"]["name"], label)
        for node, label in zip(nodes, labels, strict=True)
        if label not in (node["metadata"].get("labels") or {})
    ]
    if bare:
        return warning(
            f"{len(bare)} of {len(nodes)} GPU nodes have no label {bare[0][1]}, such as {bare[0][0]}: gpu_type cannot "
            "select them",
            "install NVIDIA's GPU feature discovery or AMD's node labeller, or label them",
        )
    return ok(f"{len(nodes)} nodes with GPUs, labelled {', '.join(dict.fromkeys(labels))}")


def _gpus_of(node: Mapping[str, Any]) -> dict[str, int]:
    """The number of allocatable GPUs and slices of GPUs by vendor, the largest first; empty if there never was any."""
    numbers: dict[str, int] = {}
    for name, number in (node["status"].get("allocatable") or {}).items():
        vendor, _, device = name.partition("/")
        # nvidia.com/mig-3g.40gb, amd.com/cpx_nps4: beside slices, whole GPUs may be 0.
        if vendor in GPU_MODELS and _GPUS.match(device):
            numbers[vendor] = numbers.get(vendor, 0) + int(number)
    return dict(sorted(numbers.items(), key=lambda item: -item[1]))


def _tenants(cluster: ClusterReader) -> Finding:
    if cluster.tenants:
        return ok(", ".join(cluster.tenants))
    return problem(
        f"no namespace has the label {TENANT}: no project can run anything",
        "install charts/strata with the project and domain in tenants",
    )


def _project(cluster: ClusterReader, namespace: str) -> Finding:
    """Whether Flyte has the tenant's project and domain, as far as its configuration shows it."""
    labels = cluster.tenants[namespace]
    project, domain = labels.get(_PROJECT), labels.get(_DOMAIN)
    if project is None or domain is None:
        return skipped(f"the namespace has no labels {_PROJECT} and {_DOMAIN}")
    domains = [each["id"] for each in cluster.flyte["domains"]] if "domains" in cluster.flyte else _SHIPPED_DOMAINS
    if domain not in domains:
        return problem(
            f"Flyte has no domain {domain}, only {', '.join(domains)}: it refuses the tenant's runs",
            "add it to domains of Flyte's configuration, or have the tenant in another; docs/cluster.md",
        )
    admin = (cluster.flyte.get("flyte") or {}).get("admin") or {}
    made = {*(admin.get("seedProjects") or []), *(each["name"] for each in admin.get("seedProjectsWithDetails") or [])}
    if made and project not in made:
        return warning(
            f"Flyte creates the projects {', '.join(sorted(made))} when it starts; unless somebody has created "
            f"{project}, it refuses the tenant's runs",
            "add it to flyte-core-components.admin.seedProjects of Flyte's chart, even if it exists already",
        )
    return ok(f"{project}, {domain}")


def _queues(cluster: ClusterReader, namespace: str) -> Finding:
    queues = cluster.items(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/localqueues")
    if not queues:
        return problem("there is no queue: a run that names one waits forever", "give the tenant queues in the chart")
    for queue in queues:
        why = why_inactive(queue)
        if why is not None:
            return problem(f"queue {queue['metadata']['name']} is not active: {why}", "look at its cluster queue")
    names = [queue["metadata"]["name"] for queue in queues]
    if "default" not in names:
        return warning(
            f"there is no queue called default, only {', '.join(names)}: a run must name one in resources.queue",
            "call one of them default, unless that is intended",
        )
    return ok(", ".join(names))


def _pod_template(cluster: ClusterReader, namespace: str) -> Finding:
    name = cluster.kubernetes_plugin.get("default-pod-template-name") if cluster.with_flyte else POD_TEMPLATE
    if not name:
        return problem(
            "Flyte's configuration names no pod template: pods have no kernel cache and no security context",
            f"set plugins.k8s.default-pod-template-name of Flyte; {_DOCS}",
        )
    found = [
        template
        for template in cluster.items(f"/api/v1/namespaces/{namespace}/podtemplates")
        if template["metadata"]["name"] == name
    ]
    if not found and not cluster.with_flyte:
        return problem(
            f"there is no pod template {name}: a run that names no other one is refused",
            "set the chart's tenantDefaults.podTemplate.name to it, or name one in resources.pod_template",
        )
    if not found:
        return problem(
            f"Flyte's configuration names the pod template {name}, which this namespace lacks: Flyte uses none",
            "make the chart's tenantDefaults.podTemplate.name and Flyte's default-pod-template-name the same",
        )
    spec = found[0]["template"]["spec"]
    environment = {e["name"] for c in spec["containers"] for e in c.get("env") or []}
    if "TRITON_CACHE_DIR" not in environment:
        return warning(
            f"{name} does not set TRITON_CACHE_DIR: kernels go to the image's default folder and vanish with the pod",
            "mount a folder of the node and set TRITON_CACHE_DIR to it",
        )
    return ok(f"{name}, with a kernel cache")


def _network_policies(cluster: ClusterReader, namespace: str) -> Finding:
    policies = cluster.items(f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies")
    return rendezvous(policies, JOB_LABEL if cluster.with_flyte else JOB_SET_LABEL)
