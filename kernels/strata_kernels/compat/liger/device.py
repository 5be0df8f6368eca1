"""`liger_kernel.utils`: the device type of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

PEFT_AVAILABLE = find_spec("peft") is not None


def is_peft_available() -> bool:
    """Whether PEFT is installed."""
    return PEFT_AVAILABLE


def is_npu_available() -> bool:
    """Whether an Ascend NPU is available; the operators run there in plain PyTorch."""
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def infer_device() -> str:
    """The device type of the accelerator; "cpu" without one."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"


def infer_comm_backend() -> str:
    """The name of the communication backend for that device."""
    backends = {"cuda": "nccl", "npu": "ascend", "xpu": "xccl"}
    return backends.get(infer_device(), "gloo")


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return find_spec("transformers") is not None


def get_total_gpu_memory() -> int:
    """Memory of the first accelerator, in GiB."""
    device = infer_device()
    if device == "cpu":
        raise RuntimeError("get_total_gpu_memory: torch sees no accelerator")
    return int(getattr(torch, device).get_device_properties(0).total_memory) >> 30


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable[..., Any],
    after_fn: Callable[..., Any],
    before_args: Sequence[Any] = (),
    after_args: Sequence[Any] = (),
    before_kwargs: Mapping[str, Any] | None = None,
    after_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """The result of `after_fn` if transformers has at least the required version, else that of `before_fn`."""
    from packaging.version import parse
    from transformers import __version__

    if parse(__version__) < parse(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
