"""`orpo`: learn the chosen of two answers, and make its odds larger than the rejected one's, without a reference.

The formula of the odds is that of `strata_kernels.preference`. Both terms are means over pairs, and the first is the
cross entropy per token of the answer, as in the paper; TRL's covers the prompt, too.
"""

from __future__ import annotations

from torch import Tensor

from strata_kernels.preference import orpo_losses
from strata_platform.spec.sections.objectives import Orpo as Settings
from tasks.runtime.objectives.pairs import PairObjective, Pairs


class Orpo(PairObjective):
    """Cross entropy of the chosen answer and the log odds ratio, averaged over pairs."""

    def __init__(self, settings: Settings, *, fused: bool) -> None:
        super().__init__(fused=fused)
        self._beta = settings.beta

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair."""
        return orpo_losses(*pairs, beta=self._beta) - pairs.per_token()[0]

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """`beta` times the log-probability per token."""
        chosen, rejected = pairs.per_token()
        return self._beta * chosen, self._beta * rejected

    def metrics(self, pairs: Pairs) -> dict[str, Tensor]:
        """The cross entropy of the chosen answer, and the log-sigmoid of the log odds ratio."""
        odds = -orpo_losses(*pairs, beta=self._beta) / self._beta
        return {"next_token_loss": -pairs.per_token()[0], "log_odds_ratio": odds}
