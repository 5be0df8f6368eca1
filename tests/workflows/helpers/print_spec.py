"""A user's workflow with a spec, in a file outside of the package `workflows`."""

from flytekit import task, workflow

from strata_platform.spec import RunSpec
from workflows.finetune import DEFAULT


@task
def describe(spec: RunSpec) -> str:
    return f"name {spec.name}, lr {spec.optimizer.lr}, output {spec.output}"


@workflow
def print_spec(spec: RunSpec = DEFAULT) -> str:
    return describe(spec=spec)
