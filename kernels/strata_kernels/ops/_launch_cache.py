"""The launch cache: what a host function does, recorded once and replayed without running it.

A host function is the `forward` of an operator. Apart from its launches, what it does (views, tile sizes, allocations)
follows from the shapes, strides, dtypes, alignments and plain values of its arguments: the key of a call. In Python it
costs a small operator several times the work of its kernels, and Triton's way to a launch costs as much again. So the
second call of a key is traced, and later calls replay the trace: the same allocations, then the same compiled kernels
with the new addresses. A host function that does more than allocate and launch, such as a copy or a matrix product, is
not replayable and runs every time.

With the environment variable STRATA_CHECK_LAUNCH_CACHE=1 a replayed call also runs the host function, and raises if
that does anything else than the replay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.compiler import CompiledKernel

from ._launch import Launched, capture_launches

TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})

_CALLED_ONCE, _NOT_REPLAYABLE = "called once", "not replayable"
# By key. The cache is emptied when it is full.
_cache: dict[tuple[Any, ...], _Replay | str] = {}
_MAX_ENTRIES = 8192
_CHECKS = os.environ.get("STRATA_CHECK_LAUNCH_CACHE", "0") != "0"


@dataclass(frozen=True, slots=True)
class _Launch:
    """A compiled kernel and its grid; `select` takes its arguments from a call's values.

    parameters, keywords: their names, and the constexprs and options. A check compares them.
    """

    kernel: CompiledKernel
    grid: tuple[int, ...]
    select: Callable[[list[Any]], tuple[Any, ...]]
    parameters: tuple[str, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Allocation:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zero: bool


@dataclass(frozen=True, slots=True)
class _Replay:
    """What a host function did. A call's values are its pointers, then the constants.

    pointers: (index among the input tensors and the allocations, byte offset from its start).
    results: indices among the allocations, or the one index of a result that is no tuple.
    """

    device: torch.device
    allocations: tuple[_Allocation, ...]
    pointers: tuple[tuple[int, int], ...]
    constants: tuple[Any, ...]
    launches: tuple[_Launch, ...]
    results: tuple[int, ...] | int

    def run(self, addresses: list[int]) -> Any:
        """The results for input tensors at these addresses."""
        if self.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self.run(addresses)
        allocated = []
        for new in self.allocations:
            tensor = torch.empty_strided(new.shape, new.stride, dtype=new.dtype, device=self.device)
            allocated.append(tensor.zero_() if new.zero else tensor)
        values = self.values(addresses, allocated)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        for launch in self.launches:
            kernel = launch.kernel
            # Without launch metadata and hooks: a call that has hooks is not replayed.
            kernel.run(
                *launch.grid, stream, kernel.function, kernel.packed_metadata, None, None, None,
                *launch.select(values),
            )  # fmt: skip
        return allocated[self.results] if isinstance(self.results, int) else tuple([allocated[i] for i in self.results])

    def values(self, addresses: list[int], allocated: list[Tensor]) -> list[Any]:
        """What the launches select their arguments from."""
        starts = addresses + [tensor.data_ptr() for tensor in allocated]
        values: list[Any] = [starts[index] + offset for index, offset in self.pointers]
        values += self.constants
        return values

    def parts(self) -> dict[str, str]:
        """All that a run does, in words."""
        parts = {f"allocation {i}": repr(new) for i, new in enumerate(self.allocations)}
        for i, launch in enumerate(self.launches):
            at = f"launch {i}, "
            arguments = launch.select([*(_Pointer(*place) for place in self.pointers), *self.constants])
            parts |= {f"{at}kernel": launch.kernel.name, f"{at}grid": repr(launch.grid)}
            parts |= {at + name: repr(x) for name, x in zip(launch.parameters, arguments, strict=True)}
            parts |= {at + name: repr(x) for name, x in launch.keywords.items()}
        return {**parts, "results": repr(self.results)}


class _Pointer(NamedTuple):
    """As the message of a failed check names a place in memory; `tensor` counts input tensors, then allocations."""

    tensor: int
    offset: int


def cache_key(
    name: str, types: Sequence[frozenset[type]], args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[int]] | None:
    """(the key of a call of operator `name`, the addresses of its tensors).

    None if the call cannot be cached: an argument has none of the types at its place, like a number that the dispatcher
    would convert, or a tensor has no memory of its own or a pending negation. A key starts with the index of the
    device.
    """
    key: list[Any] = [args[0].get_device(), name]
    addresses = []
    for arg, allowed in zip(args, types, strict=True):
        kind = type(arg)
        if kind not in allowed:
            return None
        if kind in TENSOR_TYPES:
            try:
                address = arg.data_ptr()
            except RuntimeError:
                return None
            if not address or arg.is_neg():
                return None
            addresses.append(address)
            # Triton compiles for aligned addresses apart.
            key += (arg.shape, arg.stride(), arg.dtype, address & 15)
        else:
            key.append(arg)
    return tuple(key), addresses


def run_cached(host: Callable[..., Any], args: tuple[Any, ...], key: tuple[Any, ...], addresses: list[int]) -> Any:
    """`host(*args)`, replayed if a call with this key has been traced.

    host: depends on nothing but the key, and returns tensors that it allocates.
    """
    entry = _cache.get(key)
    if isinstance(entry, _Replay) and not needs_real_launches():
        if _CHECKS:
            _check(host, args, key, addresses, entry)
        return entry.run(addresses)
    if entry is None and key[0] >= 0:
        # A key that comes once, like that of the last batch of an epoch, is not worth a trace.
        if len(_cache) >= _MAX_ENTRIES:
            _cache.clear()
        _cache[key] = _CALLED_ONCE
    # If a tensor is given twice, a trace does not show which of the two arguments a launch takes.
    elif entry is _CALLED_ONCE and len(set(addresses)) == len(addresses):
        output, _cache[key] = _trace(host, args)
        return output
    return host(*args)


def _check(
    host: Callable[..., Any], args: tuple[Any, ...], key: tuple[Any, ...], addresses: list[int], recorded: _Replay
) -> None:
    """Raise RuntimeError if `host(*args)` differs from the recorded call."""
    if len(set(addresses)) != len(addresses):
        return  # As in `run_cached`: a trace is ambiguous.
    _, now = _trace(host, args)
    before, after = recorded.parts(), now.parts() if isinstance(now, _Replay) else {"host function": now}
    differing = [part for part in {**before, **after} if before.get(part) != after.get(part)]
    if differing:
        part = differing[-1 if isinstance(now, str) else 0]
        raise RuntimeError(
            f"strata::{key[1]}: the launch cache replays what its host function no longer does; "
            f"{part}: recorded {before.get(part, 'nothing')}, now {after.get(part, 'nothing')}. A host function may"
            " depend only on the shapes, strides, dtypes, alignments and plain values of its arguments"
        )


def needs_real_launches() -> bool:
    """Whether launches have hooks, or kernels are to be compiled in another way than by default."""
    runtime = knobs.runtime
    # A hook is a chain of calls; it may also have been replaced by a function, or by None.
    return bool(
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )


_aten = torch.ops.aten
_EMPTY = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})
_ZEROS = frozenset({_aten.zeros, _aten.zeros_like, _aten.new_zeros})


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects allocations, and whether tensors are used for anything but allocations and views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[tuple[Tensor, bool]] = []
        self.does_more = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY or func.overloadpacket in _ZEROS:
            self.allocated.append((result, func.overloadpacket in _ZEROS))
        elif not func.is_view and "Tensor" in str(func._schema):
            self.does_more = True
        return result


class _NotReplayableError(Exception):
    """A trace cannot be replayed."""


def _trace(host: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, _Replay | str]:
    """(`host(*args)`, how to replay it)."""
    with capture_launches() as launched, _Tracer() as tracer:
        output = host(*args)
    try:
        if tracer.does_more:
            raise _NotReplayableError
        return output, _replay([x for x in args if isinstance(x, Tensor)], tracer.allocated, launched, output)
    except _NotReplayableError:
        return output, _NOT_REPLAYABLE


def _replay(
    inputs: list[Tensor], allocated: list[tuple[Tensor, bool]], launched: list[Launched], output: Any
) -> _Replay:
    new = [tensor for tensor, _ in allocated]
    if any(tensor.device != inputs[0].device for tensor in new):
        raise _NotReplayableError
    pointers: dict[tuple[int, int], int] = {}
    constants: list[Any] = []
    arguments: list[list[tuple[bool, int]]] = []
    for launch in launched:
        arguments.append([])
        for value in launch.args.values():
            if isinstance(value, Tensor):
                arguments[-1].append((False, pointers.setdefault(_origin(value, inputs + new), len(pointers))))
            elif value is None or isinstance(value, int | float):
                arguments[-1].append((True, len(constants)))
                constants.append(value)
            else:
                raise _NotReplayableError
    results = _results(output, new)
    return _Replay(
        device=inputs[0].device,
        allocations=tuple(
            _Allocation(tuple(tensor.shape), tensor.stride(), tensor.dtype, zero)
            for tensor, (_, zero) in zip(new, allocated, strict=True)
        ),
        pointers=tuple(pointers),
        constants=tuple(constants),
        launches=tuple(
            _Launch(
                launch.kernel,
                (*launch.grid, 1, 1)[:3],
                itemgetter(*[is_constant * len(pointers) + i for is_constant, i in places]),
                tuple(launch.args),
                launch.keywords,
            )
            for launch, places in zip(launched, arguments, strict=True)
        ),
        results=results,
    )


def _results(output: Any, allocated: list[Tensor]) -> tuple[int, ...] | int:
    """Which allocations `output` consists of; sets them in `allocated` to the shapes that they have in `output`."""
    if isinstance(output, Tensor):
        return _results((output,), allocated)[0]  # type: ignore[index]
    indices: list[int] = []
    for tensor in output:
        index, offset = _origin(tensor, allocated)
        is_whole = not offset and tensor.numel() == allocated[index].numel() and tensor.dtype == allocated[index].dtype
        if index in indices or not is_whole:
            raise _NotReplayableError
        allocated[index] = tensor
        indices.append(index)
    return tuple(indices)


def _origin(tensor: Tensor, bases: list[Tensor]) -> tuple[int, int]:
    """(index of the one base in whose memory `tensor` starts, bytes beyond its start)."""
    memory, address = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
    found = [
        index
        for index, base in enumerate(bases)
        if base is tensor or (memory and base.untyped_storage().data_ptr() == memory)
    ]
    if len(found) > 1:
        found = [index for index in found if bases[index].data_ptr() == address]
    if len(found) != 1:
        raise _NotReplayableError
    return found[0], address - bases[found[0]].data_ptr()
