"""The graphs of `training.compile`: fetched from an archive at the start, archived after they are compiled.

Inductor reads and writes graphs in one folder, and FlashAttention 4, where it is installed, its kernels in a folder
inside. Each start gets a new folder, filled from the first archive that exists: the pod's, the image's or the store's.
After the second step, all processes of the pod have compiled what they need. The pod's first process then archives the
folder for the pod's next start, and rank 0 also uploads it to the store. No start reads files that a killed one left
half written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

from strata_kernels.files import source_hash
from strata_kernels.warmup import graph_cache
from strata_kernels.warmup.blob_storage import FolderStorage
from strata_kernels.warmup.store import Store
from strata_kernels.warmup.time_budget import CircuitBreaker
from strata_platform.spec import KernelStore, RunSpec
from tasks.runtime.models.attention import flash_attention_4
from tasks.runtime.process.ranks import Processes
from tasks.runtime.warmup.store import open_store
from tasks.runtime.warmup.warmup_metadata import WarmupMetadata

log = logging.getLogger(__name__)

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""PyTorch's variable with the folder of the Inductor cache."""
IN_IMAGE = "graphs"
"""The folder of archives in a baked image."""

_OURS = "strata-"
# Name of PyTorch's default folder, which it also puts into the environment. Any user could have created it.
_BY_ITSELF = "torchinductor_"
_LAYERS = Path(__file__).parents[1] / "models" / "activations" / "activation_checkpointing.py"
_ARCHIVES = f"{_OURS}graphs"
_POD_LIMIT = 1 << 30
# Steps after which no process compiles any more: a process starts its second step after all have finished the first.
_SETTLED = 2


def triton_directory() -> Path:
    """Triton's cache directory, an absolute path."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache").absolute()


def use_new_folder(directory: Path, name: str) -> None:
    """Give `torch.compile` and FlashAttention 4, in this process and its children, a new folder named after `name`.

    The folder is inside the directory that the environment names, or inside `directory` if there is none or it cannot
    be written.

    Raises:
        OSError: neither can be written.
    """
    given = Path(os.environ.get(FOLDER) or directory).absolute()
    if given.name.startswith(_OURS):
        # Set by an earlier run in this process.
        given = given.parent
    if given.name.startswith(_BY_ITSELF):
        given = directory
    folder = f"{_OURS}{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    try:
        _empty(given / folder)
    except OSError:
        given = directory
        _empty(given / folder)
    os.environ[FOLDER] = str(given / folder)
    flash_attention_4.keep_kernels(given / folder)


def _folder() -> Path | None:
    """This start's folder; None for any other, which PyTorch manages and other users may share."""
    folder = Path(os.environ.get(FOLDER, ""))
    return folder if folder.name.startswith(_OURS) else None


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def graphs_key(spec: RunSpec) -> str:
    """The archive's key. It selects an archive; PyTorch's own keys then decide which graphs in it fit.

    Next to fields of the spec, it hashes the source of the activation checkpointing policy, which PyTorch's keys leave
    out.
    """
    fields = spec.model_dump(mode="json")
    parts = {
        **{section: fields[section] for section in ("model", "adapter", "objective", "parallel")},
        "kernels": [spec.kernels.enabled, spec.kernels.exclude],
        "training": {name: value for name, value in fields["training"].items() if name not in ("steps", "epochs")},
        "sequence_length": spec.data.sequence_length,
        # Processes of a pod have separate graphs, because a graph contains the GPU's index.
        "processes": spec.topology.nproc_per_node,
        "layers": source_hash(_LAYERS),
        "flash_attention_4": flash_attention_4.tested_version(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def fetch_graphs(spec: RunSpec, images: Sequence[Path], breaker: CircuitBreaker) -> WarmupMetadata:
    """Fill this start's folder from the first archive that exists. Returns metadata, empty without a folder."""
    start = time.perf_counter()
    folder, environment, key = _folder(), graph_cache.environment(), graphs_key(spec)
    if folder is None:
        return WarmupMetadata()
    origin, count = None, 0
    for name, store in _places(spec.kernels.store, environment, images, breaker):
        if name == "store":
            files = breaker.call("read", partial(store.pull, key))
        else:
            files = _pull(store, key, breaker.problems)
        breaker.problems += store.rejections()
        if files:
            try:
                graph_cache.write(folder, files)
            except OSError as error:
                breaker.problems.append(f"{folder} takes no graphs: {error}")
                # The last file may be incomplete.
                _empty(folder)
                break
            origin, count = name, len(files)
            if name == "store":
                breaker.call("refresh entries of", store.refresh_used)
            break
    return WarmupMetadata(graphs_from=origin, graph_files=count, graph_seconds=time.perf_counter() - start)


def _places(
    settings: KernelStore, environment: str, images: Sequence[Path], breaker: CircuitBreaker
) -> Iterator[tuple[str, Store]]:
    yield "cache", _of_pod(environment)
    for image in images:
        yield "image", _of_machine(image / IN_IMAGE, environment)
    store = open_store(settings, environment, graph_cache.GRAPHS, breaker.problems)
    if store is not None:
        yield "store", store


def _of_pod(environment: str) -> Store:
    """The pod's archive, next to its kernels; unlike this start's folder, it lasts."""
    return _of_machine(triton_directory() / _ARCHIVES, environment)


def _of_machine(folder: Path, environment: str) -> Store:
    """An archive that needs no signature: whoever can write there can already change what runs."""
    return Store(FolderStorage(folder), environment, size_limit=_POD_LIMIT, kind=graph_cache.GRAPHS, trusted=True)


def _pull(store: Store, key: str, problems: list[str]) -> graph_cache.Files | None:
    try:
        return store.pull(key)
    except OSError as error:
        problems.append(f"graphs kept on this machine could not be read: {error}")
        return None


class GraphArchiver:
    """Archives what this pod compiles, in a thread. Training waits for it only in `close`."""

    def __init__(self, spec: RunSpec, processes: Processes) -> None:
        self._spec, self._processes = spec, processes
        self._folder = _folder()
        self._steps = self._given = 0
        self._before = self._graphs()
        self._kernels = self._attention_kernels()
        self._thread: Thread | None = None
        self._breaker = CircuitBreaker(spec.kernels.store.timeout)
        self._pushed = 0

    def step_ended(self) -> None:
        """Call after every step."""
        self._steps += 1
        if self._steps == _SETTLED:
            self._give()

    def close(self) -> None:
        """Archive what was compiled since, and wait for it."""
        self._give()
        if self._thread is not None:
            self._thread.join()

    def metadata(self) -> WarmupMetadata:
        """Graphs that this process found and compiled, and archives that it uploaded."""
        now = self._graphs()
        return WarmupMetadata(
            graphs_found=now.found - self._before.found,
            graphs_compiled=now.compiled - self._before.compiled,
            graphs_not_kept=now.bypassed - self._before.bypassed,
            graphs_pushed=self._pushed,
            graph_problems=tuple(self._breaker.problems),
        )

    def _graphs(self) -> graph_cache.GraphCounts:
        # Without `torch.compile`, its counters would have to be imported.
        return graph_cache.graph_counts() if self._spec.training.compile else graph_cache.GraphCounts(0, 0, 0)

    def _attention_kernels(self) -> int:
        return 0 if self._folder is None else flash_attention_4.kept_kernels(self._folder)

    def _give(self) -> None:
        graphs = self._graphs().compiled - self._before.compiled
        compiled = graphs + self._attention_kernels() - self._kernels
        if compiled == self._given or self._processes.local_rank != 0 or self._folder is None:
            return
        if self._thread is not None:
            self._thread.join()
        self._given = compiled
        self._thread = Thread(target=self._archive, args=(self._folder,), daemon=True, name="graphs")
        self._thread.start()

    def _archive(self, folder: Path) -> None:
        environment, key = graph_cache.environment(), graphs_key(self._spec)
        problems = self._breaker.problems
        files: graph_cache.Files = {}
        try:
            files = graph_cache.read(folder)
            pod = _of_pod(environment)
            pod.replace(key, files)
            pod.trim()
        except OSError as error:
            problems.append(f"{folder} could not be archived: {error}")
        if files and self._processes.is_main:
            self._push(environment, key, files)
        for problem in problems:
            log.warning("graphs: %s", problem)

    def _push(self, environment: str, key: str, files: graph_cache.Files) -> None:
        store = open_store(self._spec.kernels.store, environment, graph_cache.GRAPHS, self._breaker.problems)
        if store is None:
            return

        def push() -> bool:
            store.replace(key, files)
            return True

        if self._breaker.call("push to", push):
            self._pushed += 1
            self._breaker.call("trim", store.trim)
