"""Set up a training process and tear it down: checks, warm-up, process group, lock of the run's folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from uuid import uuid4

import torch

from strata_platform import kept_log
from strata_platform.runs import Stage
from strata_platform.spec import RunSpec
from tasks.runtime.checkpoint import newest_step
from tasks.runtime.checkpoint.object_store import retry, undo_upload
from tasks.runtime.checkpoint.upload import STARTUP_TIMEOUT, CheckpointUploader, uploader_for
from tasks.runtime.faults.health_check import check_health
from tasks.runtime.faults.oom_advice import advice_for
from tasks.runtime.metrics import startup
from tasks.runtime.metrics.progress import report_progress
from tasks.runtime.preflight import run_checks
from tasks.runtime.process.deterministic import deterministic
from tasks.runtime.process.error_explanations import explain, is_out_of_memory
from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.signals import die_with_agent, raise_on_sigterm
from tasks.runtime.run_folder.folder import LOCK_TIMEOUT, RunFolder
from tasks.runtime.run_folder.kept_logs import repeated_lines
from tasks.runtime.run_folder.lease import RENEWAL, Lease
from tasks.runtime.warmup.pod import warm_up_pod
from tasks.runtime.warmup.training_process import TrainingWarmup, training_warmup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """What one process of the job has while the job runs."""

    spec: RunSpec
    folder: RunFolder
    processes: Processes
    training_warmup: TrainingWarmup
    uploader: CheckpointUploader | None
    """Uploads checkpoints; None on other ranks than 0, or without `checkpoint.url`."""
    leases: list[Lease]
    """Those that rank 0 holds, of the run's folder on disk and in the store."""

    def require_folder(self) -> None:
        """Raises ValueError if another machine has taken over the run's folder."""
        for lease in self.leases:
            lease.require_held()


@contextmanager
def session(spec: RunSpec) -> Iterator[Session]:
    """Check the spec, warm up, join the process group and lock the run's folder. Undo all of it at the end.

    SIGTERM raises `Preempted`. If the elastic agent dies, this process ends too.
    """
    processes = Processes.from_environment(
        tp_size=spec.parallel.tensor_parallel, cp_size=spec.parallel.context_parallel
    )
    folder = RunFolder.of(spec)
    run_checks("pod", "spec", spec=spec, processes=processes)
    uploader = uploader_for(spec, folder)
    if not torch.cuda.is_available():
        # Without it, accelerate guesses a value and warns.
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    die_with_agent()
    with raise_on_sigterm(), ExitStack() as held:
        if spec.training.deterministic:
            held.enter_context(deterministic())
        report_progress(stage=Stage.WARM_UP)
        # Before the process group exists: a long compilation must not look like a hanging collective.
        report = warm_up_pod(spec, folder)
        held.callback(processes.disconnect)
        startup.mark("imports of the processes")
        processes.connect()
        startup.mark("rendezvous")
        leases: list[Lease] = []
        processes.on_main(lambda: held.enter_context(_locked_folder(spec, folder, uploader, leases)))
        if uploader is not None:
            held.callback(uploader.close)
        _require_shared_folder(spec.output, folder, processes)
        with _explain_errors(spec, folder, processes):
            check_health(spec.faults, folder, processes)
            with training_warmup(spec, folder, processes, report) as warm:
                yield Session(spec, folder, processes, warm, uploader, leases)


@contextmanager
def _locked_folder(
    spec: RunSpec, folder: RunFolder, uploader: CheckpointUploader | None, leases: list[Lease]
) -> Iterator[None]:
    """Lock the run's folder and claim it for this spec, on disk and in the object store; adds to `leases`.

    A start that fails before its first step removes its claim from the store.
    """
    with folder.lock() as exclusive, ExitStack() as held:
        urls = [
            f"file://{folder.root}",
            *([f"{spec.checkpoint.url.rstrip('/')}/{spec.name}"] if spec.checkpoint.url else []),
        ]
        for url in urls:
            leases.append(_taken(url))
            held.callback(leases[-1].release)
        if uploader is not None:
            uploader.download_run_files()
        folder.claim(spec, done=newest_step(folder.checkpoints), exclusive=exclusive)
        if uploader is not None:
            uploader.upload_spec()
        for line in repeated_lines(spec):
            report_progress(**kept_log.repeated(line))
        try:
            yield
        except BaseException:
            if spec.checkpoint.url and exclusive and not folder.has_progress:
                undo_upload(spec.checkpoint.url, spec.name, folder.spec)
            raise


def _taken(url: str) -> Lease:
    """The lease of a folder, once this process has it. Raises ValueError while another one keeps it."""
    lease, deadline, waiting = Lease(url), time.monotonic() + LOCK_TIMEOUT, False
    while (holder := retry(lease.try_to_take, url, STARTUP_TIMEOUT)) is not None:
        if time.monotonic() >= deadline:
            raise ValueError(
                f"{url} is being trained by {holder}; wait for it or end it, or choose another name for this run"
            )
        if not waiting:
            log.warning("%s is being trained by %s; waiting for its end", url, holder)
        waiting = True
        time.sleep(RENEWAL / 5)
    lease.start_renewing()
    return lease


@contextmanager
def _explain_errors(spec: RunSpec, folder: RunFolder, processes: Processes) -> Iterator[None]:
    """Explain errors of the GPU and its libraries; every out-of-memory error becomes `torch.OutOfMemoryError` with
    advice.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error):
            share = torch.cuda.get_per_process_memory_fraction(processes.device)
            capacity = share * torch.cuda.get_device_properties(processes.device).total_memory
            raise torch.OutOfMemoryError(f"{error}\n{advice_for(spec, folder, capacity)}") from error
        known = explain(error)
        if known:
            error.add_note(f"{type(error).__name__} means: {known.sentence}")
        raise


def _require_shared_folder(output: str, folder: RunFolder, processes: Processes) -> None:
    """Raises ValueError if the processes see different folders."""
    if processes.world_size == 1:
        return
    # A new file name each time: a network file system may cache for seconds that an old name did not exist.
    mark = folder.root / processes.on_main(lambda: f".shared-{uuid4().hex}")
    if processes.is_main:
        mark.touch()
    processes.barrier()
    shared = processes.all_true(mark.exists())
    if processes.is_main:
        mark.unlink()
    if not shared:
        raise ValueError(
            f"output {output!r} is not the same folder for all {processes.world_size} processes, which read their "
            "checkpoints there; set output to a folder on a volume that every pod of the run mounts"
        )
