"""What is old is removed, or named: pods, jobs, checkpoints and runs; what is in use or young stays."""

import fcntl
import json
import os
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest

from strata_platform import kept_log
from strata_platform.chart import retention as retention_module
from strata_platform.chart.retention import Retention, Settings
from strata_platform.kubernetes_api import ApiError

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)
OLD = (NOW - timedelta(days=8)).isoformat()
NEW = (NOW - timedelta(hours=1)).isoformat()


def run(root, name, days, *, status="complete", exported=True):
    """The folder of a run whose last change was so many days ago."""
    folder = root / name
    for file, text in {
        "spec.yaml": "name: x", "attempts.txt": "0\n", "record.json": json.dumps({"status": status}),
        "checkpoints/step-10/weights.safetensors": "x" * 100,
        **({"model/config.json": "{}"} if exported else {}),
    }.items():  # fmt: skip
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
        at = (NOW - timedelta(days=days)).timestamp()
        os.utime(folder / file, (at, at))
    return folder


def folders(root, dry_run=False, checkpoints="", runs=""):
    settings = Settings(dry_run=dry_run, checkpoints=checkpoints, runs=runs, folders=[str(root)])
    retention = Retention(settings, NOW)
    *said, looked_at = retention.folders()
    assert looked_at.startswith(f"{root}: ") and looked_at.endswith("looked at")
    return said, retention.failed


def test_checkpoints_of_old_complete_runs_are_removed_and_nothing_else_of_them(tmp_path):
    old = run(tmp_path / "team", "old", 31)
    young = run(tmp_path / "team", "young", 29)
    unfinished = run(tmp_path, "unfinished", 31, status="incomplete")
    nowhere = run(tmp_path, "not-exported", 31, exported=False)
    said, failed = folders(tmp_path, checkpoints="30d")
    assert [line.split(",")[0] for line in said] == [f"removed {old / 'checkpoints'}"] and not failed
    assert sorted(path.name for path in old.iterdir()) == [".lock", "attempts.txt", "model", "record.json", "spec.yaml"]
    assert all((folder / "checkpoints/step-10").is_dir() for folder in (young, unfinished, nowhere))


def test_old_runs_are_removed_whole_whatever_became_of_them(tmp_path):
    old, young = run(tmp_path, "old", 91, status="incomplete"), run(tmp_path, "young", 89)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.safetensors").write_text("not a run's")
    said, _ = folders(tmp_path, checkpoints="30d", runs="90d")
    assert len(said) == 2 and not old.exists() and not (young / "checkpoints").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "young"]


def test_a_run_that_left_nothing_but_logs_of_its_pods_is_removed_and_a_folder_of_other_logs_is_not(tmp_path):
    name = kept_log.file_name(0.0, "bot-w-0-0")
    for folder, files in {
        "never-begun": [name],
        "with-notes": [name, "notes.txt"],
        "somebodys": ["app.jsonl"],
        "empty": [],
    }.items():
        (tmp_path / folder / "logs").mkdir(parents=True)
        for file in files:
            (tmp_path / folder / "logs" / file).write_text("{}")
            os.utime(tmp_path / folder / "logs" / file, (0, 0))
        for path in (tmp_path / folder / "logs", tmp_path / folder):
            os.utime(path, (0, 0))
    said, _ = folders(tmp_path, runs="90d")
    assert len(said) == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["empty", "somebodys", "with-notes"]


def test_a_dry_run_names_it_with_its_size_and_removes_nothing(tmp_path):
    old = run(tmp_path, "old", 91)
    (said,), _ = folders(tmp_path, dry_run=True, runs="90d")
    assert said == f"would remove {old}, 0.00 GiB, last changed 2026-08-25 12:00"
    assert (old / "checkpoints/step-10").is_dir() and not (old / ".lock").exists()


def test_a_run_that_goes_on_is_left_alone(tmp_path):
    locked, leased = run(tmp_path, "locked", 91), run(tmp_path, "leased", 91)
    (leased / ".lease").mkdir()
    (leased / ".lease" / "lease-000001.json").write_text("{}")
    at = (NOW - timedelta(seconds=10)).timestamp()
    os.utime(leased / ".lease" / "lease-000001.json", (at, at))
    before = (NOW - timedelta(days=91)).timestamp()
    with (locked / ".lock").open("w") as file:
        os.utime(locked / ".lock", (before, before))
        fcntl.flock(file, fcntl.LOCK_EX)
        (said,), failed = folders(tmp_path, runs="90d")
    assert said.startswith(f"in use, so kept: {locked}") and not failed
    assert (locked / "checkpoints").is_dir() and (leased / "checkpoints").is_dir()


def test_a_run_that_has_just_released_its_lease_is_as_old_as_its_files(tmp_path):
    released = run(tmp_path, "released", 91)
    (released / ".lease").mkdir()
    (released / ".lease" / "lease-000002.json").write_text('{"released": true}')
    at = (NOW - timedelta(seconds=10)).timestamp()
    os.utime(released / ".lease" / "lease-000002.json", (at, at))
    # Its newest file is the lease, of ten seconds ago.
    (said,), _ = folders(tmp_path, checkpoints="5s")
    assert said.startswith(f"removed {released / 'checkpoints'}")
    assert folders(tmp_path, runs="1h") == ([], [])


def test_a_run_that_starts_after_it_was_found_old_is_left_alone(tmp_path, monkeypatch):
    old = run(tmp_path, "old", 91)
    locked = retention_module._locked

    @contextmanager
    def starts(path):
        (old / "attempts.jsonl").write_text("another")
        with locked(path):
            yield

    monkeypatch.setattr(retention_module, "_locked", starts)
    (said,), failed = folders(tmp_path, runs="90d")
    assert said.startswith("in use, so kept") and not failed and (old / "checkpoints").is_dir()


def test_what_an_interrupted_removal_left_goes_with_the_next_one(tmp_path):
    done = run(tmp_path, "done", 91)
    left = [tmp_path / ".gone.removed-by-retention", done / ".checkpoints.removed-by-retention"]
    for folder in left:
        (folder / "step-10").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path)
    said, failed = folders(tmp_path, checkpoints="90d")
    assert len(said) == 3 and not failed
    assert not any(folder.exists() for folder in left) and not (done / "checkpoints").exists()


def test_a_run_that_rotates_its_files_is_left_alone(tmp_path, monkeypatch):
    first, second = run(tmp_path, "first", 91), run(tmp_path, "second", 91)

    def last_change(folder):
        if folder == first:
            raise FileNotFoundError(folder / "checkpoints/step-10")
        return last(folder)

    last = retention_module._last_change
    monkeypatch.setattr(retention_module, "_last_change", last_change)
    (said,), failed = folders(tmp_path, runs="90d")
    assert said.startswith(f"removed {second}") and first.is_dir() and not failed


def test_a_folder_that_is_not_there_is_seen_and_one_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    run(tmp_path, "old", 91)
    settings = Settings(dry_run=True, runs="90d", folders=[str(tmp_path / "nowhere"), str(tmp_path)])
    retention = Retention(settings, NOW)
    nowhere, old, here = retention.folders()
    assert nowhere == f"{tmp_path}/nowhere: 0 runs looked at" and here == f"{tmp_path}: 1 run looked at"
    assert old.startswith("would remove") and not retention.failed
    monkeypatch.setattr(os, "scandir", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    assert list(retention.folders())[-1] == f"{tmp_path}: 0 runs looked at"
    assert retention.failed[-1] == f"what is in {tmp_path}: Permission denied"


def test_links_are_not_followed_out_of_the_folder(tmp_path):
    outside = run(tmp_path / "outside", "old", 91)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(outside)
    assert folders(tmp_path / "runs", runs="90d") == ([], [])
    assert outside.is_dir()


class Api:
    """Objects of a namespace."""

    def __init__(self, refuses=()):
        self.deleted, self.refuses = [], refuses

    def items(self, path, labelSelector):  # as Kubernetes spells it
        assert labelSelector == ("strata/execution" if path.endswith("jobsets") else "execution-id")
        if "empty" in path:
            raise ApiError(404, "NotFound", path)

        def item(name, status, **more):
            return {
                "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": OLD, **more},
                "status": status,
            }

        def pod(name, at, phase="Succeeded", **more):
            return item(
                name, {"phase": phase, "containerStatuses": [{"state": {"terminated": {"finishedAt": at}}}]}, **more
            )

        failed = {"type": "Failed", "status": "True", "lastTransitionTime": OLD}
        if path.endswith("jobsets"):
            canceled = {"annotations": {"strata/canceled": str(datetime.fromisoformat(OLD).timestamp())}}
            return [
                item("complete", {"conditions": [failed | {"type": "Completed"}]}), item("canceled", {}, **canceled),
                item("suspended", {"conditions": [failed | {"type": "Suspended"}]}),
            ]  # fmt: skip
        if path.endswith("pytorchjobs"):
            return [
                item("old", {"completionTime": OLD}), item("failed", {"conditions": [failed]}),
                item("new", {"completionTime": NEW}), item("trains", {"conditions": [failed | {"status": "False"}]}),
            ]  # fmt: skip
        return [
            pod("old", OLD), pod("new", NEW), pod("runs", None, phase="Running"),
            pod("worker", OLD, ownerReferences=[{"kind": "PyTorchJob"}]), pod("going", OLD, deletionTimestamp=NEW),
            item("evicted", {"phase": "Failed"}),
        ]  # fmt: skip

    def request(self, method, path, body):
        name = path.rpartition("/")[2]
        if name in self.refuses:
            raise ApiError(403, "Forbidden", f"no {name}")
        assert (method, body["preconditions"]["uid"]) == ("DELETE", f"uid-{name}")
        self.deleted.append("/".join(path.split("/")[-2:]))


@pytest.mark.parametrize("dry_run", [True, False])
def test_finished_pods_and_jobs_are_removed_when_they_are_old(dry_run):
    api = Api()
    retention = Retention(Settings(dry_run=dry_run, objects="7d", namespaces=["empty", "team-a"]), NOW)
    said = list(retention.objects(api))
    verb = "would remove" if dry_run else "removed"
    assert [line.split(",")[0] for line in said] == [
        f"{verb} job team-a/old", f"{verb} job team-a/failed",
        f"{verb} job team-a/complete", f"{verb} job team-a/canceled",
        f"{verb} pod team-a/old", f"{verb} pod team-a/evicted",
    ]  # fmt: skip
    named = [
        "pytorchjobs/old",
        "pytorchjobs/failed",
        "jobsets/complete",
        "jobsets/canceled",
        "pods/old",
        "pods/evicted",
    ]
    assert api.deleted == ([] if dry_run else named)


def test_what_cannot_be_removed_is_told_and_keeps_nothing_else():
    api = Api(refuses=("failed",))
    retention = Retention(Settings(dry_run=False, objects="7d", namespaces=["team-a"]), NOW)
    assert len(list(retention.objects(api))) == 5 and len(api.deleted) == 5
    assert retention.failed == ["job team-a/failed, which ended 2026-11-16 12:00: no failed"]
