"""Algorithms that give the same bits at every start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Have PyTorch take no algorithm whose result depends on which of its parts is done first, until the end.

    Of what a training step does on a GPU that is mostly attention's backward pass. The operators of the kernel layer
    repeat bit for bit by themselves. An operation without such an algorithm runs as it is, with PyTorch's warning.
    """
    # cuBLAS reads it when it is first used: without memory of its own, products on several streams share some.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # For attention by the package flash-attn; transformers reads it.
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    settings = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would write all new memory once more, to make the same of errors that the runtime does not have.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled
