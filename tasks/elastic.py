"""How a training task runs in its pod: warm up, start the elastic agent, and make lost machines a new attempt.

Flyte's own elastic task treats a pod that receives SIGTERM as a success without outputs, and a killed worker as an
error of the user. The cluster causes both. `TrainingTask` ends such an attempt as recoverable instead; Flyte then
starts the next attempt, which continues from the last checkpoint.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from flytekit import PythonFunctionTask
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.error_handling import is_recoverable_worker_error
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from strata_platform import kept_log
from strata_platform.outcomes import PREEMPTED
from strata_platform.spec import RunSpec
from tasks.paths import directory, fetched, is_local
from tasks.runtime.metrics import startup
from tasks.runtime.process.error_explanations import MemoryKills
from tasks.runtime.process.forks import prepare_to_fork
from tasks.steps.pod_log import pod_log
from tasks.steps.train_step import (
    described,
    end_stopped_pod,
    error_files,
    prepare_pod,
    reason_of_exit,
    wait_for_main_pod,
)


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
        with pod_log(kwargs["spec"], kept_log.TRAIN, local=is_local()):
            return self._train(**kwargs)

    def _train(self, **kwargs: Any) -> Any:
        spec: RunSpec = kwargs["spec"]
        prepare_pod(spec)
        import torch.distributed as dist
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        # The agent downloads the data once for all processes of the pod.
        kwargs["data"] = FlyteDirectory(str(fetched(kwargs["data"])))
        startup.mark("data")
        # On one machine, the process is not ours alone: it may have used a GPU, or threads.
        if not is_local():
            self.task_config.start_method = "fork" if prepare_to_fork("training processes") else "spawn"
            # The collector of a fork would walk, and so copy, all that is imported.
            gc.collect()
            gc.freeze()
            startup.mark("imports before the fork")
        kills = MemoryKills()
        try:
            trained = super()._execute(**kwargs)
        except IgnoreOutputs as end:
            # A pod without rank 0 also succeeds with this exception. Its context tells a signal from a success.
            if isinstance(end.__context__, SignalException):
                _stopped(f"the pod was stopped by {signal.Signals(end.__context__.sigval).name}", end)
            if not is_local():
                wait_for_main_pod()
                # If this pod was stopped for a reason of its own, exit code 0 would end the job as a success.
                raise SystemExit(PREEMPTED.exit_code) from end
            raise
        except (RendezvousError, dist.DistError) as error:
            _recoverable(f"this pod lost the connection to the other pods, or never reached them: {error}", error)
        except FlyteRecoverableException as error:
            # When one process ends, the others lose their peer, and the agent reports any one of them.
            if final := _final_failure(error.__context__):
                raise final from error
            if cause := kills.sentence(spec.resources.memory):
                _recoverable(f"a process was killed: {cause}", error)
            raise
        except FlyteUserRuntimeException as error:
            if isinstance(error.value, ChildFailedError) and (why := reason_of_exit(error.value, spec, kills)):
                _recoverable(why, error)
            raise
        finally:
            # What stays frozen, Triton's bindings call leaked when the process ends.
            gc.unfreeze()
        try:
            # Its processes are gone, so the GPUs are idle while the store is waited for.
            return trained._replace(weights=directory(trained.weights.path))
        except SignalException as end:
            _stopped(f"the pod was stopped by {signal.Signals(end.sigval).name} before its weights were stored", end)


def _final_failure(reported: BaseException | None) -> FlyteUserRuntimeException | None:
    """The first error in this pod that another attempt cannot mend; `reported` is the one that the agent raised."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not isinstance(reported, ChildFailedError):
        return None
    for failure in error_files(reported):
        if not is_recoverable_worker_error(failure):
            # Flyte shows the error with the earliest timestamp of all pods.
            return FlyteUserRuntimeException(RuntimeError(described(failure)), timestamp=failure.timestamp)
    return None


def _stopped(reason: str, cause: BaseException) -> NoReturn:
    """End a pod that received SIGTERM."""
    if is_local():
        # pyflyte prints the traceback of each cause: after Ctrl-C, 120 lines that end in the one that matters.
        _recoverable(reason, None)
    raise end_stopped_pod(reason, cause)


def _recoverable(reason: str, cause: BaseException | None) -> NoReturn:
    advice = "run the same command again to continue" if is_local() else "the next attempt continues"
    raise FlyteRecoverableException(f"{reason}; {advice} from the last checkpoint") from cause


TaskPlugins.register_pythontask_plugin(Training, TrainingTask)
