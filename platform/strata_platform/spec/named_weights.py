"""The weights that a spec names: of the model, and of those that it learns from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from strata_platform.spec.run_spec import RunSpec
from strata_platform.spec.sections.model import PRESETS, Lora
from strata_platform.spec.sections.objectives import Distill, Grpo


class NamedWeights(NamedTuple):
    """The field that names weights, the folder or Hub id in it, and where a commit of the Hub is pinned.

    random: whether config.json alone is read, and weights are drawn for it.
    """

    field: str
    name: str
    revision: str | None = None
    revision_field: str | None = None
    random: bool = False


def named_weights(spec: RunSpec) -> Iterator[NamedWeights]:
    """The weights that a run of `spec` reads; a preset has none."""
    model, adapter, objective = spec.model, spec.adapter, spec.objective
    if model.name not in PRESETS:
        yield NamedWeights("model.name", model.name, model.revision, "model.revision", model.init == "random")
    if isinstance(adapter, Lora) and adapter.init_from is not None:
        yield NamedWeights("adapter.init_from", adapter.init_from)
    if isinstance(objective, Distill) and objective.teacher is not None:
        pinned = objective.teacher_revision, "objective.teacher_revision"
        yield NamedWeights("objective.teacher", objective.teacher, *pinned)
    if isinstance(objective, Grpo):
        for number, term in enumerate(objective.rewards):
            if term.model is not None:
                yield NamedWeights(f"objective.rewards[{number}].model", term.model)
