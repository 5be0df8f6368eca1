"""The log of a pod of either Flyte, which is kept where its run's logs are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from strata_platform.spec import RunSpec
from tasks.runtime.run_folder.kept_logs import kept_logs


def pod_log(spec: RunSpec, task: str, *, local: bool, data: Path | None = None) -> AbstractContextManager[Any]:
    """Keep the log of the block in the run's folder, and beside the `data` that it prepares.

    task: what the pod does, as `strata_platform.kept_log` names it. local: nothing is kept; all is on this machine.
    """
    return nullcontext() if local else kept_logs(spec, task=task, data=data)
