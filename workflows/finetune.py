"""Fine-tune a language model: `pyflyte run workflows/finetune.py finetune [--spec my.yaml]`."""

from __future__ import annotations

from functools import partial

from flytekit import dynamic, map_task, workflow
from flytekit.types.directory import FlyteDirectory

from strata_platform import kept_log
from strata_platform.spec import RunSpec
from tasks.finish import Exported, finish, finished
from tasks.paths import is_local
from tasks.prepare import complete, found, plan, prepare, prepare_share
from tasks.resources import CONTROL_TASK, overrides, with_scheduling
from tasks.steps.pod_log import pod_log
from tasks.topology import task_for

DEFAULT = RunSpec()


@workflow
def finetune(spec: RunSpec = DEFAULT) -> Exported:
    """Prepare the data, train, evaluate before and after, export.

    `spec` is a YAML or JSON file. Without one, a small Llama learns to write docstrings from Python's standard library.
    """
    return start(spec=spec)


# Dynamic: Flyte fixes a task's topology and resources at registration, but the spec's are known only at run time. One
# task plans, finds what is there already and starts the rest, because each pod costs seconds of imports.
@dynamic(**CONTROL_TASK, node_dependency_hints=[prepare])
def start(spec: RunSpec) -> Exported:
    """Plan the run and start what is left of it: nothing, if it has finished before."""
    with pod_log(spec, kept_log.PLAN, local=is_local()):
        planned = plan(spec)
        if (outputs := finished(spec, planned.recipe)) is not None:
            return outputs
        data = found(planned, spec)
    if data is None:
        prepared = prepare(recipe=planned.recipe, output=planned.output, url=planned.url, spec=spec)
        if planned.url:
            return train_on_parts(spec=spec, data=prepared.data, shares=prepared.shares)
        data = prepared.data
    return _train_and_finish(spec, read=data, data=data)


@dynamic(**CONTROL_TASK)
def train_on_parts(spec: RunSpec, data: FlyteDirectory, shares: list[str]) -> Exported:
    """Prepare what is left of large data in as many pods as it takes, and train.

    With streaming, training does not wait for the parts: it finds them in the store.
    """
    completed = data
    if shares:
        counts = map_task(partial(prepare_share, data=data, spec=spec))(share=shares)
        completed = complete(data=data, prepared=counts, spec=spec)
    return _train_and_finish(spec, read=data if spec.data.streaming else completed, data=completed)


def _train_and_finish(spec: RunSpec, *, read: FlyteDirectory, data: FlyteDirectory) -> Exported:
    """The part of a workflow that uses the topology and the resources of the spec. `read`: what training reads."""
    asked = spec.resources
    train = with_scheduling(task_for(spec.topology), asked, trains=True)
    trained = train(spec=spec, data=read).with_overrides(**overrides(asked))
    last = with_scheduling(finish, asked)(spec=spec, record=trained.record, weights=trained.weights, data=data)
    return last.with_overrides(**overrides(asked, gpus=1))
