"""Checkpoints are copied to an object store, and a machine that has nothing continues from there."""

import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from tasks.runtime.checkpoint import manifest, object_store, upload
from tasks.runtime.checkpoint.object_store import RunStore, retry
from tasks.runtime.checkpoint.upload import CheckpointUploader
from tasks.runtime.process.error_explanations import explain
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.signals import Preempted
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.training.job import Job
from tasks.runtime.training.resume_point import find_resume_point
from tasks.runtime.training.session import session
from tests.runtime.helpers.comparable_runs import curve, make_spec
from tests.runtime.helpers.train_only import train_spec

STEPS = 6


class Flaky(MemoryFileSystem):
    """A store in memory that can be away, or refuse what is written."""

    protocol = "flaky"
    store, pseudo_dirs = {}, [""]
    error = None
    denied = None
    refusing = False
    asked = threading.Event()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "/"))

    def _may(self):
        self.asked.set()
        if self.error is not None:
            raise self.error

    def cat_file(self, path, *arguments, **options):
        self._may()
        return super().cat_file(path, *arguments, **options)

    def pipe_file(self, path, *arguments, **options):
        self._may()
        return super().pipe_file(path, *arguments, **options)

    def put_file(self, here, there, *arguments, **options):
        self._may()
        if self.denied and self.denied in there:
            raise PermissionError(there)
        return super().put_file(here, there, *arguments, **options)

    def ls(self, path, *arguments, **options):
        if self.refusing:
            raise OSError("away")
        return super().ls(path, *arguments, **options)

    def info(self, path, **options):
        self._may()
        return super().info(path, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """The store is empty and there, and nobody waits for it for long."""
    monkeypatch.setattr(Flaky, "store", {})
    monkeypatch.setattr(Flaky, "pseudo_dirs", [""])
    monkeypatch.setattr(Flaky, "error", None)
    monkeypatch.setattr(Flaky, "denied", None)
    monkeypatch.setattr(Flaky, "refusing", False)
    monkeypatch.setattr(object_store, "INITIAL_BACKOFF", 0.01)
    monkeypatch.setattr(upload, "STARTUP_TIMEOUT", 0.05)
    Flaky.asked.clear()
    return Flaky


def names():
    """Files of runs in the store, without the leases."""
    return sorted(path.removeprefix("/bucket/runs/") for path in Flaky.store if "/.lease/" not in path)


def save(root, step, text="weights", **metadata):
    """A whole checkpoint, made by hand."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "a.safetensors").write_text(text)
    (folder / "config.json").write_text("{}")
    manifest.commit(folder, {}, {"data_hash": "d", **metadata})
    return folder


@pytest.fixture(scope="module")
def s3():
    """An S3 server of its own, and a bucket in it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "user")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="runs")
        yield "s3://runs/here"
    server.stop()


@pytest.fixture(params=["flaky", "file", "s3", "flaky [team]", "file [team]", "s3 [team]"])
def url(request, tmp_path):
    """With what is a pattern to some clients, too."""
    store, _, folder = request.param.partition(" ")
    if store == "s3":
        return f"{request.getfixturevalue('s3')}/{folder}"
    return f"{'flaky://bucket/runs' if store == 'flaky' else f'file://{tmp_path}/store'}/{folder}"


# The store.


def test_a_checkpoint_comes_back_as_it_was(url, tmp_path):
    run_store, here, there = RunStore(url, "x"), tmp_path / "here", tmp_path / "there"
    assert run_store.complete_steps() == [] and not run_store.download_file(tmp_path / "spec.yaml")
    for step in (2, 10):
        run_store.upload(save(here, step, f"weights {step}"))
    assert run_store.complete_steps() == [2, 10]
    folder = run_store.download(10, there)
    assert manifest.verification_error(folder) is None and manifest.step_of(folder) == 10
    assert (folder / "a.safetensors").read_text() == "weights 10"
    run_store.delete(10)
    assert run_store.complete_steps() == [2]
    # Another one in its place.
    shutil.rmtree(here / "checkpoint-2")
    run_store.upload(save(here, 2, "other weights"))
    assert (run_store.download(2, there) / "a.safetensors").read_text() == "other weights"
    (here / "spec.yaml").write_text("name: x")
    run_store.upload_file(here / "spec.yaml")
    assert run_store.download_file(there / "spec.yaml") and (there / "spec.yaml").read_text() == "name: x"


def test_a_changed_manifest_travels_alone(tmp_path, monkeypatch):
    run_store, folder = RunStore("flaky://bucket/runs", "x"), save(tmp_path, 2)
    run_store.upload(folder)
    manifest.update_metadata(folder, {"guard": 1})
    monkeypatch.setattr(Flaky, "put_file", None)
    run_store.upload(folder)
    assert manifest.metadata_of(run_store.download(2, tmp_path / "there"))["guard"] == 1


def test_a_store_that_is_full_keeps_what_it_has(tmp_path):
    """One that is a folder, where a file could be cut short; objects are replaced whole by the store."""
    run_store, folder, notes = RunStore(f"file://{tmp_path}/store", "x"), save(tmp_path, 2), tmp_path / "metrics.jsonl"
    notes.write_text("up to step 2\n")
    run_store.upload(folder)
    run_store.upload_file(notes)
    notes.write_text("up to step 4\n" * 9)
    manifest.update_metadata(folder, {"guard": 1})
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, most))
    try:
        for put in (partial(run_store.upload, folder), partial(run_store.upload_file, notes)):
            with pytest.raises(OSError, match="File too large"):
                put()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert manifest.verification_error(run_store.download(2, tmp_path / "there")) is None
    assert run_store.download_file(tmp_path / "there" / "metrics.jsonl")
    assert (tmp_path / "there" / "metrics.jsonl").read_text() == "up to step 2\n"


def test_what_an_upload_left_is_no_checkpoint_and_is_replaced(tmp_path, store, monkeypatch):
    run_store, folder = RunStore("flaky://bucket/runs", "x"), save(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(Flaky, "pipe_file", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_store.upload(folder)
    assert names() and run_store.complete_steps() == []
    run_store.upload(folder)
    assert run_store.complete_steps() == [2]


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path):
    run_store, folder = RunStore("flaky://bucket/runs", "x"), save(tmp_path, 2)
    run_store.upload(folder)
    Flaky.store["/bucket/runs/x/checkpoint-2/manifest.json"].write(b'{"files": {"../../x": {}}}' + b" " * 999)
    with pytest.raises(ValueError, match="names files outside its folder"):
        run_store.download(2, tmp_path / "there")


@pytest.mark.parametrize(
    ("url", "words"),
    [("s3://key:secret@bucket", "a URL without credentials"), ("bucket/path", "a URL without credentials")],
)
def test_urls_that_say_too_much_or_too_little_are_refused(url, words):
    with pytest.raises(SpecError, match=rf"checkpoint\.url.*{words}"):
        RunSpec.model_validate({"checkpoint": {"url": url}})


def test_an_unknown_scheme_is_refused_at_once(tmp_path):
    spec = RunSpec.model_validate({"output": str(tmp_path), "checkpoint": {"url": "s4://bucket"}})
    with pytest.raises(ValueError, match=r"checkpoint\.url 's4://bucket' cannot be opened: .*s4"):
        CheckpointUploader(spec, RunFolder.of(spec))


# Patience.


def test_what_passes_is_waited_for_and_what_does_not_is_told(caplog):
    caplog.set_level(logging.INFO)
    outcomes, pauses = iter([OSError("away"), OSError("away"), "there"]), []

    def call():
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert retry(call, "s3://x", 60, pauses.append) == "there"
    assert pauses == [0.01, 0.02]
    assert caplog.text.count("cannot be reached (OSError: away); trying again") == 1
    assert "can be reached again" in caplog.text


def test_how_long_a_store_is_away_is_counted_from_when_it_fails(monkeypatch):
    """And not from the beginning of a copy, which may take longer than that by itself."""
    now, failures = [0.0], []
    monkeypatch.setattr(object_store, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def copy():
        now[0] += 1000
        if failures:
            raise failures.pop()
        return "there"

    failures[:] = [OSError("torn off")]
    assert retry(copy, "s3://x", 900, lambda seconds: None) == "there"
    failures[:] = [OSError("torn off")] * 2
    with pytest.raises(Unreachable, match="torn off"):
        retry(copy, "s3://x", 900, lambda seconds: None)


@pytest.mark.parametrize(
    ("error", "timeout", "kind", "said"),
    [
        (OSError("away"), 0, Unreachable, "s3://x cannot be reached: OSError: away. When it can, start the run again"),
        (PermissionError("no"), 60, ValueError, "s3://x cannot be used: PermissionError: no. Fix that and start"),
    ],
)
def test_giving_up_says_what_to_do_and_whether_another_attempt_may_mend_it(error, timeout, kind, said):
    def call():
        raise error

    with pytest.raises(kind, match=re.escape(f"checkpoint.url: {said}")) as raised:
        retry(call, "s3://x", timeout)
    explained = explain(raised.value)
    assert (explained is not None and explained.retry) == (kind is Unreachable)


# A run.


@pytest.fixture
def make_uploader(tmp_path):
    def make(**settings):
        spec = RunSpec.model_validate(
            {"name": "x", "output": str(tmp_path), "checkpoint": {"url": "flaky://bucket/runs", **settings}}
        )
        folder = RunFolder.of(spec)
        folder.claim(spec)
        folder.metrics.write_text("{}\n")
        return CheckpointUploader(spec, folder), folder

    return make


@pytest.mark.parametrize("theirs", ["checkpoint-500/model.safetensors", "metrics.jsonl"])
def test_what_is_no_runs_in_the_store_is_not_taken_over(make_uploader, store, theirs):
    uploader, folder = make_uploader()
    folder.metrics.unlink()
    store.store[f"/bucket/runs/x/{theirs}"] = MemoryFile(Flaky(), "-", b"precious")
    with pytest.raises(ValueError, match=rf"checkpoint\.url: flaky://bucket/runs/x has no spec.*{theirs[:7]}.*"
                       r"choose another name or checkpoint\.url"):  # fmt: skip
        uploader.download_run_files()
    assert names() == [f"x/{theirs}"] and not folder.metrics.exists()


def test_a_spec_in_the_store_that_cannot_be_read_is_told_by_its_place_there(make_uploader, store):
    uploader, folder = make_uploader()
    store.store["/bucket/runs/x/spec.yaml"] = MemoryFile(Flaky(), "-", b"name: x\nseeds: 0\n")
    with pytest.raises(SpecError, match=r"^flaky://bucket/runs/x/spec\.yaml has 1 problem:\n  seeds \(line 2\)"):
        uploader.download_run_files()
    assert not (folder.root / ".theirs").exists()


def test_what_is_no_runs_here_is_not_taken_over_for_what_the_store_has(make_uploader, store):
    uploader, folder = make_uploader()
    uploader.upload_spec()
    shutil.rmtree(folder.root)
    (folder.checkpoints / "checkpoint-500").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"output: {folder.root} has no spec.* its checkpoints;"):
        uploader.download_run_files()
    assert [path.name for path in folder.root.iterdir()] == ["checkpoints"]


def test_the_commits_that_a_run_reads_come_along(tmp_path):
    commit = "a" * 40

    def make(machine, revision):
        data = {"source": "org/texts", "revision": revision}
        values = {"name": "x", "output": str(tmp_path / machine), "checkpoint": {"url": "flaky://bucket/runs"}}
        spec = RunSpec.model_validate({**values, "data": data, "model": {"name": "org/m", "revision": revision}})
        return spec, RunFolder.of(spec), CheckpointUploader(spec, RunFolder.of(spec))

    spec, folder, uploader = make("first", None)
    folder.claim(spec)
    folder.write_data_commits([commit])
    folder.write_initial_weights_ids({"model.name": commit} if commit else {})
    uploader.enqueue(save(folder.checkpoints, 50))
    uploader.finish()
    for machine, revision in (("second", None), ("third", commit)):
        spec, folder, uploader = make(machine, revision)
        uploader.download_run_files()
        folder.claim(spec)
        assert folder.data_commits_for(spec) == (commit,)
        assert folder.initial_weights_ids.get("model.name") == commit
    with pytest.raises(ValueError, match=r"data\.revision was None, is 'other'"):
        make("fourth", "other")[-1].download_run_files()


@pytest.mark.parametrize("known", [True, False])
def test_pinned_files_are_those_of_the_newest_checkpoint_before_data_are_prepared(tmp_path, known):
    """The first machine ended before a checkpoint; meanwhile another began anew, with another commit or none."""
    first, second = "a" * 40, "b" * 40 if known else None

    def make(machine):
        values = {"name": "x", "output": str(tmp_path / machine), "checkpoint": {"url": "flaky://bucket/runs"}}
        spec = RunSpec.model_validate({**values, "data": {"source": "org/texts"}, "model": {"name": "org/m"}})
        folder = RunFolder.of(spec)
        folder.claim(spec)
        return spec, folder, CheckpointUploader(spec, folder)

    def begin(folder, commit):
        folder.write_data_commits([commit])
        folder.write_initial_weights_ids({"model.name": commit} if commit else {})

    spec, folder, uploader = make("first")
    begin(folder, first)
    _, other, others = make("second")
    begin(other, second)
    others.upload_spec()
    others.enqueue(save(other.checkpoints, 50))
    others.finish()
    uploader.download_run_files()
    assert folder.initial_weights_ids.get("model.name") == second
    assert folder.data_commits_for(spec) == ((second,) if known else ())
    # What the disk has is as new as the store now.
    uploader.download_latest()
    begin(folder, first)
    uploader.download_run_files()
    assert folder.initial_weights_ids.get("model.name") == first


def test_checkpoints_wait_while_the_store_is_away(make_uploader, store, caplog):
    uploader, folder = make_uploader(keep_last=1, keep_every=100)
    store.error = OSError("away")
    for step in (50, 100, 150):
        uploader.enqueue(save(folder.checkpoints, step))
        # As the writer does, whether or not they are copied.
        manifest.prune(folder.checkpoints, 1, 100)
    assert store.asked.wait(10)
    store.error = None
    uploader.finish()
    assert RunStore("flaky://bucket/runs", "x").complete_steps() == [100, 150]
    assert "x/metrics.jsonl" in names() and "cannot be reached" in caplog.text


def test_the_best_checkpoint_stays_in_the_store_and_comes_back_with_the_newest(make_uploader, store):
    uploader, folder = make_uploader(keep_last=1)
    for step, best in ((50, 50), (100, 100), (150, 100), (200, 100)):
        uploader.enqueue(save(folder.checkpoints, step, best_step=best))
        manifest.prune(folder.checkpoints, 1)
    uploader.finish()
    assert [manifest.step_of(path) for path in manifest.folders(folder.checkpoints)] == [100, 200]
    assert RunStore("flaky://bucket/runs", "x").complete_steps() == [100, 200]
    # Another machine.
    shutil.rmtree(folder.checkpoints)
    assert manifest.step_of(uploader.download_latest()) == 200
    assert manifest.verification_error(folder.checkpoints / "checkpoint-100") is None


def test_a_store_that_is_slower_than_checkpoints_come_has_some_of_them(make_uploader, store, monkeypatch, caplog):
    uploader, folder = make_uploader(keep_last=1)
    put_file, begun, go_on, order = Flaky.put_file, threading.Event(), threading.Event(), []

    def slow(self, here, there, *arguments, **options):
        order.append(manifest.step_of(Path(here).parent))
        begun.set()
        assert go_on.wait(10)
        return put_file(self, here, there, *arguments, **options)

    monkeypatch.setattr(Flaky, "put_file", slow)
    uploader.enqueue(save(folder.checkpoints, 50))
    assert begun.wait(10)
    for step in (100, 150, 200):
        uploader.enqueue(save(folder.checkpoints, step))
        manifest.prune(folder.checkpoints, 1, keep=uploader.uploading)
    assert list(map(manifest.step_of, manifest.folders(folder.checkpoints))) == [50, 200]
    go_on.set()
    uploader.finish()
    assert order == [50, 50, 200, 200]
    assert RunStore("flaky://bucket/runs", "x").complete_steps() == [200]
    assert not caplog.text


def test_what_waited_when_a_process_ended_is_copied_by_the_next(make_uploader):
    _, folder = make_uploader()
    for step in (40, 80, 90, 100, 110):
        save(folder.checkpoints, step)
    (folder.checkpoints / "checkpoint-80" / "config.json").write_text("torn")
    uploader, _ = make_uploader(every=10, keep_last=2, keep_every=40)
    uploader.enqueue_pending(folder.checkpoints / "checkpoint-110")
    uploader.finish()
    assert RunStore("flaky://bucket/runs", "x").all_steps() == [40, 100, 110]


def test_what_a_kill_left_of_a_copy_or_a_removal_goes_with_the_next_ones(make_uploader, store):
    uploader, folder = make_uploader(keep_last=2, keep_every=100)
    for step in (40, 50, 73, 200):
        store.store[f"/bucket/runs/x/checkpoint-{step}/a.safetensors"] = MemoryFile(Flaky(), "-", b"weights")
    for step in (50, 100, 150):
        uploader.enqueue(save(folder.checkpoints, step))
    uploader.finish()
    # One that is newer may be whole, and the store slow to say so.
    assert RunStore("flaky://bucket/runs", "x").all_steps() == [100, 150, 200]


@pytest.mark.parametrize(
    ("error", "timeout", "kind"), [(OSError("away"), 1, Unreachable), (PermissionError("no"), 900, ValueError)]
)
def test_a_store_that_stays_away_ends_the_run(make_uploader, store, error, timeout, kind):
    uploader, folder = make_uploader(url_timeout=timeout)
    store.error = error
    uploader.enqueue(save(folder.checkpoints, 50))
    with pytest.raises(kind, match=r"checkpoint\.url: flaky://bucket/runs/x cannot be"):
        uploader.finish()
    with pytest.raises(kind, match="cannot be"):
        uploader.enqueue(save(folder.checkpoints, 100))


def test_a_process_that_is_told_to_end_does_not_wait_for_a_store_that_is_away(make_uploader, store):
    uploader, folder = make_uploader()
    store.error = OSError("away")
    uploader.enqueue(save(folder.checkpoints, 50))
    assert store.asked.wait(10)
    uploader.close()
    assert not uploader._thread.is_alive()


ENDS = """
import threading
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from tasks.runtime.checkpoint import manifest
from tasks.runtime.checkpoint.object_store import RunStore

folder = Path("checkpoint-50")
folder.mkdir()
(folder / "weights").touch()
manifest.commit(folder, {}, {})
begun = threading.Event()
LocalFileSystem.put_file = lambda *arguments: begun.set() or threading.Event().wait()
run_store = RunStore(f"file://{folder.absolute().parent}/store", "x")
threading.Thread(target=run_store.upload, args=(folder,), daemon=True).start()
assert begun.wait(10)
"""


def test_a_process_ends_while_a_file_is_on_its_way(tmp_path):
    subprocess.run(
        [sys.executable, "-c", ENDS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
        timeout=600,
    )


def test_of_damaged_copies_the_newest_good_one_is_taken(make_uploader, caplog):
    uploader, folder = make_uploader(keep_last=3)
    for step in (50, 100, 150):
        uploader.enqueue(save(folder.checkpoints, step))
    uploader.finish()
    shutil.rmtree(folder.checkpoints)
    Flaky.store["/bucket/runs/x/checkpoint-150/a.safetensors"].write(b"torn")
    del Flaky.store["/bucket/runs/x/checkpoint-100/config.json"]
    uploader.download_latest()
    assert manifest.step_of(manifest.latest(folder.checkpoints)) == 50
    assert "checkpoint-150 of flaky://bucket/runs/x is not used: a.safetensors has" in caplog.text
    assert "checkpoint-100 of flaky://bucket/runs/x is not used: " in caplog.text
    uploader.discard_after(50)
    assert RunStore("flaky://bucket/runs", "x").complete_steps() == [50]


@pytest.mark.parametrize("on_disk", [False, True], ids=["downloaded", "on disk"])
def test_a_start_digests_each_file_of_the_newest_checkpoint_once(make_uploader, monkeypatch, on_disk):
    """It may have tens of gigabytes."""
    uploader, folder = make_uploader()
    uploader.enqueue(save(folder.checkpoints, 50))
    uploader.finish()
    if not on_disk:
        shutil.rmtree(folder.checkpoints)
    digest, digested = manifest._digest, []
    monkeypatch.setattr(manifest, "_digest", lambda file: digested.append(file.name) or digest(file))
    run = SimpleNamespace(uploader=uploader, folder=folder, spec=RunSpec())
    data = SimpleNamespace(manifest=SimpleNamespace(identities=("d",)))
    assert find_resume_point(run, data, 100) == (folder.checkpoints / "checkpoint-50", None)
    uploader.finish()
    assert sorted(digested) == ["a.safetensors", "config.json"]


def test_a_file_that_comes_after_its_manifest_is_waited_for(make_uploader, monkeypatch):
    uploader, folder = make_uploader()
    uploader.enqueue(save(folder.checkpoints, 50))
    uploader.finish()
    shutil.rmtree(folder.checkpoints)
    get_file, late = Flaky.get_file, ["config.json", "a.safetensors", "config.json"]

    def not_yet(self, there, here):
        if Path(there).name in late:
            late.remove(Path(there).name)
            raise FileNotFoundError(there)
        get_file(self, there, here)

    monkeypatch.setattr(Flaky, "get_file", not_yet)
    uploader.download_latest()
    assert not late and manifest.step_of(manifest.latest(folder.checkpoints)) == 50


def test_killed_while_it_fetches_a_run_has_its_metrics_all_the_same(make_uploader, store, monkeypatch):
    uploader, folder = make_uploader()
    folder.metrics.write_text("up to step 100\n")
    uploader.enqueue(save(folder.checkpoints, 100))
    uploader.finish()
    # A machine that had the run before, up to step 50.
    shutil.rmtree(folder.checkpoints)
    folder.metrics.write_text("up to step 50\n")
    fetch = RunStore.download

    def killed(*arguments):
        fetch(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunStore, "download", killed)
        uploader.download_latest()
    uploader.download_latest()
    assert manifest.step_of(manifest.latest(folder.checkpoints)) == 100
    assert folder.metrics.read_text() == "up to step 100\n"


@pytest.mark.parametrize("content", [b"", b'{"format": 2, "files": {"a.saf', b"\xff"])
def test_a_machine_that_has_nothing_passes_over_a_torn_manifest(make_uploader, caplog, content):
    uploader, folder = make_uploader()
    for step in (50, 100):
        uploader.enqueue(save(folder.checkpoints, step))
    uploader.finish()
    shutil.rmtree(folder.checkpoints)
    Flaky.store["/bucket/runs/x/checkpoint-100/manifest.json"] = MemoryFile(Flaky(), "-", content)
    uploader.download_latest()
    assert manifest.step_of(manifest.latest(folder.checkpoints)) == 50
    assert "checkpoint-100 of flaky://bucket/runs/x is not used: manifest.json is unreadable" in caplog.text
    uploader.discard_after(50)
    assert RunStore("flaky://bucket/runs", "x").complete_steps() == [50]


@pytest.fixture(scope="module")
def undisturbed(output):
    spec = make_spec(output, "undisturbed", "torch", "single", 1, steps=STEPS)
    assert train_spec(spec).status == "complete"
    return curve(spec)


def test_a_machine_that_has_nothing_continues_the_run(output, undisturbed, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    spec = make_spec(output, "moved", "torch", "single", 1, steps=STEPS)
    checkpoint = {"every": 2, "keep_last": 1, "url": "flaky://bucket/runs"}
    spec = RunSpec.model_validate({**spec.model_dump(), "checkpoint": checkpoint})
    with monkeypatch.context() as patched:

        def lost(job, step, *arguments):
            end_step(job, step, *arguments)
            if step == 5:
                raise KeyboardInterrupt

        end_step = Job.end_step
        patched.setattr(Job, "end_step", lost)
        with pytest.raises(KeyboardInterrupt):
            train_spec(spec)
    shutil.rmtree(RunFolder.of(spec).root)

    record = train_spec(spec)
    assert (record.status, record.restarts, record.steps) == ("complete", 1, STEPS)
    assert "downloading checkpoint-4" in caplog.text and "continuing after step 4" in caplog.text
    assert curve(spec) == undisturbed
    assert {name.split("/")[1] for name in names()} == {
        "attempts.txt", f"checkpoint-{STEPS}", "metrics.jsonl", "spec.yaml",
    }  # fmt: skip
    [metrics] = [file for name, file in Flaky.store.items() if name.endswith("metrics.jsonl")]
    assert json.loads(metrics.getvalue().splitlines()[-1])["step"] == STEPS

    shutil.rmtree(RunFolder.of(spec).root)
    other = RunSpec.model_validate({**spec.model_dump(), "seed": 7})
    with pytest.raises(ValueError, match=r"moved holds a run of another spec.*seed was 0, is 7"):
        train_spec(other)
    training = {**spec.training.model_dump(), "steps": 2 * STEPS}
    longer = RunSpec.model_validate({**spec.model_dump(), "training": training})
    shutil.rmtree(RunFolder.of(spec).root)
    with pytest.raises(ValueError, match=rf"moved holds a run of another spec.*at least the {STEPS} steps"):
        train_spec(longer)
    # Whoever finished here may have lost everything but what was copied.
    shutil.rmtree(RunFolder.of(spec).root)
    assert train_spec(spec).restarts >= 1
    assert curve(spec) == undisturbed


def test_a_start_that_was_refused_leaves_its_name_in_the_store(output, store, caplog):
    spec = make_spec(output, "refused", "torch", "single", 1, steps=2)
    spec = RunSpec.model_validate({**spec.model_dump(), "checkpoint": {"every": 2, "url": "flaky://bucket/runs"}})
    many = RunSpec.model_validate({**spec.model_dump(), "training": {"steps": 2, "micro_batch_size": 2**16}})
    folder = RunFolder.of(spec)
    with pytest.raises(ValueError, match="fewer than one batch"):
        train_spec(many)
    assert names() == [] and not folder.has_progress
    # As after a kill: nobody knows whether that one is at work.
    RunStore("flaky://bucket/runs", "refused").upload_file(folder.spec)
    with pytest.raises(ValueError, match=r"flaky://bucket/runs/refused holds a run of another spec"):
        train_spec(spec)
    with pytest.raises(ValueError, match="fewer than one batch"):
        train_spec(many)
    assert train_spec(spec).status == "complete"

    # Elsewhere, before the checkpoint is fetched.
    there = names()
    shutil.rmtree(folder.root)
    with pytest.raises(RuntimeError, match="unfit"), session(spec):
        raise RuntimeError("unfit")
    assert names() == there and "refused/spec.yaml" in there


def test_logs_of_its_pods_do_not_keep_the_name_of_a_start_that_was_refused(tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.touch()
    store = RunStore(f"file://{tmp_path}/store", "run")
    store.upload_file(spec)
    (tmp_path / "store/run/logs").mkdir()
    store.delete_if_only(spec)
    assert store.list_files() == ["logs"]


def test_a_store_that_is_away_does_not_hide_why_a_start_ends(output, store, caplog):
    spec = make_spec(output, "hidden", "torch", "single", 1, steps=2)
    spec = RunSpec.model_validate({**spec.model_dump(), "checkpoint": {"url": "flaky://bucket/runs"}})
    with pytest.raises(RuntimeError, match="unfit"), session(spec):
        store.refusing = True
        raise RuntimeError("unfit")
    assert "spec.yaml could not be deleted from flaky://bucket/runs/hidden: OSError: away" in caplog.text


@pytest.mark.parametrize("moment", ["in the last step", "while it waits"])
def test_told_to_stop_a_run_does_not_wait_for_its_last_copy(output, store, monkeypatch, moment):
    spec = make_spec(output, f"stopped-{moment.split()[0]}", "torch", "single", 1, steps=2)
    checkpoint = {"every": 2, "url": "flaky://bucket/runs", "url_timeout": 5, "on_sigterm": "save"}
    spec = RunSpec.model_validate({**spec.model_dump(), "checkpoint": checkpoint})
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    end_step, enqueue = Job.end_step, CheckpointUploader.enqueue

    def last_step(job, step, *arguments):
        if step == 2 and moment == "in the last step":
            stop()
        end_step(job, step, *arguments)

    def away(uploader, folder):
        # The checkpoint is whole by now, however slow the disk.
        if moment == "while it waits":
            threading.Timer(0.5, stop).start()
        store.error = OSError("away")
        enqueue(uploader, folder)

    with monkeypatch.context() as patched:
        patched.setattr(Job, "end_step", last_step)
        patched.setattr(CheckpointUploader, "enqueue", away)
        with pytest.raises(Preempted):
            train_spec(spec)
    assert manifest.step_of(manifest.latest(RunFolder.of(spec).checkpoints)) == 2
    assert not RunFolder.of(spec).record.exists()

    store.error = None
    assert train_spec(spec).status == "complete"
    assert RunStore("flaky://bucket/runs", spec.name).complete_steps() == [2]


def test_a_run_is_complete_when_its_last_checkpoints_are_in_the_store(output, store):
    spec = make_spec(output, "copied", "torch", "single", 1, steps=2)
    checkpoint = {"every": 1, "keep_last": 2, "url": "flaky://bucket/runs"}
    spec = RunSpec.model_validate({**spec.model_dump(), "checkpoint": checkpoint})
    store.denied = "checkpoint-"
    # The second one finds nothing left to train.
    for _ in range(2):
        with pytest.raises(ValueError, match=r"checkpoint\.url: .* cannot be used"):
            train_spec(spec)
        assert not RunFolder.of(spec).record.exists()
    store.denied = None
    assert train_spec(spec).status == "complete"
    assert RunStore("flaky://bucket/runs", "copied").complete_steps() == [1, 2]
