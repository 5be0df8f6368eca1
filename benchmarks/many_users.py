"""Many users who submit at once, over two tenants: is a run lost, doubled or invisible, and what does one cost the API?

    KUBECONFIG=... FLYTECTL_CONFIG=... python -m benchmarks.many_users --image IMAGE [--users 20] [--runs 10]

Each user is a process with the client of `strata submit`. Runs are pods that sleep: IMAGE needs `sleep`, and no Python.
The first names are the same for all users of a tenant, who submit them at the same moment; one of them is to get each,
and the others an answer that says so. Prints what was wrong, and a table of seconds and calls; exit code 1 if a run is
lost, doubled or invisible.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import Any

from strata_platform.backends.flyte import FlyteBackend
from strata_platform.backends.flyte_admin import FlyteAdmin
from strata_platform.backends.flyte_registration import WORKFLOW
from strata_platform.backends.kubernetes_objects import Namespace
from strata_platform.client import Client
from strata_platform.errors import RunExists, StrataError
from strata_platform.kubernetes_api import KubernetesApi
from strata_platform.queue_shares import CONFIG_MAP, KEY, Shares
from strata_platform.runs import Phase, Run
from strata_platform.spec import RunSpec

DOMAIN = "development"
CONTESTED = 2
PATIENCE = 900.0


@dataclass
class Attempt:
    """What came of a submission."""

    project: str
    name: str
    user: str
    seconds: float
    where: str = ""
    refusal: str = ""
    calls: Counter[str] = field(default_factory=Counter)


def register(project: str, image: str, seconds: int) -> str:
    """A workflow under the name of `finetune` whose one pod sleeps; returns its version."""
    from flytekit import ContainerTask, Resources
    from flytekit.configuration import Config, SerializationSettings
    from flytekit.core.workflow import ImperativeWorkflow
    from flytekit.remote import FlyteRemote

    small = Resources(cpu="10m", mem="16Mi")
    sleep = ContainerTask("sleep", image=image, command=["sleep", str(seconds)], requests=small, limits=small)
    workflow = ImperativeWorkflow(WORKFLOW)
    workflow.add_workflow_input("spec", RunSpec)
    workflow.add_entity(sleep)
    remote = FlyteRemote(Config.auto(), project, DOMAIN, interactive_mode_enabled=False)
    version = f"many-users-{time.time_ns() // 10**9}"
    settings = SerializationSettings(image_config=None, project=project, domain=DOMAIN, version=version)
    remote.register_workflow(workflow, settings, version)
    return version


def count_calls() -> Counter[str]:
    """Every call of this process to Flyte and Kubernetes from now on, by kind."""
    calls: Counter[str] = Counter()

    def counted(kind: type, method: str, name: str) -> None:
        original: Callable[..., Any] = getattr(kind, method)

        def call(self: Any, *arguments: Any, **more: Any) -> Any:
            calls[name] += 1
            return original(self, *arguments, **more)

        setattr(kind, method, call)

    counted(FlyteAdmin, "_call", "Flyte")
    counted(KubernetesApi, "_send", "Kubernetes")
    return calls


def user(name: str, project: str, version: str, runs: list[str], start: Barrier, results: Any) -> None:
    """A user's process: submit `runs` one after the other, the contested ones at the same moment as others."""
    os.environ["STRATA_OWNER"] = name
    calls = count_calls()
    # The tenant's first queue, for which the client looks; the pods do not queue.
    shares = Shares.parse(Namespace(f"{project}-{DOMAIN}").text(CONFIG_MAP, KEY) or "")
    resources = {"queue": next(iter(shares.queues)), "cpu": "10m", "memory": "16Mi"}
    for number, run in enumerate(runs):
        client = Client(FlyteBackend(project, DOMAIN, version=version))
        if number < CONTESTED:
            start.wait(PATIENCE)
        calls.clear()
        begin = time.monotonic()
        attempt = Attempt(project, run, name, 0.0)
        try:
            attempt.where = client.submit(
                RunSpec.model_validate({"name": run, "output": "/runs", "resources": resources})
            ).where
        except RunExists as error:
            attempt.refusal = str(error)
        except StrataError as error:
            attempt.refusal = f"NOT A REFUSAL IN WORDS: {type(error).__name__}: {error}"
        attempt.seconds = time.monotonic() - begin
        attempt.calls = Counter(calls)
        results.put(attempt)


def submit_all(projects: list[str], versions: dict[str, str], users: int, runs: int, stamp: int) -> list[Attempt]:
    """All users at once."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(users), context.Queue()
    processes = []
    for number in range(users):
        project, name = projects[number % len(projects)], f"user-{number:02d}"
        mine = [f"contested-{stamp}-{index}" for index in range(CONTESTED)]
        mine += [f"run-{stamp}-{number:02d}-{index}" for index in range(runs - CONTESTED)]
        arguments = (name, project, versions[project], mine, start, results)
        processes.append(context.Process(target=user, args=arguments))
    for process in processes:
        process.start()
    attempts = [results.get(timeout=PATIENCE) for _ in range(users * runs)]
    for process in processes:
        process.join()
    return attempts


def problems_of(project: str, attempts: list[Attempt], stamp: int) -> tuple[list[str], list[Run]]:
    """What is wrong with the runs of a tenant, and the runs as `list` shows them."""
    admin = FlyteBackend(project, DOMAIN)._admin
    client = Client(FlyteBackend(project, DOMAIN))
    executions = [each.id.name for each in admin.executions() if f"-{stamp}-" in each.id.name]
    listed = [run for run in client.list() if f"-{stamp}-" in run.name]
    accepted = [attempt for attempt in attempts if not attempt.refusal]
    found = [f"{item} has no execution" for item in {a.name for a in accepted} - set(executions)]
    found += [
        f"{item} is an execution that nobody was told of" for item in set(executions) - {a.name for a in accepted}
    ]
    found += [f"{name} was accepted {n} times" for name, n in Counter(a.name for a in accepted).items() if n > 1]
    found += [f"{attempt.name} is not listed" for attempt in accepted if attempt.name not in {r.name for r in listed}]
    found += [a.refusal for a in attempts if a.refusal.startswith("NOT")]
    owners = {run.name: run.owner for run in listed}
    for attempt in accepted:
        if owners.get(attempt.name, attempt.user) != attempt.user:
            found.append(f"{attempt.name} of {attempt.user} is listed as of {owners[attempt.name]}")
    refused = {a.name for a in attempts if a.refusal} - {a.name for a in accepted}
    found += [f"{name} was refused to everybody" for name in refused]
    return found, listed


def report(attempts: list[Attempt], users: int, seconds: float) -> None:
    """Print what submissions took and cost, before the runs have ended."""
    accepted = [attempt for attempt in attempts if not attempt.refusal]
    refused = [attempt for attempt in attempts if attempt.refusal]
    print(f"{len(attempts)} submissions by {users} users in {seconds:.0f} s: {len(accepted)} runs, {len(refused)} "
          f"refused; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")  # fmt: skip
    for what, chosen in (("accepted", accepted), ("refused", refused)):
        if chosen:
            taken = sorted(attempt.seconds for attempt in chosen)
            calls = {kind: statistics.mean(a.calls[kind] for a in chosen) for kind in ("Flyte", "Kubernetes")}
            shown = ", ".join(f"{number:.1f} calls to {kind}" for kind, number in calls.items())
            print(f"| {what} | {statistics.median(taken):.2f} s | {taken[0]:.2f} to {taken[-1]:.2f} | {shown} |")
    print("".join(f"a refusal: {attempt.refusal}" for attempt in refused[:1]), flush=True)


def main() -> int:
    """Submit, look, wait, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True, help="an image with `sleep` that a tenant's pods may run")
    parser.add_argument("--projects", nargs="+", default=["flytesnacks", "rival"])
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--runs", type=int, default=10, help="submissions of each user")
    parser.add_argument("--seconds", type=int, default=20, help="that each run takes")
    asked = parser.parse_args()
    versions = {project: register(project, asked.image, asked.seconds) for project in asked.projects}
    stamp, begin = time.time_ns() // 10**9, time.monotonic()
    attempts = submit_all(asked.projects, versions, asked.users, asked.runs, stamp)
    report(attempts, asked.users, time.monotonic() - begin)
    problems = []
    for project in asked.projects:
        found, _ = problems_of(project, [a for a in attempts if a.project == project], stamp)
        problems += [f"{project}: {line}" for line in found]
    end, done = time.monotonic() + PATIENCE, Counter[Phase]()
    while time.monotonic() < end:
        runs = [run for p in asked.projects for run in problems_of(p, [], stamp)[1]]
        done = Counter(run.phase for run in runs)
        if all(run.is_done for run in runs):
            break
        time.sleep(2)
    if set(done) != {Phase.SUCCEEDED}:
        problems.append(f"not all succeeded: {dict(done)}")
    print(f"all had ended after {time.monotonic() - begin:.0f} s")
    print("\n".join(problems) or "none lost, none doubled, none invisible")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
