"""Does this model train right? `pyflyte run workflows/verify.py verify --spec my.yaml`, before it trains for long."""

from __future__ import annotations

from flytekit import dynamic, workflow

from strata_platform.spec import RunSpec
from tasks.resources import CONTROL_TASK, overrides, with_scheduling
from tasks.verify import verify as check

DEFAULT = RunSpec()


@workflow
def verify(spec: RunSpec = DEFAULT) -> str:
    """Do all checks of `strata verify` on a node of the kind that will train; the report as JSON.

    The execution fails, and is not tried again, when a check fails.
    """
    return verify_as_trained(spec=spec)


# Dynamic, because a task's resources are fixed when it is registered, and the spec's are known only now.
@dynamic(**CONTROL_TASK)
def verify_as_trained(spec: RunSpec) -> str:
    """With the resources, the queue and the pod template of the spec's pods."""
    return with_scheduling(check, spec.resources)(spec=spec).with_overrides(**overrides(spec.resources))
