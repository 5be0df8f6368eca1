"""Files between tasks: a store that is away is waited for, in place."""

import asyncio
import gc
import logging
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import fsspec
import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteDataNotFoundException, FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.utils.asyn import loop_manager
from fsspec.implementations.memory import MemoryFileSystem

from tasks import paths
from tasks.steps import retry


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights" / "inner"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")
    (folder.parent / "metrics.jsonl").write_text("{}")
    return folder.parent


class Away(MemoryFileSystem):
    """A store in memory that can be away."""

    protocol = "away"
    store, pseudo_dirs = {}, [""]
    is_away, read = True, 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("away://", "/"))

    def put(self, *arguments, **options):
        if self.is_away:
            raise ConnectionError("no route to the store")
        return super().put(*arguments, **options)

    def get_file(self, *arguments, **options):
        if self.is_away and self.read:
            raise ConnectionError("no route to the store")
        type(self).read += 1
        return super().get_file(*arguments, **options)

    def exists(self, *arguments, **options):
        if self.is_away:
            raise ConnectionError("no route to the store")
        return super().exists(*arguments, **options)


fsspec.register_implementation("away", Away, clobber=True)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Where Flyte's tasks write."""
    monkeypatch.setattr(paths, "is_local", lambda: False)
    monkeypatch.setattr(Away, "is_away", True)
    monkeypatch.setattr(Away, "read", 0)
    access = FileAccessProvider(str(tmp_path / "sandbox"), "away://bucket/run")
    context = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(context.with_file_access(access)):
        yield Away


def test_a_store_that_comes_back_gets_the_folder_without_another_attempt(weights, store, caplog):
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 7:
            store.is_away = False

    stored = paths.directory(weights, sleep)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert [message for message in caplog.messages if "trying again" in message] == caplog.messages[:1]
    # Flyte passes the address on and copies nothing again.
    expected = TypeEngine.to_literal_type(FlyteDirectory)
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, stored, FlyteDirectory, expected)
    assert literal.scalar.blob.uri.startswith("away://bucket/run/")
    there = Path(literal.scalar.blob.uri.removeprefix("away:/"))
    found = {str(Path(file).relative_to(there)): content.getvalue() for file, content in store.store.items()}
    assert found == {"metrics.jsonl": b"{}", "inner/model.safetensors": b"weights"}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that passed, as a list, by a clock that stands still otherwise."""
    passed = []
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: sum(passed)))
    return passed


def test_a_store_that_stays_away_is_a_matter_for_another_attempt(weights, store, clock):
    with pytest.raises(FlyteRecoverableException, match=r"weights could not be stored for 8\d\d s: "):
        paths.directory(weights, clock.append)
    assert 870 < sum(clock) <= 900


def test_the_time_of_calls_that_fail_counts(weights, store, clock, monkeypatch):
    def put(*_, **__):
        clock.append(100)
        raise TimeoutError("no answer")

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(FlyteRecoverableException, match=r"weights could not be stored for 8\d\d s: no answer"):
        paths.directory(weights, clock.append)
    # Eight calls, and seven pauses.
    assert clock == [100, 1, 100, 2, 100, 4, 100, 8, 100, 16, 100, 30, 100, 30, 100]


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, AttributeError, PermissionError, FileNotFoundError])
def test_what_another_call_would_not_mend_ends_at_once(error, weights, store, monkeypatch):
    def fail(*_, **__):
        raise error("no")

    for call in ("put", "get"):
        monkeypatch.setattr(store, call, fail)
    monkeypatch.setattr(store, "is_away", False)
    with pytest.raises(error, match="no"):
        paths.directory(weights, pytest.fail)
    # flytekit has an error of its own, a ValueError, for what is not there.
    with pytest.raises((error, ValueError)):
        paths.fetched(handed("away://bucket/run/other"), pytest.fail)


def handed(url):
    """A folder as the next task gets it."""
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(
        context, FlyteDirectory.from_source(url), FlyteDirectory, TypeEngine.to_literal_type(FlyteDirectory)
    )
    return TypeEngine.to_python_value(context, literal, FlyteDirectory)


def test_a_store_that_goes_away_within_a_download_gives_the_whole_folder_later(weights, store, monkeypatch):
    monkeypatch.setattr(store, "is_away", False)
    folder, pauses = handed(paths.directory(weights).remote_source), []
    monkeypatch.setattr(store, "is_away", True)

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            store.is_away = False

    copy = paths.fetched(folder, sleep)
    assert pauses == [1, 2, 4] and store.read > 1, "it gave a part before it went away"
    found = {str(file.relative_to(copy)): file.read_text() for file in copy.rglob("*") if file.is_file()}
    assert found == {"metrics.jsonl": "{}", "inner/model.safetensors": "weights"}
    store.is_away = True
    assert paths.fetched(folder, sleep) == copy and (copy / "metrics.jsonl").exists()


def test_what_the_store_does_not_have_is_not_waited_for(store, monkeypatch):
    monkeypatch.setattr(store, "is_away", False)
    with pytest.raises(FlyteDataNotFoundException):
        paths.fetched(handed("away://bucket/run/removed"), pytest.fail)


def test_what_cannot_be_read_for_long_is_a_matter_for_another_attempt(store, clock):
    with pytest.raises(FlyteRecoverableException, match=r"away://bucket/run/gone could not be read for 8\d\d s: "):
        paths.fetched(handed("away://bucket/run/gone"), clock.append)
    assert 870 < sum(clock) <= 900


async def _session():
    return aiohttp.ClientSession()


async def _fail_unseen():
    asyncio.get_running_loop().call_exception_handler({"message": "a part of the upload failed"})


@pytest.mark.filterwarnings("ignore:Unclosed client session:ResourceWarning")
def test_connections_that_flytekit_leaves_open_are_no_errors_in_the_log_of_a_pod(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flytekit"), "handlers", [caplog.handler])
    # A `pyflyte` that an earlier test ran in this process has set another.
    caplog.set_level(logging.ERROR, "flytekit")

    loop_manager.run_sync(_session)
    gc.collect()
    loop_manager.run_sync(_fail_unseen)

    (record,) = caplog.records
    assert "a part of the upload failed" in record.getMessage()
