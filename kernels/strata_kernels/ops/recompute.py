"""Recompute the results of some operators in the backward pass, instead of keeping them for it.

A norm keeps its input, and the linear layers behind it keep its result. The result is quickly made again: within
`recomputing()`, autograd keeps the arguments of such operators where it would keep their results. The bits are the
same, because the same kernel computes them from the same values.

Operators say by `Operator.recomputed` which of their results these are. Of a layer of Qwen3 0.6B this is a quarter of
what the backward pass needs. What `torch.utils.checkpoint` or a compiled graph keeps within the block is theirs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# Of the pass that runs; an operator is called by one thread.
_active: _Results | None = None
# Others may have no storage of their own.
_PLAIN = (Tensor, nn.Parameter)


@contextmanager
def recomputing() -> Iterator[None]:
    """Within the block, a forward pass, autograd recomputes what is cheap; the backward pass may come later.

    Raises:
        RuntimeError: in the backward pass, if something was changed in place that it needs.
    """
    global _active
    before, _active = _active, _Results()
    try:
        with torch.autograd.graph.saved_tensors_hooks(_active.hold, lambda kept: kept.get()):
            yield
    finally:
        _active = before


def note_results(run: Callable[..., Any], args: tuple[Any, ...], output: Any, recomputed: int, keeps: bool) -> None:
    """Note what `run(*args)` has returned, of an operator with these values of `recomputed` and `keeps_inputs`."""
    if _active is not None:
        _active.note(run, args, output if isinstance(output, tuple) else (output,), recomputed, keeps)


class _Kept:
    """A tensor as it is, but without its history: a node that keeps its own result would hold itself for ever."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._version = x.detach(), x._version

    def get(self) -> Tensor:
        if self._x._version != self._version:
            raise RuntimeError(
                "a tensor that the backward pass needs was changed in place after the forward pass had used it"
            )
        return self._x


class _Call:
    """A call of an operator. Its results are computed once for all that need them."""

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._run, self._args = run, args
        self._found: tuple[Tensor, ...] | None = None
        self.users = 0

    def result(self, number: int) -> Tensor:
        """For one user; the last of them frees the results."""
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
    """Where a tensor lies in a result of a call."""

    def __init__(self, call: _Call, number: int, x: Tensor) -> None:
        self._call, self._number = call, number
        self._place = (x.size(), x.stride(), x.storage_offset())
        call.users += 1

    def get(self) -> Tensor:
        return self._call.result(self._number).as_strided(*self._place)


class _Result(NamedTuple):
    """One of the results of a call. The weak reference keeps the address of its storage from being used again."""

    storage: StorageWeakRef
    dtype: torch.dtype
    version: int
    call: _Call
    number: int


class _Results:
    """What a forward pass has computed and can be computed again, by the address of its storage."""

    def __init__(self) -> None:
        self._calls: dict[int, _Result] = {}

    def note(
        self, run: Callable[..., Any], args: tuple[Any, ...], output: tuple[Any, ...], recomputed: int, keeps: bool
    ) -> None:
        if not keeps and not all(isinstance(x, Tensor) and self._find(x) for x in args[:recomputed]):
            return
        # A call that no node keeps lives as long as its results, as within a layer that is recomputed as a whole.
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
        """What is kept in place of a tensor."""
        found = self._find(x)
        return _Kept(x) if found is None else _View(*found, x)

    def _find(self, x: Tensor) -> tuple[_Call, int] | None:
        """The call whose result `x` is, or is a view of; None if it was changed since."""
        found = self._calls.get(x.untyped_storage()._cdata) if type(x) in _PLAIN else None
        if found is None or (found.dtype, found.version) != (x.dtype, x._version):
            return None
        return found.call, found.number
