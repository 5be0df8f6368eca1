"""The one way a kernel is started.

Every operator launches through `launch`, so that one place sets the device and the options, and a plan of what a run
will compile can be taken by running the real code on meta tensors: inside `recording()` nothing runs, calls are noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction

_KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

# As error messages say it.
DTYPES = "bf16, fp16, fp32, fp64"

# What a launch asks for that only NVIDIA's compiler can do: an option that Triton knows for it alone, and a constexpr
# by which a kernel has PTX in it.
_NVIDIA_OPTIONS = frozenset({"maxnreg"})
_NVIDIA_CONSTEXPRS = frozenset({"REPACK", "FAST"})

_calls: ContextVar[list[Call] | None] = ContextVar("strata_kernels_calls", default=None)
_captured: ContextVar[list[Launched] | None] = ContextVar("strata_kernels_captured", default=None)


@dataclass(frozen=True)
class Call:
    """A launch that would have happened: the kernel, its positional arguments (meta tensors) and its keywords."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Launched:
    """A launch that happened, as Triton's launcher was asked for it.

    args: by name, for all parameters in order; None for constexprs, which launchers take and skip.
    keywords: the constexprs and options.
    """

    kernel: CompiledKernel
    grid: tuple[int, ...]
    args: dict[str, Any]
    keywords: dict[str, Any]

    def with_addresses(self) -> Launched:
        """The same with the addresses of tensors in place of them."""
        args = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in self.args.items()}
        return replace(self, args=args, grid=(*self.grid, 1, 1)[:3])

    def again(self, changed: dict[str, Any]) -> None:
        """Launch on the current device and stream, with other arguments of the same types and alignments by name.

        Of a launch `with_addresses`, whose tensors still exist.
        """
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        kernel = self.kernel
        # Without launch metadata and hooks: a call that has hooks is not repeated.
        kernel.run(
            *self.grid, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *(self.args | changed).values(),
        )  # fmt: skip


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Run `kernel[grid](*args, **kwargs)` on the device of args[0], or note it when recording.

    args: a tensor, then tensors, int, float and None, for all parameters but the constexprs, in order.
    kwargs: the constexprs, which are the last parameters, and Triton's options.

    An empty grid launches nothing.
    """
    # Said aloud, because Triton's default changes with 3.10: one multiply-add, rounded once.
    kwargs = {"enable_fp_fusion": True, **kwargs}
    calls = _calls.get()
    if calls is not None:
        calls.append(Call(kernel, args, kwargs))
        return
    if 0 in grid:
        return
    if torch.version.hip:
        kwargs = keywords_on("hip", kwargs)
    index = args[0].get_device()
    if index < 0:
        assert isinstance(kernel, InterpretedFunction), "cpu tensors need TRITON_INTERPRET=1"
        kernel[grid](*args, **kwargs)
    elif index == torch._C._cuda_getDevice():
        _capture(kernel[grid](*args, **kwargs), kernel, grid, args, kwargs)
    else:
        with torch.cuda.device(index):
            _capture(kernel[grid](*args, **kwargs), kernel, grid, args, kwargs)


def keywords_on(backend: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a launch as `backend`, "cuda" or "hip", takes them."""
    if backend == "cuda":
        return keywords
    return {
        name: False if name in _NVIDIA_CONSTEXPRS else value
        for name, value in keywords.items()
        if name not in _NVIDIA_OPTIONS
    }


def _capture(
    compiled: CompiledKernel, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    launched = _captured.get()
    if launched is not None:
        assert [param.is_constexpr for param in kernel.params] == [i >= len(args) for i in range(len(kernel.params))], (
            f"{kernel.__name__}: its constexprs, and they alone, must come last and be given by keyword"
        )
        names = [param.name for param in kernel.params]
        values = args + (None,) * (len(names) - len(args))
        launched.append(Launched(compiled, grid, dict(zip(names, values, strict=True)), keywords))


def runs_triton(x: Tensor) -> bool:
    """Whether an operator on `x` runs the kernel: on a GPU, and on the CPU under TRITON_INTERPRET=1."""
    return x.is_cuda or (x.device.type == "cpu" and bool(knobs.runtime.interpret))


def is_recording() -> bool:
    """Whether launches are noted instead of run: then operators take the kernel path on meta tensors."""
    return _calls.get() is not None


def takes_kernel(x: Tensor) -> bool:
    """Whether an operator on `x` takes the kernel path: it runs the kernel, or its launches are being noted.

    fp64 never does: it is for checking gradients, in plain PyTorch.
    """
    return x.dtype in _KERNEL_DTYPES and (runs_triton(x) or (x.is_meta and is_recording()))


def has_dtype(x: Tensor) -> bool:
    """Whether operators take the dtype of `x`: one of DTYPES."""
    return x.dtype in _KERNEL_DTYPES or x.dtype == torch.float64


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once on `device`: its multiprocessors. Two elsewhere, so that loops over tiles run."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed and summed: fp32, or fp64 for itself."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def describe(x: Tensor) -> str:
    """A tensor as error messages name it: `float32 [2, 3]`."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def as_rows(x: Tensor) -> Tensor:
    """x [..., D] as [N, D] with adjacent columns: a view where strides allow one, else a copy."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def dense(weight: Tensor | None) -> Tensor | None:
    """A weight with adjacent elements; None if there is none."""
    return None if weight is None else weight.contiguous()


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Collect this thread's launches instead of running them; yields the list that fills.

    The backward pass of meta tensors runs in the thread that asks for it, so it is noted too.
    """
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@contextmanager
def capture_launches() -> Iterator[list[Launched]]:
    """Collect this thread's launches on a GPU while they happen; yields the list that fills."""
    launched: list[Launched] = []
    token = _captured.set(launched)
    try:
        yield launched
    finally:
        _captured.reset(token)
