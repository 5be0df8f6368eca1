"""Training objectives: one file for each value of `objective.type`."""

from __future__ import annotations

from strata_platform.spec import RunSpec
from strata_platform.spec.sections import objectives as settings
from tasks.runtime.data import PreparedData
from tasks.runtime.generation import Generator
from tasks.runtime.models.config import has_router_loss
from tasks.runtime.objectives.cpo import Cpo
from tasks.runtime.objectives.custom import Custom, require_objective
from tasks.runtime.objectives.distill import Distill
from tasks.runtime.objectives.dpo import Dpo
from tasks.runtime.objectives.grpo import Grpo
from tasks.runtime.objectives.grpo_validation import GrpoValidation
from tasks.runtime.objectives.kto import Kto
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.objectives.objective import MicroBatchLoss, Objective, ObjectiveContext, target_tokens
from tasks.runtime.objectives.orpo import Orpo
from tasks.runtime.objectives.reward import Reward
from tasks.runtime.objectives.simpo import Simpo
from tasks.runtime.objectives.teacher_model import require_same_tokens
from tasks.runtime.parallel.whole_model import WholeModel

__all__ = [
    "Custom",
    "MicroBatchLoss",
    "Objective",
    "ObjectiveContext",
    "build_objective",
    "build_validation_objective",
    "require_objective",
    "require_same_tokens",
    "target_tokens",
]


def build_objective(spec: RunSpec, *, fused: bool) -> Objective:
    """The objective that `objective.type` names. `fused`: the patched model computes the loss without logits."""
    match spec.objective:
        case settings.Dpo():
            return Dpo(spec.objective, spec.adapter, fused=fused)
        case settings.Kto():
            return Kto(spec.objective, spec.adapter, fused=fused)
        case settings.Orpo():
            return Orpo(spec.objective, fused=fused)
        case settings.Simpo():
            return Simpo(spec.objective, fused=fused)
        case settings.Cpo():
            return Cpo(spec.objective, fused=fused)
        case settings.Reward():
            return Reward(spec.objective)
        case settings.Distill():
            return Distill(spec, fused=fused)
        case settings.Grpo():
            return Grpo(spec, fused=fused)
        case settings.Custom():
            return Custom(spec.objective, fused=fused)
    return NextToken(fused=fused, routed=has_router_loss(spec.model))


def build_validation_objective(
    spec: RunSpec,
    *,
    fused: bool,
    data: PreparedData | None = None,
    whole: WholeModel | None = None,
    generator: Generator | None = None,
) -> Objective:
    """The objective that measures the trained model. A distilled model is measured without its teacher, one that learns
    from rewards by those of its answers to the prompts of `data`, which `generator` writes with the weights of `whole`.
    """
    if spec.objective.type == "grpo":
        return GrpoValidation(spec.objective, data, whole, generator)
    if spec.objective.type == "distill":
        return NextToken(fused=fused, routed=has_router_loss(spec.model))
    return build_objective(spec, fused=fused)
