"""Tensors come back as they were, from files that any safetensors reader reads and no pickle among them."""

import errno
import hashlib
import json
import os
import re
import resource
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from tasks.runtime import checkpoint
from tasks.runtime.checkpoint import manifest, state, writer
from tasks.runtime.checkpoint.state import load_model, load_optimizer, load_random_states, model_tensors
from tasks.runtime.checkpoint.storage import INDEX, Index, write_tensors
from tasks.runtime.process.ranks import Processes
from tests.helpers import fork_server

TENSORS = {
    "half": torch.arange(7, dtype=torch.bfloat16).reshape(7, 1),
    "scalar": torch.tensor(2.5),
    "states": torch.arange(5, dtype=torch.uint8),
    "whole": torch.arange(6).reshape(2, 3),
    "none": torch.empty(0, 4),
}


def test_files_are_plain_safetensors_and_digests_are_those_of_the_file(tmp_path):
    told = write_tensors(tmp_path / "x.safetensors", TENSORS)
    content = (tmp_path / "x.safetensors").read_bytes()
    assert told == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.generation_config = PretrainedConfig(), GenerationConfig()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("computed", torch.ones(2), persistent=False)

    def can_generate(self):
        return True


def make_writer(root, model, optimizer, keep_last=2):
    return writer.CheckpointWriter(
        root, model, optimizer, Processes(), keep_last=keep_last, metadata={"data_hash": "d"}
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.head(model.embed(torch.arange(5))).sum().backward()
    optimizer.step()
    return optimizer


def test_a_tied_weight_is_saved_once_and_what_is_computed_is_not(model):
    assert set(model_tensors(model)) == {"model.embed.weight", "model.kept"}


def test_what_is_saved_is_what_it_was_when_save_was_called(tmp_path, model, optimizer, monkeypatch):
    """The file is written while the next step is computed."""
    go, real = threading.Event(), writer.write_tensors
    monkeypatch.setattr(writer, "write_tensors", lambda *arguments: go.wait(30) and real(*arguments))
    monkeypatch.setattr(writer, "FILE_BYTES", 64)
    saver = make_writer(tmp_path, model, optimizer)
    weight = model.embed.weight.detach().clone()
    moment = optimizer.state[model.embed.weight]["exp_avg"].clone()
    saver.save(7)
    optimizer.step()
    assert checkpoint.latest(tmp_path) is None
    go.set()
    saver.wait()

    folder = checkpoint.latest(tmp_path)
    assert checkpoint.step_of(folder) == 7
    assert len(list(folder.glob("*.safetensors"))) > 1
    other = Model()
    fresh = torch.optim.AdamW(other.parameters(), fused=True)
    load_model(Index(folder), other)
    load_optimizer(Index(folder), other, fresh)
    assert torch.equal(other.head.weight, weight)
    assert torch.equal(fresh.state[other.embed.weight]["exp_avg"], moment)
    assert fresh.state[other.embed.weight]["step"] == 1


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path, model, optimizer):
    saver = make_writer(tmp_path, model, optimizer)
    saver.save(1)
    saver.wait()
    folder = checkpoint.latest(tmp_path)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    assert json.loads((folder / INDEX).read_text())["model.kept"]["shape"] == [2]


def test_a_run_begun_on_the_cpu_continues_on_a_gpu_with_the_states_that_there_are(
    tmp_path, model, optimizer, monkeypatch
):
    saver = make_writer(tmp_path, model, optimizer)
    saver.save(1)
    expected = torch.rand(3)
    saver.wait()
    real = state.random_states
    monkeypatch.setattr(state, "random_states", lambda: {**real(), "cuda": torch.zeros(16, dtype=torch.uint8)})
    load_random_states(Index(checkpoint.latest(tmp_path)), 0)
    assert torch.equal(torch.rand(3), expected)


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(tmp_path, model, optimizer):
    saver = make_writer(tmp_path, model, optimizer)
    saver.save(1)
    saver.wait()

    # The largest file that this process may write: as on a full disk, the system refuses in the middle of a file.
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        saver.save(2)
        with pytest.raises(
            ValueError, match=r"checkpoint-2 could not be written: rank 0: .*File too large.*free disk space"
        ):
            saver.save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    # What was written of the other would keep the disk full.
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint-1"]
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == 1


def test_a_disk_that_is_full_before_the_first_checkpoint_is_told_as_well(tmp_path, model, optimizer, monkeypatch):
    def refuse(folder, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    saver = make_writer(tmp_path / "checkpoints", model, optimizer)
    monkeypatch.setattr(writer.Path, "mkdir", refuse)
    saver.save(1)
    with pytest.raises(ValueError, match=r"checkpoint-1 could not be written: .*No space left.*GB are free"):
        saver.wait()


def test_a_save_in_flight_ends_with_the_process_and_failing_is_told(tmp_path, model, optimizer, monkeypatch, caplog):
    saver = make_writer(tmp_path, model, optimizer)
    saver.save(1)
    saver.close()
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == 1
    monkeypatch.setattr(writer, "write_tensors", lambda *arguments: 1 / 0)
    saver.save(2)
    saver.close()
    assert re.search(
        r"the last checkpoint is not complete: .*checkpoint-2 could not be .*division by zero", caplog.text
    )


def write_as_one_of_two(root):
    """Saves in which each of the processes in turn meets an error that nobody thought of."""
    processes = Processes.from_environment()
    processes.connect()
    model = Model()
    saver = writer.CheckpointWriter(
        root, model, torch.optim.AdamW(model.parameters()), processes, keep_last=1, metadata={"data_hash": "d"}
    )
    for broken, module, function in ((1, writer, "write_tensors"), (0, manifest, "write_json")):
        with pytest.MonkeyPatch.context() as patched:
            if processes.rank == broken:
                patched.setattr(module, function, lambda *arguments: 1 / 0)
            saver.save(1)
            # Before either gives up, and the other one notices that it is gone.
            saver._thread.join(30)
            processes.barrier()
            with pytest.raises(ValueError, match=r"checkpoint-1 could not be written: .*division by zero"):
                saver.wait()
    processes.disconnect()


TWO = """
import sys
from pathlib import Path
from tests.runtime.checkpoint.test_storage import write_as_one_of_two
from tests.runtime.helpers.train_forked import run_forked
sys.exit(run_forked(2, lambda: write_as_one_of_two(Path(sys.argv[1]))))
"""


def test_every_process_hears_what_one_of_them_failed_with(tmp_path):
    ended = fork_server.run(
        [sys.executable, "-c", TWO, tmp_path], env=fork_server.clean_environment(), text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert checkpoint.latest(tmp_path) is None


def test_old_checkpoints_go_when_the_new_one_is_whole(tmp_path, model, optimizer):
    saver = make_writer(tmp_path, model, optimizer, keep_last=2)
    for step in (1, 2, 3):
        saver.save(step)
    saver.wait()
    assert [checkpoint.step_of(folder) for folder in checkpoint.folders(tmp_path)] == [2, 3]


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, model, optimizer, monkeypatch, caplog):
    def busy(folder):
        raise OSError(16, os.strerror(16), str(folder))

    saver = make_writer(tmp_path, model, optimizer, keep_last=1)
    with monkeypatch.context() as patched:
        patched.setattr(manifest.shutil, "rmtree", busy)
        for step in (1, 2):
            saver.save(step)
        saver.wait()
    assert "checkpoint-1 could not be deleted" in caplog.text
    assert [checkpoint.step_of(folder) for folder in checkpoint.folders(tmp_path)] == [1, 2]
    saver.save(3)
    saver.wait()
    assert [checkpoint.step_of(folder) for folder in checkpoint.folders(tmp_path)] == [3]


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path, model, optimizer):
    saver = make_writer(tmp_path, model, optimizer)
    saver.save(1)
    saver.wait()
    index = checkpoint.latest(tmp_path) / INDEX
    index.write_text(index.read_text().replace("process-", "../process-"))
    with pytest.raises(ValueError, match=r"names '\.\./process-00000-000\.safetensors', which is not a file of"):
        Index(index.parent)


def test_a_checkpoint_of_another_model_is_refused(tmp_path, model, optimizer):
    saver = make_writer(tmp_path, model, optimizer)
    saver.save(1)
    saver.wait()
    other = Model()
    other.register_buffer("more", torch.ones(1))
    with pytest.raises(ValueError, match=r"has no tensor 'model\.more': it was saved from another model"):
        load_model(Index(checkpoint.latest(tmp_path)), other)
    other = Model()
    other.kept = torch.ones(3)
    with pytest.raises(ValueError, match=r"'model\.kept' has the shape \(2,\), not \(3,\)"):
        load_model(Index(checkpoint.latest(tmp_path)), other)
