"""Several runs as one: `pyflyte run workflows/align.py align --stages align.yaml`.

# align.yaml: files of specs in order; `model: {name: run:sft}` in dpo.yaml is the model of the run named sft
stages: [sft.yaml, reward.yaml, dpo.yaml]
"""

from __future__ import annotations

from flytekit import dynamic, workflow

from strata_platform.spec.stages import Stages, models_used
from tasks.align import Aligned, check_stages, start_from, summarize
from tasks.finish import Exported
from tasks.resources import CONTROL_TASK
from workflows.finetune import finetune


# Dynamic: the stages decide how many runs there are, and which of them wait for which.
@dynamic(**CONTROL_TASK)
def run_stages(stages: Stages) -> Aligned:
    """Fine-tune stage by stage. Those that use no model of each other run side by side on a cluster."""
    by_name = {spec.name: spec for spec in stages.stages}
    done: dict[str, Exported] = {}
    for name, spec in by_name.items():
        used = list(dict.fromkeys(other for _, other in models_used(spec)))
        if used:
            records = [done[other].record for other in used]
            spec = start_from(spec=spec, before=[by_name[other] for other in used], records=records)
        done[name] = finetune(spec=spec)
    last = done[stages.stages[-1].name]
    table = summarize(stages=stages, records=[exported.record for exported in done.values()])
    return Aligned(last.model, last.report, last.record, table)


@workflow
def align(stages: Stages) -> Aligned:
    """Train, evaluate and export each stage: usually a fine-tuned model, a reward model, and a model that prefers.

    Prepared data are cached, and a stage that has finished is not trained again: the same command continues.
    """
    return run_stages(stages=check_stages(stages=stages))
