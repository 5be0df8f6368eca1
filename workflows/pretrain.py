"""Pretrain a language model: `pyflyte run workflows/pretrain.py pretrain [--spec my.yaml]`."""

from __future__ import annotations

from flytekit import workflow

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import Pretrain
from tasks.finish import Exported
from workflows.finetune import finetune

DEFAULT = RunSpec(name="pretrain", objective=Pretrain())


@workflow
def pretrain(spec: RunSpec = DEFAULT) -> Exported:
    """Train on every token of the data, from scratch or from a pretrained model.

    The same steps as `finetune` with another default: without a spec, a small Llama learns all docstrings of Python's
    standard library.
    """
    return finetune(spec=spec)
