"""Where a run keeps what it writes: one folder, the same for every attempt."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from strata_platform.spec import DataRecipe, RunSpec, dump_spec, load_spec
from tasks.runtime.metrics.metrics_file import read_points

log = logging.getLogger(__name__)

# How long to wait for the end of whoever else has the run: as long as an NFS server keeps the locks of a lost machine.
LOCK_SECONDS = 120.0

# What may differ between two attempts of one run: none of it changes what the next step computes, rounding aside. How
# the rows of a step are spread over processes and micro-batches is free, how many they are is not.
_FREE = {
    "tracking": True,
    "evaluation": True,
    "export": True,
    "resources": True,
    "checkpoint": True,
    "faults": True,
    "output": True,
    "kernels": {"warmup", "warmup_timeout", "store"},
    "runtime": True,
    "parallel": True,
    "topology": True,
    "optimizer": {"in_backward", "paged", "precision"},
    "training": {
        "micro_batch_size",
        "gradient_accumulation_steps",
        "tokens_per_step",
        "gradient_checkpointing",
        "gradient_checkpointing_every",
        "compile",
        "deterministic",
    },
}


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run below `<output>/<name>`."""

    root: Path

    @classmethod
    def of(cls, spec: RunSpec) -> RunFolder:
        """The folder of this spec's run; nothing is created."""
        return cls(Path(spec.output).absolute() / spec.name)

    @property
    def spec(self) -> Path:
        """The run's spec, whole."""
        return self.root / "spec.yaml"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints by step."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.root / "metrics.jsonl"

    @property
    def data_commit(self) -> Path:
        """The commit of the Hub's data set that the run reads; there only when it reads one."""
        return self.root / "data_commit.txt"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    @property
    def attempts(self) -> Path:
        """One line per start of the training processes."""
        return self.root / "attempts.txt"

    @property
    def hangs(self) -> Path:
        """Stacks of processes that hung, by attempt."""
        return self.root / "hangs"

    @property
    def weights(self) -> Path:
        """The trained weights on their way to evaluation and export."""
        return self.root / "weights"

    @property
    def model(self) -> Path:
        """The exported model."""
        return self.root / "model"

    @property
    def report(self) -> Path:
        """The report."""
        return self.root / "report.html"

    @property
    def record(self) -> Path:
        """The completion record; there only when the run has one."""
        return self.root / "record.json"

    @property
    def _own(self) -> tuple[Path, ...]:
        """What a run writes after its spec, and replaces or removes."""
        made = (self.record, self.report, self.model, self.weights)
        return (self.checkpoints, self.metrics, self.data_commit, self.tensorboard, self.attempts, self.hangs, *made)

    def make(self) -> None:
        """Make the folder, if it is not there. Raises ValueError when that fails."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"output: the run's folder {self.root} cannot be made: {error.strerror}; set output to a folder that "
                "may be written to"
            ) from error

    @property
    def begun(self) -> bool:
        """Whether there is what a start would continue, or could lose: a step that was taken, or what came of it."""
        made = (self.record, self.weights, self.model)
        if any(path.exists() for path in made) or any(self.checkpoints.glob("*")):
            return True
        return any(not point.skipped for point in read_points(self.metrics))

    def require_no_strangers(self) -> None:
        """Raises ValueError when the folder has no spec, but what a run would replace or remove."""
        if not self.spec.exists():
            require_no_runs_entries([path.name for path in self._own if path.exists()], str(self.root), "output")

    def claim(self, spec: RunSpec, *, alone: bool = False) -> None:
        """Make the folder this spec's own; `alone` says that nobody else can be at work in it.

        Raises ValueError when it holds a run of another spec, which is at work or has begun: continuing would train
        something nobody described. And when it holds what is no run's, though a run would replace or remove it.
        """
        self.make()
        self.require_no_strangers()
        if self.spec.exists() and self.differs_from(spec):
            if self.begun or not alone:
                require_same_run(self, spec, str(self.root))
            log.info("%s is of another spec so far, which took no step; it is begun anew", self.root)
            # The trackers' names for the run, too.
            for left in (self.metrics, self.attempts, self.data_commit, *self.root.glob("*.id")):
                left.unlink(missing_ok=True)
        _write(self.spec, dump_spec(spec))

    @contextmanager
    def lock(self, patience: float = LOCK_SECONDS) -> Iterator[bool]:
        """Keep out every other process that would write this run; says whether it does, as not every file system can.

        The kernel unlocks when the process ends, however it does; some file systems need a while to notice that a
        machine is gone. Raises ValueError when it is locked after `patience` seconds.
        """
        self.make()
        with (self.root / ".lock").open("a+") as file:
            alone = _lock(file, time.monotonic() + patience)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield alone

    def commit_for(self, spec: RunSpec) -> str | None:
        """The commit of the Hub's data set that this spec's run has read so far; None when it has read none."""
        return self._noted_commit if self.spec.exists() and not self.differs_from(spec) else None

    def note_commit(self, commit: str) -> None:
        """Note the commit of the Hub's data set that the run reads, for all starts to come."""
        _write(self.data_commit, f"{commit}\n")

    @property
    def _noted_commit(self) -> str | None:
        return self.data_commit.read_text(encoding="utf-8").strip() if self.data_commit.exists() else None

    def differs_from(self, spec: RunSpec) -> list[str]:
        """What makes `spec` the spec of another run than this folder's, in words."""
        old, commit = load_spec(self.spec), self._noted_commit
        if commit is not None and spec.data.revision == commit:
            # To name the commit that is read anyway changes nothing.
            old = old.model_copy(update={"data": old.data.model_copy(update={"revision": commit})})
        return what_binds(old, spec)

    def begin_attempt(self) -> int:
        """Note that the training processes start, and return how often they did before."""
        before = len(self.attempts.read_text().splitlines()) if self.attempts.exists() else 0
        with self.attempts.open("a") as file:
            file.write(f"{before}\n")
        return before


def require_no_runs_entries(entries: list[str], where: str, field: str) -> None:
    """Raises ValueError when the folder `where`, which has no spec of a run, has `entries` named as those of a run.

    `field` of the spec says where the folder is.
    """
    if entries:
        raise ValueError(
            f"{field}: {where} is not a run's, having no spec.yaml, and a run there would take its "
            f"{', '.join(entries)} for its own; choose another name or {field}, or move that away"
        )


def require_same_run(folder: RunFolder, spec: RunSpec, where: str) -> None:
    """Raises ValueError when `spec` is of another run than that of `folder`, which a person knows as `where`."""
    changed = folder.differs_from(spec)
    if changed:
        raise ValueError(
            f"{where} holds a run of another spec; different: {'; '.join(changed)}. "
            "Choose another name, restore these fields to continue that run, or remove the folder"
        )


def what_binds(old: RunSpec, new: RunSpec) -> list[str]:
    """What makes `new` the spec of another run than `old`, in words; empty when it may continue that one."""
    return _differences(_bound(old), _bound(new))


def data_folder(output: str, recipe: DataRecipe) -> Path:
    """Where prepared data is kept: shared by all runs of the output folder that read the same recipe."""
    return Path(output).absolute() / "data" / recipe.hash()


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _lock(file: TextIO, deadline: float) -> bool:
    warned = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{Path(file.name).parent} is being trained by {holder}; wait for it or end it, or choose another "
                    "name"
                ) from None
            if not warned:
                log.warning("%s is being trained by %s; waiting for its end", Path(file.name).parent, holder)
            warned = True
            time.sleep(0.2)
        except OSError as error:
            log.warning("%s has no locks (%s): see to it that nobody starts this run twice", file.name, error)
            return False


def _bound(spec: RunSpec) -> dict[str, Any]:
    decisive = {
        "rows per step (training.micro_batch_size x gradient_accumulation_steps x processes)": spec.rows_per_step,
        "parallel.compute_dtype": spec.parallel.compute_dtype if spec.parallel.type == "fsdp" else "model",
    }
    return spec.model_dump(mode="json", exclude=_FREE) | decisive  # type: ignore[arg-type]


def _differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    found: list[str] = []
    for key in old | new:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after, f"{path}{key}.")
        elif before != after:
            found.append(f"{path}{key} was {before!r}, is {after!r}")
    return found
