"""Runs as processes of this machine, detached from the process that submits them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata_platform.backends.backend import Pause, already_runs, destinations, find_gpu, parse_points, with_progress
from strata_platform.backends.kept_logs import kept_lines
from strata_platform.backends.run_state import CANCEL, RESUBMIT, RunFiles, State, read_last, tail
from strata_platform.errors import BackendError, NotReady, RunExists, RunNotFound, SpecError
from strata_platform.estimate.gpus import Gpu
from strata_platform.file_io import acquire_lock
from strata_platform.owner import this_user
from strata_platform.run_layout import RunLayout
from strata_platform.runs import Event, Held, LogLine, MetricPoint, Outputs, Phase, Run

if TYPE_CHECKING:
    from strata_platform.spec import RunSpec
    from strata_platform.spec.run_spec import Resources, Topology

log = logging.getLogger(__name__)

_GONE = "its processes are gone: killed, or the machine was restarted"


def default_registry() -> Path:
    """The folder that links the names of runs to their folders."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "strata" / "runs"


class LocalBackend:
    """Runs as processes of this machine.

    A run is found by its name in `registry`, or by the path of its folder. Its supervisor starts it again up to
    `retries` times after a retryable outcome, and gives it `grace` seconds to end when it is canceled.
    """

    name = "local"

    def __init__(self, registry: Path | None = None, *, retries: int = 5, grace: int = 60) -> None:
        self._registry = registry or default_registry()
        self._retries, self._grace = retries, grace

    def gpu(self, resources: Resources) -> Gpu | None:
        """The model of this machine's first GPU, as its driver names it."""
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        except FileNotFoundError:
            return None
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stdout", None) or error
            log.warning("cannot estimate whether the run fits: nvidia-smi failed: %s", str(output).strip())
            return None
        return find_gpu(answer.stdout.partition("\n")[0])

    def require_admission(self, resources: Resources, topology: Topology) -> None:
        """Nothing queues here."""

    def me(self) -> str:
        """Who this process belongs to, or STRATA_OWNER."""
        return this_user()

    def finished(self, spec: RunSpec) -> None:
        """The run is started: its processes end soon, and write what is missing in its folder."""

    def submit(self, spec: RunSpec) -> Run:
        """Start the run, which outlives this process."""
        from strata_platform.spec import dump_spec

        if spec.topology.nnodes > 1:
            raise BackendError(
                f"topology.nnodes is {spec.topology.nnodes}, and this is one machine; set it to 1",
                status=422,
                reason="Invalid",
            )
        if importlib.util.find_spec("tasks") is None:
            raise BackendError("the training runtime is not installed with this command; install the package strata")
        files = RunFiles(Path(spec.output).resolve() / spec.name)
        with contextlib.ExitStack() as stack:
            with self._registry_lock():
                self._require_free_name(spec.name, files)
                lock = _take_lock(spec.name, files)
                # The supervisor inherits the lock and keeps it.
                stack.callback(os.close, lock)
                files.spec.write_text(dump_spec(spec), encoding="utf-8")
                files.set_state(State(submitted=time.time()))
                files.add_event(Event(time.time(), "Submitted", f"from {Path.cwd()}"))
                self._register(spec.name, files)
            self._start(files, lock)
        return self._run(files)

    @contextlib.contextmanager
    def _registry_lock(self) -> Iterator[None]:
        """Let one submission at a time check that its name is free and take it."""
        self._registry.mkdir(parents=True, exist_ok=True)
        with (self._registry / ".lock").open("a") as file:
            acquire_lock(file)
            yield

    def _require_free_name(self, name: str, files: RunFiles) -> None:
        """Raises RunExists if an active run of another folder has this name."""
        known = RunFiles((self._registry / name).resolve())
        if known.run != files.run and known.is_active:
            raise _exists(name, known)

    def _register(self, name: str, files: RunFiles) -> None:
        temporary = self._registry / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(files.run)
        temporary.replace(self._registry / name)

    def _start(self, files: RunFiles, lock: int) -> None:
        module = "strata_platform.backends.supervisor"
        arguments = [str(files.run), str(lock), str(self._retries), str(self._grace)]
        with files.output.open("wb") as output:
            # The started process detaches its supervisor and ends at once.
            ended = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[lock],
                start_new_session=True,
            )
        if ended.returncode:
            raise BackendError(f"the run could not be started: {_last_line(files.output)}; see {files.output}")

    def get(self, name: str) -> Run:
        """The current state of the run."""
        return self._run(self._files(name))

    def logs(self, name: str, pause: Pause | None) -> Iterator[LogLine]:
        """Lines that the run's processes printed, over all submissions.

        The path of the folder of a run on a cluster, which this machine mounts, gives the kept logs of its pods.
        """
        if not self._files_of(name).exists and (lines := kept_lines(name, pause)) is not None:
            return lines
        files = self._files(name)
        return (LogLine(**values) for values in _follow(files, files.log, pause))

    def metrics(self, name: str, pause: Pause | None) -> Iterator[MetricPoint]:
        """The points of the run's metrics file."""
        files = self._files(name)
        return parse_points(_follow(files, files.metrics, pause))

    def events(self, name: str) -> list[Event]:
        """Events that the supervisor recorded, and stages that the run reported."""
        files = self._files(name)
        return [Event(**values) for values in _follow(files, files.events, None)]

    def cancel(self, name: str) -> None:
        """Ask the supervisor to end the run."""
        files = self._files(name)
        # A supervisor that has just started has not written its process id yet.
        while files.is_supervised:
            pid = files.state().pid
            if pid is not None:
                _signal_supervisor(pid, files)
                return
            time.sleep(0.05)

    def outputs(self, name: str, to: Path | None) -> Outputs:
        """Paths in the run's folder."""
        run = self.get(name)
        folder = Path(run.where)
        if run.phase is not Phase.SUCCEEDED:
            raise NotReady(f"{name} is {run.phase}: outputs exist once a run has succeeded; it writes to {folder}")
        found = RunLayout(folder).outputs
        missing = [str(path) for path in found.values() if not path.exists()]
        if missing:
            raise NotReady(
                f"{name} has succeeded, but {', '.join(missing)} is missing: it was removed after the run", status=410
            )
        if to is not None:
            for kind, target in destinations(to).items():
                copy = shutil.copytree if found[kind].is_dir() else shutil.copy2
                found[kind] = Path(copy(found[kind], target))
        return Outputs(**{kind: str(path) for kind, path in found.items()})

    def list(self, limit: int | None, owner: str | None) -> list[Run]:
        """The newest runs of the registry whose folders are still there."""
        links = self._registry.glob("[!.]*")
        runs = [self._run(files) for link in links if (files := RunFiles(link.resolve())).exists]
        found = [run for run in runs if owner in (None, run.owner)]
        return sorted(found, key=lambda run: run.submitted or 0.0, reverse=True)[:limit]

    def held(self, since: float) -> Iterator[tuple[Run, Sequence[Held] | None]]:
        """The attempts in the events of the registry's runs, on the device of the record or this machine's GPU."""
        from strata_platform.spec import load_spec

        for run in self.list(None, None):
            if (run.submitted or 0.0) < since:
                continue
            files = RunFiles(Path(run.where))
            try:
                spec = load_spec(files.spec)
            except SpecError as error:
                # Another version may have written it.
                log.warning("the GPU hours of %s are unknown: %s", run.name, error)
                yield run, None
                continue
            record = RunLayout(files.run).record
            device = json.loads(record.read_text(encoding="utf-8")).get("device") if record.exists() else None
            if device is None:
                found = self.gpu(spec.resources)
                device = "CPU" if found is None else found.name
            gpu = None if device.startswith("CPU") else device
            attempts = [(begin, end) for begin, end in _attempts(run, files) if begin >= since]
            yield run, [Held(end - begin, spec.topology.world_size, gpu) for begin, end in attempts]

    def _files(self, name: str) -> RunFiles:
        files = self._files_of(name)
        if not files.exists:
            known = ", ".join(run.name for run in self.list(20, None)) or "none"
            raise RunNotFound(f"no run was submitted here as {name!r}; runs: {known}")
        return files

    def _files_of(self, name: str) -> RunFiles:
        return RunFiles((Path(name) if os.sep in name else self._registry / name).resolve())

    def _run(self, files: RunFiles) -> Run:
        # In this order: a supervisor writes its last state before it releases the lock.
        supervised, state = files.is_supervised, files.state()
        if not supervised and not state.phase.is_end:
            failed = _last_line(files.output)
            why = f"its supervisor failed: {failed}, see {files.output}" if failed else _GONE
            state = replace(state, phase=Phase.INTERRUPTED, stage=None, message=f"{why}; {RESUBMIT}")
        run = Run(
            name=files.run.name,
            backend=self.name,
            phase=state.phase,
            stage=state.stage,
            message=state.message,
            submitted=state.submitted,
            started=state.started,
            ended=state.ended,
            restarts=state.restarts,
            steps=state.steps,
            eval_loss=state.eval_loss,
            stopped_early=state.stopped_early,
            owner=files.owner,
            where=str(files.run),
        )
        return with_progress(run, list(parse_points(read_last(files.metrics))))


def _take_lock(name: str, files: RunFiles) -> int:
    """Take the lock of the run's files.

    Raises RunExists while another run has it, BackendError if it cannot be written.
    """
    try:
        lock = files.lock()
        while lock is None and files.exists and not files.is_active:
            # The supervisor has written its last state and is about to end.
            time.sleep(0.02)
            lock = files.lock()
    except OSError as error:
        raise BackendError(
            f"output: {files.folder} cannot be written: {error.strerror}; set output to a folder that can be"
        ) from error
    if lock is None:
        raise _exists(name, files)
    return lock


def _follow(files: RunFiles, file: Path, pause: Pause | None) -> Iterator[dict[str, Any]]:
    return tail(file, lambda: pause is None or not files.is_supervised, pause or (lambda: None))


def _exists(name: str, files: RunFiles) -> RunExists:
    return already_runs(name, "has not ended", f"in {files.run}")


def _signal_supervisor(pid: int, files: RunFiles) -> None:
    """Ask the supervisor to end the run, unless another process has its process id by now."""
    try:
        if b"strata_platform.backends.supervisor" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            raise ProcessLookupError
        os.kill(pid, CANCEL)
    except (FileNotFoundError, ProcessLookupError) as error:
        if files.is_supervised:
            raise BackendError(
                f"the supervisor of {files.run}, process {pid}, is not on this machine; cancel the run where it was "
                "submitted"
            ) from error


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").split("\n") if file.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _attempts(run: Run, files: RunFiles) -> list[tuple[float, float]]:
    """Begin and end of each attempt of all submissions of a run, up to now."""
    found: list[tuple[float, float]] = []
    for event in _follow(files, files.events, None):
        if event["reason"] == "Started":
            found.append((event["time"], event["time"]))
        elif event["reason"] != "Submitted" and found:
            found[-1] = (found[-1][0], event["time"])
    if found and (not run.is_done or run.phase is Phase.INTERRUPTED):
        # Of a supervisor that was killed, the last line that it wrote is all that is known.
        now = time.time() if not run.is_done else files.log.stat().st_mtime if files.log.exists() else 0.0
        found[-1] = (found[-1][0], max(now, found[-1][1]))
    return found
