"""Fine-tune a language model: `pyflyte run workflows/finetune.py finetune [--spec my.yaml]`."""

from __future__ import annotations

from flytekit import workflow

from strata_platform.spec import RunSpec
from tasks.evaluate import evaluate
from tasks.export import Exported, export
from tasks.prepare import plan, prepare
from tasks.train import train

DEFAULT = RunSpec()


@workflow
def finetune(spec: RunSpec = DEFAULT) -> Exported:
    """Prepare the data, train, evaluate before and after, export.

    `spec` is a YAML or JSON file. Without one a small Llama learns to write docstrings from Python's standard library.
    """
    planned = plan(spec=spec)
    data = prepare(recipe=planned.recipe, output=planned.output)
    trained = train(spec=spec, data=data)
    record = evaluate(spec=spec, record=trained.record, weights=trained.weights, data=data)
    return export(spec=spec, record=record, weights=trained.weights, data=data)
