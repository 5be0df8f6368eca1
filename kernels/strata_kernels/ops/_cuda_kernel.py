"""Kernels in CUDA C++, for what Triton cannot express, such as messages between the thread blocks of a cluster.

A `CudaKernel` is launched, recorded, replayed, warmed up and baked like a kernel of Triton, whose interface it has:
`kernel[grid](*args, **constants)`. NVRTC compiles it, and Triton's cache directory keeps the result. NVRTC and the
driver are called through `cuda.bindings`, which PyTorch depends on.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.cache import get_cache_manager

# Types of parameters.
TENSOR, INT32, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True)
class Parameter:
    """A parameter, with the attributes of Triton's. A CUDA kernel is not specialized for the values of arguments."""

    name: str
    type: Any
    is_constexpr: bool = False
    do_not_specialize: bool = True
    do_not_specialize_on_alignment: bool = True


@dataclass(frozen=True)
class _Source:
    """What listeners to Triton's compilations read of a source."""

    name: str
    signature: dict[str, str]
    constants: Mapping[Any, Any]
    attrs: Mapping[Any, Any]


class CudaKernel:
    """A persistent kernel whose thread blocks form clusters.

    Args:
        module, name: where the kernel can be imported; `name` is also that of the `.cu` file and of its function.
        parameters: types by name, in the order of the function's parameters.
        constants: names of integers that are macros in the source.
        cluster: the constant that is the number of thread blocks in a cluster.
        threads, shared: threads and bytes of dynamic shared memory of a thread block. `shared` is the macro SHARED.
        arch: the only architecture that it is for; `sm_90a` are Hopper GPUs.

    The grid is the number of tasks: there are as many clusters as can be resident at once, and at most one per task.
    """

    def __init__(
        self, module: str, name: str, parameters: Mapping[str, Any], *, constants: tuple[str, ...], cluster: str,
        threads: int, shared: int, arch: str,
    ) -> None:  # fmt: skip
        self.__module__, self.__name__, self.__qualname__ = module, name, name
        self.cluster, self.threads, self.shared, self.arch = cluster, threads, shared, arch
        self.params = [Parameter(name, kind) for name, kind in parameters.items()]
        self.params += [Parameter(name, None, is_constexpr=True) for name in constants]
        self.arg_names = [param.name for param in self.params]
        self._compiled: dict[tuple[Any, ...], CompiledCudaKernel] = {}

    @property
    def fn(self) -> CudaKernel:
        """The object with the kernel's module and name."""
        return self

    @functools.cached_property
    def source(self) -> str:
        """The CUDA C++ source."""
        return (Path(sys.modules[self.__module__].__file__ or "").parent / f"{self.__name__}.cu").read_text("utf-8")

    @functools.cached_property
    def cache_key(self) -> str:
        """A hash of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def supports(self, target: Any) -> bool:
        """Whether the kernel is for this target of Triton."""
        return target.backend == "cuda" and self.arch.rstrip("a") == f"sm_{target.arch}"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., CompiledCudaKernel]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **keywords: Any) -> CompiledCudaKernel:
        compiled = self.compile(keywords)
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        compiled.run(grid[0], 1, 1, stream, None, None, None, None, None, *addresses)
        return compiled

    def warmup(self, *args: Any, grid: tuple[int, ...], **keywords: Any) -> CompiledCudaKernel:
        """Compile, or read Triton's cache; the arguments do not matter, except constants."""
        return self.compile(keywords)

    def compile(self, keywords: Mapping[str, Any]) -> CompiledCudaKernel:
        """The kernel with these constants, compiled or read from Triton's cache; other keywords are ignored."""
        constants = {param.name: int(keywords[param.name]) for param in self.params if param.is_constexpr}
        key = (knobs.cache.dir, *constants.values())
        if key not in self._compiled:
            self._compiled[key] = CompiledCudaKernel(self, constants)
        return self._compiled[key]

    def resident_clusters(self, device: torch.device, **constants: int) -> int:
        """How many clusters the GPU holds at once; 0 for other GPUs, and, with a warning, where the kernel fails."""
        return _resident_clusters(self, device, tuple(constants.items()))


@functools.cache
def _resident_clusters(kernel: CudaKernel, device: torch.device, constants: tuple[tuple[str, int], ...]) -> int:
    with torch.cuda.device(device):
        if not kernel.supports(triton.runtime.driver.active.get_current_target()):
            return 0
        try:
            return kernel.compile(dict(constants)).clusters()
        except (RuntimeError, ImportError, OSError) as error:
            warnings.warn(f"{kernel.__name__} cannot be used, a slower kernel is: {error}", stacklevel=2)
            return 0


class CompiledCudaKernel:
    """A compiled kernel, with the attributes of Triton's `CompiledKernel` that callers use.

    hash: names its entry in Triton's cache, as in Triton.
    """

    function = packed_metadata = None

    def __init__(self, kernel: CudaKernel, constants: Mapping[str, int]) -> None:
        self.name = kernel.__name__
        self._kernel, self._cluster = kernel, constants[kernel.cluster]
        self._types = tuple(param.type for param in kernel.params if not param.is_constexpr)
        options = [f"-D{name}={value}" for name, value in {**constants, "SHARED": kernel.shared}.items()]
        options += [f"--gpu-architecture={kernel.arch}", "--std=c++17"]
        key = [kernel.source, kernel.__name__, *options, _compiler_version()]
        self.hash = hashlib.sha256("\n".join(key).encode()).hexdigest()
        manager, name = get_cache_manager(self.hash), f"{self.name}.json"
        files = manager.get_group(name)
        hit = bool(files) and f"{self.name}.cubin" in files
        if not hit:
            binary = _compile(kernel.source, f"{self.name}.cu", options)
            metadata = json.dumps({"hash": self.hash, "name": self.name, "arch": kernel.arch, **constants})
            files = {
                f"{self.name}.cubin": manager.put(binary, f"{self.name}.cubin"),
                name: manager.put(metadata, name, binary=False),
            }
            manager.put_group(name, files)
        self._binary = Path(files[f"{self.name}.cubin"]).read_bytes()
        # Per device: its function and the number of clusters.
        self._loaded: dict[int, tuple[Any, int]] = {}
        if knobs.compilation.listener is not None:
            kinds = {param.name: "constexpr" if param.is_constexpr else "" for param in kernel.params}
            values = {(i,): constants[name] for i, (name, kind) in enumerate(kinds.items()) if kind}
            knobs.compilation.listener(
                src=_Source(self.name, kinds, values, {}), metadata={"hash": self.hash}, metadata_group=files,
                times=None, cache_hit=hit,
            )  # fmt: skip

    @property
    def run(self) -> Callable[..., None]:
        """The launcher, with the arguments of Triton's, after loading the binary onto the current device."""
        self._on_device()
        return self._run

    def clusters(self) -> int:
        """How many clusters the current device holds at once."""
        return self._on_device()[1]

    def _run(
        self, tasks: int, _y: int, _z: int, stream: int, _function: None, _packed: None, _metadata: None,
        _enter: None, _exit: None, *args: Any,
    ) -> None:  # fmt: skip
        from cuda.bindings import driver

        function, clusters = self._on_device()
        values = args[: len(self._types)]
        launch = functools.partial(
            driver.cuLaunchKernel,
            function, self._cluster * min(tasks, clusters), 1, 1, self._kernel.threads, 1, 1, self._kernel.shared,
            stream, (values, self._types), 0,
        )  # fmt: skip
        result = launch()
        if result[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # A thread that has not used the GPU; this gives it the device's context.
            torch.cuda.synchronize()
            result = launch()
        _check(result)

    def _on_device(self) -> tuple[Any, int]:
        device = torch.cuda.current_device()
        if device not in self._loaded:
            # Creates the device's context if nothing has used it.
            torch.cuda.synchronize()
            self._loaded[device] = self._load()
        return self._loaded[device]

    def _load(self) -> tuple[Any, int]:
        from cuda.bindings import driver

        module = _check(driver.cuModuleLoadData(self._binary))
        function = _check(driver.cuModuleGetFunction(module, self.name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, attribute, self._kernel.shared))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._kernel.threads, 1, 1
        config.sharedMemBytes = self._kernel.shared
        dimension = driver.CUlaunchAttribute()
        dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension.value.clusterDim.x, dimension.value.clusterDim.y, dimension.value.clusterDim.z = self._cluster, 1, 1
        config.attrs, config.numAttrs = [dimension], 1
        return function, int(_check(driver.cuOccupancyMaxActiveClusters(function, config)))


@functools.cache
def _compiler_version() -> str:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    _check((error, None))
    return f"{major}.{minor}"


def _compile(source: str, name: str, options: list[str]) -> bytes:
    """The cubin. Raises RuntimeError with the compiler's messages."""
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if error:
        log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC does not compile {name}: {log.decode(errors='replace')}")
    binary = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
    _check((*nvrtc.nvrtcGetCUBIN(program, binary), None))
    _check((*nvrtc.nvrtcDestroyProgram(program), None))
    return bytes(binary)


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a call of `cuda.bindings`. Raises RuntimeError if it failed."""
    if result[0]:
        raise RuntimeError(f"CUDA call failed: {result[0]!r}")
    return result[1] if len(result) > 1 else None
