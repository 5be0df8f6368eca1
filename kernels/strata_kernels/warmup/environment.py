"""The environment of a process in a store: the inputs common to all of its Triton cache keys."""

from __future__ import annotations

import hashlib
import sysconfig

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key


def current_target() -> GPUTarget:
    """Triton's target for the current GPU, without Triton's driver, which would first compile its helper."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip is not None:
        return GPUTarget("hip", properties.gcnArchName.partition(":")[0], properties.warp_size)
    return GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)


def environment(target: GPUTarget) -> str:
    """The environment for a target: a path of two folders.

    An example is `triton-3.9.0-<hash>/cpython-312-x86_64-linux-gnu-cuda-90-<hash>`. The first identifies Triton: its
    version, and a hash of its sources and its compiled library. The second has Python's ABI, for which launchers are
    built, and the chip with the version of its assembler. The driver, the GPU's name and PyTorch are not part of
    Triton's keys, so they are not part of the environment.
    """
    interface = str(sysconfig.get_config_var("SOABI"))
    backend = make_backend(target)
    return (
        f"triton-{triton.__version__}-{_short(triton_key())}/"
        f"{interface}-{target.backend}-{target.arch}-{_short(backend.hash())}"
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
