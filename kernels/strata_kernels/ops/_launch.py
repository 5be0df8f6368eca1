"""`launch`, through which every operator launches its kernels, and helpers of host functions.

`launch` sets the device and default options. Inside `recording()` it records launches instead of running them, so that
running the real code on meta tensors gives the list of kernels to compile: a warm-up plan.
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

# Supported dtypes, for error messages.
DTYPES = "bf16, fp16, fp32, fp64"

# Launch keywords that only the NVIDIA backend supports: options, and constexprs that enable inline PTX.
_NVIDIA_OPTIONS = frozenset({"maxnreg"})
_NVIDIA_CONSTEXPRS = frozenset({"REPACK", "FAST"})

_calls: ContextVar[list[Call] | None] = ContextVar("strata_kernels_calls", default=None)
_captured: ContextVar[list[Launched] | None] = ContextVar("strata_kernels_captured", default=None)


@dataclass(frozen=True)
class Call:
    """A recorded launch that did not run: kernel, positional arguments (meta tensors) and keyword arguments."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Launched:
    """A launch that ran.

    args: by name, for all parameters in order; None for constexprs, which Triton's launchers ignore.
    keywords: the constexprs and options.
    """

    kernel: CompiledKernel
    grid: tuple[int, ...]
    args: dict[str, Any]
    keywords: dict[str, Any]

    def with_addresses(self) -> Launched:
        """A copy with `data_ptr()` in place of each tensor."""
        args = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in self.args.items()}
        return replace(self, args=args, grid=(*self.grid, 1, 1)[:3])

    def again(self, changed: dict[str, Any]) -> None:
        """Launch again on the current device and stream, with the arguments in `changed` (by name) replaced.

        Call it on the result of `with_addresses` while its tensors exist; `changed` keeps types and alignments.
        """
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        kernel = self.kernel
        # No launch metadata and no hooks: callers do not use `again` if hooks are set.
        kernel.run(
            *self.grid, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *(self.args | changed).values(),
        )  # fmt: skip


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Run `kernel[grid](*args, **kwargs)` on the device of args[0], or record it inside `recording()`.

    args: all parameters except constexprs, in order; a tensor first, then tensors, int, float or None.
    kwargs: the constexprs, which are the last parameters, and Triton's launch options.

    An empty grid launches nothing.
    """
    # Explicit, because Triton 3.10 changes the default: multiply-adds are fused and rounded once.
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
    """The launch keywords that `backend`, "cuda" or "hip", supports."""
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
            f"{kernel.__name__}: constexprs must be the last parameters, and only they passed by keyword"
        )
        names = [param.name for param in kernel.params]
        values = args + (None,) * (len(names) - len(args))
        launched.append(Launched(compiled, grid, dict(zip(names, values, strict=True)), keywords))


def runs_triton(x: Tensor) -> bool:
    """Whether an operator on `x` runs the kernel: on a GPU, and on the CPU under TRITON_INTERPRET=1."""
    return x.is_cuda or (x.device.type == "cpu" and bool(knobs.runtime.interpret))


def is_recording() -> bool:
    """Whether launches are recorded instead of run; operators then take the kernel path on meta tensors."""
    return _calls.get() is not None


def takes_kernel(x: Tensor) -> bool:
    """Whether an operator on `x` takes the kernel path, to run or to record its launches.

    False for fp64, which is for gradient checks and runs in plain PyTorch.
    """
    return x.dtype in _KERNEL_DTYPES and (runs_triton(x) or (x.is_meta and is_recording()))


def has_dtype(x: Tensor) -> bool:
    """Whether operators support the dtype of `x`: one of DTYPES."""
    return x.dtype in _KERNEL_DTYPES or x.dtype == torch.float64


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of `device`; 2 for other devices, so that tests cover loops over tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and sums on values of `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def describe(x: Tensor) -> str:
    """Dtype and shape for error messages: `float32 [2, 3]`."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def as_rows(x: Tensor) -> Tensor:
    """x [..., D] as [N, D] with column stride 1; a view if the strides of x allow it, else a copy."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def dense(weight: Tensor | None) -> Tensor | None:
    """`weight.contiguous()`, or None."""
    return None if weight is None else weight.contiguous()


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Record this thread's launches instead of running them; yields the list to which they are appended.

    Autograd runs the backward pass of meta tensors in the calling thread, so its launches are recorded, too.
    """
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@contextmanager
def capture_launches() -> Iterator[list[Launched]]:
    """Record this thread's GPU launches while running them; yields the list to which they are appended."""
    launched: list[Launched] = []
    token = _captured.set(launched)
    try:
        yield launched
    finally:
        _captured.reset(token)
