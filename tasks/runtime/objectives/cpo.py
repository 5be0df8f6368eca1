"""`cpo`: prefer one answer by its log-probability, without a reference, and learn it by its cross entropy per token.

The formula is that of `strata_kernels.preference`. Both terms are means over pairs.
"""

from __future__ import annotations

from torch import Tensor

from strata_kernels.preference import cpo_losses
from strata_platform.spec.sections.objectives import Cpo as Settings
from tasks.runtime.objectives.pairs import PairObjective, Pairs


class Cpo(PairObjective):
    """The CPO loss, averaged over pairs."""

    def __init__(self, settings: Settings, *, fused: bool) -> None:
        super().__init__(fused=fused)
        self._settings, self._beta = settings, settings.beta

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair."""
        settings = self._settings
        preference = cpo_losses(
            pairs.chosen, pairs.rejected, beta=settings.beta, label_smoothing=settings.label_smoothing
        )
        return preference - settings.alpha * pairs.per_token()[0]

    def metrics(self, pairs: Pairs) -> dict[str, Tensor]:
        """The cross entropy of the chosen answer."""
        return {"next_token_loss": -pairs.per_token()[0]}
