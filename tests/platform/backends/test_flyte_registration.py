"""Submissions to Flyte: who has a name, which registration is taken, and what reaches Flyte."""

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from flyteidl.admin import execution_pb2
from flyteidl.core import execution_pb2 as core_pb2

from strata_platform.backends import flyte_registration
from strata_platform.backends.flyte import FlyteBackend
from strata_platform.backends.flyte_registration import WORKFLOW, digest
from strata_platform.client import Client
from strata_platform.errors import BackendError, RunExists
from strata_platform.runs import Phase
from strata_platform.spec import RunSpec

QUEUED, RUNNING, FAILED = (core_pb2.WorkflowExecution.Phase.Value(name) for name in ("QUEUED", "RUNNING", "FAILED"))
TWIN = RunSpec(name="twin")


@pytest.fixture
def released(admin):
    admin.active = "v1"
    return admin


@pytest.mark.parametrize("earlier", [0, 1], ids=["the first", "the second submission"])
def test_of_two_submissions_at_once_one_has_the_name(client, released, tmp_path, earlier):
    if earlier:
        released.add("twin", FAILED, "twin")
    both = threading.Barrier(2)
    released.before_create = lambda name: both.wait(10)
    other = Client(FlyteBackend(config=str(tmp_path / "flyte.yaml")))

    def submit(client):
        try:
            return client.submit(TWIN)
        except RunExists as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(submit, [client, other]))
    (refused,) = [result for result in results if isinstance(result, RunExists)]
    name = "twin-x2" if earlier else "twin"
    assert f"run 'twin' has not ended, as execution {name}" in str(refused)
    assert [request.name for request in released.created] == [name]


def test_a_submission_whose_answer_was_lost_is_ones_own(client, released):
    released.lost_answers = 1
    assert client.submit(TWIN).phase is Phase.QUEUED
    assert list(released.executions) == ["twin"]


def test_a_name_that_another_run_takes_meanwhile_is_not_this_runs(client, released):
    released.add("twin", FAILED, "twin")

    def take(name):
        if name == "twin-x2":
            released.add("twin-x2", RUNNING, "twin-x2")

    released.before_create = take
    assert client.submit(TWIN).where.endswith("/twin-x3")


def test_a_run_that_the_console_relaunched_is_not_started_beside_it(client, released):
    released.add("twin", FAILED, "twin")
    released.add("f0a1b2", RUNNING, "twin", owner="ada")
    with pytest.raises(RunExists, match="as execution f0a1b2 of ada; follow it with 'strata logs -f twin'"):
        client.submit(TWIN)
    assert released.created == []


def test_cancel_ends_every_live_execution_of_a_name(client, admin):
    admin.add("old", FAILED, "twin")
    admin.add("twin", RUNNING, "twin")
    admin.add("twin-x2", RUNNING, "twin")
    admin.add("other", RUNNING, "other")
    admin.add("f0a1b2", QUEUED, "twin")
    assert client.cancel("twin").phase is Phase.ABORTED
    assert sorted(admin.terminated) == ["f0a1b2", "twin", "twin-x2"]


def test_get_and_list_mean_the_same_execution_after_a_relaunch(client, admin):
    admin.add("twin", FAILED, "twin")
    assert client.get("twin").phase is Phase.FAILED
    admin.add("f0a1b2", RUNNING, "twin")
    admin.add("other", FAILED, "other")
    (listed,) = [run for run in client.list() if run.name == "twin"]
    assert listed.where.endswith("/f0a1b2") and client.get("twin").where == listed.where
    # Another look reads what is new alone, and sees a second relaunch.
    before = admin.pages
    admin.add("f9", FAILED, "twin")
    assert client.get("twin").where.endswith("/f9")
    assert admin.pages == before + 1


def test_flyte_gets_what_flytekit_would_send(client, released, monkeypatch):
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine
    from flytekit.models.common import Annotations, Labels
    from flytekit.models.core.identifier import Identifier, ResourceType
    from flytekit.models.execution import ExecutionMetadata, ExecutionSpec, NotificationList
    from flytekit.models.literals import LiteralMap
    from flytekit.models.types import LiteralType, SimpleType

    monkeypatch.setenv("STRATA_OWNER", "Ada L.")
    client.submit(TWIN)
    (sent,) = released.created
    context = FlyteContextManager.current_context()
    inputs = LiteralMap({"spec": TypeEngine.to_literal(context, TWIN, RunSpec, LiteralType(simple=SimpleType.STRUCT))})
    spec = ExecutionSpec(
        Identifier(ResourceType.LAUNCH_PLAN, "flytesnacks", "development", WORKFLOW, "v1"),
        ExecutionMetadata(ExecutionMetadata.ExecutionMode.MANUAL, "placeholder", 0),
        notifications=NotificationList([]),
        labels=Labels({"strata/run": "twin", "strata/owner": "Ada-L"}),
        annotations=Annotations(dict(sent.spec.annotations.values)),
    )
    theirs = execution_pb2.ExecutionCreateRequest(
        project="flytesnacks", domain="development", name="twin", spec=spec.to_flyte_idl(), inputs=inputs.to_flyte_idl()
    )
    # Empty, and a word that Flyte replaces.
    theirs.spec.ClearField("auth_role")
    theirs.spec.metadata.principal = ""
    assert str(sent).splitlines() == str(theirs).splitlines()
    assert client.get("twin").owner == "Ada-L"


def test_without_a_release_nobodys_working_copy_is_taken(client, admin):
    admin.plans = {"ada-0011"}
    with pytest.raises(
        BackendError, match=r"no release of workflows\.finetune\.finetune is active in flytesnacks-deve"
    ):
        client.submit(TWIN)
    admin.active = "v2"
    client.submit(TWIN)
    assert admin.created[0].spec.launch_plan.version == "v2"


def test_a_version_is_taken_by_name(admin, tmp_path):
    admin.active, admin.plans = "v2", {"v1"}
    file = str(tmp_path / "flyte.yaml")
    Client(FlyteBackend(config=file, version="v1")).submit(TWIN)
    assert admin.created[0].spec.launch_plan.version == "v1"
    with pytest.raises(BackendError, match="has no version 'v0' in flytesnacks-development; name another"):
        Client(FlyteBackend(config=file, version="v0")).submit(RunSpec(name="other"))


def test_an_unchanged_working_copy_is_registered_once(admin, tmp_path, monkeypatch):
    monkeypatch.setenv("STRATA_OWNER", "ada")
    source = tmp_path / "source"
    (source / "workflows").mkdir(parents=True)
    (source / "workflows" / "finetune.py").write_text("one")
    registered = []

    def register(command, **options):
        # git is asked what the working copy is.
        if command[0] == "git":
            return real(command, **options)
        registered.append(command[command.index("--version") + 1])
        admin.plans.add(registered[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    real = subprocess.run
    monkeypatch.setattr(flyte_registration.subprocess, "run", register)

    def version(name, image="registry/strata:1"):
        Client(FlyteBackend(config=str(tmp_path / "flyte.yaml"), image=image, source=source)).submit(RunSpec(name=name))
        return admin.created[-1].spec.launch_plan.version

    first = version("a")
    assert version("b") == first and registered == [first] and first.startswith("ada-")
    assert version("c", image="registry/strata:2") != first
    (source / "workflows" / "finetune.py").write_text("two")
    assert version("d") != first and len(registered) == 3


def test_a_working_copy_is_what_git_does_not_ignore(tmp_path):
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "finetune.py").touch()
    (tmp_path / ".gitignore").write_text("out/\n")
    (tmp_path / "out").mkdir()
    for repository in (False, True):
        if repository:
            subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        before = digest(tmp_path, "image")
        (tmp_path / "out" / "run").write_text(str(repository))
        assert digest(tmp_path, "image") == before
        (tmp_path / "new.py").write_text(f"{repository}")
        assert digest(tmp_path, "image") != before


def test_rows_are_as_many_as_are_asked_for(client, admin, caplog):
    for number in range(230):
        admin.add(f"run-{number}", FAILED, owner="ada" if number % 2 else "bob")
    assert [run.name for run in client.list(limit=2)] == ["run-229", "run-228"]
    assert len(client.list(limit=150)) == 150
    assert len(client.list()) == 230
    of_ada = client.list(limit=110, owner="ada")
    assert len(of_ada) == 110 and {run.owner for run in of_ada} == {"ada"}
    assert client.list(owner="nobody") == []


def test_outputs_and_metrics_are_read_from_the_store(client, admin, tmp_path):
    store = tmp_path / "store"
    (store / "model" / "tokenizer").mkdir(parents=True)
    (store / "model" / "config.json").write_text("{}")
    (store / "model" / "tokenizer" / "t.json").write_text("{}")
    (store / "report.html").write_text("report")
    record = {"steps": 4, "steps_asked": 5, "train_loss": 1.5, "eval_loss_after": 1.25, "stopped_early": True,
              "tokens_per_second": 10.0, "restarts": 1}  # fmt: skip
    (store / "record.json").write_text(json.dumps(record))
    (store / "weights").mkdir()
    point = {"step": 1, "attempt": 0, "time": 0.0, "loss": 2.0, "learning_rate": 0.1, "grad_norm": None, "tokens": 1,
             "target_tokens": 1, "tokens_per_second": 8.0, "step_seconds": 3.0, "memory_bytes": 1}  # fmt: skip
    (store / "weights" / "metrics.jsonl").write_text(json.dumps(point) + "\n")
    admin.add("twin", core_pb2.WorkflowExecution.SUCCEEDED)
    kinds = {"model": "model", "report": "report.html", "record": "record.json"}
    admin.outputs["twin"] = {kind: f"file://{store}/{name}" for kind, name in kinds.items()}
    admin.nodes = {("twin", ""): {"n0": False, "n1": True}, ("twin", "n1"): {"n1-0-dn0": False}}
    admin.outputs["n1-0-dn0"] = {"weights": f"file://{store}/weights"}

    run = client.get("twin")
    assert (run.step, run.steps, run.loss, run.eval_loss, run.restarts) == (4, 5, 1.5, 1.25, 1)
    assert [found.loss for found in client.metrics("twin")] == [2.0]
    assert client.outputs("twin").model == f"file://{store}/model"
    copies = client.outputs("twin", to=tmp_path / "copies")
    assert copies.model == str(tmp_path / "copies" / "model")
    assert (tmp_path / "copies" / "model" / "tokenizer" / "t.json").read_text() == "{}"
    assert (tmp_path / "copies" / "report.html").read_text() == "report"
