"""The cluster as the tests see it: a tenant's namespace, Flyte, and runs that are watched from outside."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from flytekit.configuration import Config, Image, ImageConfig
from flytekit.constants import CopyFileDetection
from flytekit.core.type_engine import TypeEngine
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.remote import FlyteRemote
from flytekit.remote.executions import FlyteWorkflowExecution
from flytekit.tools.fast_registration import FastPackageOptions
from flytekit.types.file import FlyteFile
from kubernetes import client, stream

from strata_platform.client import Client
from strata_platform.runs import Phase, Stage
from strata_platform.runs import Run as LookedAt
from strata_platform.spec import RunSpec, load_spec
from tasks.runtime.run_folder.record import CompletionRecord

ROOT = Path(__file__).parents[3]
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "tests/e2e/values.yaml").read_text())["strata"]
SPEC: dict[str, Any] = yaml.safe_load((ROOT / "tests/e2e/spec.yaml").read_text())
TENANT, RIVAL = VALUES["tenants"]
PROJECT, DOMAIN = TENANT["project"], TENANT["domains"][0]
NAMESPACE, RIVAL_NAMESPACE = (f"{tenant['project']}-{tenant['domains'][0]}" for tenant in (TENANT, RIVAL))
JOBS = ("kubeflow.org", "v1", NAMESPACE, "pytorchjobs")
WORKLOADS = ("kueue.x-k8s.io", "v1beta2", NAMESPACE, "workloads")
QUEUES = ("kueue.x-k8s.io", "v1beta2", NAMESPACE, "localqueues")
SHARE = ("kueue.x-k8s.io", "v1beta2", "clusterqueues", VALUES["queues"]["clusterQueues"][0]["name"])
# A step between two checkpoints: those since the one before are lost, and done once more.
MIDDLE = 15
# Seconds that anything may take, waiting for other runs included. On two idle cores a tenth of it is enough.
PATIENCE = 400

# Kueue's, of a run that its queue has no place for.
NO_ROOM = "insufficient unused quota"

# Propeller's, of a node that has succeeded, and of a workflow that has ended.
SUCCEEDED = 5
PHASES = {3: "succeeded", 5: "failed", 6: "aborted"}

T = TypeVar("T")


def until(what: str, ask: Callable[[], T], seconds: float = PATIENCE) -> T:
    """What `ask` returns as soon as it is true. Raises TimeoutError, which says what it was last."""
    end = time.monotonic() + seconds
    while not (answer := ask()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not so after {seconds:.0f} s, {answer!r}")
        time.sleep(0.25)
    return answer


def beside(do: Callable[[], T]) -> Future[T]:
    """What `do` returns, from a thread. Python ends without it; for the threads of an executor it would wait."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(do())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with what `over` says, section by section."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if inner else value
    return result


def named(name: str, **changes: Any) -> RunSpec:
    """spec.yaml under a name of its own, with changes."""
    return RunSpec.model_validate(merged(SPEC, changes | {"name": f"{name}-{time.time_ns() // 10**9}"}))


def over(status: client.V1JobStatus) -> client.V1JobStatus | None:
    """The status of a Job that has ended."""
    return status if status.succeeded or status.failed else None


class Window:
    """A pod of the tenant's: it reads the volume of the runs, and tries what pods may not."""

    def __init__(self, pod: str) -> None:
        # A client of its own: streams change how a client asks.
        self._core, self.pod = client.CoreV1Api(client.ApiClient()), pod

    def __call__(self, *command: str) -> str:
        """What a command in the pod writes, errors included."""
        run = self._core.connect_get_namespaced_pod_exec
        # Loaded by the client, JSON would come back as the text of a dict.
        told = {"stdout": True, "stderr": True, "_preload_content": False}
        open_stream = stream.stream(run, self.pod, NAMESPACE, command=[*command], **told)
        open_stream.run_forever(timeout=60)
        return open_stream.read_all()


class Cluster:
    """Kubernetes' and Flyte's clients, and the workflow as this checkout has it."""

    def __init__(self, image: str) -> None:
        self.image = image
        self.core, self.custom = client.CoreV1Api(), client.CustomObjectsApi()
        self.remote = FlyteRemote(Config.auto(), PROJECT, DOMAIN, interactive_mode_enabled=False)
        self.window: Window
        self._workflow: Any = None

    @contextmanager
    def pod(self, command: list[str], cpu: str = "10m", **resources: str) -> Iterator[str]:
        """The name of a pod from the tenant's template, with a run's queue and priority; it is gone after the block."""
        template = self.core.read_namespaced_pod_template("strata", NAMESPACE).template
        pod = self.core.api_client.sanitize_for_serialization(template)
        (container,) = pod["spec"]["containers"]
        container |= {"name": "main", "image": self.image, "command": command}
        container["resources"] = {"requests": {"cpu": cpu}, "limits": {"cpu": "2"}}
        pod["spec"] |= {"terminationGracePeriodSeconds": 0, "restartPolicy": "Never"}
        names = {"queue": "kueue.x-k8s.io/queue-name", "priority": "kueue.x-k8s.io/priority-class"}
        pod["metadata"]["labels"] |= {names[what]: name for what, name in resources.items()}
        pod["metadata"]["generateName"] = "e2e-"
        name = self.core.create_namespaced_pod(NAMESPACE, pod).metadata.name
        try:
            yield name
        finally:
            self.core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)

    @property
    def workflow(self) -> Any:
        """`finetune`, registered once."""
        if self._workflow is None:
            from workflows.finetune import finetune

            self._workflow = self.register(finetune)
        return self._workflow

    def register(self, workflow: Any) -> Any:
        """A workflow of this checkout, registered under a version of its own."""
        image = Image.look_up_image_info("default", self.image)
        return self.remote.register_script(
            workflow,
            image_config=ImageConfig(image, [image]),
            version=f"e2e-{time.time_ns()}",
            source_path=str(ROOT),
            module_name=workflow.name.rpartition(".")[0],
            fast_package_options=FastPackageOptions([], copy_style=CopyFileDetection.ALL),
        )

    def submit(self, name: str, **changes: Any) -> Run:
        """Start the run of spec.yaml under a name of its own, with changes."""
        return self.execute(named(name, **changes))

    def execute(self, spec: RunSpec) -> Run:
        """Start a run, also one whose name is taken."""
        started = self.remote.execute(self.workflow, inputs={"spec": spec}, type_hints={"spec": RunSpec})
        return Run(self, spec, started)

    def launched(self, file: Path) -> Run:
        """The run of spec.yaml, started by `pyflyte run`, with its spec in `file`."""
        name = f"undisturbed-{time.time_ns() // 10**9}"
        file.write_text(yaml.safe_dump(SPEC | {"name": name}))
        command = [Path(sys.executable).with_name("pyflyte"), "run", "--remote", "--copy", "all", "--image", self.image]
        command += ["--name", name, "workflows/finetune.py", "finetune", "--spec", file]
        subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE)
        return Run(self, load_spec(file), self.remote.fetch_execution(name=name))

    @contextmanager
    def held(self, queue: str) -> Iterator[None]:
        """Nothing is admitted through a queue of the tenant before the block's end."""
        self.shut(queue, "Hold")
        try:
            yield
        finally:
            self.shut(queue, "None")

    def shut(self, queue: str, policy: str) -> None:
        """Set whether a queue of the tenant admits: `Hold`, or `None`, which admits."""
        self.custom.patch_namespaced_custom_object(*QUEUES, queue, {"spec": {"stopPolicy": policy}})

    @contextmanager
    def cpu_quota(self, cpu: str) -> Iterator[None]:
        """The share of the tests has only so many CPUs until the block's end."""
        queue = self.custom.get_cluster_custom_object(*SHARE)
        before = queue["spec"]["resourceGroups"]
        less = copy.deepcopy(before)
        for resource in less[0]["flavors"][0]["resources"]:
            if resource["name"] == "cpu":
                resource["nominalQuota"] = cpu
        self.custom.patch_cluster_custom_object(*SHARE, {"spec": {"resourceGroups": less}})
        try:
            yield
        finally:
            self.custom.patch_cluster_custom_object(*SHARE, {"spec": {"resourceGroups": before}})

    def run_cron_job(self, namespace: str, name: str) -> str:
        """Run a CronJob now; the log of its pod, which has succeeded."""
        batch = client.BatchV1Api()
        template = batch.read_namespaced_cron_job(name, namespace).spec.job_template
        own = f"{name}-{time.time_ns() // 10**9}"
        batch.create_namespaced_job(namespace, client.V1Job(metadata=client.V1ObjectMeta(name=own), spec=template.spec))
        status = until(f"{own} has ended", lambda: over(batch.read_namespaced_job_status(own, namespace).status))
        (pod,) = self.core.list_namespaced_pod(namespace, label_selector=f"job-name={own}").items
        said = str(self.core.read_namespaced_pod_log(pod.metadata.name, namespace))
        assert status.succeeded, said
        return said

    def end_without_quota(self, runs: Client, spec: RunSpec, settled: Callable[[str], object] | None = None) -> None:
        """Submit a run to the queue express, take its quota, and see queues.timeout end it. `settled`: of Flyte."""
        with self.held("express"):
            runs.submit(spec)
            until("it waits", lambda: runs.get(spec.name).stage is Stage.WAITING)
            with self.cpu_quota("1"):
                self.shut("express", "None")
                until("that is told", lambda: "it waits for ever" in runs.get(spec.name).message)
                if settled is not None:
                    settled(spec.name)

                def ended() -> str | None:
                    """It waits for ten seconds first."""
                    said = self.run_cron_job("strata-system", "strata-queue-timeout")
                    return said if f"{spec.name} is ended" in said else None

                assert "for longer than queues.timeout.after, 10s" in (until("it is ended", ended) or "")
                found = runs.get(spec.name)
                assert found.phase is Phase.ABORTED and "no quota of queue express is large enough" in found.message

    def restart(self, namespace: str, deployment: str) -> None:
        """Delete the deployment's pods, and return when others are ready in their place."""
        labels = client.AppsV1Api().read_namespaced_deployment(deployment, namespace).spec.selector.match_labels
        mine = {"label_selector": ",".join(f"{name}={value}" for name, value in labels.items())}
        old = {pod.metadata.uid for pod in self.core.list_namespaced_pod(namespace, **mine).items}
        self.core.delete_collection_namespaced_pod(namespace, **mine)

        def renewed() -> bool:
            pods = self.core.list_namespaced_pod(namespace, **mine).items
            ready = [bool(states := pod.status.container_statuses) and all(s.ready for s in states) for pod in pods]
            return bool(pods) and all(ready) and not old & {pod.metadata.uid for pod in pods}

        until(f"{deployment} is back", renewed)
        # A flyteadmin that keeps all in its memory has forgotten what was registered.
        self._workflow = None

    def kept(self, execution: str) -> dict[str, Any]:
        """What propeller keeps of an execution in Kubernetes."""
        address = ("flyte.lyft.com", "v1alpha1", NAMESPACE, "flyteworkflows", execution)
        return dict(self.custom.get_namespaced_custom_object(*address))

    def until_settled(self, execution: str) -> None:
        """Return when propeller has kept nothing new for two seconds.

        FlytePropeller 1.16 dies when an execution is ended while it writes what it keeps of it.
        """
        versions: list[str] = []

        def settled() -> bool:
            versions.append(self.kept(execution)["metadata"]["resourceVersion"])
            return len(versions) > 8 and len(set(versions[-8:])) == 1

        until(f"{execution} is settled", settled)

    def is_running(self, pod: str) -> bool:
        """Whether there is such a pod in the tenant's namespace, and it has not ended."""
        found = self.core.list_namespaced_pod(NAMESPACE, field_selector=f"metadata.name={pod}").items
        return any(pod.status.phase == "Running" for pod in found)


class Run:
    """A run on the cluster."""

    def __init__(self, cluster: Cluster, spec: RunSpec, execution: FlyteWorkflowExecution) -> None:
        self.cluster, self.spec, self._execution = cluster, spec, execution
        self.id = execution.id.name
        self._of_run = {"label_selector": f"execution-id={self.id}"}

    def pods(self, part: str = "") -> list[client.V1Pod]:
        """Its pods whose name contains `part`."""
        found = self.cluster.core.list_namespaced_pod(NAMESPACE, **self._of_run).items
        return [pod for pod in found if part in pod.metadata.name]

    def jobs(self) -> list[dict[str, Any]]:
        """Its training jobs of several pods, one for each attempt, in their order."""
        jobs = self.cluster.custom.list_namespaced_custom_object(*JOBS, **self._of_run)["items"]
        return sorted(jobs, key=lambda job: job["metadata"]["creationTimestamp"])

    def job(self) -> dict[str, Any]:
        """The training job of the newest attempt."""
        return self.jobs()[-1]

    def attempt(self) -> int:
        """Which of Flyte's attempts at the training is the newest, from 0."""
        return int(self.job()["metadata"]["name"].rpartition("-")[2])

    def conditions(self) -> dict[str, str]:
        """What is true of the training job in Kueue's eyes, each with its reason."""
        for workload in self.workloads():
            told = workload.get("status", {}).get("conditions", [])
            return {c["type"]: c["reason"] for c in told if c["status"] == "True"}
        return {}

    def workloads(self) -> list[dict[str, Any]]:
        """Kueue's workload of the training job, if there is one."""
        uid = self.job()["metadata"]["uid"]
        found = self.cluster.custom.list_namespaced_custom_object(*WORKLOADS)["items"]
        return [w for w in found if any(o["uid"] == uid for o in w["metadata"].get("ownerReferences", []))]

    def points(self) -> list[dict[str, Any]]:
        """All lines of its metrics, repeated steps included."""
        # The last line may be half written.
        return [json.loads(line) for line in self.file("metrics.jsonl").split("\n")[:-1]]

    def file(self, name: str) -> str:
        """A text file of its folder; empty when it is not there."""
        return self.cluster.window("sh", "-c", f"cat {self.spec.output}/{self.spec.name}/{name} 2>/dev/null")

    def losses(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of each step, of the last attempt that did it."""
        return {point["step"]: (point["loss"], point["grad_norm"]) for point in self.points()}

    def until_step(self, step: int) -> None:
        """Return when `step` is done. Raises AssertionError when the run ends before."""

        def done() -> bool:
            # Ends are asked for first: a run may end between the two questions.
            over = self.phase()
            at = max((point["step"] for point in self.points()), default=0)
            assert at >= step or not over, f"the run has {over} after step {at}"
            return at >= step

        until(f"step {step} of {self.id}", done)

    def until_suspended(self) -> None:
        """Return when its queue has taken its machines back."""
        until("it is suspended", lambda: self.job()["spec"]["runPolicy"].get("suspend"))
        assert self.conditions()["Evicted"] == "Preempted"
        until("its pods are gone", lambda: not self.pods("worker"))

    def is_done(self) -> bool:
        """Whether Flyte says that it has ended, well or not."""
        self._execution = self.cluster.remote.sync_execution(self._execution)
        return bool(self._execution.is_done)

    def until_done(self) -> None:
        """Return when it has ended, well or not."""
        until(f"the end of {self.id}", self.is_done)

    def wait(self) -> None:
        """Return when it has succeeded. Raises AssertionError when it has not."""
        self.until_done()
        assert self._execution.closure.phase == WorkflowExecutionPhase.SUCCEEDED, self.error()

    def phase(self) -> str | None:
        """How its workflow has ended, as propeller keeps it in Kubernetes; None while it has not."""
        return PHASES.get(self.cluster.kept(self.id)["status"]["phase"])

    def error(self) -> str:
        """Why it failed, in Flyte's words."""
        error = self._execution.closure.error
        return error.message if error else "no error"

    def output(self, name: str, kind: type[T]) -> T:
        """One of its outputs, from the object store."""
        literal = self._execution.outputs.literals[name]
        return TypeEngine.to_python_value(self.cluster.remote.context, literal, kind)

    def record(self) -> CompletionRecord:
        """Its completion record, as it came out of the workflow."""
        return CompletionRecord.model_validate_json(Path(self.output("record", FlyteFile).download()).read_text())


class Followed:
    """A run that the client submits, and follows in all ways at once. The ways end by themselves when the run does."""

    def __init__(self, cluster: Cluster, runs: Client, name: str) -> None:
        spec = named(name)
        self.submitted, self.seen = runs.submit(spec), list[LookedAt]()
        self.run = Run(cluster, spec, cluster.remote.fetch_execution(name=spec.name))
        self.end = beside(lambda: runs.wait(spec.name, show=self.seen.append))
        self.lines = beside(lambda: list(runs.logs(spec.name, follow=True)))
        self.points = beside(lambda: list(runs.metrics(spec.name, follow=True)))
