"""Fine-tune a language model: `pyflyte run workflows/finetune.py finetune [--spec my.yaml]`."""

from __future__ import annotations

from functools import partial

from flytekit import dynamic, map_task, workflow
from flytekit.types.directory import FlyteDirectory

from strata_platform.spec import RunSpec
from tasks.evaluate import evaluate
from tasks.export import Exported, export
from tasks.prepare import complete, plan, prepare, prepare_share
from tasks.resources import CONTROL_TASK, overrides, with_scheduling
from tasks.topology import task_for

DEFAULT = RunSpec()


@workflow
def finetune(spec: RunSpec = DEFAULT) -> Exported:
    """Prepare the data, train, evaluate before and after, export.

    `spec` is a YAML or JSON file. Without one, a small Llama learns to write docstrings from Python's standard library.
    """
    planned = plan(spec=spec)
    prepared = prepare(recipe=planned.recipe, output=planned.output, url=planned.url)
    return train_evaluate_export(spec=spec, data=prepared.data, shares=prepared.shares)


# Dynamic: Flyte fixes a task's topology and resources at registration, but the spec's are known only at run time.
@dynamic(**CONTROL_TASK)
def train_evaluate_export(spec: RunSpec, data: FlyteDirectory, shares: list[str]) -> Exported:
    """The part of the workflow that uses the topology and the resources of the spec, and the number of parts."""
    asked, one = spec.resources, overrides(spec.resources, gpus=1)
    planned = data
    if shares:
        data = complete(data=planned, prepared=map_task(partial(prepare_share, data=planned))(share=shares))
    # With streaming, training does not wait for the parts: it finds them in the store.
    read = planned if spec.data.streaming else data
    trained = with_scheduling(task_for(spec.topology), asked)(spec=spec, data=read).with_overrides(**overrides(asked))
    measure, write = with_scheduling(evaluate, asked), with_scheduling(export, asked)
    record = measure(spec=spec, record=trained.record, weights=trained.weights, data=data).with_overrides(**one)
    return write(spec=spec, record=record, weights=trained.weights, data=data).with_overrides(**one)
