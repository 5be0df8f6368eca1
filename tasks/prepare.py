"""Flyte tasks: what data a run reads, and its preparation."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from strata_platform.spec import DataRecipe, RunSpec
from tasks.attempts import awaiting_hub
from tasks.paths import directory, is_local
from tasks.resources import PREPARE, SMALL
from tasks.runtime.preflight import run_checks
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder import format_versions
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.topology import task_for

log = logging.getLogger(__name__)


# Flyte's local cache remembers paths that may be gone tomorrow; prepared data has its own place in the output folder.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")


class Planned(NamedTuple):
    """What the data step reads, and the folder of the run."""

    recipe: DataRecipe
    output: str


@task(**SMALL)
def plan(spec: RunSpec) -> Planned:
    """Refuse what cannot run before anything is spent on it, and name the data by its contents."""
    configure_logging()
    from tasks.runtime.data import recipe_of

    task_for(spec.topology)
    run_checks("plan", "spec", spec=spec)
    if not is_local():
        _check_pods(spec)
    return Planned(recipe_of(spec, RunFolder.of(spec).data_commit_for(spec)), spec.output)


def _check_pods(spec: RunSpec) -> None:
    """What one machine has anyway, and pods must be given."""
    if spec.resources.gpu == 0 and spec.topology.nproc_per_node > 1:
        log.warning(
            "resources.gpu is 0: the %d processes of each pod train on its CPU; set resources.gpu to %d for a GPU each",
            spec.topology.nproc_per_node,
            spec.topology.nproc_per_node,
        )
    if os.path.isabs(spec.output):
        return
    if spec.topology.nnodes > 1:
        raise ValueError(
            f"output {spec.output!r} is a folder inside each pod, but topology.nnodes {spec.topology.nnodes} pods "
            "share their checkpoints; set output to a folder on a volume that all pods of the run mount"
        )
    log.warning(
        "output %r is a folder inside each pod: checkpoints end with the pod, and a new attempt starts from step "
        "0; set output to a folder on a volume that all pods of the run mount",
        spec.output,
    )


@task(**PREPARE, cache=Cache(version=str(format_versions.DATA), ignored_inputs=("output",)))
def prepare(recipe: DataRecipe, output: str) -> FlyteDirectory:
    """Tokenise and pack. Cached by the recipe: runs that differ elsewhere share the result."""
    configure_logging()
    from tasks.runtime.data import prepare

    folder = data_folder(output, recipe)
    with awaiting_hub():
        prepare(recipe, folder, report=log.info)
    return directory(folder)
