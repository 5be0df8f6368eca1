"""What a process ended with, in words: signals, exit codes, and errors of the GPU and its libraries."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from tasks.runtime.process.watchdog import EXIT_HUNG

_SIGNALS = {
    signal.SIGKILL: "SIGKILL; the machine is gone, somebody ended it, or it was out of memory",
    signal.SIGTERM: "SIGTERM; the cluster wants the machine back",
    signal.SIGINT: "SIGINT; interrupted from the keyboard",
    signal.SIGSEGV: "SIGSEGV; a crash in native code",
    signal.SIGBUS: "SIGBUS; usually /dev/shm is full, raise resources.shared_memory",
    signal.SIGABRT: "SIGABRT; native code gave up, for example NCCL after a collective timed out; its reason is above",
    signal.SIGILL: "SIGILL; an instruction that this processor does not have: the image is built for another one",
    signal.SIGFPE: "SIGFPE; a division by zero in native code",
    signal.SIGALRM: "SIGALRM; it hung in native code, and its stacks are above",
}
# What a process ends with that was told to stop, as a shell counts SIGTERM; and one that found a GPU or a connection
# unfit: EX_UNAVAILABLE.
EXIT_PREEMPTED = 128 + signal.SIGTERM
EXIT_UNHEALTHY = 69
# And one that did not reach the Hub or the store of checkpoints: EX_NOHOST.
EXIT_UNREACHABLE = 68
_CODES = {
    EXIT_HUNG: "hung, and left the stacks of its processes",
    EXIT_UNHEALTHY: "a GPU or a connection is not fit to train on, as is said above",
    EXIT_UNREACHABLE: "the Hugging Face Hub or checkpoint.url could not be reached, as is said above",
}


def describe_exit(code: int) -> str:
    """A sentence for a process's exit code; a signal is negative, as in `subprocess`, or above 128, as in a shell.

    >>> describe_exit(-15)
    'SIGTERM; the cluster wants the machine back'
    """
    if code in _CODES:
        return _CODES[code]
    number = -code if code < 0 else code - 128
    if number not in signal.valid_signals() or number == 0:
        return f"exit code {code}"
    return _SIGNALS.get(signal.Signals(number), signal.Signals(number).name)


@dataclass(frozen=True)
class Explanation:
    """What an error of the GPU or its libraries means."""

    sentence: str
    retry: bool
    """Whether another attempt may go better."""


# The first that is found in an error's text explains it.
_ERRORS: list[tuple[str, Explanation]] = [
    (
        r"not fit to train on",
        Explanation("the health check found a GPU or a connection unfit; another machine may be fit", True),
    ),
    (
        r"(the Hugging Face Hub at|checkpoint\.url:) \S+ cannot be reached",
        Explanation("the Hub, the store, or the network on the way there, is down for a while", True),
    ),
    (
        r"device-side assert",
        Explanation(
            "an index is out of range on the GPU, most often a token id that the model has no embedding for: give "
            "model.tokenizer the model's own. CUDA_LAUNCH_BLOCKING=1 shows where",
            retry=False,
        ),
    ),
    (
        r"does not have a deterministic implementation",
        Explanation(
            "an operation of this model has no algorithm that repeats; set training.deterministic to false", False
        ),
    ),
    (
        r"no kernel image is available",
        Explanation("PyTorch in this image was not built for this GPU; use another image or resources.gpu_type", False),
    ),
    (
        r"driver version is insufficient|system not yet initialized",
        Explanation("the node's NVIDIA driver does not fit the image, or its fabric manager is not running", True),
    ),
    (
        r"uncorrectable ECC|uncorrectable NVLink|GPU is lost|fallen off the bus|unknown error|hardware stack error",
        Explanation("this GPU is broken: take the node out of the cluster until it is reset or replaced", True),
    ),
    (
        r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction",
        Explanation(
            "an operator reads or writes where it must not, or the GPU is broken. CUDA_LAUNCH_BLOCKING=1 shows where; "
            "kernels.enabled false tells whether it is one of ours",
            retry=True,
        ),
    ),
    (
        r"collective operation timeout|[Tt]imed out|timeout",
        Explanation("a process waited for the others in vain: one of them ended, hangs, or has lost the network", True),
    ),
    (
        r"Connection (closed|reset|refused)|[Bb]roken pipe|remote process exited|unhandled system error|socket",
        Explanation("a process lost its connection to another one, which ended or whose machine is gone", True),
    ),
    (
        r"No space left on device",
        Explanation("the disk is full; make room, or lower checkpoint.keep_last", True),
    ),
]


def explain(error: BaseException) -> Explanation | None:
    """What is known of an error, by its text."""
    text = str(error)
    return next((found for pattern, found in _ERRORS if re.search(pattern, text)), None)


# Libraries take memory of their own, past PyTorch's allocator.
_OUT_OF_MEMORY = re.compile(
    r"CUDA error: out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'out of memory'"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of any type is for want of the GPU's memory, by its text."""
    return _OUT_OF_MEMORY.search(str(error)) is not None


class MemoryKills:
    """How often the kernel has ended a process of this container for want of memory, since this object was made."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._folder = _memory_folder(root, membership)
        self._before = self._count()

    def sentence(self, asked: str) -> str | None:
        """What to do about it, `asked` being `resources.memory`; None when it never has, or nobody counts."""
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
    """The control group of this process: in version 2 one for everything, in version 1 one for memory."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return root
    for _, controllers, path in lines:
        base = root / "memory" if "memory" in controllers.split(",") else root
        if "memory" in controllers.split(",") or controllers == "":
            # In a container with a namespace of its own, the group is at the root.
            inside = base / path.lstrip("/")
            return inside if inside.exists() else base
    return root
