"""Flyte tasks of stages that follow each other: check them before the first, start each from models before it, and
summarize.
"""

from __future__ import annotations

import csv
import logging
import os
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from strata_platform import kept_log
from strata_platform.spec import RunSpec
from strata_platform.spec.local_files import require_local_files
from strata_platform.spec.stages import Stages, before_its_stages, models_used, with_models
from tasks.paths import fetched, file, is_local
from tasks.resources import CONTROL_TASK
from tasks.runtime.preflight import run_checks
from tasks.runtime.process.log import configure_logging
from tasks.runtime.report.comparison import Trial, render_comparison
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps.pod_log import pod_log

log = logging.getLogger(__name__)


class Aligned(NamedTuple):
    """The outputs of all stages: the last one's model, report and record, and a table of all."""

    model: FlyteDirectory
    report: FlyteFile
    record: FlyteFile
    table: FlyteFile


@task(**CONTROL_TASK)
def check_stages(stages: Stages) -> Stages:
    """Reject stages that cannot work before the first one costs anything.

    The models of earlier stages do not exist yet: a stage is checked with the model that they begin with, and without
    their reward models. The log of each check is kept in the folder of its stage.

    Raises:
        ValueError: as `tasks.prepare.plan`, of any stage; or, on a cluster, the stages share no volume.
    """
    configure_logging()
    stages.require_order()
    bases: dict[str, str] = {}
    for spec in stages.stages:
        with pod_log(spec, kept_log.PLAN, local=is_local()):
            bases[spec.name] = _check_stage(spec, bases)
    log.info("stages: %s", ", ".join(f"{spec.name} ({spec.objective.type})" for spec in stages.stages))
    return stages


def _check_stage(spec: RunSpec, bases: dict[str, str]) -> str:
    """The model that a stage begins with. bases: those of the stages before."""
    used = list(models_used(spec))
    if used and not is_local() and not os.path.isabs(spec.output):
        raise ValueError(
            f"output {spec.output!r} is a folder inside each pod, but {used[0][0]} of stage {spec.name!r} is the "
            "model of another pod; set output to a folder on a volume that all pods of the stages mount"
        )
    try:
        checked = before_its_stages(spec, bases)
        require_local_files(checked)
        run_checks("plan", "spec", spec=checked)
    except ValueError as error:
        raise ValueError(f"stage {spec.name!r}: {error}") from error
    return checked.model.name


@task(**CONTROL_TASK)
def start_from(spec: RunSpec, before: list[RunSpec], records: list[FlyteFile]) -> RunSpec:
    """The spec of a stage with the exported models of the stages that it uses.

    before, records: these stages and the records of their runs, which Flyte waits for.

    Raises:
        ValueError: a model is not where its run has left it.
    """
    configure_logging()
    models: dict[str, str] = {}
    for stage, record in zip(before, records, strict=True):
        CompletionRecord.load(fetched(record)).require_complete()
        folder = RunFolder.of(stage).model
        if not folder.is_dir():
            raise ValueError(
                f"{folder}: stage {spec.name!r} starts from the model of stage {stage.name!r}, which does not exist; "
                "set output to a folder on a volume that all pods of the stages mount"
            )
        models[stage.name] = str(folder)
        log.info("stage %s: run:%s is %s", spec.name, stage.name, folder)
    return with_models(spec, models)


@task(**CONTROL_TASK, enable_deck=True, deck_fields=())
def summarize(stages: Stages, records: list[FlyteFile]) -> FlyteFile:
    """Write a table of all stages to the folder of the last one, which is also the task's Deck."""
    configure_logging()
    specs = stages.stages
    trials = [
        Trial(spec.name, (spec.objective.type, spec.model.name), CompletionRecord.load(fetched(record)))
        for spec, record in zip(specs, records, strict=True)
    ]
    fields = ("objective", "model")
    table = RunFolder.of(specs[-1]).root / "stages.csv"
    with table.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(["stage", *fields, *Trial.MEASURED])
        writer.writerows([trial.name, *trial.values, *trial.measured()] for trial in trials)
    Deck("Stages", render_comparison(specs[-1].name, fields, trials))
    return file(table)
