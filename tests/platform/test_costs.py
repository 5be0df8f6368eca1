"""What runs have used, from their records: hours by GPU model, and their price where there is one."""

import json
from types import SimpleNamespace

from typer.testing import CliRunner

from strata_platform.backends.local import LocalBackend
from strata_platform.cli import app
from strata_platform.costs import used_by_owner
from strata_platform.estimate import Prices
from strata_platform.runs import Phase, Run

H200 = {"device": "NVIDIA H200", "seconds": 3600.0, "world_size": 8}


def run(owner, name="r"):
    return Run(name, "flyte", Phase.SUCCEEDED, owner=owner)


def test_hours_are_those_of_all_processes_by_owner_and_cost_what_their_gpu_costs():
    prices = Prices(currency="USD", gpus={"h200": 3.5, "h100": 2.0})
    runs = [
        (run("bob"), {"device": "NVIDIA H100 80GB HBM3", "seconds": 1800.0, "world_size": 2}),
        (run("ada"), H200),
        (run("ada"), {"device": "NVIDIA H100 80GB HBM3", "seconds": 3600.0, "world_size": 1}),
        (run("ada"), {"device": "CPU (1 threads)", "seconds": 900.0, "world_size": 2}),
        (run("ada"), None),
    ]
    ada, bob = used_by_owner("language", runs, prices)
    assert (ada.owner, ada.runs, ada.without_record) == ("ada", 4, 1)
    assert ada.hours == {"h200": 8.0, "h100": 1.0, "cpu": 0.5} and ada.gpu_hours == 9.0
    assert (ada.cost, ada.currency) == (8 * 3.5 + 2.0, "USD")
    assert (bob.gpu_hours, bob.cost) == (1.0, 2.0)


def test_a_gpu_without_a_price_has_no_cost_and_no_gpu_costs_nothing():
    unknown = {"device": "Accelerator 9000", "seconds": 3600.0, "world_size": 1}
    (used,) = used_by_owner("p", [(run("ada"), H200), (run("ada"), unknown)], Prices(gpus={"h200": 1.0}))
    assert used.cost is None and used.gpu_hours == 9.0
    (used,) = used_by_owner("p", [(run("ada"), H200)], None)
    assert used.cost is None
    (used,) = used_by_owner("p", [(run("ada"), {"device": "CPU (2 threads)", "seconds": 1.0, "world_size": 1})], None)
    assert used.cost == 0.0


def test_the_table_of_this_machine_reads_the_records_of_its_runs(tmp_path, monkeypatch):
    """Those submitted in the time that is asked for; one without a record is counted."""
    monkeypatch.setattr("strata_platform.cli.time", SimpleNamespace(time=lambda: 100 * 86400.0))
    runs = [
        Run("new", "local", Phase.SUCCEEDED, submitted=99 * 86400.0, owner="ada", where=str(tmp_path / "new")),
        Run("failed", "local", Phase.FAILED, submitted=99 * 86400.0, owner="ada", where=str(tmp_path / "failed")),
        Run("old", "local", Phase.SUCCEEDED, submitted=60 * 86400.0, owner="bob", where=str(tmp_path / "old")),
    ]
    for each in runs:
        (tmp_path / each.name).mkdir()
        (tmp_path / each.name / "record.json").write_text(json.dumps(H200))
    monkeypatch.setattr(LocalBackend, "list", lambda self, limit, owner: runs)
    (tmp_path / "prices.yaml").write_text("currency: EUR\ngpus: {h200: 2}\n")

    def rows(*options):
        done = CliRunner().invoke(app, ["costs", "--prices", str(tmp_path / "prices.yaml"), *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    head, *lines = rows().splitlines()
    assert head.split("  ")[0] == "PROJECT" and [line.split() for line in lines] == [
        ["local", "ada", "2", "1", "8.00", "0.00", "16.00", "EUR"]
    ]
    (ada, bob) = json.loads(rows("--days", "90", "--format", "json"))
    assert (ada["owner"], bob["owner"], bob["cost"]) == ("ada", "bob", 16.0)
