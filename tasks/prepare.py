"""Flyte tasks: what data a run reads, and its preparation."""

from __future__ import annotations

import logging
from pathlib import Path

from flytekit import Cache, Resources, current_context, task
from flytekit.types.directory import FlyteDirectory

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import FORMAT_VERSION, fingerprint
from tasks.runtime.data import prepare as prepare_data
from tasks.runtime.log import configure_logging
from tasks.topology import task_for

SMALL = Resources(cpu="1", mem="2Gi")
LARGE = Resources(cpu="4", mem="16Gi")


@task(requests=SMALL)
def plan(spec: RunSpec) -> DataRecipe:
    """Refuse what cannot run before anything is spent on it, and name the data by its contents."""
    configure_logging()
    task_for(spec.topology)
    return DataRecipe.from_spec(spec, fingerprint(spec))


@task(requests=LARGE, cache=Cache(version=FORMAT_VERSION))
def prepare(recipe: DataRecipe) -> FlyteDirectory:
    """Tokenise and pack. Cached by the recipe: runs that differ elsewhere share the result."""
    configure_logging()
    folder = Path(current_context().working_directory) / "data"
    prepare_data(recipe, folder, report=logging.getLogger(__name__).info)
    return FlyteDirectory(str(folder))
