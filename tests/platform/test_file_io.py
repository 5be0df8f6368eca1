"""Shared files: a reader never sees a part of one, and one process at a time holds a lock."""

import os

import pytest

from strata_platform.file_io import LockTimeout, acquire_lock, write_atomic


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_as_a_whole(tmp_path, durable):
    file = tmp_path / "state.json"
    write_atomic(file, b"old", durable=durable)
    with file.open("rb") as reader:
        write_atomic(file, b"new", durable=durable)
        assert reader.read() == b"old"
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    file = tmp_path / "state.json"
    file.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomic(file, "text", durable=False)
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_durable_files_and_their_folder_are_synced_before_the_write_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    write_atomic(tmp_path / "record.json", b"{}", durable=False)
    assert synced == []
    write_atomic(tmp_path / "record.json", b"{}", durable=True)
    assert synced == [f"{tmp_path}/.record.json.{os.getpid()}.tmp", str(tmp_path)]


def test_a_lock_is_held_by_one(tmp_path):
    waits = []
    with (tmp_path / "lock").open("a+") as first, (tmp_path / "lock").open("a+") as second:
        acquire_lock(first, on_wait=lambda: waits.append("first"))
        with pytest.raises(LockTimeout):
            acquire_lock(second, timeout=0.0)
        # Whoever waits is called once; here that ends the wait.
        acquire_lock(second, timeout=30.0, on_wait=lambda: (waits.append("second"), first.close()))
    assert waits == ["second"]
