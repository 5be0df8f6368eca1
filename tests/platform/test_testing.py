"""The backend for tests keeps the contract of the real one: the same client, the same answers, the same errors."""

from pathlib import Path

import pytest

from strata_platform import Client, NotReady, Phase, RunExists, RunNotFound, RunSpec, Stage, WaitTimeout
from strata_platform.backends.local import LocalBackend
from strata_platform.estimate import GPUS
from strata_platform.testing import SUCCESS, FakeBackend, metric_point


@pytest.fixture(params=["fake", "local"])
def backend(request, monkeypatch):
    """Each of them with a run that takes three steps."""
    if request.param == "fake":
        return FakeBackend([Stage.TRAINING, *(metric_point(step, 10.0 / step) for step in (1, 2, 3)), Phase.SUCCEEDED])
    request.getfixturevalue("workspace")
    monkeypatch.setenv("STAND_IN", "finishes")
    return LocalBackend(retries=0, grace=1)


def test_a_run_from_its_submission_to_its_outputs(backend, tmp_path):
    client = Client(backend, poll=0.01)
    run = client.submit(RunSpec(name="run", output=str(tmp_path / "out")))
    assert (run.name, run.backend, run.is_done) == ("run", backend.name, False)
    assert [(point.step, point.loss) for point in client.metrics("run", follow=True)] == [
        (1, 10.0),
        (2, 5.0),
        (3, 10 / 3),
    ]
    ended = client.wait("run", timeout=600)
    assert (ended.phase, ended.stage, ended.step, ended.loss) == (Phase.SUCCEEDED, None, 3, 10 / 3)
    assert [known.name for known in client.list()] == ["run"]
    assert [known.name for known, _ in client.held(since=0)] == ["run"]
    outputs = client.outputs("run", to=tmp_path / "copy")
    assert all(Path(path).exists() for _, path in outputs.items())
    assert client.cancel("run").phase is Phase.SUCCEEDED


def test_every_verb_refuses_a_name_that_no_run_has(backend):
    client = Client(backend, poll=0.01)
    for verb in (client.get, client.wait, client.logs, client.metrics, client.events, client.cancel, client.outputs):
        with pytest.raises(RunNotFound, match="'missing'"):
            verb("missing")


def test_a_run_that_goes_on_keeps_its_name_and_its_outputs():
    client = Client(FakeBackend([Stage.TRAINING]), poll=0)
    client.submit(RunSpec(name="run"))
    with pytest.raises(RunExists):
        client.submit(RunSpec(name="run"))
    with pytest.raises(NotReady):
        client.outputs("run")
    with pytest.raises(WaitTimeout):
        client.wait("run", timeout=0)
    assert client.cancel("run").phase is Phase.ABORTED
    client.submit(RunSpec(name="run"))


def test_every_look_plays_one_item():
    client = Client(FakeBackend(), poll=0)
    client.submit(RunSpec(name="run"))
    seen = []
    client.wait("run", show=lambda run: seen.append((run.phase, run.step)))
    assert seen == [(Phase.RUNNING, 0), (Phase.RUNNING, 0), (Phase.RUNNING, 1), (Phase.RUNNING, 2)]
    assert [line.text for line in client.logs("run")] == [item.text for item in SUCCESS if hasattr(item, "text")]


def test_a_script_without_an_end_is_not_followed_for_ever():
    client = Client(FakeBackend([metric_point(1)]), poll=0)
    client.submit(RunSpec(name="run"))
    with pytest.raises(AssertionError, match="ended without a final phase"):
        list(client.metrics("run", follow=True))


def test_specs_and_gpus_are_those_of_the_test():
    backend = FakeBackend(gpu=GPUS["h200"])
    spec = RunSpec(name="run")
    assert Client(backend).estimate(spec).gpu is GPUS["h200"]
    Client(backend).submit(spec)
    assert backend.submitted == [spec]
