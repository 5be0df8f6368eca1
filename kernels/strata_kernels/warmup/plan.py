"""What a step compiles, found by running it on meta tensors.

Triton compiles a kernel once per specialization: the types of its arguments, the values of its constexprs and options,
whether each pointer is 16-byte aligned, and whether each integer is 1, a multiple of 16 or neither. A plan holds the
distinct ones. An argument is kept as a stand-in of its class, so equal specializations compare equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from strata_kernels.ops._launch import Call, recording

# An integer of another type than i32, and the classes of one that Triton tells apart.
_WIDE = 2**35
_ALIGNMENT = 16


@dataclass(frozen=True)
class Pointer:
    """A tensor argument as Triton's compiler sees it."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        """An address of this alignment."""
        return 0 if self.aligned else 1


@dataclass(frozen=True)
class Specialization:
    """One kernel to compile: its arguments by name, as stand-ins of their class, and its options."""

    kernel: JITFunction[Any]
    arguments: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return str(self.kernel.__name__)

    @property
    def signature(self) -> str:
        """The arguments and options in one line: `x=*bfloat16, n_rows=2, D=4096, num_warps=4`."""
        return ", ".join(f"{name}={_show(value)}" for name, value in (*self.arguments, *self.options))

    def compile(self) -> Any:
        """Compile for the current device, or read Triton's cache; returns the compiled kernel, not yet loaded."""
        return self.kernel.warmup(grid=(1,), **dict(self.arguments), **dict(self.options))


@dataclass(frozen=True)
class Plan:
    """The distinct specializations of a step, in the order of their first launch."""

    specializations: tuple[Specialization, ...]

    def __len__(self) -> int:
        return len(self.specializations)

    def __add__(self, other: Plan) -> Plan:
        """Both plans without repetition, for runs with several shapes of batch."""
        return Plan(tuple(dict.fromkeys((*self.specializations, *other.specializations))))


def record(step: Callable[[], object]) -> Plan:
    """Run `step` with launches noted instead of made, and return what they would compile.

    step: forward and backward of the real patched model, with parameters and batch on the meta device in the dtypes
        and shapes of the run. Meta tensors start at address 0: views are aligned here as they are on a GPU, whose
        allocator aligns to 512 bytes. Kernels of other libraries and of `torch.compile` are not seen.

    Under TRITON_INTERPRET=1 nothing is ever compiled and the plan is empty.
    """
    with recording() as calls:
        step()
    return Plan(tuple(dict.fromkeys(_specialize(call) for call in calls if isinstance(call.kernel, JITFunction))))


def _specialize(call: Call) -> Specialization:
    kernel = call.kernel
    values: dict[str, Any] = dict(zip(kernel.arg_names, call.args, strict=False))
    options = {name: value for name, value in call.kwargs.items() if name not in kernel.arg_names}
    values |= {name: value for name, value in call.kwargs.items() if name in kernel.arg_names}
    arguments = tuple((param.name, _stand_in(param, values)) for param in kernel.params if param.name in values)
    # In the order of the launch, which is part of the key by which Triton finds a kernel again.
    return Specialization(kernel, arguments, tuple(options.items()))


def _stand_in(param: Any, values: Mapping[str, Any]) -> Any:
    """A value that Triton puts in the same class as the given one, the same for all values of that class."""
    value = values[param.name]
    if param.is_constexpr or value is None or isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, param.do_not_specialize or value.data_ptr() % _ALIGNMENT == 0)
    if isinstance(value, float):
        return 0.0
    assert isinstance(value, int), f"{param.name}: no stand-in for {type(value).__name__}"
    wide = not -(2**31) <= value < 2**31
    if not param.do_not_specialize:
        if value == 1:
            return 1
        if value % _ALIGNMENT == 0 and not param.do_not_specialize_on_alignment:
            return _WIDE if wide else _ALIGNMENT
    return _WIDE + 2 if wide else 2


def _show(value: Any) -> str:
    if isinstance(value, Pointer):
        return f"*{str(value.dtype).removeprefix('torch.')}{'' if value.aligned else ' (unaligned)'}"
    return str(value)
