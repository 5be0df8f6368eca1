"""Check a run, name the data that it reads by content, and prepare them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from strata_platform import queue_shares
from strata_platform.file_io import write_atomic
from strata_platform.pod_settings import check_pods, require_flytes_gpus
from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.run_spec import Resources, Topology
from tasks.runtime.run_folder import format_versions
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.steps.plan_checks import check_plan
from tasks.steps.retry import retried

log = logging.getLogger(__name__)

# Parts that a pod prepares, about 2 GiB of text: fewer would cost more in starts of pods. Flyte 1 maps over at most
# 5,000 inputs.
_SHARE = 32
_MAX_SHARES = 5000


class Planned(NamedTuple):
    """The recipe of the data, the output folder of the run, and the object store for prepared rows or an empty text."""

    recipe: DataRecipe
    output: str
    url: str


def plan(spec: RunSpec, *, local: bool) -> Planned:
    """Reject a run that cannot work before it costs anything, and identify its data by content.

    local: whether all steps run on this machine, without pods and queues.
    """
    from tasks.runtime.data import recipe_of

    check_plan(spec, local=local)
    if not local:
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


def prepare(recipe: DataRecipe, output: str, url: str) -> tuple[Path, list[str]]:
    """Tokenize and pack; with a URL only plan it.

    Returns:
        The folder of prepared data, and shares of its parts that are left to prepare, as `source:first-last`.
    """
    from tasks.runtime.data import prepare
    from tasks.runtime.data.preparation.pipeline import begin

    folder = data_folder(output, recipe)
    with retried():
        if not url:
            prepare(recipe, folder, report=log.info)
            return folder, []
        plans = begin(recipe, folder, report=log.info, url=url)
    return folder, shares({number: len(plan.parts) for number, plan in plans.items()})


def shares(parts: Mapping[int, int]) -> list[str]:
    """Ranges of parts for pods, as texts; sources take turns. parts: of each source, by its number.

    >>> shares({0: 70, 2: 40})
    ['0:0-31', '2:0-31', '0:32-63', '0:64-69', '2:32-39']
    """
    # A source may have one share that is not full.
    size = max(_SHARE, -(-sum(parts.values()) // (_MAX_SHARES - len(parts))))
    found = [(first / count, number, first) for number, count in parts.items() for first in range(0, count, size)]
    return [f"{number}:{first}-{min(first + size, parts[number]) - 1}" for _, number, first in sorted(found)]


def prepare_share(folder: Path, share: str) -> int:
    """Prepare a range of parts, without those that are done, and write them to the store. Returns their number."""
    from tasks.runtime.data.preparation.pipeline import prepare_range

    number, _, parts = share.partition(":")
    first, last = map(int, parts.split("-"))
    with retried():
        prepare_range(folder, int(number), range(first, last + 1), log.info)
    return last + 1 - first


def complete(folder: Path) -> None:
    """Write the manifests after all parts."""
    from tasks.runtime.data.preparation.pipeline import finish

    with retried():
        finish(folder, log.info)


def note_stored(folder: Path, address: str) -> None:
    """Remember in the output folder at which address of the object store the prepared data of `folder` are."""
    write_atomic(_address_of(folder), address.encode(), durable=True)


def stored_data(planned: Planned) -> str | None:
    """The address of prepared data that an earlier run with this recipe and output folder stored.

    Flyte has a cache of its own, which costs a pod less, too, but a pod that knows the recipe had to start before.
    """
    note = _address_of(data_folder(planned.output, planned.recipe))
    return None if planned.url or not note.exists() else note.read_text(encoding="utf-8")


def log_data_source(planned: Planned, address: str | None) -> None:
    """Log which data the run reads. address: where an earlier run has stored them; None if they are to be prepared."""
    name = planned.recipe.hash()
    if address:
        log.info("reusing prepared data %s, stored at %s", name, address)
    else:
        log.info("preparing data %s", name)


def _address_of(folder: Path) -> Path:
    """The file with the address of prepared data in the object store; beside them, so that they stay as they are."""
    return folder.with_name(f"{folder.name}.stored-{format_versions.DATA}")
