"""`simpo`: prefer one answer by its log-probability per token, without a reference.

The formula is that of `strata_kernels.preference`.
"""

from __future__ import annotations

from torch import Tensor

from strata_kernels.preference import simpo_losses
from strata_platform.spec.sections.objectives import Simpo as Settings
from tasks.runtime.objectives.pairs import PairObjective, Pairs


class Simpo(PairObjective):
    """The SimPO loss, averaged over pairs."""

    def __init__(self, settings: Settings, *, fused: bool) -> None:
        super().__init__(fused=fused)
        self._settings, self._beta = settings, settings.beta

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair."""
        settings = self._settings
        return simpo_losses(*pairs, beta=settings.beta, gamma=settings.gamma, label_smoothing=settings.label_smoothing)

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """`beta` times the log-probability per token."""
        chosen, rejected = pairs.per_token()
        return self._beta * chosen, self._beta * rejected
