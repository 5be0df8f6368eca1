"""What the keys of Triton's cache have in common in one process: the folder of a store."""

from __future__ import annotations

import hashlib
import sysconfig

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key


def current_target() -> GPUTarget:
    """The current GPU, as Triton names it, without a driver of Triton's, which is itself compiled."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip is not None:
        return GPUTarget("hip", properties.gcnArchName.partition(":")[0], properties.warp_size)
    return GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)


def environment(target: GPUTarget) -> str:
    """A path of two folders, `triton-3.9.0-<hash>/cpython-312-x86_64-linux-gnu-cuda-90-<hash>`.

    The first is Triton: its version, and a hash of its sources and its compiled library. The second is Python's binary
    interface, which launchers are built for, and the chip with the version of its assembler. Nothing else is in there:
    neither the driver nor the name of the GPU nor PyTorch is part of Triton's keys.
    """
    interface = str(sysconfig.get_config_var("SOABI"))
    backend = make_backend(target)
    return (
        f"triton-{triton.__version__}-{_short(triton_key())}/"
        f"{interface}-{target.backend}-{target.arch}-{_short(backend.hash())}"
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
