"""The user's code that decides what a run learns: its digests, and whether they are still those of earlier steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from strata_platform.spec.run_spec import Objective
from strata_platform.spec.sections.objectives import Custom, Grpo
from tasks.runtime.extensions.import_object import digest_by_name

log = logging.getLogger(__name__)

CODE = "code"
"""Key of the digests in a checkpoint's metadata."""


def objective_code(objective: Objective) -> dict[str, str]:
    """Digests of the objective's own class and of its own reward functions, by their names in the spec.

    Raises ValueError for an entry point that no installed package registers.
    """
    names: list[str] = []
    if isinstance(objective, Custom):
        names = [objective.object]
    if isinstance(objective, Grpo):
        # The functions of ours have no module.
        names = [term.function for term in objective.rewards if term.function and ":" in term.function]
    return {name: digest_by_name(name, "strata.objectives") for name in names}


def warn_of_changed_code(objective: Objective, before: Mapping[str, str]) -> None:
    """Warn of code whose digest is not that of earlier steps, as far as these are known."""
    for name, digest in objective_code(objective).items():
        if before.get(name, digest) != digest:
            log.warning(
                "%r: its code has changed since the last step of this run (%s, now %s); the steps that are done are of "
                "the earlier code. To train with the new code from the first step, choose another name",
                name,
                before[name],
                digest,
            )
