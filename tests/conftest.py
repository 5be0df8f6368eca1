"""For every test and the processes it starts; libraries read these when they are imported."""

import logging
import os
from collections.abc import Iterator

import pytest

# Nothing reaches a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests run side by side: threads that wait for each other on a busy core cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that take half a minute or more come first: none of them is left to one worker while the others have nothing.
SLOW = (
    "runtime/test_matrix", "runtime/test_resume", "kernels/test_interpreter", "runtime/test_parallel",
    "runtime/test_objectives", "runtime/test_guard", "runtime/test_quantized", "workflows/test_elastic",
    "kernels/test_bake", "workflows/test_finetune", "workflows/test_sweep", "runtime/test_graphs",
    "runtime/test_watchdog", "runtime/test_shared", "runtime/test_processes", "tests/test_notebook",
    "runtime/test_adapter", "platform/test_client", "tests/test_house", "runtime/test_kills", "kernels/test_store",
    "runtime/test_checkpoint_storage", "runtime/test_upload", "runtime/test_trl", "runtime/test_verification",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order within a file, and that of other files, is as it was."""
    place = {name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(f"{item.path.parent.name}/{item.path.stem}", len(SLOW)))


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """What a test made of the project's loggers is undone: the output that they write to is closed with it."""
    yield
    for name in ("tasks", "strata_kernels"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
