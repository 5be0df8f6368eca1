"""How a training task runs in its pod: warm up, start the elastic agent, and make lost machines a new attempt.

Flyte's own elastic task treats a pod that receives SIGTERM as a success without outputs, and a killed worker as an
error of the user. The cluster causes both. `TrainingTask` ends such an attempt as recoverable instead; Flyte then
starts the next attempt, which continues from the last checkpoint.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flytekit import PythonFunctionTask
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.error_handling import is_recoverable_worker_error
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from strata_platform.outcomes import PREEMPTED, outcome_of_exit
from strata_platform.runs import Stage
from strata_platform.spec import RunSpec
from tasks.paths import directory, is_local
from tasks.runtime.metrics import startup
from tasks.runtime.metrics.progress import report_progress
from tasks.runtime.process.error_explanations import MemoryKills
from tasks.runtime.process.imports import uncollected
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import Preempted, raise_on_sigterm
from tasks.runtime.run_folder.folder import RunFolder

log = logging.getLogger(__name__)


@dataclass
class Training(Elastic):
    """Task configuration of a training task: torch elastic, with Strata's launch around it.

    The task that calls this one requests shared memory per run. The plugin's own option would change a pod template
    that all tasks share.
    """

    increase_shared_mem: bool = False


class TrainingTask(PytorchElasticFunctionTask):
    """An elastic task whose function takes the run spec as its input `spec`."""

    def __init__(self, task_config: Training, task_function: Callable[..., Any], **options: Any) -> None:
        # Without the plugin's own constructor, which imports torch to read `nnodes`: a pod that only starts training
        # makes this task, too.
        task_type = self._ELASTIC_TASK_TYPE_STANDALONE if task_config.nnodes == 1 else self._ELASTIC_TASK_TYPE
        PythonFunctionTask.__init__(self, task_config, task_function, task_type, task_type_version=1, **options)
        self.min_nodes = self.max_nodes = int(task_config.nnodes)
        self.rdzv_backend = "c10d"

    def _execute(self, **kwargs: Any) -> Any:
        startup.mark_pod()
        # Imported here: tasks that only wire or prepare load this module, too, and torch takes seconds to import.
        with uncollected():
            import torch.distributed as dist
            from torch.distributed.elastic.multiprocessing.api import SignalException
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
            from torch.distributed.elastic.rendezvous import RendezvousError

            from tasks.runtime.warmup.pod import warm_up_pod

        spec: RunSpec = kwargs["spec"]
        configure_logging()
        startup.mark("imports")
        report_progress(stage=Stage.WARM_UP)
        folder = RunFolder.of(spec)
        warm_up_pod(spec, folder)
        startup.mark("warm-up")
        # The agent downloads the data once for all processes of the pod.
        kwargs["data"] = FlyteDirectory(kwargs["data"].download())
        startup.mark("data")
        kills = MemoryKills()
        try:
            trained = super()._execute(**kwargs)
        except IgnoreOutputs as end:
            # A pod without rank 0 also succeeds with this exception. Its context tells a signal from a success.
            if isinstance(end.__context__, SignalException):
                _stopped(f"the pod was told to stop by {signal.Signals(end.__context__.sigval).name}", end)
            if not is_local():
                wait_for_main_pod()
                # If this pod was stopped for a reason of its own, exit code 0 would end the job as a success.
                raise SystemExit(PREEMPTED.exit_code) from end
            raise
        except (RendezvousError, dist.DistError) as error:
            _recoverable(f"this pod lost the others, or never found them: {error}", error)
        except FlyteRecoverableException as error:
            # When one process ends, the others lose their peer, and the agent reports any one of them.
            if final := _final_failure(error.__context__):
                raise final from error
            if cause := kills.sentence(spec.resources.memory):
                _recoverable(f"a process was killed: {cause}", error)
            raise
        except FlyteUserRuntimeException as error:
            if isinstance(error.value, ChildFailedError):
                rank, failure = error.value.get_first_failure()
                outcome = outcome_of_exit(failure.exitcode)
                if outcome.kind == "hung":
                    _recoverable(f"{outcome.message}; stacks of its processes: {folder.hangs}", error)
                if outcome.retryable:
                    cause = kills.sentence(spec.resources.memory) if failure.exitcode == -signal.SIGKILL else None
                    _recoverable(f"rank {rank}: {cause or outcome.sentence}", error)
            raise
        try:
            # Its processes are gone, so the GPUs are idle while the store is waited for.
            return trained._replace(weights=directory(trained.weights.path))
        except SignalException as end:
            _stopped(
                f"the pod was told to stop by {signal.Signals(end.sigval).name} before its weights were stored", end
            )


def _final_failure(reported: BaseException | None) -> FlyteUserRuntimeException | None:
    """The first error in this pod that another attempt cannot mend; `reported` is the one that the agent raised.

    The agent polls its processes every second and reports the lowest rank among those that have ended by then,
    which is not always the one that ended first.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    if not isinstance(reported, ChildFailedError):
        return None
    # The agent keeps a folder for each process, named by its local rank.
    files = Path(reported.get_first_failure()[1].error_file).parents[1].glob("*/error.json")
    failures = [ProcessFailure(int(file.parent.name), pid=0, exitcode=1, error_file=str(file)) for file in files]
    final = [failure for failure in failures if not is_recoverable_worker_error(failure)]
    if not final:
        return None
    first = min(final, key=lambda failure: failure.timestamp)
    message = first.error_file_data["message"]
    text = f"process {first.local_rank} of this pod: {message['message']}\n{message['extraInfo']['py_callstack']}"
    # Flyte shows the error with the earliest timestamp of all pods.
    return FlyteUserRuntimeException(RuntimeError(text), timestamp=first.timestamp)


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


def _stopped(reason: str, cause: BaseException) -> NoReturn:
    """End a pod that received SIGTERM.

    On a cluster the pod ends without Flyte's error file. A job that Kueue suspends and resumes stays in its attempt; an
    error file of its earlier pods would make Flyte fail the attempt after it succeeded. Flyte notices a failed pod
    without the file, too.
    """
    if is_local():
        _recoverable(reason, cause)
    log.warning("%s; the next pod continues from the last checkpoint", reason)
    raise SystemExit(PREEMPTED.exit_code) from cause


def _recoverable(reason: str, cause: BaseException) -> NoReturn:
    advice = "run the same command again to continue" if is_local() else "the next attempt continues"
    raise FlyteRecoverableException(f"{reason}; {advice} from the last checkpoint") from cause


TaskPlugins.register_pythontask_plugin(Training, TrainingTask)
