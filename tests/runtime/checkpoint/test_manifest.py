"""A checkpoint counts when it is whole, and only then."""

import json
import logging

import pytest

from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.manifest import MANIFEST, commit, prune, verification_error


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def write(root, step, content=b"weights", committed=True):
    folder = root / f"checkpoint-{step}"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "sub" / "state").write_bytes(content[::-1])
    if committed:
        commit(folder, {}, {"data_hash": "def"})
    return folder


def test_latest_is_the_newest_by_step_not_by_name(root):
    write(root, 9)
    newest = write(root, 10)
    assert checkpoint.latest(root) == newest


def test_no_folder_has_no_checkpoint(root):
    assert checkpoint.latest(root) is None


def test_manifest_names_every_file(root):
    manifest = json.loads((write(root, 3) / MANIFEST).read_text())
    assert manifest["step"] == 3
    assert checkpoint.metadata_of(root / "checkpoint-3")["data_hash"] == "def"
    assert set(manifest["files"]) == {"model.safetensors", "sub/state"}


def truncate(folder):
    (folder / "model.safetensors").write_bytes(b"weig")


def flip(folder):
    (folder / "model.safetensors").write_bytes(b"weightz")


def remove(folder):
    (folder / "sub" / "state").unlink()


def tear_manifest(folder):
    manifest = folder / MANIFEST
    manifest.write_text(manifest.read_text()[:40])


def unfinished(folder):
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, "has 4 bytes, not 7"),
        (flip, "has changed"),
        (remove, "is missing"),
        (tear_manifest, "unreadable"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": 1}'), "unreadable"),
        (unfinished, "did not finish"),
    ],
)
def test_harmed_checkpoint_is_passed_over_with_its_reason(root, caplog, harm, reason):
    good, bad = write(root, 10), write(root, 20)
    harm(bad)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(root) == good
    assert str(bad) in caplog.text
    assert reason in caplog.text


def test_what_a_manifest_notes_is_as_safe_as_the_tensors(root):
    folder = write(root, 20)
    checkpoint.update_metadata(folder, {"world_size": 2, "guard": {"losses": [0.1], "passed_over": [[10, 3]]}})
    written = (folder / MANIFEST).read_bytes()
    metadata = {name: fact for name, fact in checkpoint.metadata_of(folder).items() if name != "seal"}
    assert verification_error(folder) is None
    for place in range(len(written)):
        flipped = bytes([written[place] ^ 1 << place % 8])
        (folder / MANIFEST).write_bytes(written[:place] + flipped + written[place + 1 :])
        # Nothing depends on white space, or on the seal's own name.
        assert verification_error(folder) or checkpoint.metadata_of(folder).items() >= metadata.items()


def test_discard_after_removes_what_a_killed_save_left(root):
    write(root, 10)
    write(root, 20, committed=False)
    checkpoint.discard_after(root, 10)
    assert [checkpoint.step_of(f) for f in checkpoint.folders(root)] == [10]


def test_prune_keeps_the_newest(root):
    for step in (5, 10, 15):
        write(root, step)
    prune(root, 2)
    assert [checkpoint.step_of(f) for f in checkpoint.folders(root)] == [10, 15]


def test_prune_keeps_every_so_many_steps(root):
    for step in (5, 10, 15, 20, 25):
        write(root, step)
    prune(root, 1, keep_every=10)
    assert [checkpoint.step_of(f) for f in checkpoint.folders(root)] == [10, 20, 25]


def test_what_its_writer_tells_of_a_file_is_believed_until_it_is_read(root):
    folder = write(root, 5, committed=False)
    commit(folder, {"model.safetensors": {"bytes": 7, "sha256": "0" * 64}}, {})
    assert checkpoint.latest(root) is None


def test_a_checkpoint_of_another_version_is_refused_with_the_way_out(root):
    folder = write(root, 5)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["format"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=r"checkpoint format 1, but this version of Strata reads format 2; finish that run with"
    ):
        checkpoint.metadata_of(folder)
