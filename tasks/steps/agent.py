"""The first process of a pod that trains: warm up, start the pod's training processes under an elastic agent.

`tasks.elastic` has the agent of Flyte 1 in its place, which is flytekit's.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from strata_platform.outcomes import PREEMPTED
from strata_platform.spec import RunSpec
from tasks.runtime.process.error_explanations import MemoryKills
from tasks.steps.retry import Retry
from tasks.steps.train_step import (
    MAX_RESTARTS,
    MONITOR_SECONDS,
    RENDEZVOUS,
    Trained,
    described,
    end_stopped_pod,
    error_files,
    prepare_pod,
    reason_of_exit,
    train,
    wait_for_main_pod,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ENDPOINT = "PET_RDZV_ENDPOINT"
"""Environment variable with the address of the rendezvous, which the training operator sets in pods of a job."""


def train_in_pod(spec: RunSpec, data: Path, before_end: Callable[[], object] | None = None) -> Trained:
    """Train in all processes of this pod and return what rank 0 returns. before_end: called when SIGTERM ends it.

    Raises:
        Retry: another attempt may succeed.
        RuntimeError: none can; the error of the process that failed first.
        SystemExit: the pod was told to stop, or its work is done and rank 0 is in another pod.
    """
    end_on_sigterm(before_end)
    prepare_pod(spec)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    topology = spec.topology
    config = LaunchConfig(
        min_nodes=topology.nnodes,
        max_nodes=topology.nnodes,
        nproc_per_node=topology.nproc_per_node,
        run_id=spec.name,
        rdzv_backend="c10d",
        rdzv_endpoint=os.environ.get(ENDPOINT, "localhost:0"),
        rdzv_configs=dict(RENDEZVOUS),
        max_restarts=MAX_RESTARTS,
        monitor_interval=MONITOR_SECONDS,
        start_method="spawn",
    )
    kills = MemoryKills()
    try:
        results: dict[int, Trained] = elastic_launch(config, train)(spec, data)
    except SignalException as end:
        raise end_stopped_pod(f"the pod was stopped by {signal.Signals(end.sigval).name}", end) from end
    except (RendezvousError, DistError) as error:
        raise Retry(f"this pod lost the connection to the other pods, or never reached them: {error}") from error
    except ChildFailedError as error:
        raise _failure(error, spec, kills) from error
    finally:
        # The agent leaves a handler behind that raises wherever this process is, such as in an upload.
        end_on_sigterm(before_end)
    if 0 not in results:
        wait_for_main_pod()
        # If this pod was stopped for a reason of its own, exit code 0 would end the job as a success.
        raise SystemExit(PREEMPTED.exit_code)
    return results[0]


def end_on_sigterm(before_end: Callable[[], object] | None) -> None:
    """End this process on SIGTERM, which the first process of a container ignores by default."""

    def end(number: int, frame: FrameType | None) -> None:
        if before_end is not None:
            before_end()
        os._exit(PREEMPTED.exit_code)

    # Where tasks run in another thread, on one machine, the process has a user at its keyboard.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


def _failure(reported: ChildFailedError, spec: RunSpec, kills: MemoryKills) -> RuntimeError:
    """What ended this pod's processes. The first error that no attempt can mend counts: other processes lost a peer."""
    written = error_files(reported)
    for failure in written:
        if not failure.error_file_data["message"]["message"].startswith(f"{Retry.__name__}: "):
            return RuntimeError(described(failure))
    if cause := kills.sentence(spec.resources.memory):
        return Retry(f"a process was killed: {cause}")
    if why := reason_of_exit(reported, spec, kills):
        return Retry(why)
    if written:
        return Retry(written[0].error_file_data["message"]["message"].removeprefix(f"{Retry.__name__}: "))
    return RuntimeError(str(reported))
