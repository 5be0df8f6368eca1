"""The workflow that verifies a spec: what it runs, and how it ends."""

import json
from types import SimpleNamespace

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from strata_platform.spec import RunSpec, load_spec
from tasks import verify as module
from tasks.runtime.report.checks import render_verification
from workflows.verify import verify

CHECK = {"name": "mask", "status": "pass", "figure": 0.0, "limit": 0.0, "seconds": 0.1, "detail": "of 3 <documents>"}
SHOWN = [{"text": "What is <b>? ", "learned": False}, {"text": "It is 2.", "learned": True}]
REPORT = {"name": "run", "passed": True, "subject": "verify run", "checks": [{**CHECK, "shown": SHOWN}]}


@pytest.fixture
def verified(monkeypatch):
    """Lets the process that verifies end with a code and a report; returns what it was started with."""
    started = []

    def end_with(code, report):
        def run(command, **options):
            started.append((command, options["input"]))
            return SimpleNamespace(returncode=code, stdout=report and json.dumps(report))

        monkeypatch.setattr(module.subprocess, "run", run)
        return started

    return end_with


def test_the_report_of_the_same_command_is_returned(verified):
    started = verified(0, REPORT)
    spec = RunSpec(name="mine", seed=3)
    assert json.loads(verify(spec=spec)) == REPORT
    ((command, given),) = started
    assert command[1:] == ["-m", "tasks.runtime.verification", "-", "--json"] and load_spec(given) == spec


@pytest.mark.parametrize(
    ("code", "report", "error", "said"),
    [
        (
            1,
            REPORT | {"passed": False, "checks": [CHECK | {"status": "fail"}]},
            ValueError,
            "does not train correctly: mask: of 3",
        ),
        (2, {"name": "run", "passed": False, "error": "data.source is gone"}, ValueError, "data.source is gone"),
        (68, {"name": "run", "passed": False, "error": "the Hub"}, FlyteRecoverableException, "the Hub"),
        (-9, "", RuntimeError, "ended with code -9"),
    ],
)
def test_what_goes_wrong_ends_the_task_by_its_kind(verified, code, report, error, said):
    verified(code, report)
    with pytest.raises(error, match=said):
        module.verify.task_function(spec=RunSpec())


def test_the_page_shows_checks_and_what_is_learned():
    page = render_verification(REPORT)
    assert '<th scope="row">mask</th>' in page and "of 3 &lt;documents&gt;" in page
    assert '<div class="text" dir="auto">What is &lt;b&gt;? <mark>It is 2.</mark></div>' in page


def test_the_task_shows_its_report_as_a_deck(verified, monkeypatch):
    decks = {}
    monkeypatch.setattr(module, "Deck", lambda name, page: decks.update({name: page}))
    verified(0, REPORT)
    module.verify.task_function(spec=RunSpec())
    assert decks == {"Verification": render_verification(REPORT)}
