"""What is minimized: a file for each objective, chosen by `objective.type`."""

from __future__ import annotations

from strata_platform.spec import RunSpec
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.objectives.objective import Batch, Objective, Share, target_tokens

__all__ = ["Batch", "Objective", "Share", "objective_of", "target_tokens"]


def objective_of(spec: RunSpec) -> Objective:
    """The objective that `objective.type` names."""
    return {"pretrain": NextToken, "sft": NextToken}[spec.objective.type]()
