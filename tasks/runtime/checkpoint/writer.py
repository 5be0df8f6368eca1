"""Asynchronous checkpoint writer.

`save` copies the state to host memory and returns; a thread writes the copy while training continues. PyTorch's planner
assigns each rank the chunks to write and distributes replicated tensors over the ranks. When all ranks have written,
rank 0 writes the index and, last, the manifest. At most one save is in flight.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import shutil
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from transformers import PreTrainedModel

from tasks.runtime.checkpoint import manifest
from tasks.runtime.checkpoint.state import training_tensors
from tasks.runtime.checkpoint.storage import INDEX, index_entry, offset_key, part_key, write_tensors
from tasks.runtime.checkpoint.upload import CheckpointUploader
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# Maximum file size: several files of a checkpoint are hashed in parallel when it is verified.
FILE_BYTES = 2 << 30


class CheckpointWriter:
    """Writes the checkpoints of a run. Every method is a collective."""

    def __init__(
        self,
        root: Path,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        processes: Processes,
        *,
        keep_last: int,
        keep_every: int | None = None,
        metadata: dict[str, Any],
        constants: Mapping[str, Tensor] = MappingProxyType({}),
        uploader: CheckpointUploader | None = None,
    ) -> None:
        """metadata: entries of every manifest. constants: on one rank, tensors of every checkpoint that training does
        not change. uploader: on rank 0, uploads each complete checkpoint.
        """
        self.root, self._model, self._optimizer = root, model, optimizer
        self._keep, self._metadata, self._uploader = (keep_last, keep_every), metadata, uploader
        self._constants = dict(constants)
        # A group of its own: the thread's collectives must not mix with those of the training loop.
        self._processes = processes.in_new_group()
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        # Filled by the thread; see `take_saved`.
        self._saved: deque[Path] = deque()
        self._error: BaseException | None = None

    def save(self, step: int, metadata: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Start to save the state after `step`, with further `metadata` in its manifest.

        Waits for the previous save first, and raises its error if it failed.
        """
        self.wait()
        folder = self.root / f"{manifest.PREFIX}{step}"
        tensors = training_tensors(self._model, self._optimizer, self._processes.rank)
        files, index = self._stage(tensors | self._constants)
        self._thread = threading.Thread(target=self._write, args=(folder, files, index, metadata), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises ValueError on every rank when any rank could not write its files.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def take_saved(self) -> list[tuple[int, Path]]:
        """Steps and folders of the checkpoints that have become complete since the last call; rank 0 alone has them."""
        folders = [self._saved.popleft() for _ in range(len(self._saved))]
        return [(manifest.step_of(folder), folder) for folder in folders]

    def update_metadata(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Set entries of a complete checkpoint's metadata, on disk and in the object store."""

        def update() -> None:
            manifest.update_metadata(folder, metadata)
            if self._uploader is not None:
                self._uploader.enqueue(folder)

        self._processes.on_main(update)

    def finish(self) -> None:
        """Wait for the save in flight and for all uploads. Raises ValueError on every rank when one of them failed."""
        self.wait()
        self._processes.on_main(lambda: self._uploader.finish() if self._uploader is not None else None)

    def close(self) -> None:
        """Wait for the save in flight in a process that is ending; an error is logged, not raised."""
        try:
            self.wait()
        except Exception as error:
            log.warning("the last checkpoint is not complete: %s", error)

    def _stage(self, tensors: dict[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any] | None]:
        """This rank's files, copied to host memory, and on rank 0 the index of all ranks' files."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, is_coordinator=self._processes.is_main)
        plans = self._processes.gather(_without_empty(planner.create_local_plan()))
        index = None
        if plans is not None:
            plans, _ = planner.create_global_plan(plans)
            index = _index(plans)
        plan = planner.finish_plan(self._processes.scatter(plans))
        files: dict[str, dict[str, Tensor]] = {}
        for item, file in _files(plan, self._processes.rank):
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            files.setdefault(file, {})[part_key(item.index)] = self._copy(part_key(item.index), tensor.detach())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return files, index

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        """Copy `tensor` to host memory. The next save reuses the buffer: to pin it takes longer than to copy."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _write(
        self,
        folder: Path,
        files: dict[str, dict[str, Tensor]],
        index: dict[str, Any] | None,
        metadata: Mapping[str, Any],
    ) -> None:
        """Runs in the thread: write this rank's files, wait for the other ranks, commit the checkpoint."""
        try:
            digests: dict[str, Any] = {}
            failure = None
            try:
                folder.mkdir(parents=True, exist_ok=True)
                digests = {file: write_tensors(folder / file, tensors) for file, tensors in files.items()}
            # Any error: the other ranks wait in `gather` to hear of it.
            except Exception as error:
                log.warning("this rank could not write its files of %s", folder, exc_info=True)
                failure = f"rank {self._processes.rank}: {error}{_disk_space_hint(error, folder, files)}"
            outcomes = self._processes.gather((digests, failure))
            self._processes.on_main(lambda: self._commit(folder, outcomes or [], index or {}, metadata))
        except BaseException as error:
            self._error = error

    def _commit(
        self,
        folder: Path,
        outcomes: list[tuple[dict[str, Any], str | None]],
        index: dict[str, Any],
        metadata: Mapping[str, Any],
    ) -> None:
        failures = [failure for _, failure in outcomes if failure]
        try:
            if not failures:
                # The configs, with which the model can be built again.
                self._model.config.save_pretrained(folder)
                if self._model.can_generate():
                    self._model.generation_config.save_pretrained(folder)
                (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
                digests = {file: digest for written, _ in outcomes for file, digest in written.items()}
                layout = {"world_size": self._processes.world_size, "copies": self._processes.tp_size}
                manifest.commit(folder, digests, {**self._metadata, **metadata, **layout})
                manifest.prune(
                    self.root, *self._keep, keep=self._uploader.uploading if self._uploader is not None else None
                )
        except Exception as error:
            log.warning("checkpoint %s could not be committed", folder, exc_info=True)
            failures = [str(error)]
        if failures:
            if not (folder / manifest.MANIFEST).exists():
                # An incomplete checkpoint is useless, and on a full disk even the next start's lock file fails.
                shutil.rmtree(folder, ignore_errors=True)
            raise ValueError(
                f"checkpoint {folder} could not be written: {'; '.join(failures)}. Fix that, or free disk space, and "
                "start the run again: it continues from the previous checkpoint"
            )
        self._saved.append(folder)
        if self._uploader is not None:
            self._uploader.enqueue(folder)


def _disk_space_hint(error: Exception, folder: Path, files: dict[str, dict[str, Tensor]]) -> str:
    """How much disk space a checkpoint needs and how much is free, if that is the error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ""
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    # The folder of the first checkpoint, and its parent, may not exist yet.
    free = shutil.disk_usage(next(path for path in folder.parents if path.exists())).free
    return f" (this rank writes {size / 1e9:.2f} GB per checkpoint; {free / 1e9:.2f} GB are free)"


def _without_empty(plan: SavePlan) -> SavePlan:
    """The plan without empty chunks, which ranks get from a tensor with fewer rows than ranks."""
    items = [item for item in plan.items if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel() > 0]
    assert all(item.type != WriteItemType.BYTE_IO for item in plan.items), "a checkpoint has tensors only, no pickles"
    return dataclasses.replace(plan, items=items)


def _files(plan: SavePlan, rank: int) -> list[tuple[WriteItem, str]]:
    """The file of each chunk; a new file begins when the current one would exceed `FILE_BYTES`."""
    placed, number, filled = [], 0, 0
    for item in plan.items:
        assert item.tensor_data is not None
        size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        filled += size
        placed.append((item, f"process-{rank:05d}-{number:03d}.safetensors"))
    return placed


def _index(plans: list[SavePlan]) -> dict[str, Any]:
    """The index of all ranks' chunks, as `storage.Index` reads it."""
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item, file in _files(plan, rank):
            data = item.tensor_data
            assert data is not None
            entry = tensors.setdefault(item.index.fqn, index_entry(data.size, data.properties.dtype))
            entry["parts"][offset_key(data.chunk.offsets)] = {"file": file, "shape": list(data.chunk.sizes)}
    return tensors
