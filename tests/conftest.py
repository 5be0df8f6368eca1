"""For every test and the processes it starts; libraries read these when they are imported."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.process_cost import leave

# Nothing reaches a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests run side by side: threads that wait for each other on a busy core cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
# Files that take half a minute or more come first: none of them is left to one worker while the others have nothing.
SLOW = (
    "runtime/test_real_model",
    "runtime/test_frameworks_and_strategies", "runtime/test_exact_resume", "kernels/test_interpreter",
    "runtime/test_parallel_losses", "runtime/test_objectives_under_strategies", "runtime/training/test_step_guard",
    "runtime/models/adapters/test_quantization", "workflows/test_elastic", "kernels/test_bake",
    "workflows/test_finetune", "workflows/test_sweep", "runtime/warmup/test_inductor_cache",
    "runtime/process/test_watchdog", "runtime/parallel/test_parallel", "runtime/process/test_ranks", "test_notebook",
    "runtime/models/adapters/test_lora", "platform/test_client", "test_house", "runtime/test_random_kills",
    "kernels/test_cache_filler", "runtime/checkpoint/test_storage", "runtime/checkpoint/test_upload",
    "runtime/test_same_as_trl", "runtime/verification/test_verification", "runtime/test_mixed_sources",
    "runtime/test_evaluation_in_training", "runtime/test_frozen_weights", "runtime/test_learning_from_images",
    "runtime/test_adapter_runs", "runtime/test_experts", "runtime/test_plugins", "runtime/test_policy_optimization",
    "runtime/test_grpo_learns", "workflows/test_align", "runtime/models/media/test_multimodal",
    "runtime/optim/test_rounding", "runtime/test_learning_from_audio",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order within a file, and that of other files, is as it was."""
    place = {TESTS / f"{name}.py": number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.path, len(SLOW)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _has_gpu() -> bool:
    # Tests of a GPU have imported torch; others spare it.
    import torch

    return torch.cuda.is_available()


def pytest_collectstart() -> None:
    """Imports leave next to no garbage, and each of the collector's walks takes longer than the one before."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the garbage collector would walk it again and again, a fourth of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Extension modules look for leaks at the end of the interpreter."""
    gc.unfreeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End a worker here, after it has sent its results: to free all modules takes six seconds."""
    if hasattr(config, "workerinput"):
        leave(0)


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """What a test made of the project's loggers is undone: the output that they write to is closed with it."""
    yield
    for name in ("tasks", "strata_kernels"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
