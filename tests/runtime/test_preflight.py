"""The table of checks that a run passes before it trains."""

import inspect
import operator
from functools import reduce
from importlib import import_module

import pytest

from strata_platform.spec import RunSpec
from tasks.runtime import preflight
from tasks.runtime.preflight import CHECKS, WHERE, Check, run_checks, table
from tests.test_house import modules_after


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_each_row_calls_a_function_with_its_arguments(check):
    module, _, path = check.function.partition(":")
    function = reduce(getattr, path.split("."), import_module(f"tasks.runtime.{module}"))
    names = ["processes" if name == "self" else name for name in inspect.signature(function).parameters]
    assert names == [name.rpartition(".")[2] for name in check.takes]
    spec = RunSpec()
    for name in check.takes:
        if name.startswith("spec."):
            # Raises AttributeError if the spec has no such field.
            operator.attrgetter(name.removeprefix("spec."))(spec)
    assert set(check.where) <= set(WHERE)


@pytest.fixture
def calls(monkeypatch):
    """Names of the rows that ran. The rows stand for any others: `first` needs a spec, `last` the weights."""
    ran = []
    rows = [
        Check("first", ("pod", "rank 0"), "x:y", ("spec",), ""),
        Check("second", ("rank 0",), "x:y", ("spec", "data"), ""),
        Check("last", ("rank 0",), "x:y", ("model", "spec"), ""),
    ]
    monkeypatch.setattr(preflight, "CHECKS", rows)
    monkeypatch.setattr(Check, "run", lambda self, arguments: ran.append(self.name))
    return ran


@pytest.mark.parametrize(
    ("where", "needs", "expected"),
    [
        ("pod", ["spec"], ["first"]),
        ("rank 0", ["spec", "data"], ["first", "second"]),
        ("rank 0", ["weights"], ["last"]),
        ("plan", ["spec"], []),
    ],
)
def test_a_place_runs_its_rows_in_order(calls, where, needs, expected):
    run_checks(where, *needs)
    assert calls == expected


def test_the_first_mistake_stops_the_run():
    spec = RunSpec.model_validate({"evaluation": {"tasks": ["none.yaml"]}})
    with pytest.raises(ValueError, match=r"^evaluation\.tasks"):
        run_checks("plan", "spec", spec=spec)


def test_the_table_names_every_check_and_place():
    lines = table().splitlines()
    assert [line for line in lines if line.startswith("packing ")] == [
        "packing                   weights  rank 0             with data.packing or pairs of answers, no sequence of a "
        "row depends on another"
    ]
    assert len(lines) == 1 + len(CHECKS) + 1 + len(WHERE)


def test_the_table_loads_no_torch():
    loaded = modules_after("from tasks.runtime.preflight import table; table()")
    assert "tasks.runtime.preflight" in loaded and not loaded & {"torch", "transformers", "pydantic"}
