"""Rules of `distill`: what its teacher is, and the divergence from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction
from strata_platform.spec.sections.model import PRESETS
from strata_platform.spec.sections.objectives import Distill, Generation

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Objective


def distillation_rules(objective: Objective) -> Iterator[Contradiction]:
    """Every rule, broken or not."""
    if isinstance(objective, Distill):
        yield from _teacher(objective)
        yield from _on_policy(objective)


def _teacher(objective: Distill) -> Iterator[Contradiction]:
    yield Contradiction(
        objective.teacher in PRESETS,
        ("objective.teacher",),
        "a preset has random weights; give the Hub id or the folder of a trained model",
    )
    yield Contradiction(
        objective.beta is not None and objective.divergence != "jsd",
        ("objective.beta", "objective.divergence"),
        f"set, but objective.divergence '{objective.divergence}' has none; set objective.divergence to 'jsd', or leave "
        "objective.beta out",
    )
    yield Contradiction(
        objective.teacher is None and objective.divergence != "forward_kl",
        ("objective.divergence", "objective.teacher"),
        f"'{objective.divergence}' needs all of a teacher's distribution, but without objective.teacher the data has "
        "its likeliest tokens alone; set objective.divergence to 'forward_kl', or objective.teacher",
    )
    yield Contradiction(
        objective.teacher is None and objective.teacher_revision is not None,
        ("objective.teacher_revision", "objective.teacher"),
        "set, but objective.teacher is not; leave it out",
    )


def _on_policy(objective: Distill) -> Iterator[Contradiction]:
    used, field = objective.on_policy > 0, "objective.on_policy"
    yield Contradiction(
        used and objective.teacher is None,
        (field, "objective.teacher"),
        f"{objective.on_policy} needs a teacher that scores new answers, but the data has only stored predictions; "
        "set objective.teacher, or leave objective.on_policy out",
    )
    yield Contradiction(
        used and objective.weight != 1,
        ("objective.weight", field),
        f"{objective.weight} leaves a part of the loss to next-token cross entropy, but answers that the student "
        "writes are not labels; set objective.weight to 1",
    )
    yield Contradiction(
        not used and objective.generation != Generation(),
        ("objective.generation", field),
        "set, but objective.on_policy is 0, so that the student writes no answers; set objective.on_policy, or leave "
        "objective.generation out",
    )
