"""Flyte tasks that prepare the data of a run; the steps are in `tasks.steps.prepare_step`."""

from __future__ import annotations

import os
from typing import NamedTuple

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from strata_platform import kept_log
from strata_platform.spec import DataRecipe, RunSpec
from tasks.attempts import retried_by_flyte
from tasks.paths import directory, fetched, is_local, is_stored
from tasks.resources import CONTROL_TASK, PREPARE_TASK
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder import format_versions
from tasks.runtime.run_folder.folder import data_folder
from tasks.runtime.run_folder.kept_logs import copy_preparation_logs
from tasks.steps import prepare_step as steps
from tasks.steps.pod_log import pod_log
from tasks.steps.prepare_step import Planned
from tasks.topology import task_for

# Flyte's local cache remembers paths that may no longer exist; the output folder keeps prepared data itself.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")


class Prepared(NamedTuple):
    """The folder of prepared data, and shares of its parts that are left to prepare, as `source:first-last`."""

    data: FlyteDirectory
    shares: list[str]


def plan(spec: RunSpec) -> Planned:
    """Reject a run that cannot work before it costs anything, and identify its data by content."""
    configure_logging()
    task_for(spec.topology)
    return steps.plan(spec, local=is_local())


@task(**PREPARE_TASK, cache=Cache(version=str(format_versions.DATA), ignored_inputs=("output", "spec")))
def prepare(recipe: DataRecipe, output: str, url: str, spec: RunSpec) -> Prepared:
    """Tokenize and pack; with a URL only plan it. Flyte caches the result by the recipe, so runs with it share it.

    spec: the run that has it prepared, where this pod's log is kept. The result does not depend on it.
    """
    configure_logging()
    with pod_log(spec, kept_log.PREPARE, local=is_local(), data=data_folder(output, recipe)):
        with retried_by_flyte():
            folder, shares = steps.prepare(recipe, output, url)
        data = directory(folder)
        if not url and not is_local():
            steps.note_stored(folder, str(data.remote_source))
        return Prepared(data, shares)


def found(planned: Planned, spec: RunSpec) -> FlyteDirectory | None:
    """Prepared data that an earlier run with this recipe and output folder stored, if they are still there."""
    if is_local():
        return None
    address = steps.stored_data(planned)
    if address is not None and not is_stored(address):
        address = None
    steps.log_data_source(planned, address)
    if address or planned.url:
        copy_preparation_logs(spec, data_folder(planned.output, planned.recipe))
    return FlyteDirectory.from_source(address) if address else None


@task(**PREPARE_TASK)
def prepare_share(data: FlyteDirectory, share: str, spec: RunSpec) -> int:
    """Prepare a range of parts, without those that are done, and write them to the store. Returns their number."""
    configure_logging()
    with pod_log(spec, kept_log.PREPARE, local=is_local()), retried_by_flyte():
        return steps.prepare_share(fetched(data), share)


@task(**CONTROL_TASK)
def complete(data: FlyteDirectory, prepared: list[int], spec: RunSpec) -> FlyteDirectory:
    """Write the manifests after all parts. `prepared` only makes Flyte wait for them."""
    configure_logging()
    with pod_log(spec, kept_log.PREPARE, local=is_local()):
        folder = fetched(data)
        with retried_by_flyte():
            steps.complete(folder)
        return directory(folder)
