"""Compile kernels for a GPU that this machine does not have.

Triton's driver provides the compilation target, and builds C extensions that link to the GPU's driver library: a helper
and, up to version 3.6, a launcher per signature. Here a stub driver replaces Triton's, and extensions link to a stub
library that defines CUDA's functions without implementing them. The stub has the soname of the real library, which is
used instead on a machine with a GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver

from ..ops._cuda_kernel import CompiledCudaKernel
from .plan import Specialization

_SONAME = "libcuda.so.1"
# Folders of the driver library in pods: NVIDIA's container toolkit on Debian and Red Hat images, and GKE.
_MULTIARCH = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
_LIBRARY_FOLDERS = (f"/lib/{_MULTIARCH}", f"/usr/lib/{_MULTIARCH}", "/lib64", "/usr/lib64", "/usr/local/nvidia/lib64")
# CUDA_ERROR_NO_DEVICE
_NO_DEVICE = 100


def target_of(arch: str) -> GPUTarget:
    """Triton's target for an architecture: `sm_90` (H100, H200), `sm_100` (B200), `gfx942` (MI300).

    Raises:
        ValueError: the architecture is unknown.
    """
    if match := re.fullmatch(r"sm_(\d{2,3})", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
        # Wavefronts have 64 lanes on data center GPUs, 32 on others.
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ValueError(f"arch {arch!r} is unknown; use e.g. sm_90 (H100, H200), sm_100 (B200), gfx942 (MI300)")


class NoLauncherError(Exception):
    """A kernel is compiled, but its launcher cannot be built on this machine."""


class StubDriver:
    """The parts of a Triton driver that the compiler and the launchers need, for a given target."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.backend: ModuleType = import_module(
            f"triton.backends.{'nvidia' if target.backend == 'cuda' else 'amd'}.driver"
        )
        self.launcher_cls = self.backend.CudaLauncher if target.backend == "cuda" else self.backend.HIPLauncher
        self.utils: Any = None

    def get_current_target(self) -> GPUTarget:
        """The target to compile for."""
        return self.target

    def get_current_device(self) -> str:
        """The key of a kernel's in-memory cache of compiled versions."""
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: str) -> int:
        """0, because nothing is launched."""
        return 0

    def map_python_to_cpp_type(self, name: str) -> str:
        """As in Triton's driver."""
        return str(self.backend.ty_to_cpp(name))

    def build_launchers(self, compiled: Any) -> None:
        """Build everything that the first launch of the kernel would build, unless it is in the cache.

        From Triton 3.8 on, the folder of the driver library is part of the key, so this builds for each folder that a
        pod may use.

        Raises:
            NoLauncherError: AMD's library is missing, whose path Triton compiles into launchers.
        """
        if self.target.backend == "hip":
            try:
                self.backend._get_path_to_hip_runtime_dylib()
            except RuntimeError as error:
                raise NoLauncherError("libamdhip64.so is missing; bake in an image that has it") from error
            self._build(compiled)
            return
        for folder in library_folders():
            with _environment("TRITON_LIBCUDA_PATH", folder):
                self.backend.library_dirs.cache_clear()
                self.backend.libcuda_dirs.cache_clear()
                self._build(compiled)

    def _build(self, compiled: Any) -> None:
        self.utils = self.backend.CudaUtils() if self.target.backend == "cuda" else self.backend.HIPUtils()
        self.launcher_cls(compiled.src, compiled.metadata)


def library_folders() -> tuple[str, ...]:
    """The folders of the driver library in pods: TRITON_LIBCUDA_PATH if it is set, otherwise the usual ones."""
    path = knobs.nvidia.libcuda_path
    return (path,) if path else _LIBRARY_FOLDERS


@contextmanager
def stub_driver(target: GPUTarget) -> Iterator[StubDriver]:
    """Context manager in which Triton compiles for `target` in this process."""
    before, triton_driver._active = triton_driver._active, (stub := StubDriver(target))
    try:
        yield stub
    finally:
        triton_driver._active = before


def build_library(scratch: Path) -> Path:
    """Compile a stub of CUDA's driver library and return its path.

    If TRITON_LIBCUDA_PATH is set and has no library, the stub is written there, so that Triton in this image can link
    to the same path later. Otherwise it is written to `scratch`.

    Raises:
        RuntimeError: there is no C compiler.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("baking needs a C compiler, as Triton does: install gcc, or set CC")
    backend = Path(import_module("triton.backends.nvidia").__file__ or "").parent
    sources = [path.read_text(encoding="utf-8") for path in backend.iterdir() if path.suffix in (".py", ".c", ".h")]
    # Without these definitions, the linker would omit the library's NEEDED entry.
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", "\n".join(sources))))
    path = knobs.nvidia.libcuda_path
    library = (Path(path) if path and not (Path(path) / _SONAME).exists() else scratch) / _SONAME
    library.parent.mkdir(parents=True, exist_ok=True)
    source = scratch / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names), encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{_SONAME}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def load_library(library: Path) -> None:
    """Make this process link extensions to the stub library, and load them."""
    # The linker searches this after the folders on its command line, which need not exist.
    os.environ["LIBRARY_PATH"] = str(library.parent)
    # Extensions that are loaded later use the loaded library of this soname.
    ctypes.CDLL(str(library))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def compile_for_target(item: Specialization, target: GPUTarget) -> tuple[Any, str | None]:
    """(the kernel, compiled for `target` or from the cache; the reason if there is no launcher, see
    `StubDriver.build_launchers`)."""
    with stub_driver(target) as stub:
        compiled = item.compile()
        if isinstance(compiled, CompiledCudaKernel):
            return compiled, None
        try:
            stub.build_launchers(compiled)
        except NoLauncherError as error:
            return compiled, str(error)
        return compiled, None
