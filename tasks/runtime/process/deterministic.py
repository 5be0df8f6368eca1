"""Algorithms that give the same bits at every start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Have PyTorch take no algorithm whose result depends on which of its parts is done first, until the end.

    Of what a training step does on a GPU that is mostly attention's backward pass. The operators of the kernel layer
    repeat bit for bit by themselves. An operation without such an algorithm raises RuntimeError; were it only warned
    of, attention would stay as it is, too.
    """
    # cuBLAS reads it when it is first used: without memory of its own, products on several streams share some.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # For attention by the package flash-attn; transformers reads it.
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # It would write all new memory once more, to make the same of errors that the runtime does not have.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        enabled, settings.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(enabled)
