"""A lease of a run's folder: one holder, whoever starts at once; a dead one is followed, a late one stops."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from strata_platform.run_layout import LEASE
from tasks.runtime.run_folder import lease as leases
from tasks.runtime.run_folder.lease import EXPIRY, Lease
from tasks.runtime.training import session, train
from tests.runtime.helpers import comparable_runs
from tests.runtime.helpers.train_only import train_spec


@pytest.fixture(scope="module")
def s3():
    """An S3 server of its own, and a bucket in it."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    # Other servers were on other ports.
    s3fs.S3FileSystem.clear_instance_cache()
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "user")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="leases")
        yield "s3://leases/runs"
    server.stop()


@pytest.fixture(params=["file", "s3", "memory"])
def url(request, tmp_path):
    roots = {"file": f"file://{tmp_path}/runs [team]", "memory": "memory://runs"}
    root = roots.get(request.param) or request.getfixturevalue("s3")
    yield f"{root}/{tmp_path.name}"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/runs", recursive=True)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes leases of processes on another machine, which this one cannot see."""

    def made(url, name="away", **more):
        with monkeypatch.context() as patch:
            patch.setattr(leases, "_process", lambda: {"boot": "another", "namespace": "pid:[1]", "pid": 1})
            patch.setattr(leases.socket, "gethostname", lambda: name)
            return Lease(url, **more)

    return made


def test_of_many_that_start_at_once_one_has_it(url, elsewhere):
    everyone = [elsewhere(url, f"pod-{number}") for number in range(4)]
    together = threading.Barrier(4)

    def take(lease):
        together.wait(20)
        return lease.try_to_take()

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(take, everyone))
    assert results.count(None) == 1
    winner = everyone[results.index(None)]
    # Whoever looks now sees its holder, and the holder may write.
    assert f"on pod-{results.index(None)}" in elsewhere(url).try_to_take()
    winner.renew()
    winner.require_held()


def test_what_was_released_is_free_at_once(url, elsewhere):
    first, second = elsewhere(url), elsewhere(url)
    assert first.try_to_take() is None and second.try_to_take() is not None
    first.release()
    assert second.try_to_take() is None
    assert first.try_to_take() is not None


def test_a_holder_that_is_silent_is_followed_and_one_that_renews_is_not(url, elsewhere):
    clock = Clock()
    first, second = elsewhere(url), elsewhere(url, clock=clock)
    assert first.try_to_take() is None
    for _ in range(4):
        assert second.try_to_take() is not None
        clock.now += EXPIRY - 1
        first.renew()
    assert second.try_to_take() is not None
    clock.now += EXPIRY - 1
    assert second.try_to_take() is not None
    clock.now += 1
    assert second.try_to_take() is None
    # The first one was away, and is back.
    first.renew()
    with pytest.raises(ValueError, match=r"is being trained by process .* on away, which took over"):
        first.require_held()
    # What it does at its end leaves the other's lease alone.
    first.release()
    second.renew()
    second.require_held()
    assert elsewhere(url).try_to_take() is not None


def test_a_store_that_ignores_conditions_has_one_holder_after_a_renewal(tmp_path, elsewhere):
    url = f"file://{tmp_path}/x"
    first, second = elsewhere(url, "one"), elsewhere(url, "two")
    assert first.try_to_take() is None
    # Both have created the same number, and the second one wrote last.
    second._number = first._number
    second._write(second._number, {})
    first.renew()
    second.renew()
    second.require_held()
    with pytest.raises(ValueError, match="on two"):
        first.require_held()


def test_a_file_that_was_cut_off_is_nobodys_after_a_while(tmp_path, elsewhere):
    clock = Clock()
    file = tmp_path / "x" / LEASE / "lease-000004.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"owner": "ab')
    lease = elsewhere(f"file://{tmp_path}/x", clock=clock)
    assert lease.try_to_take() == "another process"
    clock.now += EXPIRY
    assert lease.try_to_take() is None
    assert [path.name for path in file.parent.iterdir()] == ["lease-000005.json"]


def test_a_run_whose_folder_another_machine_took_ends_before_it_saves(tmp_path, elsewhere, monkeypatch, narrowed):
    run = comparable_runs.make_spec(tmp_path, "taken", "torch", "single", 1, steps=4)
    original = train._step_ended

    def taken_after_the_first_step(run):
        if not (other := elsewhere(f"file://{run.folder.root}", "gpu-7"))._create(run.leases[0]._number + 1):
            raise AssertionError(other)
        run.leases[0].renew()
        original(run)

    monkeypatch.setattr(train, "_step_ended", taken_after_the_first_step)
    with pytest.raises(ValueError, match="on gpu-7, which took over"):
        train_spec(run)
    assert [path.name for path in (tmp_path / "taken" / "checkpoints").glob("*")] == []


HOLD = """
import sys, time
from tasks.runtime.run_folder.lease import Lease
print(Lease(sys.argv[1]).try_to_take(), flush=True)
time.sleep(600)
"""


def test_a_killed_process_of_this_machine_is_followed_at_once(tmp_path):
    url = f"file://{tmp_path}/x"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, url], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "None\n"
    lease = Lease(url)
    assert f"process {holder.pid} on " in lease.try_to_take()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lease.try_to_take() is None
    holder.stdout.close()


def test_a_start_names_who_trains_in_the_folder(tmp_path, elsewhere, monkeypatch, caplog):
    monkeypatch.setattr(session, "LOCK_TIMEOUT", 0.05)
    monkeypatch.setattr(session, "RENEWAL", 0.05)
    url = f"file://{tmp_path}/x"
    assert elsewhere(url, "gpu-7").try_to_take() is None
    with pytest.raises(ValueError, match=r"x is being trained by process \d+ on gpu-7; wait for it or end it, or choo"):
        session._taken(url)
    assert len([message for message in caplog.messages if "waiting for its end" in message]) == 1


def test_a_release_that_did_not_arrive_is_known_to_this_process(tmp_path, monkeypatch):
    first, second = Lease(f"file://{tmp_path}/x"), Lease(f"file://{tmp_path}/x")
    assert first.try_to_take() is None
    monkeypatch.setattr(first, "_write", lambda *values: 1 / 0)
    first.release()
    assert second.try_to_take() is None


def test_the_thread_renews_and_a_release_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "RENEWAL", 0.01)
    lease = Lease(f"file://{tmp_path}/x")
    assert lease.try_to_take() is None
    renewed = threading.Event()
    write = lease._write
    monkeypatch.setattr(lease, "_write", lambda *values: (write(*values), renewed.set()))
    lease.start_renewing()
    assert renewed.wait(20)
    lease.release()
    assert json.loads(Path(tmp_path, "x", LEASE, "lease-000001.json").read_text())["released"] is True
    assert not lease._thread.is_alive()
