"""Train in one process of a job, and what the first process of each pod needs around the elastic agent."""

from __future__ import annotations

import json
import logging
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from strata_platform import pod_settings
from strata_platform.file_io import write_atomic
from strata_platform.outcomes import PREEMPTED, outcome_of_exit
from strata_platform.pod_settings import STOP_SECONDS
from strata_platform.runs import Stage
from strata_platform.spec import RunSpec
from tasks.runtime.metrics import startup
from tasks.runtime.metrics.progress import report_progress
from tasks.runtime.process import forks
from tasks.runtime.process.error_explanations import MemoryKills, reason_to_retry
from tasks.runtime.process.errors import is_final
from tasks.runtime.process.imports import uncollected
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import Preempted, die_with_agent, raise_on_sigterm
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps.retry import Retry

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

log = logging.getLogger(__name__)

# Restarts of a pod's processes before the attempt fails. A new process takes seconds, a new pod minutes.
MAX_RESTARTS = 2
# Seconds between two looks of the agent at its processes. torch's 5 s are lost at the end of each run.
MONITOR_SECONDS = 1
# Without read_timeout a slow first pod breaks the rendezvous of the others.
RENDEZVOUS = {"timeout": 900, "join_timeout": 900, "read_timeout": 900}
ENVIRONMENT = {
    **pod_settings.ENVIRONMENT,
    **forks.ENVIRONMENT,
    # torch 2.11 ignores the variable and gives workers 30 s.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(STOP_SECONDS),
}


# Beside the error file of a process whose error no other start mends.
_FINAL = "final.json"


class Trained(NamedTuple):
    """The completion record of a run, and the folder of its weights; both of rank 0 are those of the run."""

    record: CompletionRecord
    weights: Path


def train(spec: RunSpec, data: Path) -> Trained:
    """Train in one process of the job, which an elastic agent has started.

    Raises Retry if another attempt may succeed.
    """
    configure_logging()
    # Before torch is imported: an agent that is killed meanwhile would leave this process behind.
    die_with_agent()
    startup.mark_process()
    with _final_errors():
        return _train(spec, data)


def _train(spec: RunSpec, data: Path) -> Trained:
    with uncollected():
        import torch

        from tasks.runtime.data import open_prepared
        from tasks.runtime.models.trained_weights import collect_weights
        from tasks.runtime.training.session import session
        from tasks.runtime.training.train import train

    if threads := os.environ.get("OMP_NUM_THREADS"):
        # A fork got torch from its agent, which sets the variable later.
        torch.set_num_threads(int(threads.partition(",")[0]))
    try:
        with session(spec) as run:
            record = train(run, open_prepared(data, spec.data))
            weights = collect_weights(run.folder, spec.adapter, record) if run.processes.is_main else run.folder.root
    except Preempted as signal_name:
        raise Retry(f"stopped by {signal_name} before the last step") from signal_name
    except (RuntimeError, OSError) as error:
        meaning = reason_to_retry(error, spec.topology.world_size)
        if meaning is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise Retry(f"{meaning}: {error}") from error
    return Trained(record, weights)


class _EarlierTraceback(Exception):
    """The traceback of an error in a process that is gone."""


@contextmanager
def _final_errors() -> Iterator[None]:
    """End a process at once if one of this pod has ended before, on its way to training, with an error that no other
    start mends.

    The agent does not tell errors apart: it starts the processes `MAX_RESTARTS` times again, each of which would load
    or wait for minutes first. In training, a process that loses its peers may end with any error.
    """
    # <folder>/attempt_<restarts>/<local rank>/error.json.
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        yield
        return
    for earlier in sorted(Path(error_file).parents[2].glob(f"attempt_*/*/{_FINAL}")):
        message, details = json.loads(earlier.read_text(encoding="utf-8"))
        raise ValueError(message) from _EarlierTraceback(details)
    try:
        yield
    except Exception as error:
        if is_final(error) and not startup.passed("model"):
            message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            noted = json.dumps([message, traceback.format_exc()]).encode()
            try:
                write_atomic(Path(error_file).with_name(_FINAL), noted, durable=False)
            except OSError as problem:
                log.warning(
                    "the error cannot be recorded (%s), so the agent's restarts will fail with it again", problem
                )
        raise


def prepare_pod(spec: RunSpec) -> None:
    """Load what training needs and warm up its kernels, once for all processes of a pod."""
    # Imported here: tasks that only wire or prepare load this module, too, and torch takes seconds to import.
    with uncollected():
        from tasks.runtime.warmup.pod import warm_up_pod

    configure_logging()
    startup.mark("imports")
    report_progress(stage=Stage.WARM_UP)
    warm_up_pod(spec, RunFolder.of(spec))
    startup.mark("warm-up")


def error_files(reported: ChildFailedError) -> list[ProcessFailure]:
    """The exceptions that processes of this pod ended with, the first one first; each has its local rank.

    The agent polls its processes every second and reports the lowest rank among those that have ended by then,
    which is not always the one that ended first.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    # The agent keeps a folder for each process, named by its local rank. Of a process that was killed it says no file.
    files = Path(reported.get_first_failure()[1].error_file).parents[1].glob("*/error.json")
    failures = [ProcessFailure(int(file.parent.name), pid=0, exitcode=1, error_file=str(file)) for file in files]
    return sorted(failures, key=lambda failure: failure.timestamp)


def described(failure: ProcessFailure) -> str:
    """The exception in an error file, with its traceback."""
    message = failure.error_file_data["message"]
    return f"process {failure.local_rank} of this pod: {message['message']}\n{message['extraInfo']['py_callstack']}"


def reason_of_exit(reported: ChildFailedError, spec: RunSpec, kills: MemoryKills) -> str | None:
    """Why another attempt may succeed after the end that the agent reports, by its exit code; None if it cannot."""
    rank, failure = reported.get_first_failure()
    outcome = outcome_of_exit(failure.exitcode)
    if outcome.kind == "hung":
        return f"{outcome.message}; stacks of its processes: {RunFolder.of(spec).hangs}"
    if not outcome.retryable:
        return None
    cause = kills.sentence(spec.resources.memory) if failure.exitcode == -signal.SIGKILL else None
    return f"rank {rank}: {cause or outcome.sentence}"


def wait_for_main_pod() -> None:
    """Wait until the cluster stops this pod, whose work is done.

    The training operator calls a job a success, and removes its pods, as soon as one pod succeeds. The pod of rank 0
    must be that one: it still has to upload the weights.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    log.info("this pod is done; it waits for the pod of rank 0, which uploads the weights")
    try:
        with raise_on_sigterm():
            while True:
                signal.pause()
    # The agent leaves its own signal handler behind, which may run instead.
    except (Preempted, SignalException):
        return


def end_stopped_pod(reason: str, cause: BaseException) -> SystemExit:
    """The end of a pod on a cluster that received SIGTERM, to be raised.

    It ends without Flyte's error file. A job that Kueue suspends and resumes stays in its attempt; an error file of its
    earlier pods would make Flyte fail the attempt after it succeeded. Flyte notices a failed pod without the file, too.
    """
    log.warning("%s; the next pod continues from the last checkpoint", reason)
    end = SystemExit(PREEMPTED.exit_code)
    end.__cause__ = cause
    return end
