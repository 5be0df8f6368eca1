"""Fine-tune under Flyte 2: `flyte run --local workflows/flyte2/finetune.py finetune [--spec my.yaml]`."""

from __future__ import annotations

import asyncio

from flyte.io import Dir

from strata_platform import kept_log
from strata_platform.pod_settings import RETRIES
from strata_platform.spec import RunSpec
from tasks.flyte2.files import is_local
from tasks.flyte2.final_errors import final_unless_retried
from tasks.flyte2.pod_overrides import job, overrides
from tasks.flyte2.run import (
    Exported,
    Trained,
    complete,
    control,
    finish,
    finished,
    found,
    plan,
    prepare,
    prepare_share,
    train,
)
from tasks.steps.pod_log import pod_log

DEFAULT = RunSpec()


@control.task(retries=RETRIES, entrypoint=True)
async def finetune(spec: RunSpec = DEFAULT) -> Exported:
    """Prepare the data, train, evaluate before and after, export.

    `spec` is a YAML or JSON file. Without one, a small Llama learns to write docstrings from Python's standard library.
    """
    with final_unless_retried():
        asked = spec.resources
        with pod_log(spec, kept_log.PLAN, local=is_local()):
            # Also a check: a task of Flyte 2 cannot have all that a spec may ask for.
            trains, evaluates = overrides(asked, trains=True), overrides(asked, gpus=1)
            planned = await asyncio.to_thread(plan, spec)
            if (outputs := await finished(spec, planned.recipe)) is not None:
                return outputs
            data, shares = await found(planned, spec), []
        if data is None:
            data, shares = await prepare(planned.recipe, planned.output, planned.url, spec)

        async def train_on(data: Dir) -> Trained:
            return Trained(*await train.override(**trains, plugin_config=job(spec.topology))(spec, data))

        if spec.data.streaming and not is_local():
            # Training does not wait for the parts: it finds them in the store.
            trained, data = await asyncio.gather(train_on(data), _prepared(spec, data, shares))
        else:
            data = await _prepared(spec, data, shares)
            trained = await train_on(data)
        return Exported(*await finish.override(**evaluates)(spec, trained.record, trained.weights, data))


async def _prepared(spec: RunSpec, data: Dir, shares: list[str]) -> Dir:
    """The data after the shares that are left, each prepared in a pod of its own."""
    if not shares:
        return data
    await asyncio.gather(*(prepare_share(data, share, spec) for share in shares))
    return await complete(data, spec)
