"""What is unfit to train on is refused by every process, and named, before anything is loaded."""

import json
import sys

import pytest
import torch

from strata_platform.outcomes import UNHEALTHY
from strata_platform.spec import RunSpec
from tasks.runtime import __main__ as entry
from tasks.runtime.faults.health_check import Unhealthy, _products, check_health, slow_processes
from tasks.runtime.process.error_explanations import explain
from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.watchdog import Watchdog
from tasks.runtime.run_folder.folder import RunFolder
from tests.helpers import fork_server
from tests.runtime.helpers.unhealthy_processes import CASES, wrong_products


@pytest.fixture(scope="module")
def said():
    """By case: what both processes raised."""
    ended = fork_server.run(
        [sys.executable, "-m", "tests.runtime.helpers.unhealthy_processes"],
        env=fork_server.clean_environment(NODE_NAME="node-b"), text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(zip(CASES, map(json.loads, ended.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", ["healthy", "off"])
def test_what_is_fit_or_not_looked_at_is_not_refused(said, case):
    assert said[case] == [None, None]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wrong products", "process 1 (node-b): 1 values of a matrix product are wrong"),
        ("broken", "process 1 (node-b): CUDA error: uncorrectable ECC error encountered. Nothing"),
        ("slow", "faults.min_bandwidth is 1e+06; slowed down by process 0 (node-b) and process 1 (node-b)"),
    ],
)
def test_every_process_says_who_is_unfit(said, case, words):
    first, second = said[case]
    assert first == second and words in first
    assert first.startswith("not fit to train on: ")
    # Only the one at fault, where one is.
    assert case == "slow" or "process 0" not in first


def test_a_wrong_sum_is_found_by_all(said):
    assert all(
        "process 0 (node-b): 1 values of a sum over all are wrong; process 1" in text for text in said["wrong sums"]
    )


@pytest.mark.parametrize(
    ("links", "blamed"),
    [
        ({}, []),
        ({(0, 1): 3.0}, [0, 1]),
        ({(0, 1): 40.0, (1, 2): 39.0, (0, 2): 41.0}, []),
        # One cable, one machine, and two machines side by side.
        ({(0, 1): 40.0, (1, 2): 4.0, (2, 3): 38.0, (0, 3): 40.0}, [1, 2]),
        ({(0, 1): 40.0, (1, 2): 4.0, (2, 3): 5.0, (0, 3): 40.0}, [2]),
        ({(0, 1): 40.0, (1, 2): 4.0, (2, 3): 4.0, (3, 4): 4.0, (4, 5): 40.0, (0, 5): 40.0}, [2, 3]),
    ],
)
def test_who_slows_others_down(links, blamed):
    assert slow_processes(links) == blamed


def test_a_wrong_value_of_a_product_is_seen():
    assert _products(torch.device("cpu"))[0] == 0
    plain = torch.Tensor.__matmul__
    try:
        wrong_products()
        assert _products(torch.device("cpu"))[0] == 1
    finally:
        torch.Tensor.__matmul__ = plain


def test_every_start_has_a_place_of_its_own_for_what_hangs(tmp_path, monkeypatch):
    """Stacks of an earlier start would be taken for those of this one."""
    places = []

    def noting(place, *arguments):
        places.append(place)
        return Watchdog(place, *arguments)

    monkeypatch.setattr("tasks.runtime.faults.health_check.Watchdog", noting)
    spec = RunSpec.model_validate({"output": str(tmp_path)})
    for _ in range(2):
        check_health(spec.faults, RunFolder.of(spec), Processes())
    assert len(set(places)) == 2 and {place.parent for place in places} == {RunFolder.of(spec).hangs}


def test_another_attempt_may_go_better(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise Unhealthy("not fit to train on: process 0: lost")

    monkeypatch.setattr("tasks.runtime.training.session.check_health", refuse)
    (tmp_path / "my.yaml").write_text(json.dumps({"output": str(tmp_path)}))
    monkeypatch.setattr(sys, "argv", ["strata", str(tmp_path / "my.yaml")])
    assert entry.main() == UNHEALTHY.exit_code
    assert capsys.readouterr().err == "error: not fit to train on: process 0: lost\n"
    assert explain(Unhealthy("in any words")).retry
