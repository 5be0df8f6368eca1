"""Name the data that a run reads; Flyte tasks that prepare it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from strata_platform import queue_shares
from strata_platform.file_io import write_atomic
from strata_platform.pod_settings import check_pods, require_flytes_gpus
from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.run_spec import Resources, Topology
from tasks.attempts import retried_by_flyte
from tasks.paths import directory, is_local, is_stored
from tasks.plan_checks import check_plan
from tasks.resources import CONTROL_TASK, PREPARE_TASK
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder import format_versions
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.topology import task_for

log = logging.getLogger(__name__)


# Flyte's local cache remembers paths that may no longer exist; the output folder keeps prepared data itself.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")


class Planned(NamedTuple):
    """The recipe of the data, the output folder of the run, and the object store for prepared rows or an empty text."""

    recipe: DataRecipe
    output: str
    url: str


class Prepared(NamedTuple):
    """The folder of prepared data, and shares of its parts that are left to prepare, as `source:first-last`."""

    data: FlyteDirectory
    shares: list[str]


# Parts that a pod of the map task prepares, about 2 GiB of text: fewer would cost more in starts of pods. Flyte maps
# over at most 5,000 inputs.
_SHARE = 32
_MAX_SHARES = 5000


def plan(spec: RunSpec) -> Planned:
    """Reject a run that cannot work before it costs anything, and identify its data by content."""
    configure_logging()
    from tasks.runtime.data import recipe_of

    task_for(spec.topology)
    check_plan(spec)
    if not is_local():
        require_flytes_gpus(spec.resources)
        _check_queue(spec.resources, spec.topology)
        for warning in check_pods(spec.output, spec.resources, spec.topology):
            log.warning("%s", warning)
    recipe = recipe_of(spec, RunFolder.of(spec).data_commits_for(spec))
    return Planned(recipe, spec.output, spec.data.prepared_url or "")


def _check_queue(resources: Resources, topology: Topology) -> None:
    """Raises ValueError if no queue of the tenant can ever admit the run, as far as the pod was told."""
    text = os.environ.get(queue_shares.VARIABLE)
    if not text:
        return
    shares = queue_shares.Shares.parse(text)
    if problem := shares.problem(resources, topology, is_job=topology.nnodes > 1):
        raise ValueError(problem)


@task(**PREPARE_TASK, cache=Cache(version=str(format_versions.DATA), ignored_inputs=("output",)))
def prepare(recipe: DataRecipe, output: str, url: str) -> Prepared:
    """Tokenize and pack; with a URL only plan it. Flyte caches the result by the recipe, so runs with it share it."""
    configure_logging()
    from tasks.runtime.data import prepare
    from tasks.runtime.data.pipeline import begin

    folder = data_folder(output, recipe)
    with retried_by_flyte():
        if not url:
            prepare(recipe, folder, report=log.info)
            data = directory(folder)
            if not is_local():
                write_atomic(_address_of(folder), str(data.remote_source).encode(), durable=True)
            return Prepared(data, [])
        plans = begin(recipe, folder, report=log.info, url=url)
    return Prepared(directory(folder), shares({number: len(plan.parts) for number, plan in plans.items()}))


def found(planned: Planned) -> FlyteDirectory | None:
    """Prepared data that an earlier run with this recipe and output folder stored, if they are still there.

    Flyte has a cache of its own, which costs a pod less, too, but a pod that knows the recipe had to start before.
    """
    note = _address_of(data_folder(planned.output, planned.recipe))
    if is_local() or planned.url or not note.exists():
        return None
    address = note.read_text(encoding="utf-8")
    return FlyteDirectory.from_source(address) if is_stored(address) else None


def _address_of(folder: Path) -> Path:
    """The file with the address of prepared data in the object store; beside them, so that they stay as they are."""
    return folder.with_name(f"{folder.name}.stored-{format_versions.DATA}")


def shares(parts: Mapping[int, int]) -> list[str]:
    """Ranges of parts for pods, as texts; sources take turns. parts: of each source, by its number.

    >>> shares({0: 70, 2: 40})
    ['0:0-31', '2:0-31', '0:32-63', '0:64-69', '2:32-39']
    """
    # A source may have one share that is not full.
    size = max(_SHARE, -(-sum(parts.values()) // (_MAX_SHARES - len(parts))))
    found = [(first / count, number, first) for number, count in parts.items() for first in range(0, count, size)]
    return [f"{number}:{first}-{min(first + size, parts[number]) - 1}" for _, number, first in sorted(found)]


@task(**PREPARE_TASK)
def prepare_share(data: FlyteDirectory, share: str) -> int:
    """Prepare a range of parts, without those that are done, and write them to the store. Returns their number."""
    configure_logging()
    from tasks.runtime.data.pipeline import prepare_range

    number, _, parts = share.partition(":")
    first, last = map(int, parts.split("-"))
    with retried_by_flyte():
        prepare_range(Path(data.download()), int(number), range(first, last + 1), log.info)
    return last + 1 - first


@task(**CONTROL_TASK)
def complete(data: FlyteDirectory, prepared: list[int]) -> FlyteDirectory:
    """Write the manifests after all parts. `prepared` only makes Flyte wait for them."""
    configure_logging()
    from tasks.runtime.data.pipeline import finish

    folder = Path(data.download())
    with retried_by_flyte():
        finish(folder, log.info)
    return directory(folder)
