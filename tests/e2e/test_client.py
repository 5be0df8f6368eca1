"""The client on a cluster: a run of two pods from its submission to its outputs, preempted on the way.

What tests/platform has of the client over this machine, and over servers that answer as a cluster does, is seen here
on one.
"""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from strata_platform.backends.flyte_messages import NAME, OWNER, spec_inputs
from strata_platform.backends.local import LocalBackend
from strata_platform.client import Client
from strata_platform.errors import BackendError, RunExists, RunNotFound
from strata_platform.runs import Phase, Stage
from tasks.runtime.run_folder.record import CompletionRecord
from tests.e2e.helpers.cluster import (
    DOMAIN,
    MIDDLE,
    NAMESPACE,
    NO_ROOM,
    PATIENCE,
    PROJECT,
    ROOT,
    SPEC,
    Run,
    beside,
    named,
    until,
)

STEPS = SPEC["training"]["steps"]


def index(items, matches, start=0):
    """Of the first that matches, from `start` on."""
    return next(number for number, item in enumerate(items) if number >= start and matches(item))


def test_waiting_shows_the_queue_the_training_the_preemption_and_the_training_again(preempted):
    ended, seen = preempted.end.result(60), preempted.seen
    assert (ended.phase, ended.step, ended.steps, ended.restarts) == (Phase.SUCCEEDED, STEPS, STEPS, 1)
    preparing = index(seen, lambda run: run.stage is Stage.PREPARING)
    # Kueue says why some moments after it has the run. The undisturbed run may be before it.
    queued = index(seen, lambda run: NO_ROOM in run.message, preparing)
    assert (seen[queued].phase, seen[queued].stage, seen[queued].queue) == (Phase.QUEUED, Stage.WAITING, "research")
    assert seen[queued].position in (0, 1)
    training = index(seen, lambda run: run.stage is Stage.TRAINING and run.eta is not None, queued)
    assert seen[training].phase is Phase.RUNNING and seen[training].steps == STEPS
    evicted = index(seen, lambda run: run.message.startswith("Preempted:"), training)
    assert seen[evicted].phase is Phase.QUEUED
    again = index(seen, lambda run: run.stage is Stage.TRAINING, evicted)
    assert seen[again].restarts == 1


def test_the_lines_of_all_pods_come_in_the_order_of_time_and_end_with_the_run(preempted):
    lines = preempted.lines.result(60)
    assert {line.prefix for line in lines} >= {"[rank 0]", "[rank 1]"}
    starts = [line for line in lines if line.rank == 0 and line.text.startswith(f"training: {STEPS} steps")]
    assert len(starts) == 2
    assert any(line.text.startswith("validation loss") for line in lines)
    assert not any(line.text.startswith("@strata") for line in lines)
    late = sum(later.time < line.time for line, later in pairwise(lines))
    assert late <= len(lines) // 20


def test_metrics_are_the_same_while_it_trains_and_afterwards(strata, preempted):
    points, afterwards = preempted.points.result(60), list(strata.metrics(preempted.run.spec.name))
    assert {point.step: point for point in points} == {point.step: point for point in afterwards}
    assert {point.step for point in points} == set(range(1, STEPS + 1))
    last = max(point.step for point in points if point.attempt == 0)
    first_again = min(point.step for point in points if point.attempt == 1)
    assert last >= MIDDLE and first_again <= last + 1
    assert first_again % SPEC["checkpoint"]["every"] == 1


def test_events_have_those_of_flyte_kubernetes_and_kueue(strata, preempted):
    events = strata.events(preempted.run.spec.name)
    assert {"Submitted", "Started", "Succeeded", "Scheduled", "Admitted", "Preempted"} <= {e.reason for e in events}
    assert [event.time for event in events] == sorted(event.time for event in events)
    # Of the start after the preemption.
    phases = [event.message.partition(":")[0] for event in events if event.reason == "Startup"]
    assert phases[:6] == ["queue", "job's controller", "scheduler", "volumes", "image", "container"]
    assert phases[-2:] == ["first step", "second step"]


SMALL = {
    "topology": {"nnodes": 1},
    "parallel": {"type": "single"},
    "training": {"steps": 2},
    "checkpoint": {"every": 2},
}


def kept_after_its_pods(cluster, run, folder):
    """The lines that are kept of a run once its pods are removed, from a copy of its folder."""
    run.until_done()
    cluster.core.delete_collection_namespaced_pod(NAMESPACE, label_selector=f"execution-id={run.id}")
    until("its pods are removed", lambda: not run.pods())
    where = f"{run.spec.output}/{run.spec.name}/logs"
    (folder / "logs").mkdir(parents=True)
    for name in cluster.window("ls", where).split():
        (folder / "logs" / name).write_text(cluster.window("cat", f"{where}/{name}"))
    return list(Client(LocalBackend(folder / "names")).logs(str(folder)))


def test_what_removed_pods_said_that_planned_and_prepared_stays_readable(cluster, tmp_path):
    # No other run has data of this seed.
    seed = time.time_ns() % 2**31
    first = cluster.submit("prepared", seed=seed, **SMALL)
    lines = kept_after_its_pods(cluster, first, tmp_path / "first")
    (planned,) = [line for line in lines if line.text.startswith("preparing data ")]
    (done,) = [line for line in lines if line.text.startswith("prepared in ")]
    assert planned.rank is None and done.rank is None
    assert len({planned.source, done.source}) == 2
    assert any(line.text.startswith("validation loss") for line in lines)
    # Another run of these data has no such pod.
    second = cluster.submit("reused", seed=seed, **SMALL)
    lines = kept_after_its_pods(cluster, second, tmp_path / "second")
    assert any(line.text.startswith("reusing prepared data ") for line in lines)
    assert done in lines


def test_data_that_are_rejected_leave_the_log_of_the_pod_that_rejected_them(cluster, tmp_path):
    file = f"{SPEC['output']}/rejected-{time.time_ns()}.jsonl"
    rows = '{"text": "a text"}\\n' * 60 + '{"text": 7}\\n'
    cluster.window("sh", "-c", f"mkdir -p {SPEC['output']} && printf '{rows}' > {file}")
    run = cluster.submit(
        "rejected", data={"source": file, "max_samples": None}, objective={"type": "pretrain"}, **SMALL
    )
    lines = kept_after_its_pods(cluster, run, tmp_path)
    assert any(line.text.startswith("Traceback") for line in lines)
    assert any("ValueError" in line.text and file in line.text for line in lines)


def test_outputs_are_fetched(strata, preempted, tmp_path):
    outputs = strata.outputs(preempted.run.spec.name, to=tmp_path)
    assert CompletionRecord.load(Path(outputs.record)).require_complete().steps == STEPS
    assert Path(outputs.report).read_text().startswith("<!doctype html>")
    assert json.loads((Path(outputs.model) / "config.json").read_text())["model_type"] == "llama"


# Resources that no queue of the tenant admits, and why.
HOPELESS = {
    "of-another-tenant": ({"queue": "rival"}, "there is no queue 'rival', only: express, research"),
    "larger-than-the-share": ({"cpu": "2"}, "all pods together ask for 4 CPUs and at most 1.6 CPUs can be had"),
}


@pytest.mark.parametrize("case", HOPELESS)
def test_a_run_that_no_queue_admits_is_refused_before_it_is_an_execution(strata, case):
    asked, reason = HOPELESS[case]
    spec = named("hopeless", resources=asked)
    with pytest.raises(BackendError, match=reason):
        strata.submit(spec)
    with pytest.raises(RunNotFound):
        strata.get(spec.name)


@pytest.mark.parametrize("case", HOPELESS)
def test_its_first_pod_refuses_it_where_the_client_did_not(cluster, case):
    asked, reason = HOPELESS[case]
    run = cluster.submit("hopeless", resources=asked)
    run.until_done()
    assert reason in run.error()
    # Another attempt would find the same.
    assert len(run.pods()) == 1 and not run.jobs()


@pytest.mark.slow
def test_a_run_that_no_quota_can_admit_any_more_is_ended(cluster, strata):
    spec = named("shrunk", resources={"queue": "express"})
    cluster.end_without_quota(strata, spec, settled=cluster.until_settled)


# A cancellation may end FlytePropeller 1.16 itself (see until_settled), and with it all tests that follow.
@pytest.mark.slow
def test_a_run_that_goes_on_is_one_and_is_canceled_and_its_name_used_again(cluster, strata):
    spec = named("canceled")
    for execution in (spec.name, f"{spec.name}-x2"):
        assert strata.submit(spec).where.endswith(f"/{execution}")
        with pytest.raises(RunExists, match=f"has not ended, as execution {execution} of "):
            strata.submit(spec)
        cluster.until_settled(execution)
        assert strata.get(spec.name).phase is Phase.RUNNING
        assert strata.cancel(spec.name).phase is Phase.ABORTED
    assert [run.phase for run in strata.list() if run.name == spec.name] == [Phase.ABORTED]


@pytest.mark.slow
def test_of_two_submissions_at_once_one_trains(cluster, strata):
    spec = named("twin")

    def submit():
        try:
            return strata.submit(spec)
        except RunExists as error:
            return error

    results = [each.result(PATIENCE) for each in [beside(submit), beside(submit)]]
    assert sorted(isinstance(result, RunExists) for result in results) == [False, True]
    cluster.until_settled(spec.name)
    assert strata.get(spec.name).where.endswith(f"/{spec.name}")
    assert strata.cancel(spec.name).phase is Phase.ABORTED


@pytest.mark.slow
def test_list_and_get_mean_the_execution_that_the_console_relaunched(cluster, strata):
    spec = named("relaunched", resources={"queue": "express"})
    with cluster.held("express"):
        first = strata.submit(spec)
        until("it waits", lambda: strata.get(spec.name).stage is Stage.WAITING)
        # What the console sends: the inputs and labels of the execution, under a name of its own.
        admin = strata.backend._admin
        plan = admin.execution(spec.name).spec.launch_plan
        admin.create(f"a{spec.name}", plan, spec_inputs(spec), {NAME: spec.name, OWNER: "ada"}, {})
        (listed,) = [run for run in strata.list() if run.name == spec.name]
        found = strata.get(spec.name)
        assert first.where != found.where == listed.where and listed.owner == found.owner == "ada"
        until("it waits", lambda: strata.get(spec.name).stage is Stage.WAITING)
        (listed,) = [run for run in strata.list(owner="ada") if run.name == spec.name]
        assert (listed.phase, listed.stage, listed.queue) == (Phase.QUEUED, Stage.WAITING, "express")
        for execution in (spec.name, f"a{spec.name}"):
            cluster.until_settled(execution)
        strata.cancel(spec.name)
        for execution in (spec.name, f"a{spec.name}"):
            Run(cluster, spec, cluster.remote.fetch_execution(name=execution)).until_done()


@pytest.mark.slow
def test_the_notebook_submits_through_the_client_and_through_flytes_own(tmp_path):
    place = ["--project", PROJECT, "--domain", DOMAIN, "--version", f"release-{time.time_ns()}"]
    release = [*place, "--copy", "none", "--image", os.environ["STRATA_E2E_IMAGE"]]
    pyflyte = [Path(sys.executable).with_name("pyflyte"), "register", *release, "--activate-launchplans"]
    subprocess.run([*pyflyte, "workflows/finetune.py"], cwd=ROOT, check=True, timeout=300)
    own = {"STRATA_BACKEND": "flyte", "STRATA_PROJECT": PROJECT, "STRATA_DOMAIN": DOMAIN, "TMPDIR": str(tmp_path)}
    program, notebook = ROOT / "tests/helpers/run_notebook.py", tmp_path / "submit.ipynb"
    # The tests' tenant has no queue called `default`.
    text = (ROOT / "examples/submit.ipynb").read_text()
    notebook.write_text(text.replace("resources: {cpu", "resources: {queue: research, cpu"))
    command = [sys.executable, program, notebook, tmp_path / "shown.json"]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, timeout=590)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert "def sorted(iterable):" in ended.stdout
    # The other run's name is of Flyte's own making.
    assert any(line.split()[1:2] == ["succeeded"] for line in ended.stdout.splitlines())
    assert len(json.loads((tmp_path / "shown.json").read_text())["loss"]) == 20
