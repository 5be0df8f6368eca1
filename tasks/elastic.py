"""How a training task runs in its pod: warm up, start the elastic agent, turn the end of a machine into a new attempt.

Flyte's own elastic task calls a pod that is told to stop a success without outputs, and a worker that is killed an
error of the user. Both are the cluster's doing: here they end the attempt as recoverable, so that Flyte starts the next
one, which continues from the last checkpoint.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.error_handling import is_recoverable_worker_error
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from strata_platform.runs import Stage
from strata_platform.spec import RunSpec
from tasks.paths import directory, is_local
from tasks.runtime.metrics.progress import tell
from tasks.runtime.process.exit_codes import EXIT_PREEMPTED, MemoryKills, describe_exit
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import Preempted, raise_on_sigterm
from tasks.runtime.process.watchdog import EXIT_HUNG
from tasks.runtime.run_folder.folder import RunFolder

log = logging.getLogger(__name__)


@dataclass
class Training(Elastic):
    """Task configuration of a training task: torch elastic, with Strata's launch around it.

    Shared memory is asked for per run by the task that calls this one; the plugin's own way changes a pod template that
    all tasks share.
    """

    increase_shared_mem: bool = False


class TrainingTask(PytorchElasticFunctionTask):
    """An elastic task whose function takes the run spec as its input `spec`."""

    def _execute(self, **kwargs: Any) -> Any:
        # Here, because tasks that only wire or prepare load this module, too, and torch takes seconds.
        import torch.distributed as dist
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        from tasks.runtime.warmup.pod import warm_up_pod

        spec: RunSpec = kwargs["spec"]
        configure_logging()
        tell(stage=Stage.WARM_UP)
        warm_up_pod(spec, RunFolder.of(spec))
        # Once for the pod, not once for each of its processes.
        kwargs["data"] = FlyteDirectory(kwargs["data"].download())
        kills = MemoryKills()
        try:
            trained = super()._execute(**kwargs)
        except IgnoreOutputs as end:
            # Also how a node without rank 0 ends well; a signal is told by what the plugin was handling.
            if isinstance(end.__context__, SignalException):
                _stopped(f"the pod was told to stop: {describe_exit(-end.__context__.sigval)}", end)
            if not is_local():
                outlive_main_pod()
                # Were this pod told to stop for a reason of its own, a good end would end the job.
                raise SystemExit(EXIT_PREEMPTED) from end
            raise
        except (RendezvousError, dist.DistError) as error:
            _recoverable(f"this pod lost the others, or never found them: {error}", error)
        except FlyteRecoverableException as error:
            # Where one process ends the others lose it, and the agent tells of any one of them.
            if mistake := _mistake(error.__context__):
                raise mistake from error
            if how := kills.sentence(spec.resources.memory):
                _recoverable(f"a process was killed: {how}", error)
            raise
        except FlyteUserRuntimeException as error:
            if isinstance(error.value, ChildFailedError):
                rank, failure = error.value.get_first_failure()
                if failure.exitcode == EXIT_HUNG:
                    _recoverable(f"training hung; the stacks of its processes are in {RunFolder.of(spec).hangs}", error)
                if failure.exitcode < 0:
                    how = describe_exit(failure.exitcode)
                    if failure.exitcode == -signal.SIGKILL:
                        how = kills.sentence(spec.resources.memory) or how
                    _recoverable(f"rank {rank} was killed: {how}", error)
            raise
        return trained._replace(weights=directory(trained.weights.path))


def _mistake(told: BaseException | None) -> FlyteUserRuntimeException | None:
    """The first error in this pod that another attempt cannot mend, beside the one that the agent has `told` of.

    It looks at its processes every few seconds, and tells of the first by rank of those that have ended by then.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    if not isinstance(told, ChildFailedError):
        return None
    # A folder for each process, by its rank in the pod.
    files = Path(told.get_first_failure()[1].error_file).parents[1].glob("*/error.json")
    failures = [ProcessFailure(int(file.parent.name), pid=0, exitcode=1, error_file=str(file)) for file in files]
    final = [failure for failure in failures if not is_recoverable_worker_error(failure)]
    if not final:
        return None
    first = min(final, key=lambda failure: failure.timestamp)
    said = first.error_file_data["message"]
    text = f"process {first.local_rank} of this pod: {said['message']}\n{said['extraInfo']['py_callstack']}"
    # Of several pods Flyte takes the first one's word.
    return FlyteUserRuntimeException(RuntimeError(text), timestamp=first.timestamp)


def outlive_main_pod() -> None:
    """Return when the cluster stops this pod, whose work is done.

    A job of several pods is a success, and its pods are removed, when the first of them ends well. The pod of rank 0
    still has the weights to upload then, and must be that first one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    log.info("this pod is done; it waits for the pod of rank 0, which hands on the weights")
    try:
        with raise_on_sigterm():
            while True:
                signal.pause()
    # The agent leaves a handler of its own behind, which may be the one that is called.
    except (Preempted, SignalException):
        return


def _stopped(reason: str, cause: BaseException) -> NoReturn:
    """End a pod that was told to stop.

    In a cluster without Flyte's error file: a job that is suspended and resumed stays in its attempt, and Flyte would
    call it failed, once it has succeeded, for the file that its earlier pods left there. A pod that fails is known to
    Flyte without one.
    """
    if is_local():
        _recoverable(reason, cause)
    log.warning("%s; what comes next continues from the last checkpoint", reason)
    raise SystemExit(EXIT_PREEMPTED) from cause


def _recoverable(reason: str, cause: BaseException) -> NoReturn:
    advice = "run the same command again to continue" if is_local() else "the next attempt continues"
    raise FlyteRecoverableException(f"{reason}; {advice} from the last checkpoint") from cause


TaskPlugins.register_pythontask_plugin(Training, TrainingTask)
