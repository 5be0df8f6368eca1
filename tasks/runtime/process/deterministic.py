"""`training.deterministic`: algorithms that give the same bits in every run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside the block PyTorch uses deterministic algorithms only: `torch.use_deterministic_algorithms(True)`.

    In a training step on a GPU this mostly concerns the backward pass of attention. The operators of the kernel layer
    are deterministic anyway. An operation without a deterministic algorithm raises RuntimeError; with `warn_only`
    attention, too, would stay as it is.
    """
    # cuBLAS reads it at its first use. Otherwise matrix products on several streams share one workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # transformers passes it to the package flash-attn.
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Otherwise PyTorch fills every new tensor, which only helps to find reads of uninitialized memory.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        enabled, settings.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(enabled)
