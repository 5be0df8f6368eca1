"""Compiling for a GPU that is not here.

Triton asks its driver which chip to compile for, and builds C extensions that link to the chip's own library: a helper
for the process and, up to version 3.6, a launcher for each signature. All of it is done here with a driver that
stands in for Triton's, and with a library that has the names of CUDA's functions and none of their work. Its soname is
that of the real one, which takes its place when the extensions are loaded beside a GPU.
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

from .plan import Specialization

_SONAME = "libcuda.so.1"
# Where pods find it: mounted by NVIDIA's container toolkit, on Debian's and Red Hat's images, and by GKE.
_MULTIARCH = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
_LIBRARY_FOLDERS = (f"/lib/{_MULTIARCH}", f"/usr/lib/{_MULTIARCH}", "/lib64", "/usr/lib64", "/usr/local/nvidia/lib64")
# CUDA_ERROR_NO_DEVICE
_NO_DEVICE = 100


def target_of(arch: str) -> GPUTarget:
    """`sm_90` (H100, H200), `sm_100` (B200), `gfx942` (MI300): what Triton compiles for.

    Raises:
        ValueError: it is none.
    """
    if match := re.fullmatch(r"sm_(\d{2,3})", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
        # The wavefronts of the data center's chips have 64 lanes, those of the others 32.
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ValueError(f"arch {arch!r} is no target; give the like of sm_90 (H100, H200), sm_100 (B200), gfx942 (MI300)")


class NoLauncherError(Exception):
    """A kernel was compiled, and what launches it cannot be built here."""


class StandIn:
    """What Triton's compiler and launchers ask of a driver, answered for a target that is not here."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.backend: ModuleType = import_module(
            f"triton.backends.{'nvidia' if target.backend == 'cuda' else 'amd'}.driver"
        )
        self.launcher_cls = self.backend.CudaLauncher if target.backend == "cuda" else self.backend.HIPLauncher
        self.utils: Any = None

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> str:
        """By which a kernel tells apart what it has compiled in this process."""
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: str) -> int:
        """Nothing is launched."""
        return 0

    def map_python_to_cpp_type(self, name: str) -> str:
        """As the real one."""
        return str(self.backend.ty_to_cpp(name))

    def launchable(self, compiled: Any) -> None:
        """Build, or find in the cache, all that a first launch of the kernel builds.

        Since 3.8 the folder of the driver's library is part of the key, so for each in which a pod may have it.

        Raises:
            NoLauncherError: AMD's library is not here; Triton writes its path into what it builds.
        """
        if self.target.backend == "hip":
            try:
                self.backend._get_path_to_hip_runtime_dylib()
            except RuntimeError as error:
                raise NoLauncherError("libamdhip64.so is not here; bake in the image that has it") from error
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
    """Where the driver's library is taken to be in pods: TRITON_LIBCUDA_PATH where it is set, the usual ones else."""
    given = knobs.nvidia.libcuda_path
    return (given,) if given else _LIBRARY_FOLDERS


@contextmanager
def standing_in(target: GPUTarget) -> Iterator[StandIn]:
    """Let Triton compile for `target` in this process."""
    before, triton_driver._active = triton_driver._active, (stand_in := StandIn(target))
    try:
        yield stand_in
    finally:
        triton_driver._active = before


def build_library(scratch: Path) -> Path:
    """Compile the stand-in for CUDA's driver library and return its path.

    It is put where TRITON_LIBCUDA_PATH says, if nothing is there: so that Triton can link to it later, too, in an image
    that is to find what is baked by one path on every node. Otherwise it is in `scratch`.

    Raises:
        RuntimeError: there is no C compiler.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("baking needs a C compiler, as Triton does: install gcc, or name one in CC")
    backend = Path(import_module("triton.backends.nvidia").__file__ or "").parent
    sources = [path.read_text(encoding="utf-8") for path in backend.iterdir() if path.suffix in (".py", ".c", ".h")]
    # Defined, so that the linker has something to link to and keeps the library among those that are needed.
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", "\n".join(sources))))
    given = knobs.nvidia.libcuda_path
    library = (Path(given) if given and not (Path(given) / _SONAME).exists() else scratch) / _SONAME
    library.parent.mkdir(parents=True, exist_ok=True)
    source = scratch / "stand_in.c"
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names), encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{_SONAME}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def load_library(library: Path) -> None:
    """Let this process link extensions to the stand-in, and load them."""
    # Where the linker looks after the folders that it is given, which need not exist.
    os.environ["LIBRARY_PATH"] = str(library.parent)
    # A library of this soname that is loaded satisfies those that are loaded later.
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


def prepare(item: Specialization, target: GPUTarget) -> tuple[Any, str | None]:
    """(the kernel compiled for `target` or found in the cache, why it has no launcher); see `StandIn.launchable`."""
    with standing_in(target) as stand_in:
        compiled = item.compile()
        try:
            stand_in.launchable(compiled)
        except NoLauncherError as error:
            return compiled, str(error)
        return compiled, None
