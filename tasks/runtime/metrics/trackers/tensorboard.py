"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.tensorboard import SummaryWriter

from strata_platform.spec import RunSpec
from tasks.runtime.metrics.trackers.tracker import Values
from tasks.runtime.run_folder.folder import RunFolder


class TensorBoard:
    """Writes event files, and hides events of steps that run again."""

    def __init__(self, spec: RunSpec, folder: RunFolder, done: int) -> None:
        self._folder = str(folder.tensorboard)
        self._writer = SummaryWriter(self._folder, purge_step=done + 1)
        self._newest: dict[str, int] = {}

    def log(self, values: Sequence[Values]) -> None:
        """Write the values."""
        for step, time, named in values:
            if any(step <= self._newest.get(name, 0) for name in named):
                # The run returned to a checkpoint. Only a new file's purge_step hides events of earlier files.
                self._writer.close()
                self._writer = SummaryWriter(self._folder, purge_step=step)
                self._newest.clear()
            for name, value in named.items():
                self._writer.add_scalar(name, value, step, walltime=time)
                self._newest[name] = step
        self._writer.flush()

    def close(self, *, complete: bool) -> None:
        """Close the file."""
        self._writer.close()


begin = TensorBoard
