"""For every test and the processes it starts; libraries read these when they are imported."""

import logging
import os
from collections.abc import Iterator

import pytest

# Nothing reaches a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests run side by side: threads that wait for each other on a busy core cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """What a test made of the project's loggers is undone: the output that they write to is closed with it."""
    yield
    for name in ("tasks", "strata_kernels"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
