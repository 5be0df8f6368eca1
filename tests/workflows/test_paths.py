"""Files between tasks: a store that is away is waited for, in place."""

from pathlib import Path

import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from tasks import paths


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights" / "inner"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")
    (folder.parent / "metrics.jsonl").write_text("{}")
    return folder.parent


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Where Flyte's tasks write; nothing can be written until it is a folder."""
    monkeypatch.setattr(paths, "is_local", lambda: False)
    place = tmp_path / "store"
    place.write_text("a disk that is not mounted")
    access = FileAccessProvider(str(tmp_path / "sandbox"), f"file://{place}/run")
    context = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(context.with_file_access(access)):
        yield place


def test_a_store_that_comes_back_gets_the_folder_without_another_attempt(weights, store, caplog):
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 7:
            store.unlink()
            store.mkdir()

    stored = paths.directory(weights, sleep)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert [message for message in caplog.messages if "trying again" in message] == caplog.messages[:1]
    # Flyte passes the address on and copies nothing again.
    expected = TypeEngine.to_literal_type(FlyteDirectory)
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, stored, FlyteDirectory, expected)
    there = Path(literal.scalar.blob.uri.removeprefix("file://"))
    assert there.is_relative_to(store)
    found = {str(file.relative_to(there)) for file in there.rglob("*") if file.is_file()}
    assert found == {"metrics.jsonl", "inner/model.safetensors"}
    assert (there / "inner" / "model.safetensors").read_text() == "weights"


def test_a_store_that_stays_away_is_a_matter_for_another_attempt(weights, store, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(paths.time, "monotonic", lambda: clock[0])

    def sleep(seconds):
        clock[0] += seconds

    with pytest.raises(FlyteRecoverableException, match="weights could not be stored for 900 s"):
        paths.directory(weights, sleep)
    assert 870 < clock[0] <= 900
