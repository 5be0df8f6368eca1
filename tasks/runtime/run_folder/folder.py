"""The run folder `<output>/<name>`: its layout, its lock, and which spec it belongs to."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from strata_platform.file_io import LockTimeout, acquire_lock, write_atomic
from strata_platform.run_layout import RunLayout
from strata_platform.spec import DataRecipe, RunSpec, dump_spec, load_spec
from strata_platform.spec.named_weights import named_weights
from strata_platform.spec.sections.training import Schedule
from tasks.runtime.optim.lr_schedule import same_learning_rates
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord

log = logging.getLogger(__name__)

# Seconds to wait for another process's lock: an NFS server keeps the locks of a lost machine for about that long.
LOCK_TIMEOUT = 120.0

# Fields that may change between two attempts of a run, because the next step computes the same without rounding. The
# number of rows in a step is fixed; how they are spread over processes and micro-batches is not. The length of the run
# and the schedule may change if the steps that are done keep their learning rates: `_keeps_learning_rates`.
_CHANGEABLE = {
    "tracking": True,
    "evaluation": True,
    "export": True,
    "resources": True,
    "checkpoint": True,
    "faults": True,
    "output": True,
    "kernels": True,
    "runtime": True,
    "parallel": True,
    "topology": True,
    "data": {"cache_gib", "streaming"},
    "optimizer": {"in_backward", "paged", "precision"},
    "schedule": {"warmup_ratio"},
    "training": {
        "micro_batch_size",
        "gradient_accumulation_steps",
        "tokens_per_step",
        "gradient_accumulation_dtype",
        "gradient_checkpointing",
        "gradient_checkpointing_every",
        "gradient_checkpointing_except_last",
        "activation_offloading",
        "compile",
        "cuda_graphs",
        "float8",
        "deterministic",
    },
}


@dataclass(frozen=True)
class RunFolder(RunLayout):
    """The folder of a run, `<output>/<name>`, and what a start may do with it."""

    @classmethod
    def of(cls, spec: RunSpec) -> RunFolder:
        """The folder of this spec's run. Does not create it."""
        return cls(Path(spec.output).absolute() / spec.name)

    @property
    def _outputs(self) -> tuple[Path, ...]:
        """Paths that a run writes after its spec, and that it replaces or deletes."""
        results = (self.record, self.report, self.model, self.weights)
        begun = (self.checkpoints, self.metrics, *self.pinned_files, self.tensorboard, self.attempts, self.hangs)
        return (*begun, *results)

    def create(self) -> None:
        """Create the folder unless it exists. Raises ValueError when that fails."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"output: the run folder {self.root} cannot be created: {error.strerror}; set output to a writable "
                "folder"
            ) from error

    @property
    def pinned_files(self) -> tuple[Path, ...]:
        """Files of what the first start read, to which later ones keep."""
        return (self.data_commit, self.initial_weights)

    @property
    def has_progress(self) -> bool:
        """Whether the run has taken a step or written a result, which a new start would continue or could lose."""
        results = (self.record, self.weights, self.model)
        if any(path.exists() for path in results) or any(self.checkpoints.glob("*")):
            return True
        return any(not point.skipped for point in read_points(self.metrics))

    def require_no_unowned_files(self) -> None:
        """Raises ValueError when the folder has no spec but has files that a run would replace or delete."""
        if not self.spec.exists():
            refuse_unowned_files([path.name for path in self._outputs if path.exists()], str(self.root), "output")

    def claim(self, spec: RunSpec, *, done: int = 0, exclusive: bool = False) -> None:
        """Claim the folder for `spec` and write spec.yaml.

        done: step of the newest checkpoint, after which the run would continue.
        exclusive: this process holds the folder's lock.

        Raises ValueError when the folder holds a run of another spec that is running or has progress, or files that a
        run would overwrite but that belong to none.
        """
        self.create()
        self.require_no_unowned_files()
        if not done and self.record.is_file():
            # Its checkpoints were removed.
            done = CompletionRecord.load(self.record).steps
        if self.spec.exists() and self.differences_from(spec, done):
            if self.has_progress or not exclusive:
                require_same_run(self, spec, done, str(self.root))
            log.info("%s holds another spec that took no step; the run starts from scratch", self.root)
            # `*.id`: the trackers' identifiers of the run.
            for path in (self.metrics, self.attempts, *self.pinned_files, *self.root.glob("*.id")):
                path.unlink(missing_ok=True)
        write_atomic(self.spec, dump_spec(spec).encode(), durable=False)

    @contextmanager
    def lock(self, timeout: float = LOCK_TIMEOUT) -> Iterator[bool]:
        """Hold the run's lock, which keeps other processes out. Yields False on a file system without locks.

        The kernel releases the lock when the process ends in any way. A network file system may take a while to notice
        that a machine is gone. Raises ValueError when another process still holds the lock after `timeout` seconds.
        """
        self.create()
        with self.lock_file.open("a+") as file:
            exclusive = _lock(file, timeout)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield exclusive

    def data_commits_for(self, spec: RunSpec) -> tuple[str | None, ...]:
        """The commits of the Hub datasets that this spec's run has read so far, as they were written, or none."""
        return self._stored_data_commits if self.spec.exists() and not self.differences_from(spec) else ()

    def write_data_commits(self, commits: Sequence[str | None]) -> None:
        """Store the commits of the Hub datasets that the run reads, so that every later start reads the same.

        A line for each source; empty for one that is not on the Hub.
        """
        if any(commits):
            write_atomic(self.data_commit, "".join(f"{commit or ''}\n" for commit in commits).encode(), durable=False)

    @property
    def _stored_data_commits(self) -> tuple[str | None, ...]:
        if not self.data_commit.exists():
            return ()
        return tuple(line.strip() or None for line in self.data_commit.read_text(encoding="utf-8").splitlines())

    @property
    def initial_weights_ids(self) -> dict[str, str]:
        """What `models.initial_weights` was when the run began, as far as it is known."""
        if not self.initial_weights.exists():
            return {}
        lines = self.initial_weights.read_text(encoding="utf-8").splitlines()
        return {field: identity for field, _, identity in (line.partition(" ") for line in lines)}

    def write_initial_weights_ids(self, weights: Mapping[str, str]) -> None:
        """Store what `models.initial_weights` is when the run begins: a line for each field."""
        self.initial_weights.unlink(missing_ok=True)
        if weights:
            lines = (f"{field} {identity}\n" for field, identity in weights.items())
            write_atomic(self.initial_weights, "".join(lines).encode(), durable=True)

    def differences_from(self, spec: RunSpec, done: int = 0) -> list[str]:
        """Changes, in words, that make `spec` another run than this folder's; empty when it may continue the run.

        done: step of the newest checkpoint.
        """
        old, commits = load_spec(self.spec), self._stored_data_commits
        revisions = [source.data.revision for source in spec.data.single_sources()]
        if len(commits) == len(revisions) == len(old.data.single_sources()):
            # To pin the commit that the run reads already is no change.
            pinned = [commit if commit == new else None for commit, new in zip(commits, revisions, strict=True)]
            old = old.model_copy(update={"data": old.data.with_revisions(pinned)})
        began_with = self.initial_weights_ids
        for weights in named_weights(spec):
            if weights.revision_field is not None and weights.revision == began_with.get(weights.field, ""):
                section, _, field = weights.revision_field.partition(".")
                changed = getattr(old, section).model_copy(update={field: weights.revision})
                old = old.model_copy(update={section: changed})
        return changed_fixed_fields(old, spec, done)

    def begin_attempt(self) -> int:
        """Record a start of the training processes; returns the number of earlier starts."""
        before = len(self.attempts.read_text().splitlines()) if self.attempts.exists() else 0
        with self.attempts.open("a") as file:
            file.write(f"{before}\n")
        return before


def refuse_unowned_files(entries: list[str], where: str, field: str) -> None:
    """Raises ValueError when the folder `where` has no spec, but `entries` that a run would overwrite.

    field: the field of the spec that names the folder.
    """
    if entries:
        raise ValueError(
            f"{field}: {where} has no spec.yaml, so it is not the folder of a run, and a run would overwrite its "
            f"{', '.join(entries)}; choose another name or {field}, or move these files"
        )


def require_same_run(folder: RunFolder, spec: RunSpec, done: int, where: str) -> None:
    """Raises ValueError unless `spec` may continue the run in `folder` after step `done`.

    where: the folder's name in the message.
    """
    changed = folder.differences_from(spec, done)
    if changed:
        about_length = (
            f"training.steps and schedule may change only if the new run has at least the {done} steps that are done, "
            "with the same learning rates. "
        )
        if not any(line.startswith(("training.steps", "training.epochs", "schedule.")) for line in changed):
            about_length = ""
        raise ValueError(
            f"{where} holds a run of another spec; different: {'; '.join(changed)}. {about_length}"
            "Choose another name, restore these fields to continue that run, or delete the folder"
        )


def changed_fixed_fields(old: RunSpec, new: RunSpec, done: int) -> list[str]:
    """Changes from `old` to `new`, in words, of fields that a run may not change; empty when `new` may continue it.

    done: step after which it would.
    """
    if _keeps_learning_rates((old.schedule, old.training.steps), (new.schedule, new.training.steps), done):
        training = old.training.model_copy(update={"steps": new.training.steps})
        old = old.model_copy(update={"training": training, "schedule": new.schedule})
    return _differences(_fixed_fields(old), _fixed_fields(new))


def _keeps_learning_rates(old: tuple[Schedule, int | None], new: tuple[Schedule, int | None], done: int) -> bool:
    """Whether the first `done` steps are also steps of `new`, with the same learning rates.

    Each is a schedule with the number of steps of its run. Only the data tells the steps of an epoch.
    """
    (before, steps), (after, new_steps) = old, new
    if steps is None or new_steps is None or new_steps < done:
        return False
    # A start that is refused for its schedule after it has claimed the folder must not keep a corrected one out.
    return old == new or not done or same_learning_rates((before, steps), (after, new_steps), done)


def data_folder(output: str, recipe: DataRecipe) -> Path:
    """Folder of the prepared data; runs of one output folder that have the same recipe share it."""
    return Path(output).absolute() / "data" / recipe.hash()


def _lock(file: TextIO, timeout: float) -> bool:
    """Lock the run's lock file; False on a file system without locks."""
    folder = Path(file.name).parent

    def holder() -> str:
        file.seek(0)
        return file.read() or "another process"

    try:
        acquire_lock(
            file,
            timeout=timeout,
            on_wait=lambda: log.warning("%s is being trained by %s; waiting for its end", folder, holder()),
        )
        return True
    except LockTimeout:
        raise ValueError(
            f"{folder} is being trained by {holder()}; wait for it or end it, or choose another name"
        ) from None
    except OSError as error:
        log.warning("%s cannot be locked (%s): do not start this run twice at the same time", file.name, error)
        return False


def _fixed_fields(spec: RunSpec) -> dict[str, Any]:
    derived = {
        "rows per step (training.micro_batch_size x gradient_accumulation_steps x processes)": spec.rows_per_step,
        "schedule.warmup_ratio": spec.schedule.warmup_share,
        "parallel.compute_dtype": spec.parallel.compute_dtype if spec.parallel.type == "fsdp" else "model",
    }
    return spec.model_dump(mode="json", exclude=_CHANGEABLE) | derived  # type: ignore[arg-type]


def _differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    found: list[str] = []
    for key in old | new:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after, f"{path}{key}.")
        elif before != after:
            found.append(f"{path}{key} was {before!r}, is {after!r}")
    return found
