"""For tests that train."""

import shutil
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.helpers import fork_server
from tests.runtime.helpers.narrow_preset import narrow


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Where the runs of a module go. Their checkpoints, gigabytes in all, are not kept until the last test ends."""
    folder = tmp_path_factory.mktemp("out")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def forked_readers() -> Iterator[None]:
    """Forks read what is exported; in `workflows/test_finetune` an interpreter of its own does."""
    readers = SimpleNamespace(run=partial(fork_server.run, env=fork_server.clean_environment()))
    with mock.patch("tasks.runtime.process.forks.subprocess", readers):
        yield


@pytest.fixture(scope="module", autouse=True)
def one_renderer() -> Iterator[None]:
    """The process that renders templates serves all tests, as it serves all rows; starting it takes two seconds."""
    with mock.patch("tasks.runtime.data.preparation.pipeline.stop_rendering"):
        yield


@pytest.fixture(scope="module")
def narrowed():
    """The preset is small while a module's tests run; processes that they start are to be told."""
    with narrow():
        yield
