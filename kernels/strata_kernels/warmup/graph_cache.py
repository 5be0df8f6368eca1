"""Inductor's cache of compiled graphs (`torch.compile`), as files that an archive carries from pod to pod.

Inductor, AOTAutograd and the FX graph cache share one folder, TORCHINDUCTOR_CACHE_DIR. It contains pickled graphs, the
Python and C++ generated from them, shared objects, and the Triton kernels of the graphs. None of it depends on the path
of the folder. PyTorch finds an entry by a key of the graph, its inputs, PyTorch's sources, the device and the settings.
The archive's name adds what this key omits: `environment` includes the CPU, for which C++ is compiled, and the sources
of this package, because a graph refers to operators by name, but contains their compiled backward.

**Loading a graph executes it**, pickles and shared objects alike; see `store`.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from ..files import source_hash
from . import triton_cache
from .store import ArchiveKind

_SOURCES = Path(__file__).parents[1]
Files = triton_cache.Files
# Lock files of running processes.
_SKIPPED = frozenset({"locks"})


@dataclass(frozen=True)
class GraphCounts:
    """Lookups of this process in PyTorch's graph cache. Forward and backward of a layer are a graph each.

    found: hits.
    compiled: misses.
    bypassed: graphs that PyTorch does not cache.
    """

    found: int
    compiled: int
    bypassed: int


def graph_counts() -> GraphCounts:
    """The lookups of this process so far."""
    # The import takes seconds, but processes that compile have already done it.
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return GraphCounts(*(inductor[f"fxgraph_cache_{result}"] for result in ("hit", "miss", "bypass")))


def environment() -> str:
    """The environment of the archives: a path of two folders.

    An example is `torch-2.15.0-<hash>/cpython-312-x86_64-linux-gnu-NVIDIA-H200-<hash>`. The first identifies PyTorch:
    its version, and a hash of its build, Triton's version and this package's sources. The second has Python's ABI and
    the targets of the compilation: the current GPU and the processor.
    """
    release = torch.__version__.partition("+")[0]
    build = f"{torch.__version__} {torch.version.git_version} {triton.__version__} {source_hash(_SOURCES)}"
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    interface = str(sysconfig.get_config_var("SOABI"))
    return f"torch-{release}-{_short(build)}/{interface}-{device}-{_short(_processor())}"


def read(folder: Path) -> triton_cache.Files:
    """Read all files below a folder, by relative path, except those that are still being written."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            # Writers use hidden names and rename; a file may disappear meanwhile. Locks are as in `_SKIPPED`.
            if not name.startswith(".") and not name.endswith(".lock") and path.is_file():
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """The inverse of `read`, for a new folder. Raises OSError."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _check(key: str, files: Mapping[str, bytes]) -> None:
    if not files:
        raise triton_cache.CorruptEntry("it is empty")
    for name, data in files.items():
        if name.endswith((".so", ".o")):
            triton_cache.check_elf(name, data)


GRAPHS = ArchiveKind(_check, max_files=100_000, subfolders=True)
"""Archives of Inductor's cache folders."""


def _processor() -> str:
    """Model and instruction sets of the first CPU core."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return os.uname().machine
    return "\n".join(line for line in first.splitlines() if line.startswith(wanted))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
