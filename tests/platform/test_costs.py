"""What runs have held: hours by GPU model over all attempts, and their price where there is one."""

import json
from types import SimpleNamespace

from typer.testing import CliRunner

from strata_platform.backends.local import LocalBackend
from strata_platform.backends.run_state import RunFiles
from strata_platform.cli import app
from strata_platform.costs import used_by_owner
from strata_platform.estimate import Prices
from strata_platform.runs import Event, Held, Phase, Run

H200 = Held(3600.0, 8, "NVIDIA H200")
DAY = 86400.0


def run(owner, name="r", phase=Phase.SUCCEEDED):
    return Run(name, "flyte", phase, owner=owner)


def test_hours_are_those_of_all_processes_by_owner_and_cost_what_their_gpu_costs():
    prices = Prices(currency="USD", gpus={"h200": 3.5, "h100": 2.0})
    submissions = [
        (run("bob"), [Held(1800.0, 2, "NVIDIA H100 80GB HBM3")]),
        (run("ada"), [H200, Held(3600.0, 1, "NVIDIA-H100-80GB-HBM3")]),
        (run("ada", phase=Phase.FAILED), [H200]),
        (run("ada", "other"), [Held(900.0, 2, None)]),
        (run("ada", "another"), None),
        (run("ada", "waits", Phase.QUEUED), []),
    ]
    ada, bob = used_by_owner("language", submissions, prices)
    assert (ada.owner, ada.runs, ada.unknown) == ("ada", 4, 1), "one was submitted twice"
    assert ada.hours == {"h200": 16.0, "h100": 1.0, "cpu": 0.5} and ada.gpu_hours == 17.0
    assert (ada.cost, ada.currency) == (16 * 3.5 + 2.0, "USD")
    assert (bob.gpu_hours, bob.cost) == (1.0, 2.0)


def test_a_gpu_without_a_price_has_no_cost_and_no_gpu_costs_nothing():
    unknown = [Held(3600.0, 1, "Accelerator 9000"), Held(3600.0, 2, "")]
    (used,) = used_by_owner("p", [(run("ada"), [H200]), (run("ada"), unknown)], Prices(gpus={"h200": 1.0}))
    assert used.cost is None and used.hours == {"h200": 8.0, "Accelerator 9000": 1.0, "unnamed GPU": 2.0}
    (used,) = used_by_owner("p", [(run("ada"), [H200])], None)
    assert used.cost is None
    (used,) = used_by_owner("p", [(run("ada"), [Held(1.0, 1, None)])], None)
    assert used.cost == 0.0


def test_the_table_of_this_machine_has_every_attempt_of_its_runs(tmp_path, monkeypatch, caplog):
    """Of those submitted in the time that is asked for."""
    now = 100 * DAY
    for module in ("cli", "backends.local"):
        monkeypatch.setattr(f"strata_platform.{module}.time", SimpleNamespace(time=lambda: now))
    hour, began = 3600.0, now - DAY
    events = {
        # Submitted twice: it died once and was canceled, then succeeded.
        "new": ((0, "Submitted"), (0, "Started"), (1, "Died"), (1, "Started"), (3, "Canceled"), (5, "Submitted"),
                (5, "Started"), (5.5, "Stage"), (6, "Succeeded")),
        "goes-on": ((0, "Submitted"), (22, "Started"), (23, "Stage")),
        "old": ((-1000, "Submitted"), (-1000, "Started"), (-999, "Failed")),
    }  # fmt: skip
    # A spec that this version rejects.
    events["rejected"] = events["goes-on"]
    phases = {"new": Phase.SUCCEEDED, "goes-on": Phase.RUNNING, "rejected": Phase.FAILED, "old": Phase.FAILED}
    runs = []
    for name, happened in events.items():
        files = RunFiles(tmp_path / name)
        files.folder.mkdir(parents=True)
        removed = "no_such_field: 1\n" if name == "rejected" else ""
        files.spec.write_text(f"topology: {{nproc_per_node: 4}}\nparallel: {{type: ddp}}\n{removed}")
        for hours, reason in happened:
            files.add_event(Event(began + hours * hour, reason, ""))
        (files.run / "record.json").write_text(json.dumps({"device": "NVIDIA H200"}))
        submitted = began + happened[0][0] * hour
        runs.append(Run(name, "local", phases[name], submitted=submitted, owner="ada", where=str(files.run)))
    monkeypatch.setattr(LocalBackend, "list", lambda self, limit, owner: runs)
    (tmp_path / "prices.yaml").write_text("currency: EUR\ngpus: {h200: 2}\n")

    def rows(*options):
        done = CliRunner().invoke(app, ["costs", "--prices", str(tmp_path / "prices.yaml"), *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    head, *lines = rows().splitlines()
    # 1 + 2 + 1 hours, and two of the one that goes on, of four GPUs.
    assert head.split("  ")[0] == "PROJECT" and [line.split() for line in lines] == [
        ["local", "ada", "3", "1", "24.00", "0.00", "48.00", "EUR"]
    ]
    (ada,) = json.loads(rows("--days", "90", "--format", "json"))
    assert "the GPU hours of rejected are unknown: " in caplog.text and "no_such_field" in caplog.text
    assert (ada["owner"], ada["runs"], ada["cost"]) == ("ada", 4, 56.0)
    assert CliRunner().invoke(app, ["costs", "--project", "language"]).exit_code == 2
