"""The chart's CronJobs that remove what is old: `python -m strata_platform.chart.retention objects` or `folders`.

`objects` removes finished pods and training jobs of all tenants, from the release's namespace. `folders` removes the
checkpoints of complete runs, and the folders of runs, in a tenant's namespace, from its pod template with its claims
and without any right. An age counts from the last change of any file of the run; the folder of a run that trains,
evaluates or exports is locked, and is left alone. With `dry_run` nothing is removed, only named. The chart passes the
settings as JSON in the variable STRATA_RETENTION.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from strata_platform.backends.job_set import CANCELED
from strata_platform.backends.kubernetes_objects import FLYTE, JOB_SET
from strata_platform.chart.value_fields import duration
from strata_platform.file_io import LockTimeout, acquire_lock
from strata_platform.kept_log import is_kept_log
from strata_platform.kubernetes_answers import condition_of
from strata_platform.kubernetes_api import Access, ApiError, KubernetesApi, Object, items_if_installed
from strata_platform.run_layout import LEASE, RunLayout

VARIABLE = "STRATA_RETENTION"
# The end of a folder's name while it is removed.
_REMOVED = ".removed-by-retention"
# A lease that was renewed so recently may belong to a machine whose lock this file system does not show.
_LEASE = timedelta(minutes=5)


class Settings(BaseModel):
    """What the chart says; an empty age keeps for ever."""

    dry_run: bool
    namespaces: list[str] = []
    objects: str = ""
    checkpoints: str = ""
    runs: str = ""
    folders: list[str] = []
    """What runs are looked for in, down to `depth` levels."""
    depth: int = 3


class Retention:
    """What is old is removed, or named. A thing that cannot be removed keeps no other from it."""

    def __init__(self, settings: Settings, now: datetime) -> None:
        self._settings, self._now = settings, now
        self.failed: list[str] = []

    def objects(self, api: KubernetesApi) -> Iterator[str]:
        """Finished training jobs with their pods, and finished pods of runs that have no job."""
        longest = duration(self._settings.objects)
        if longest is None:
            return
        for place in self._settings.namespaces:
            kinds: list[tuple[str, str, str, Callable[[Object], datetime | None]]] = [
                (f"/apis/{group}/{version}/namespaces/{place}/{plural}", label, "job", _job_ended)
                for label, (group, version, plural) in ((made.label, made.jobs) for made in (FLYTE, JOB_SET))
            ]
            # A JobSet's pods go with it.
            kinds.append((f"/api/v1/namespaces/{place}/pods", FLYTE.label, "pod", _pod_ended))
            for path, label, kind, ended in kinds:
                try:
                    # These labels: other programs' pods are none of ours.
                    found = items_if_installed(api, path, labelSelector=label)
                except ApiError as error:
                    self.failed.append(f"{kind}s of {place}: {error}")
                    continue
                for item in found:
                    at, metadata = ended(item), item["metadata"]
                    if at is None or self._now - at < longest or metadata.get("deletionTimestamp"):
                        continue
                    # Of exactly this object: another of the name may have come meanwhile.
                    body = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
                    remove = partial(api.request, "DELETE", f"{path}/{metadata['name']}", body)
                    yield from self._remove(
                        f"{kind} {place}/{metadata['name']}, which ended {at:%Y-%m-%d %H:%M}", remove
                    )

    def folders(self) -> Iterator[str]:
        """Checkpoints of complete runs, and folders of runs."""
        checkpoints, runs = duration(self._settings.checkpoints), duration(self._settings.runs)
        for root in self._settings.folders if checkpoints or runs else ():
            for level in range(self._settings.depth + 1):
                for left in sorted(Path(root).glob("*/" * level + f".*{_REMOVED}")):
                    if left.resolve().parent != left.parent.absolute():
                        continue  # Behind a link.
                    yield from self._remove(f"{left}, of a removal that was interrupted", partial(shutil.rmtree, left))
            looked_at = 0
            for folder in self._run_folders(Path(root), self._settings.depth):
                looked_at += 1
                run = RunLayout(folder)
                try:
                    changed, removed = self._removed_of(run, checkpoints, runs)
                    if removed is not None:
                        yield from self._remove_folder(run, removed, changed)
                except FileNotFoundError:
                    # A run that is writing: it is not old.
                    continue
            yield f"{root}: {looked_at} run{'s' if looked_at != 1 else ''} looked at"

    def _run_folders(self, root: Path, depth: int) -> Iterator[Path]:
        """Folders with the spec and the attempts of a run, or with nothing but logs of its pods, up to `depth` levels
        below; links are not followed.
        """
        try:
            entries = sorted(os.scandir(root), key=lambda entry: entry.name)
        except OSError as error:
            # A tenant need not have every claim; others hide what is in them.
            if not isinstance(error, FileNotFoundError):
                self.failed.append(f"what is in {root}: {error.strerror}")
            return
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False) or entry.name.startswith("."):
                continue
            run = RunLayout(Path(entry.path))
            if (run.spec.is_file() and run.attempts.is_file()) or _has_only_logs(run):
                yield run.root
            elif depth > 1:
                yield from self._run_folders(run.root, depth - 1)

    def _removed_of(
        self, run: RunLayout, checkpoints: timedelta | None, runs: timedelta | None
    ) -> tuple[datetime, Path | None]:
        """When a run's folder was last changed, and what of it is old: the folder, its checkpoints, or nothing."""
        changed = _last_change(run.root)
        if changed is None or self._is_leased(run.root):
            return self._now, None
        old = self._now - changed
        if runs is not None and old >= runs:
            return changed, run.root
        if checkpoints is not None and old >= checkpoints and run.checkpoints.is_dir() and _is_complete(run):
            return changed, run.checkpoints
        return changed, None

    def _is_leased(self, folder: Path) -> bool:
        files = sorted((folder / ".lease").glob("lease-*.json"))
        try:
            released = bool(files) and json.loads(files[-1].read_text()).get("released", False)
        except (OSError, ValueError):
            # It is being written.
            released = False
        newest = None if released else _last_change(folder / ".lease")
        return newest is not None and self._now - newest < _LEASE

    def _remove_folder(self, run: RunLayout, folder: Path, changed: datetime) -> Iterator[str]:
        size = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())

        def remove() -> None:
            with _locked(run.lock_file):
                if _last_change(run.root) != changed or self._is_leased(run.root):
                    raise LockTimeout(str(run.lock_file))
                # Out of the way in one step: a start finds all of it or none.
                gone = folder.with_name(f".{folder.name}{_REMOVED}")
                folder.rename(gone)
                shutil.rmtree(gone)

        yield from self._remove(f"{folder}, {size / 2**30:.2f} GiB, last changed {changed:%Y-%m-%d %H:%M}", remove)

    def _remove(self, what: str, remove: Callable[[], object]) -> Iterator[str]:
        if self._settings.dry_run:
            yield f"would remove {what}"
            return
        try:
            remove()
        except LockTimeout:
            yield f"in use, so kept: {what}"
        except (OSError, ApiError) as error:
            self.failed.append(f"{what}: {error}")
        else:
            yield f"removed {what}"


def _last_change(folder: Path) -> datetime | None:
    """When any file of a folder but its lock was written last; None without files. Raises FileNotFoundError if one
    goes meanwhile.
    """
    lock = RunLayout(folder).lock_file
    times = [file.lstat().st_mtime for file in folder.rglob("*") if not file.is_dir() and file != lock]
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _is_complete(run: RunLayout) -> bool:
    """Whether nothing of a run needs its checkpoints any more: it is complete, and its model is exported or stored."""
    try:
        complete = json.loads(run.record.read_text())["status"] == "complete"
    except (OSError, ValueError, KeyError):
        return False
    return complete and (run.model.is_dir() or run.stored_outputs.is_file())


def _has_only_logs(run: RunLayout) -> bool:
    """Whether no start of a run came as far as to write its spec, so that its pods' logs are all there is."""
    try:
        names = {path.name for path in run.root.iterdir()} - {run.lock_file.name, LEASE}
        logs = [path.name for path in run.logs.iterdir()] if names == {run.logs.name} else []
        # An empty folder of that name may be anybody's.
        return bool(logs) and all(map(is_kept_log, logs))
    except OSError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a run's lock, if the file system has locks. Raises LockTimeout if a run holds it."""
    with path.open("a+") as file:
        # On a file system without locks, the lease alone tells of a run.
        with suppress(OSError):
            acquire_lock(file, timeout=0.0)
        yield


def _job_ended(job: Object) -> datetime | None:
    ended = job.get("status", {}).get("completionTime")
    for kind in ("Failed", "Completed"):
        # JobSet says Completed, and has no completionTime.
        condition = condition_of(job, kind)
        if condition is not None and condition["status"] == "True":
            ended = ended or condition["lastTransitionTime"]
    if not ended and (canceled := (job["metadata"].get("annotations") or {}).get(CANCELED)):
        return datetime.fromtimestamp(float(canceled), UTC)
    return datetime.fromisoformat(ended) if ended else None


def _pod_ended(pod: Object) -> datetime | None:
    """Pods of a job go with the job."""
    status = pod.get("status", {})
    if status.get("phase") not in ("Succeeded", "Failed") or _is_of_a_job(pod):
        return None
    ends = [
        (state.get("state") or {}).get("terminated", {}).get("finishedAt")
        for state in status.get("containerStatuses") or []
    ]
    known = [end for end in ends if end] or [pod["metadata"]["creationTimestamp"]]
    return max(map(datetime.fromisoformat, known))


def _is_of_a_job(pod: Object) -> bool:
    return any(owner["kind"] == "PyTorchJob" for owner in pod["metadata"].get("ownerReferences") or [])


def main(what: str) -> int:
    """Remove what is old; 1 if some of it could not be."""
    retention = Retention(Settings.model_validate_json(os.environ[VARIABLE]), datetime.now(UTC))
    removed = retention.folders() if what == "folders" else retention.objects(KubernetesApi(Access.of_environment()))
    for line in removed:
        print(line, flush=True)
    for problem in retention.failed:
        print(f"not removed: {problem}", flush=True)
    return 1 if retention.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
