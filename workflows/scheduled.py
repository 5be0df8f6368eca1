"""A scheduled run: `pyflyte run workflows/scheduled.py scheduled --kickoff_time now --spec my.yaml` starts one now.

examples/nightly.py has the schedule.
"""

from __future__ import annotations

from datetime import datetime

from flytekit import workflow

from strata_platform.spec import RunSpec
from tasks.finish import Exported
from tasks.scheduled import announce, announce_failure, dated_spec
from workflows.finetune import finetune

DEFAULT = RunSpec(name="scheduled")


@workflow(on_failure=announce_failure)
def scheduled(kickoff_time: datetime, spec: RunSpec = DEFAULT) -> Exported:
    """The steps of `finetune` under a name with the time in it, and a message when they end."""
    run = dated_spec(spec=spec, kickoff_time=kickoff_time)
    exported = finetune(spec=run)
    announce(spec=run, record=exported.record, model=exported.model)
    return exported
