"""Flyte tasks: name the data that a run reads, and prepare it."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from strata_platform.spec import DataRecipe, RunSpec
from tasks.attempts import retried_by_flyte
from tasks.paths import directory, is_local
from tasks.resources import CONTROL_TASK, PREPARE_TASK
from tasks.runtime.preflight import run_checks
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder import format_versions
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.topology import task_for

log = logging.getLogger(__name__)


# Flyte's local cache remembers paths that may no longer exist; the output folder keeps prepared data itself.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")


class Planned(NamedTuple):
    """The recipe of the data, and the output folder of the run."""

    recipe: DataRecipe
    output: str


@task(**CONTROL_TASK)
def plan(spec: RunSpec) -> Planned:
    """Reject a run that cannot work before it costs anything, and identify its data by content."""
    configure_logging()
    from tasks.runtime.data import recipe_of

    task_for(spec.topology)
    run_checks("plan", "spec", spec=spec)
    if not is_local():
        _check_pods(spec)
    return Planned(recipe_of(spec, RunFolder.of(spec).data_commits_for(spec)), spec.output)


def _check_pods(spec: RunSpec) -> None:
    """Check what a single machine has anyway, but pods need: GPUs, and an output folder that outlives them."""
    if spec.resources.gpu == 0 and spec.topology.nproc_per_node > 1:
        log.warning(
            "resources.gpu is 0: the %d processes of each pod train on CPUs; set resources.gpu to %d for one GPU each",
            spec.topology.nproc_per_node,
            spec.topology.nproc_per_node,
        )
    if os.path.isabs(spec.output):
        return
    if spec.topology.nnodes > 1:
        raise ValueError(
            f"output {spec.output!r} is a folder inside each pod, but topology.nnodes {spec.topology.nnodes} pods "
            "share checkpoints; set output to a folder on a volume that all pods of the run mount"
        )
    log.warning(
        "output %r is a folder inside each pod: checkpoints vanish with the pod, and a new attempt starts from step "
        "0; set output to a folder on a volume that all pods of the run mount",
        spec.output,
    )


@task(**PREPARE_TASK, cache=Cache(version=str(format_versions.DATA), ignored_inputs=("output",)))
def prepare(recipe: DataRecipe, output: str) -> FlyteDirectory:
    """Tokenize and pack. Flyte caches the result by the recipe, so runs with the same data share it."""
    configure_logging()
    from tasks.runtime.data import prepare

    folder = data_folder(output, recipe)
    with retried_by_flyte():
        prepare(recipe, folder, report=log.info)
    return directory(folder)
