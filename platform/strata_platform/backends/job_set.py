"""A run as a JobSet: what `strata submit --backend kubernetes` sends to Kubernetes.

All pods of a run are one indexed Job. The pod of rank 0 prepares the data, trains with the others, evaluates and
exports; no process plans the run from outside, so no pod has rights. If a pod fails with an exit code of
`outcomes.RETRYABLE_CODES`, or is lost, all pods start again, and continue from the last checkpoint. Any other exit code
ends the run.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strata_platform.backends.backend import execution_name
from strata_platform.backends.kubernetes_objects import JOB_SET, RESTART, SHAPE
from strata_platform.kubernetes_api import Object
from strata_platform.outcomes import RETRYABLE_CODES
from strata_platform.pod_settings import (
    ATTEMPT,
    ENVIRONMENT,
    GRACE_SECONDS,
    POD_NAME,
    RETRIES,
    SPEC,
    add_shared_memory,
    gpu_resource,
    gpu_tolerations,
    scheduling_labels,
)

if TYPE_CHECKING:
    from strata_platform.spec import RunSpec
    from strata_platform.spec.run_spec import Resources, Topology

NAME, OWNER = "strata/run", "strata/owner"
"""Labels of a JobSet: the name of its run, and who submitted it."""
SUBMISSION = "strata/submission"
"""Annotation: which call of `submit` made it, to know one's own after a lost answer."""
CANCELED = "strata/canceled"
"""Annotation: when somebody canceled it, in seconds since the epoch."""
CAUSE = "strata/cause"
"""Annotation: why the platform canceled it; without it, a person did."""

PORT = 29500
# Short: the name of a pod's host has the JobSet's, this, and two numbers, and at most 63 characters.
WORKERS = "w"
_LONGEST = 63 - len(f"-{WORKERS}-0-9999") - len("-x999")
# Labels of nodes, by vendor: of NVIDIA's feature discovery, and of AMD's node labeller.
GPU_MODELS = {"nvidia.com": "nvidia.com/gpu.product", "amd.com": "amd.com/gpu.product-name"}


def object_name(run: str, number: int) -> str:
    """The name of a run's `number`-th JobSet. Its service's name has to begin with a letter."""
    first = execution_name(run, 1)
    if len(first) > _LONGEST:
        digest = hashlib.sha256(run.encode()).hexdigest()[:8]
        first = f"{first[: _LONGEST - 9].rstrip('-')}-{digest}"
    return first if number == 1 else f"{first}-x{number}"


def submission_order(job: Object) -> tuple[str, int]:
    """The order of JobSets: Kubernetes' times are of whole seconds, and the names of a run's are numbered."""
    number = job["metadata"]["name"].rpartition("-x")[2]
    return job["metadata"]["creationTimestamp"], int(number) if number.isdigit() else 1


def job_set(name: str, spec: RunSpec, template: Object, image: str, owner: str, submission: str) -> Object:
    """The JobSet `name` of a run. `template`: the tenant's pod template, which its pods start from.

    Raises ValueError if a pod cannot start from the template.
    """
    from strata_platform.spec import dump_spec

    group, version, _ = JOB_SET.jobs
    labels = {JOB_SET.label: name, NAME: spec.name, OWNER: owner}
    pod = _pod(name, spec.resources, spec.topology, template, image, dump_spec(spec, "json"))
    pod["metadata"]["labels"] |= {JOB_SET.label: name, NAME: spec.name}
    pods = spec.topology.nnodes
    return {
        "apiVersion": f"{group}/{version}",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "labels": labels | scheduling_labels(spec.resources),
            "annotations": {SUBMISSION: submission},
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": RETRIES,
                "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {
                    "name": WORKERS,
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "completionMode": "Indexed",
                            "parallelism": pods,
                            "completions": pods,
                            "backoffLimit": 0,
                            "podFailurePolicy": {"rules": [_fail_for_good()]},
                            "template": pod,
                        }
                    },
                }
            ],
        },
    }


def _fail_for_good() -> Object:
    codes = {"containerName": "main", "operator": "NotIn", "values": list(RETRYABLE_CODES)}
    return {"action": "FailJob", "onExitCodes": codes}


def spec_of(job: Object) -> RunSpec:
    """What the pods of a JobSet run. Raises SpecError if another version wrote it."""
    from strata_platform.spec import load_spec

    return load_spec(text_of_spec(job))


def text_of_spec(job: Object) -> str:
    """The spec of a JobSet, as JSON."""
    (inner,) = job["spec"]["replicatedJobs"]
    variables = inner["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    return str(next(each["value"] for each in variables if each["name"] == SPEC))


def _pod(name: str, resources: Resources, topology: Topology, template: Object, image: str, spec: str) -> Object:
    """The template of the run's pods."""
    pod: Object = copy.deepcopy(template)
    pod.setdefault("metadata", {}).pop("creationTimestamp", None)
    pod["metadata"]["labels"] = {**(pod["metadata"].get("labels") or {}), SHAPE: _shape(topology)}
    inner = pod["spec"]
    container = _container(inner["containers"])
    container |= {
        "name": "main",
        "image": image,
        # As Flyte does, and unlike `command`, this keeps the entrypoint of the image.
        "args": ["python", "-u", "-m", "tasks.runtime.launch"],
        "resources": _resources(resources, container.get("resources") or {}),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    first = f"{name}-{WORKERS}-0-0.{name}"
    # Kubernetes makes $ of $$, and a variable's value, perhaps a secret's, of $(NAME). JSON has $ in strings alone.
    spec = spec.replace("$", "\\u0024")
    variables = {**ENVIRONMENT, SPEC: spec, "MASTER_ADDR": first, "MASTER_PORT": str(PORT)}
    fields = {ATTEMPT: f"metadata.labels['{RESTART}']", POD_NAME: "metadata.name"}
    container["env"] = [
        *(each for each in container.get("env") or [] if each["name"] not in {*variables, *fields}),
        *({"name": key, "value": value} for key, value in variables.items()),
        *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()),
    ]
    add_shared_memory(inner, resources.shared_memory)
    inner |= {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": GRACE_SECONDS}
    if resources.gpu:
        device = gpu_resource(resources)
        inner["tolerations"] = [*(inner.get("tolerations") or []), *gpu_tolerations(device)]
        if resources.gpu_type:
            vendor = device.partition("/")[0]
            inner["nodeSelector"] = {**(inner.get("nodeSelector") or {}), GPU_MODELS[vendor]: resources.gpu_type}
    return pod


def _container(containers: Sequence[Object]) -> Object:
    """The one that pods start from. Raises ValueError if there is another one, or none.

    Flyte's templates may have a `primary` one and others that run beside it.
    """
    names = [each["name"] for each in containers]
    if names != ["default"]:
        raise ValueError(
            f"its containers are {', '.join(names)}; runs without Flyte take a template with one, called 'default'; "
            "make such a template, or name another one in resources.pod_template"
        )
    return containers[0]


def _shape(topology: Topology) -> str:
    return f"{topology.nnodes}x{topology.nproc_per_node}"


def _resources(asked: Resources, base: Object) -> dict[str, Any]:
    """Requests and limits of a pod, beside those of its template, such as a network device."""
    own = {
        "cpu": asked.cpu,
        "memory": asked.memory,
        **({gpu_resource(asked): str(asked.gpu)} if asked.gpu else {}),
    }
    return {kind: {**(base.get(kind) or {}), **own} for kind in ("requests", "limits")}
