"""Seconds from the submission of a run to its first running pod and to its training pods, and where they go.

    KUBECONFIG=... FLYTECTL_CONFIG=... python -m benchmarks.submission --image IMAGE [--runs 20]

Submits the run of tests/e2e/spec.yaml again and again, each when the one before it has left nothing behind, and cancels
it when the pod in question runs. Kubernetes tells of changes as they come (watches), so that looking costs the cluster
nothing. The platform's seconds are those in which no pod of the run works at its own task. Prints the rows of a table:
median, least, most.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config, watch

from strata_platform.backends.flyte import FlyteBackend
from strata_platform.client import Client
from strata_platform.spec import RunSpec

SPEC = Path(__file__).parents[1] / "tests" / "e2e" / "spec.yaml"
TRAIN = "train"
# The task before training: a pod. Data are prepared once, by the first submission.
BEFORE = ("start",)
TASKS = {"workflows-finetune-start": "start", "tasks-prepare-prepare": "prepare", "tasks-finish-finish": "finish"}

# What passes between two moments: a name, the two, and what happens between them.
Stage = tuple[str, str, str, str]
FIRST: tuple[Stage, ...] = (
    ("request", "begin", "answered", "client and Flyte: version, name, CreateExecution, until submit returns"),
    ("propeller", "answered", "start created", "Flyte's propeller, until it has made the first pod"),
    ("scheduler", "start created", "start scheduled", "until the pod has a node"),
    ("kubelet", "start scheduled", "start running", "until its container runs: volumes, network, runtime"),
)
JOB: tuple[Stage, ...] = (
    ("to the job", "start ended", "job created", "Flyte notices the end and makes the training job"),
    ("queue", "job created", "job admitted", "Kueue: makes the workload and admits it, the queue being empty"),
    ("operator", "job admitted", "train created", "Kueue resumes the job, the operator makes its pods"),
    ("job's scheduler", "train created", "train scheduled", "until the first pod has a node"),
    ("job's kubelet", "train scheduled", "train running", "until its container runs"),
)
END: tuple[Stage, ...] = (
    ("to the last pod", "train ended", "finish running", "Flyte notices, makes the pod, until its container runs"),
    ("last task", "finish running", "finish ended", "evaluates, exports, stores the model and the report"),
    ("to the end", "finish ended", "done", "until the client knows of it"),
)
MEANINGS = {name: meaning for name, _, _, meaning in FIRST + JOB + END}


class Moments:
    """When what first happened to each execution, as Kubernetes told it."""

    def __init__(self, namespace: str) -> None:
        self._changed = threading.Condition()
        self._at: dict[str, dict[str, float]] = defaultdict(dict)
        self._owners: dict[str, str] = {}
        core, custom = client.CoreV1Api(), client.CustomObjectsApi()
        self._watch(self._pod, core.list_namespaced_pod, namespace)
        listed = custom.list_namespaced_custom_object
        self._watch(self._job, listed, "kubeflow.org", "v1", namespace, "pytorchjobs")
        self._watch(self._workload, listed, "kueue.x-k8s.io", "v1beta2", namespace, "workloads")

    def of(self, execution: str) -> dict[str, float]:
        """All that is known of an execution."""
        with self._changed:
            return dict(self._at[execution])

    def wait(self, execution: str, what: str, patience: float = 180) -> None:
        """Return when it has happened. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: what in self._at[execution], patience):
                raise TimeoutError(f"{execution}: not {what} after {patience:.0f} s; so far {self._at[execution]}")

    def note(self, execution: str, what: str) -> None:
        """It happens now, unless it has already."""
        with self._changed:
            self._at[execution].setdefault(what, time.monotonic())
            self._changed.notify_all()

    def _watch(self, take: Callable[[Any], None], listed: Callable[..., Any], *where: str) -> None:
        def forever() -> None:
            while True:
                # Of a kind that nothing was ever made of, a server may not know yet what is new.
                with contextlib.suppress(client.ApiException):
                    for event in watch.Watch().stream(listed, *where, timeout_seconds=3600):
                        take(event["object"])
                time.sleep(0.1)

        threading.Thread(target=forever, daemon=True).start()

    def _pod(self, pod: client.V1Pod) -> None:
        labels = pod.metadata.labels or {}
        execution, name = labels.get("execution-id"), labels.get("task-name", "")
        if execution is None:
            return
        task = next((short for long, short in TASKS.items() if name.startswith(long)), TRAIN)
        self.note(execution, f"{task} created")
        if pod.spec.node_name:
            self.note(execution, f"{task} scheduled")
        if pod.status.phase in ("Running", "Succeeded"):
            self.note(execution, f"{task} running")
        # What Flyte looks at; that the pod has, follows.
        if any(status.state.terminated for status in pod.status.container_statuses or []):
            self.note(execution, f"{task} ended")

    def _job(self, job: dict[str, Any]) -> None:
        execution = job["metadata"]["labels"]["execution-id"]
        self._owners[job["metadata"]["uid"]] = execution
        self.note(execution, "job created")

    def _workload(self, workload: dict[str, Any]) -> None:
        conditions = {c["type"]: c["status"] for c in workload.get("status", {}).get("conditions", [])}
        for owner in workload["metadata"].get("ownerReferences", []):
            if conditions.get("Admitted") == "True" and (execution := self._owners.get(owner["uid"])):
                self.note(execution, "job admitted")


def stages(moments: dict[str, float], asked: tuple[Stage, ...]) -> dict[str, float]:
    """Seconds of each stage."""
    return {name: moments[end] - moments[begin] for name, begin, end, _ in asked}


def submission(runs: Client, moments: Moments, namespace: str, last: str) -> dict[str, float]:
    """The moments of one submission, which is canceled when `last` has happened; nothing of it is left."""
    name = f"submission-{time.time_ns() // 10**6}"
    spec = RunSpec.model_validate(yaml.safe_load(SPEC.read_text()) | {"name": name})
    moments.note(name, "begin")
    runs.submit(spec)
    moments.note(name, "answered")
    moments.wait(name, last)
    runs.cancel(name)
    mine = {"label_selector": f"execution-id={name}"}
    while client.CoreV1Api().list_namespaced_pod(namespace, **mine).items:
        time.sleep(0.5)
    return moments.of(name)


def rows_of(seen: list[dict[str, float]], whole: bool) -> list[dict[str, float]]:
    """Seconds by stage of each submission, and their sums."""
    rows = [stages(moments, FIRST + JOB if whole else FIRST) for moments in seen]
    for row, moments in zip(rows, seen, strict=True):
        platform = sum(row.values())
        if whole:
            row["training runs, platform"] = platform
            row["training runs, tasks"] = sum(moments[f"{task} ended"] - moments[f"{task} running"] for task in BEFORE)
            row["training runs"] = moments["train running"] - moments["begin"]
        else:
            row["first pod runs"] = platform
    return rows


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True, help="the project's image")
    parser.add_argument("--project", default="flytesnacks")
    parser.add_argument("--domain", default="development")
    parser.add_argument("--runs", type=int, default=20, help="submissions up to the first running pod")
    parser.add_argument("--whole", type=int, default=5, help="submissions up to the training pods")
    asked = parser.parse_args()
    config.load_kube_config()
    place, namespace = (asked.project, asked.domain), f"{asked.project}-{asked.domain}"
    # The first submission registers the workflow.
    runs, moments = Client(FlyteBackend(*place, image=asked.image), poll=0.5), Moments(namespace)
    submission(runs, moments, namespace, "start running")
    for last, count in (("start running", asked.runs), ("train running", asked.whole)):
        begin = time.monotonic()
        seen = [submission(runs, moments, namespace, last) for _ in range(count)]
        load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        print(f"\nuntil {last}: {count} submissions, {time.monotonic() - begin:.0f} s, {load}\n")
        rows = rows_of(seen, whole=last.startswith(TRAIN))
        for name in rows[0] if rows else ():
            show(name, [row[name] for row in rows], MEANINGS.get(name, ""))


def show(name: str, seconds: list[float], meaning: str) -> None:
    """A row of the table."""
    print(f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f} | {meaning} |")


if __name__ == "__main__":
    main()
