"""What `torch.compile` keeps of the graphs that it has compiled, as files that travel from pod to pod.

Inductor, AOTAutograd and its cache of FX graphs share one folder, which TORCHINDUCTOR_CACHE_DIR names: pickles of
graphs, the Python and C++ that was made of them, libraries, and the Triton kernels that belong to a graph. All of it
stands for itself below any path. PyTorch finds an entry by a key that holds the graph, its inputs, PyTorch's sources,
the device and the settings. What that key leaves out has to be in the names under which such folders are kept:
`environment` has the processor, which C++ is compiled for, and the sources of this package, whose operators a graph
holds by their names alone while their backward formulas are compiled into it.

**Loading it is running it**, pickles and shared objects alike; see `store`.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path

import torch
import triton

from . import triton_cache
from .store import Kind

_SOURCES = Path(__file__).parents[1]
Files = triton_cache.Files
# Locks are of the processes that hold them.
_PASSED_OVER = frozenset({"locks"})


@dataclass(frozen=True)
class Graphs:
    """Graphs that this process has asked PyTorch's cache for: a layer's forward pass is one, its backward another.

    found, compiled: those that the cache had, and had not.
    not_kept: those that PyTorch does not keep.
    """

    found: int
    compiled: int
    not_kept: int


def counted() -> Graphs:
    """Up to now."""
    # Takes seconds, unless the process compiles, which has imported it.
    from torch._dynamo.utils import counters

    of = counters["inductor"]
    return Graphs(*(of[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")))


def environment() -> str:
    """A path of two folders, `torch-2.15.0-<hash>/cpython-312-x86_64-linux-gnu-NVIDIA-H200-<hash>`.

    The first is PyTorch: its version, and a hash of its build, of Triton's version and of this package's sources. The
    second is Python's binary interface and what is compiled for: the current GPU and the processor.
    """
    release = torch.__version__.partition("+")[0]
    build = f"{torch.__version__} {torch.version.git_version} {triton.__version__} {sources(_SOURCES)}"
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    interface = str(sysconfig.get_config_var("SOABI"))
    return f"torch-{release}-{_short(build)}/{interface}-{device}-{_short(_processor())}"


@cached
def sources(folder: Path) -> str:
    """A hash of the Python files of a folder, or of one file."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder.parent)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def read(folder: Path) -> triton_cache.Files:
    """The files below a folder by their paths in it; what a writer has not finished is left out."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            # A process that writes renames from such a name, or removes what it no longer needs.
            if not name.startswith(".") and path.is_file():
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """The inverse of `read`; the folder is new. Raises OSError."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _check(key: str, files: Mapping[str, bytes]) -> None:
    if not files:
        raise triton_cache.Damaged("it is empty")
    for name, data in files.items():
        if name.endswith(".so"):
            triton_cache.check_elf(name, data)


GRAPHS = Kind(_check, most_files=100_000, folders=True)
"""Archives of such folders."""


def _processor() -> str:
    """The first core's model and instructions."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return os.uname().machine
    return "\n".join(line for line in first.splitlines() if line.startswith(wanted))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
