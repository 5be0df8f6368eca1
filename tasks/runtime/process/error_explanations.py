"""What errors of the GPU, its libraries and the network mean, and how often the kernel killed a process for memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from strata_platform.outcomes import RunError


@dataclass(frozen=True)
class Explanation:
    """What an error means."""

    sentence: str
    retry: bool
    """Whether another attempt may succeed."""


# Errors of other people's libraries, by their text: they have no types and no codes of their own. The first pattern
# that is found explains the error. A pattern is a phrase that one library writes, never a word that others may write as
# well.
_FOREIGN_ERRORS: list[tuple[str, Explanation]] = [
    (
        r"device-side assert triggered",
        Explanation(
            "an index is out of range on the GPU, most often a token id without an embedding: set model.tokenizer to "
            "the model's own. CUDA_LAUNCH_BLOCKING=1 shows the operation",
            retry=False,
        ),
    ),
    (
        r"does not have a deterministic implementation",
        Explanation(
            "an operation of this model has no deterministic algorithm; set training.deterministic to false", False
        ),
    ),
    (
        r"no kernel image is available",
        Explanation("PyTorch in this image was not built for this GPU; use another image or resources.gpu_type", False),
    ),
    (
        r"driver version is insufficient|system not yet initialized",
        Explanation("the node's NVIDIA driver is too old for the image, or its fabric manager does not run", True),
    ),
    (
        r"uncorrectable ECC|uncorrectable NVLink|GPU is lost|fallen off the bus|CUDA error: unknown error"
        r"|hardware stack error",
        Explanation("this GPU is broken: take the node out of the cluster until it is reset or replaced", True),
    ),
    (
        r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction was encountered",
        Explanation(
            "an operator accesses memory that it must not, or the GPU is broken. CUDA_LAUNCH_BLOCKING=1 shows the "
            "operator; set kernels.enabled to false to rule out the fused ones",
            retry=True,
        ),
    ),
    (
        # NCCL's watchdog, gloo, monitored barriers, and the rendezvous store and its clients.
        r"Watchdog caught collective operation timeout|milliseconds before timing out|Timed out waiting \d+ ?ms"
        r"|monitoredBarrier|wait timeout after \d+ ?ms|client socket has timed out"
        r"|Timed out after \d+ seconds waiting for clients|Connection timed out",
        Explanation(
            "a process waited for the others until a timeout: one of them ended, hangs, or lost the network", True
        ),
    ),
    (
        r"Connection (closed|reset|refused)|Broken pipe|remote process exited|unhandled system error"
        r"|ncclRemoteError|ncclSystemError|client socket has failed to connect|failed on SocketImpl",
        Explanation("a process lost its connection to another one, which ended or whose machine is gone", True),
    ),
    (
        r"No space left on device",
        Explanation("the disk is full; free space, or lower checkpoint.keep_last", True),
    ),
]


def explain(error: BaseException) -> Explanation | None:
    """The meaning of an error: ours by its type, one of a library by its text; None where it is not known."""
    if isinstance(error, RunError):
        return Explanation(error.outcome.sentence, error.outcome.retryable)
    text = str(error)
    return next((found for pattern, found in _FOREIGN_ERRORS if re.search(pattern, text)), None)


def reason_to_retry(error: BaseException, processes: int) -> str | None:
    """Why another attempt of a job of so many processes may succeed after this error; None if it cannot.

    A collective that loses a peer raises RuntimeError, as other faults of a machine do. Without an explanation a job of
    several processes is therefore retried.
    """
    known = explain(error)
    if known is not None:
        return known.sentence if known.retry else None
    return "a process failed or lost its peers" if isinstance(error, RuntimeError) and processes > 1 else None


# Libraries allocate GPU memory of their own, outside PyTorch's allocator, and raise errors of their own.
_OUT_OF_MEMORY = re.compile(
    r"CUDA error: out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'out of memory'"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of any type says that the GPU is out of memory, by its text."""
    return _OUT_OF_MEMORY.search(str(error)) is not None


class MemoryKills:
    """Counts the processes of this container that the kernel killed for memory since this object was made."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._folder = _memory_folder(root, membership)
        self._before = self._count()

    def sentence(self, asked: str) -> str | None:
        """What happened and what to do, given `resources.memory`; None if it did not happen, or cannot be known."""
        before, now = self._before, self._count()
        if before is None or now is None or now == before:
            return None
        limit = self._read("memory.max", "memory.limit_in_bytes")
        bounds = f" of {int(limit) / 2**30:.1f} GiB" if limit and limit.strip().isdigit() else ""
        return f"the container's memory{bounds} was used up; raise resources.memory, now {asked}"

    def _count(self) -> int | None:
        text = self._read("memory.events", "memory.oom_control") or ""
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else None

    def _read(self, *names: str) -> str | None:
        for name in names:
            try:
                return (self._folder / name).read_text()
            except OSError:
                continue
        return None


def _memory_folder(root: Path, membership: Path) -> Path:
    """The folder of this process's control group: the one of cgroup v2, or the memory controller's of v1."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return root
    for _, controllers, path in lines:
        base = root / "memory" if "memory" in controllers.split(",") else root
        if "memory" in controllers.split(",") or controllers == "":
            # In a container with its own cgroup namespace, the group is at the root.
            inside = base / path.lstrip("/")
            return inside if inside.exists() else base
    return root
