"""Recompute results of cheap operators in the backward pass instead of saving them.

A norm saves its input, and the linear layers after it save its result, which is cheap to recompute. Inside
`recomputing()`, autograd saves the arguments of such operators in place of their results. Recomputed results are
bitwise equal, because the same kernel runs on the same values.

`Operator.recomputed` says which results are recomputed. In a layer of Qwen3 0.6B, they are a quarter of the saved
tensors. Tensors saved by `torch.utils.checkpoint` or a compiled graph inside the block are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# State of the active `recomputing` block. A global: operators are called from one thread.
_active: _Results | None = None
# Other Tensor subclasses may have no storage.
_PLAIN = (Tensor, nn.Parameter)


@contextmanager
def recomputing() -> Iterator[None]:
    """Context manager for a forward pass whose cheap results backward recomputes; backward may run outside it.

    Raises:
        RuntimeError: in the backward pass, if a tensor that it needs was modified in place.
    """
    global _active
    before, _active = _active, _Results()
    try:
        with torch.autograd.graph.saved_tensors_hooks(_active.hold, lambda kept: kept.get()):
            yield
    finally:
        _active = before


def note_results(run: Callable[..., Any], args: tuple[Any, ...], output: Any, recomputed: int, keeps: bool) -> None:
    """Register `output = run(*args)` of an operator with these values of `recomputed` and `keeps_inputs`."""
    if _active is not None:
        _active.note(run, args, output if isinstance(output, tuple) else (output,), recomputed, keeps)


class _Kept:
    """A saved tensor, detached: a node that saved its own result would be a reference cycle."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._version = x.detach(), x._version

    def get(self) -> Tensor:
        if self._x._version != self._version:
            raise RuntimeError(
                "a tensor that the backward pass needs was modified in place after the forward pass had used it"
            )
        return self._x


class _Call:
    """A call of an operator, whose results are recomputed once for all users."""

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._run, self._args = run, args
        self._found: tuple[Tensor, ...] | None = None
        self.users = 0

    def result(self, number: int) -> Tensor:
        """Result `number`, for one user; freed after the last user."""
        if self._found is None:
            with torch.no_grad():
                found = self._run(*(x.get() if isinstance(x, _Kept | _View) else x for x in self._args))
            self._found = found if isinstance(found, tuple) else (found,)
        found = self._found[number]
        self.users -= 1
        if self.users <= 0:
            self._found = None
        return found


class _View:
    """A saved tensor that is a view of a recomputed result."""

    def __init__(self, call: _Call, number: int, x: Tensor) -> None:
        self._call, self._number = call, number
        self._place = (x.size(), x.stride(), x.storage_offset())
        call.users += 1

    def get(self) -> Tensor:
        return self._call.result(self._number).as_strided(*self._place)


class _Result(NamedTuple):
    """A result of a call. The weak reference keeps the address of its storage from being reused."""

    storage: StorageWeakRef
    dtype: torch.dtype
    version: int
    call: _Call
    number: int


class _Results:
    """Recomputable results of a forward pass, by address of their storage."""

    def __init__(self) -> None:
        self._calls: dict[int, _Result] = {}

    def note(
        self, run: Callable[..., Any], args: tuple[Any, ...], output: tuple[Any, ...], recomputed: int, keeps: bool
    ) -> None:
        if not keeps and not all(isinstance(x, Tensor) and self._find(x) for x in args[:recomputed]):
            return
        # Drop calls whose results no longer exist, e.g. those of a checkpointed layer.
        self._calls = {
            address: result
            for address, result in self._calls.items()
            if not result.storage.expired()  # type: ignore[no-untyped-call]
        }
        call = _Call(run, tuple(self.hold(x) if isinstance(x, Tensor) else x for x in args))
        for number, x in enumerate(output[:recomputed]):
            storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
            self._calls[storage.cdata] = _Result(storage, x.dtype, x._version, call, number)

    def hold(self, x: Tensor) -> _Kept | _View:
        """The object that autograd saves in place of x."""
        found = self._find(x)
        return _Kept(x) if found is None else _View(*found, x)

    def _find(self, x: Tensor) -> tuple[_Call, int] | None:
        """The call and index of the result that `x` is a view of; None if there is none or it was modified."""
        found = self._calls.get(x.untyped_storage()._cdata) if type(x) in _PLAIN else None
        if found is None or (found.dtype, found.version) != (x.dtype, x._version):
            return None
        return found.call, found.number
