"""The kernels that a training step compiles, found by running the step on meta tensors.

Triton compiles a kernel once per specialization: the types of its arguments, the values of its constexprs and options,
whether each pointer is 16-byte aligned, and whether each integer is 1, a multiple of 16 or neither; for AMD also
whether a tensor's memory is within 2 GiB. A plan contains the distinct specializations. It replaces each argument with
a representative of its class, so that equal specializations compare equal.

A plan does not depend on the GPU: the number of multiprocessors is only an unspecialized kernel argument or the size of
the grid, never a constexpr. Where a kernel is for some GPUs only, the plan contains it and the one for the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from strata_kernels.ops._cuda_kernel import CudaKernel
from strata_kernels.ops._launch import Call, keywords_on, recording

# An integer that needs 64 bits, and the divisor for which Triton specializes integers and pointers.
_WIDE = 2**35
_ALIGNMENT = 16
# The largest memory that 32-bit offsets can address.
_NEAR = 2**31 - 1
# The kernels that a launch compiles; under TRITON_INTERPRET=1, those of Triton have another type.
_COMPILED = (JITFunction, CudaKernel)


@dataclass(frozen=True)
class Pointer:
    """A tensor argument as Triton's compiler sees it; `near` if its memory is within 2 GiB."""

    dtype: torch.dtype
    aligned: bool
    near: bool = True

    def data_ptr(self) -> int:
        """An address with this alignment."""
        return 0 if self.aligned else 1

    def ptr_range(self) -> int:
        """A memory size of this class; Triton calls this method when compiling for AMD."""
        return _NEAR if self.near else _NEAR + 1


@dataclass(frozen=True)
class Specialization:
    """One kernel to compile: its arguments by name, as representatives of their classes, and its options."""

    kernel: JITFunction[Any] | CudaKernel
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

    def on(self, backend: str) -> Specialization:
        """The specialization that `backend`, "cuda" or "hip", compiles; equal for two that the backend does not
        distinguish."""
        keywords = keywords_on(backend, dict((*self.arguments, *self.options)))
        arguments = tuple((name, _on(backend, keywords[name])) for name, _ in self.arguments)
        options = tuple((name, keywords[name]) for name, _ in self.options if name in keywords)
        return replace(self, arguments=arguments, options=options)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the kernel's module and name."""
        return {
            "kernel": f"{self.kernel.fn.__module__}:{self.kernel.fn.__qualname__}",
            "arguments": {name: _to_plain(value) for name, value in self.arguments},
            "options": {name: _to_plain(value) for name, value in self.options},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Specialization:
        """The inverse of `to_dict`; imports the kernel's module.

        Raises:
            ValueError: the kernel does not exist.
        """
        module, _, name = data["kernel"].partition(":")
        try:
            kernel = getattr(import_module(module), name, None)
        except ModuleNotFoundError:
            kernel = None
        if not isinstance(kernel, _COMPILED):
            raise ValueError(f"the plan contains the kernel {data['kernel']!r}, which is missing; record a new plan")
        arguments = tuple((name, _from_plain(value)) for name, value in data["arguments"].items())
        return cls(kernel, arguments, tuple(data["options"].items()))


@dataclass(frozen=True)
class Plan:
    """The distinct specializations of a step, in the order of their first launch."""

    specializations: tuple[Specialization, ...]

    def __len__(self) -> int:
        return len(self.specializations)

    def __add__(self, other: Plan) -> Plan:
        """The union of both plans, for runs with several batch shapes."""
        return Plan(tuple(dict.fromkeys((*self.specializations, *other.specializations))))

    def on(self, target: GPUTarget) -> Plan:
        """The distinct specializations that a GPU of this target compiles."""
        items = [
            item
            for item in self.specializations
            if isinstance(item.kernel, JITFunction) or item.kernel.supports(target)
        ]
        return Plan(tuple(dict.fromkeys(item.on(target.backend) for item in items)))

    @property
    def hash(self) -> str:
        """SHA-256 of the specializations in any order, without the kernels' sources."""
        lines = sorted(json.dumps(item.to_dict(), sort_keys=True) for item in self.specializations)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON."""
        kernels = [item.to_dict() for item in self.specializations]
        return json.dumps({"plan": self.hash, "kernels": kernels}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`. Imports the modules that the plan names, so load only plans that you trust.

        Raises:
            ValueError: the text is not a plan, was edited, or contains kernels that do not exist.
        """
        try:
            data = json.loads(text)
            expected, kernels = data["plan"], data["kernels"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"this is not a plan of kernels ({type(error).__name__}: {error})") from error
        plan = cls(tuple(Specialization.from_dict(item) for item in kernels))
        if plan.hash != expected:
            raise ValueError(f"the plan was edited: its hash is {plan.hash}, not {expected}; record a new plan")
        return plan


def record(step: Callable[[], object]) -> Plan:
    """Run `step` without launching kernels, and return the plan of its launches.

    Under TRITON_INTERPRET=1 Triton compiles nothing, so the plan is empty.

    Args:
        step: forward and backward of the real patched model, with parameters and batch on the meta device in the dtypes
            and shapes of the run. Meta tensors start at address 0, so views are aligned as on a GPU, whose allocator
            aligns to 512 bytes. Kernels of other libraries and of `torch.compile` are not recorded.
    """
    with recording() as calls:
        step()
    return Plan(tuple(dict.fromkeys(_specialize(call) for call in calls if isinstance(call.kernel, _COMPILED))))


def _specialize(call: Call) -> Specialization:
    kernel = call.kernel
    values: dict[str, Any] = dict(zip(kernel.arg_names, call.args, strict=False))
    options = {name: value for name, value in call.kwargs.items() if name not in kernel.arg_names}
    values |= {name: value for name, value in call.kwargs.items() if name in kernel.arg_names}
    arguments = tuple((param.name, _representative(param, values)) for param in kernel.params if param.name in values)
    # In the order of the launch keywords, which is part of Triton's in-memory key.
    return Specialization(kernel, arguments, tuple(options.items()))


def _representative(param: Any, values: Mapping[str, Any]) -> Any:
    """A representative of all values with the same specialization."""
    value = values[param.name]
    if param.is_constexpr or value is None or isinstance(value, bool):
        return value
    if isinstance(value, torch.Tensor):
        plain = param.do_not_specialize
        aligned = plain or value.data_ptr() % _ALIGNMENT == 0
        return Pointer(value.dtype, aligned, plain or value.untyped_storage().nbytes() <= _NEAR)
    if isinstance(value, float):
        return 0.0
    assert isinstance(value, int), f"{param.name}: no representative for {type(value).__name__}"
    wide = not -(2**31) <= value < 2**31
    if not param.do_not_specialize:
        if value == 1:
            return 1
        if value % _ALIGNMENT == 0 and not param.do_not_specialize_on_alignment:
            return _WIDE if wide else _ALIGNMENT
    return _WIDE + 2 if wide else 2


def _on(backend: str, value: Any) -> Any:
    return replace(value, near=True) if isinstance(value, Pointer) and backend == "cuda" else value


def _to_plain(value: Any) -> Any:
    if isinstance(value, Pointer):
        return {"dtype": str(value.dtype).removeprefix("torch."), "aligned": value.aligned, "near": value.near}
    assert value is None or isinstance(value, bool | int | float | str), f"{value!r} does not go into JSON"
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return Pointer(getattr(torch, value["dtype"]), value["aligned"], value["near"])
    return value


def _show(value: Any) -> str:
    if isinstance(value, Pointer):
        return f"*{str(value.dtype).removeprefix('torch.')}{'' if value.aligned else ' (unaligned)'}"
    return str(value)
