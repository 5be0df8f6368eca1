"""Host functions that are repeated without being run.

What an operator's host function does apart from its launches, the views, the tile it picks, what it allocates, follows
from the shapes, strides, dtypes and plain values of its arguments: their form. In Python it costs a small operator
several times the work of its kernels, and the way through Triton to a launch costs as much again. So a call is observed
once, and later calls of the same form are repeated: the same allocations, then the same compiled kernels with the new
addresses. A host function that does more than that, a copy or a matrix product, is run every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.compiler import CompiledKernel

from ._launch import Launched, noting

TENSORS = frozenset({Tensor, torch.nn.Parameter})

# What is known of a form: how to repeat it, or that it came once, or that it cannot be repeated.
_SEEN, _UNREPEATABLE = "seen", "unrepeatable"
_plans: dict[tuple[Any, ...], _Plan | str] = {}
# Beyond so many forms all are forgotten.
_MOST_PLANS = 8192


@dataclass(frozen=True, slots=True)
class _Launch:
    """A compiled kernel, and the choice of its arguments among a call's numbers."""

    kernel: CompiledKernel
    grid: tuple[int, ...]
    choose: Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class _Allocation:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zero: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to repeat. A call's numbers are the addresses of all places, then the constants.

    places: (index among the tensors given and allocated, bytes beyond its start).
    results: indices among the allocations, or the one of a result that is no tuple.
    """

    device: torch.device
    allocations: tuple[_Allocation, ...]
    places: tuple[tuple[int, int], ...]
    constants: tuple[Any, ...]
    launches: tuple[_Launch, ...]
    results: tuple[int, ...] | int

    def repeat(self, given: list[int]) -> Any:
        """The results for tensors at these addresses."""
        if self.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self.repeat(given)
        made = []
        for new in self.allocations:
            tensor = torch.empty_strided(new.shape, new.stride, dtype=new.dtype, device=self.device)
            made.append(tensor.zero_() if new.zero else tensor)
        starts = given + [tensor.data_ptr() for tensor in made]
        numbers: list[Any] = [starts[index] + offset for index, offset in self.places]
        numbers += self.constants
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        for launch in self.launches:
            kernel = launch.kernel
            # Without metadata and hooks: nobody watches.
            kernel.run(
                *launch.grid, stream, kernel.function, kernel.packed_metadata, None, None, None,
                *launch.choose(numbers),
            )  # fmt: skip
        return made[self.results] if isinstance(self.results, int) else tuple([made[i] for i in self.results])


def form_of(
    name: str, kinds: Sequence[frozenset[type]], args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[int]] | None:
    """(what a call of operator `name` has in common with those that can repeat it, the addresses of its tensors).

    None if an argument is not of its kind, like a number that the dispatcher would convert, or a tensor has no memory
    of its own or a negation pending. The form starts with the index of the device.
    """
    form: list[Any] = [args[0].get_device(), name]
    addresses = []
    for arg, allowed in zip(args, kinds, strict=True):
        kind = type(arg)
        if kind not in allowed:
            return None
        if kind in TENSORS:
            try:
                address = arg.data_ptr()
            except RuntimeError:
                return None
            if not address or arg.is_neg():
                return None
            addresses.append(address)
            # Triton compiles for aligned addresses apart.
            form += (arg.shape, arg.stride(), arg.dtype, address & 15)
        else:
            form.append(arg)
    return tuple(form), addresses


def repeat(run: Callable[..., Any], args: tuple[Any, ...], form: tuple[Any, ...], addresses: list[int]) -> Any:
    """`run(*args)`, repeated if a call of this form has been observed.

    run: must depend on nothing but the form, and return tensors that it allocates.
    """
    plan = _plans.get(form)
    if isinstance(plan, _Plan) and not _is_watched():
        return plan.repeat(addresses)
    if plan is None and form[0] >= 0:
        # A form that comes once, like the last batch of an epoch, is not worth observing.
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[form] = _SEEN
    # Of a tensor that is given twice it could not be observed which of the two a launch takes.
    elif plan is _SEEN and len(set(addresses)) == len(addresses):
        output, _plans[form] = _observe(run, args)
        return output
    return run(*args)


def _is_watched() -> bool:
    """Whether someone wants to hear of launches, or to have kernels compiled in another way than by default."""
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


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that are allocated, and whether anything is done with tensors but to view them."""

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


class _UnclearError(Exception):
    """What was observed does not tell how to repeat it."""


def _observe(run: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, _Plan | str]:
    """(`run(*args)`, how to repeat it)."""
    with noting() as launched, _Observer() as observer:
        output = run(*args)
    try:
        if observer.does_more:
            raise _UnclearError
        return output, _plan([x for x in args if isinstance(x, Tensor)], observer.allocated, launched, output)
    except _UnclearError:
        return output, _UNREPEATABLE


def _plan(given: list[Tensor], allocated: list[tuple[Tensor, bool]], launched: list[Launched], output: Any) -> _Plan:
    made = [tensor for tensor, _ in allocated]
    if any(tensor.device != given[0].device for tensor in made):
        raise _UnclearError
    places: dict[tuple[int, int], int] = {}
    constants: list[Any] = []
    chosen: list[list[tuple[bool, int]]] = []
    for launch in launched:
        chosen.append([])
        for value in launch.args:
            if isinstance(value, Tensor):
                chosen[-1].append((False, places.setdefault(_origin(value, given + made), len(places))))
            elif value is None or isinstance(value, int | float):
                chosen[-1].append((True, len(constants)))
                constants.append(value)
            else:
                raise _UnclearError
    results = _results(output, made)
    return _Plan(
        device=given[0].device,
        allocations=tuple(
            _Allocation(tuple(tensor.shape), tensor.stride(), tensor.dtype, zero)
            for tensor, (_, zero) in zip(made, allocated, strict=True)
        ),
        places=tuple(places),
        constants=tuple(constants),
        launches=tuple(
            _Launch(
                launch.kernel,
                (*launch.grid, 1, 1)[:3],
                itemgetter(*[constant * len(places) + i for constant, i in numbers]),
            )
            for launch, numbers in zip(launched, chosen, strict=True)
        ),
        results=results,
    )


def _results(output: Any, made: list[Tensor]) -> tuple[int, ...] | int:
    """Which allocations `output` is; in `made` they take the shapes that they have there."""
    if isinstance(output, Tensor):
        return _results((output,), made)[0]  # type: ignore[index]
    indices: list[int] = []
    for tensor in output:
        index, offset = _origin(tensor, made)
        is_whole = not offset and tensor.numel() == made[index].numel() and tensor.dtype == made[index].dtype
        if index in indices or not is_whole:
            raise _UnclearError
        made[index] = tensor
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
        raise _UnclearError
    return found[0], address - bases[found[0]].data_ptr()
