"""The log of a pod of Flyte 1, which is kept where its run's logs are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from strata_platform.spec import RunSpec
from tasks.paths import is_local
from tasks.runtime.run_folder.kept_logs import kept_logs


def pod_log(spec: RunSpec, data: Path | None = None) -> AbstractContextManager[Any]:
    """Keep the log of the block in the run's folder, and beside the `data` that it prepares; not on one machine."""
    return nullcontext() if is_local() else kept_logs(spec, data=data)
