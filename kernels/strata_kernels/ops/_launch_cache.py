"""The launch cache: allocations and launches of a host function, traced once and replayed without running its Python.

A host function is the `forward` of an operator. Its allocations, views, tile sizes and launches are a function of the
shapes, strides, dtypes, alignments and plain values of its arguments: the cache key of a call. For a small operator,
its Python takes several times as long as its kernels, and Triton's launch path as long again. So the second call with a
key is traced, and later calls replay the trace: the same allocations, then the same compiled kernels with the new
addresses. A host function with other operations, such as a copy or a matrix product, is not replayable and runs every
time.

With STRATA_CHECK_LAUNCH_CACHE=1, a replayed call also runs the host function, and raises if the two differ.
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
# Key → trace or state. Cleared when it has _MAX_ENTRIES entries.
_cache: dict[tuple[Any, ...], _Replay | str] = {}
_MAX_ENTRIES = 8192
_CHECKS = os.environ.get("STRATA_CHECK_LAUNCH_CACHE", "0") != "0"


@dataclass(frozen=True, slots=True)
class _Launch:
    """A traced launch; `select` picks the kernel's arguments from `_Replay.values`.

    parameters, keywords: names of the arguments, and constexprs and options, for `_check` only.
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
    """The trace of a host function.

    pointers: pointer arguments of launches, as (index into input tensors + allocations, byte offset).
    constants: the other arguments of launches.
    results: indices into the allocations; an int for a single tensor.
    """

    device: torch.device
    allocations: tuple[_Allocation, ...]
    pointers: tuple[tuple[int, int], ...]
    constants: tuple[Any, ...]
    launches: tuple[_Launch, ...]
    results: tuple[int, ...] | int

    def run(self, addresses: list[int]) -> Any:
        """Allocate and launch for input tensors at these addresses; returns the results."""
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
            # No launch metadata and no hooks: calls are not replayed if hooks are set.
            kernel.run(
                *launch.grid, stream, kernel.function, kernel.packed_metadata, None, None, None,
                *launch.select(values),
            )  # fmt: skip
        return allocated[self.results] if isinstance(self.results, int) else tuple([allocated[i] for i in self.results])

    def values(self, addresses: list[int], allocated: list[Tensor]) -> list[Any]:
        """The addresses of `pointers`, then `constants`; launches select their arguments from this list."""
        starts = addresses + [tensor.data_ptr() for tensor in allocated]
        values: list[Any] = [starts[index] + offset for index, offset in self.pointers]
        values += self.constants
        return values

    def parts(self) -> dict[str, str]:
        """Allocations, launches and results as text, for `_check`."""
        parts = {f"allocation {i}": repr(new) for i, new in enumerate(self.allocations)}
        for i, launch in enumerate(self.launches):
            at = f"launch {i}, "
            arguments = launch.select([*(_Pointer(*place) for place in self.pointers), *self.constants])
            parts |= {f"{at}kernel": launch.kernel.name, f"{at}grid": repr(launch.grid)}
            parts |= {at + name: repr(x) for name, x in zip(launch.parameters, arguments, strict=True)}
            parts |= {at + name: repr(x) for name, x in launch.keywords.items()}
        return {**parts, "results": repr(self.results)}


class _Pointer(NamedTuple):
    """A pointer in the message of a failed check; `tensor`: index into input tensors + allocations."""

    tensor: int
    offset: int


def cache_key(
    name: str, types: Sequence[frozenset[type]], args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[int]] | None:
    """(cache key of a call of operator `name`, addresses of its tensors).

    None if the call cannot be cached: an argument's type is not in `types` (a number that the dispatcher would
    convert), or a tensor has no data pointer or its negative bit is set. The first element is the device index.
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
            # Triton specializes kernels on 16-byte alignment.
            key += (arg.shape, arg.stride(), arg.dtype, address & 15)
        else:
            key.append(arg)
    return tuple(key), addresses


def run_cached(host: Callable[..., Any], args: tuple[Any, ...], key: tuple[Any, ...], addresses: list[int]) -> Any:
    """`host(*args)`, replayed if a call with this key has been traced.

    host: a function of the key only, which returns tensors that it allocates.
    """
    entry = _cache.get(key)
    if isinstance(entry, _Replay) and not needs_real_launches():
        if _CHECKS:
            _check(host, args, key, addresses, entry)
        return entry.run(addresses)
    if entry is None and key[0] >= 0:
        # Not traced at the first call: keys that occur once, like an epoch's last batch, do not repay a trace.
        if len(_cache) >= _MAX_ENTRIES:
            _cache.clear()
        _cache[key] = _CALLED_ONCE
    # If one tensor is passed twice, a trace cannot tell which argument a launch used.
    elif entry is _CALLED_ONCE and len(set(addresses)) == len(addresses):
        output, _cache[key] = _trace(host, args)
        return output
    return host(*args)


def _check(
    host: Callable[..., Any], args: tuple[Any, ...], key: tuple[Any, ...], addresses: list[int], recorded: _Replay
) -> None:
    """Raise RuntimeError if `host(*args)` differs from the recorded call."""
    if len(set(addresses)) != len(addresses):
        return  # As in `run_cached`: the trace would be ambiguous.
    _, now = _trace(host, args)
    before, after = recorded.parts(), now.parts() if isinstance(now, _Replay) else {"host function": now}
    differing = [part for part in {**before, **after} if before.get(part) != after.get(part)]
    if differing:
        part = differing[-1 if isinstance(now, str) else 0]
        raise RuntimeError(
            f"strata::{key[1]}: the host function differs from the trace in the launch cache; "
            f"{part}: recorded {before.get(part, 'nothing')}, now {after.get(part, 'nothing')}. A host function may"
            " depend only on the shapes, strides, dtypes, alignments and plain values of its arguments"
        )


def needs_real_launches() -> bool:
    """Whether launch hooks or non-default compilation settings are active, so that replay would be wrong."""
    runtime = knobs.runtime
    # A hook is a HookChain with `calls`, or whatever a user replaced it with: a function or None.
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
    """Records allocations, and whether any operator other than allocations and views ran."""

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
    """(`host(*args)`, its trace or _NOT_REPLAYABLE)."""
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
    """Indices of the allocations in `output`; replaces them in `allocated` with their views in `output`."""
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
    """(index of the base whose memory contains `tensor`, byte offset of `tensor` from its start)."""
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
