"""`liger_kernel.chunked_loss`: preference losses over an LM head; logits are never all materialized.

Log-probabilities of tokens come from `linear_logprobs`, formulas from `strata_kernels.preference`. `chunk_size` and
`compiled` are ignored. Like Liger's, the functions also return metrics for logging; mean logits are computed from sums
of hidden states and of the head's weight, in fp32.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from ...ops.linear_cross_entropy.linear_logprobs import linear_logprobs
from ...preference import PairLoss, cpo_losses, dpo_losses
from .options import WithOptions

# (loss, metrics without gradients: log-probabilities, mean logits, negative log-likelihood, rewards).
Result = tuple[Tensor, tuple[Tensor, ...]]


def _answers(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, average: bool
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the answers [B], sum or mean over their tokens; of the tokens [B, T])."""
    tokens = linear_logprobs(x, weight, target, bias=bias, ignore_index=ignore_index)
    answers = tokens.sum(-1)
    return answers / (target != ignore_index).sum(-1) if average else answers, tokens


@torch.no_grad()
def _sum_of_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sums of logits over tokens and vocabulary, [B], by linearity in the hidden states."""
    sums = x.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + x.shape[1] * bias.sum(dtype=torch.float32)


def _pairs(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, average: bool,
    nll_target: Tensor | None = None, with_nll: bool = True,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """(chosen and rejected log-probabilities [B] each, negative log-likelihood of the chosen, Liger's metrics)."""
    answers, tokens = _answers(x, weight, target, bias, ignore_index, average)
    chosen, rejected = answers.chunk(2)
    nll = answers.new_zeros(())
    if with_nll:
        labels, n = target if nll_target is None else nll_target, len(chosen)
        if nll_target is not None:
            tokens = linear_logprobs(x[:n], weight, labels[:n], bias=bias, ignore_index=ignore_index)
        nll = -tokens[:n].sum() / (labels[:n] != ignore_index).sum()
    means = (_sum_of_logits(x, weight, bias) / (target.shape[1] * weight.shape[0])).chunk(2)
    figures = (chosen.detach(), rejected.detach(), *(mean.mean() for mean in means), nll.detach())
    return chosen, rejected, nll, figures


class LigerFusedLinearDPOFunction:
    """DPO and its variants: `strata_kernels.preference.dpo_losses`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, ignore_index: int = -100, beta: float = 0.1,
        compute_nll_loss: bool = False, compiled: bool = True, use_ref_model: bool = True,
        average_log_prob: bool = False, chunk_size: int = 1, loss_type: PairLoss = "sigmoid",
        label_smoothing: float = 0.0, discopop_tau: float = 0.05, alpha: float = 1.0,
    ) -> Result:  # fmt: skip
        """_input: [2 B, T, H], chosen answers first; target: [2 B, T] → the loss and Liger's metrics."""
        chosen, rejected, nll, figures = _pairs(
            _input, weight, target, bias, ignore_index, average_log_prob, with_nll=compute_nll_loss
        )
        reference = torch.zeros(len(target), device=chosen.device)
        if use_ref_model:
            assert ref_input is not None and ref_weight is not None
            with torch.no_grad():
                reference, _ = _answers(ref_input, ref_weight, target, ref_bias, ignore_index, average_log_prob)
        ratios = [answers - r for answers, r in zip((chosen, rejected), reference.chunk(2), strict=True)]
        # Liger applies label smoothing only in these.
        smoothing = label_smoothing if loss_type in ("exo_pair", "robust") else 0.0
        losses = dpo_losses(
            chosen, rejected, *reference.chunk(2), loss=loss_type, beta=beta, label_smoothing=smoothing,
            discopop_tau=discopop_tau,
        )  # fmt: skip
        rewards = (beta * ratio.detach() for ratio in ratios)
        return losses.mean() + alpha * nll, (*figures, *rewards)


class LigerFusedLinearCPOFunction:
    """CPO."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = True,
        compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> Result:  # fmt: skip
        """_input: [2 B, T, H], chosen answers first; target: [2 B, T] → the loss and Liger's metrics."""
        chosen, rejected, nll, figures = _pairs(
            _input, weight, target, bias, ignore_index, average_log_prob, with_nll=compute_nll_loss
        )
        losses = cpo_losses(chosen, rejected, beta=beta, label_smoothing=label_smoothing)
        return losses.mean() + alpha * nll, (*figures, beta * chosen.detach(), beta * rejected.detach())


class LigerFusedLinearSimPOFunction:
    """SimPO: log-probabilities per token, and a margin."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0, compute_nll_loss: bool = False,
        compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> Result:  # fmt: skip
        """_input: [2 B, T, H], chosen answers first; target: [2 B, T] → the loss and Liger's metrics."""
        chosen, rejected, nll, figures = _pairs(
            _input, weight, target, bias, ignore_index, average=True, with_nll=compute_nll_loss
        )
        losses = cpo_losses(chosen - gamma / beta, rejected, beta=beta, label_smoothing=label_smoothing)
        return losses.mean() + alpha * nll, (*figures, beta * chosen.detach(), beta * rejected.detach())


class LigerFusedLinearORPOFunction:
    """ORPO: odds of the answers, from log-probabilities per token."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        beta: float = 0.1, compute_nll_loss: bool = True, nll_target: Tensor | None = None, compiled: bool = True,
        chunk_size: int = 1,
    ) -> Result:  # fmt: skip
        """_input: [2 B, T, H], chosen answers first; target: [2 B, T] → the loss and Liger's metrics."""
        chosen, rejected, nll, figures = _pairs(
            _input, weight, target, bias, ignore_index, True, nll_target, with_nll=compute_nll_loss
        )
        log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        ratio = nn.functional.logsigmoid(log_odds)
        rewards = beta * chosen.detach(), beta * rejected.detach()
        return nll - beta * ratio.mean(), (*figures, *rewards, ratio.detach().mean(), log_odds.detach().mean())


class LigerFusedLinearKTOFunction:
    """KTO: single answers, desirable or undesirable."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        kl: Tensor | None = None, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True,
        use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> Result:  # fmt: skip
        """_input: [B, T, H]; target: [B, T]; preference_labels: [B], bool → the loss and sums of Liger's metrics."""
        answers, _ = _answers(_input, weight, target, bias, ignore_index, average_log_prob)
        ratios = answers
        if use_ref_model:
            assert ref_input is not None and ref_weight is not None
            with torch.no_grad():
                reference, _ = _answers(ref_input, ref_weight, target, ref_bias, ignore_index, average_log_prob)
            ratios = answers - reference
        good = preference_labels.bool()
        margin = ratios if kl is None else ratios - kl
        losses = 1 - torch.sigmoid(beta * margin.where(good, -margin))
        logits = _sum_of_logits(_input, weight, bias)
        figures = (values.detach()[rows].sum() for values in (answers, logits, beta * ratios) for rows in (good, ~good))
        return losses.mean(), tuple(figures)


class LigerFusedLinearDPOLoss(WithOptions):
    """`LigerFusedLinearDPOFunction` as a module."""

    function: Any = LigerFusedLinearDPOFunction
    defaults = {  # noqa: RUF012
        "ignore_index": -100, "beta": 0.1, "alpha": 1.0, "compute_nll_loss": False, "compiled": True,
        "use_ref_model": True, "average_log_prob": False, "chunk_size": 1, "loss_type": "sigmoid",
        "label_smoothing": 0.0, "discopop_tau": 0.05,
    }  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss, smoothing = self.options["loss_type"], self.options["label_smoothing"]
        # Liger's message, which callers may match.
        if loss not in get_args(PairLoss):
            raise ValueError(f"Unsupported loss_type: {loss}; known are {', '.join(get_args(PairLoss))}")
        if loss == "exo_pair" and smoothing <= 0.0:
            raise ValueError(f"label_smoothing must be > 0 for loss_type='exo_pair', got {smoothing}, such as 1e-3")
        if loss == "robust" and not 0.0 <= smoothing < 0.5:
            raise ValueError(f"label_smoothing must lie in [0.0, 0.5) for loss_type='robust', got {smoothing}")

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> Result:
        """As `LigerFusedLinearDPOFunction.apply`; the head's weight is first."""
        result: Result = self.call(_input, lin_weight, target, bias, ref_input, ref_weight, ref_bias)
        return result


class LigerFusedLinearCPOLoss(WithOptions):
    """`LigerFusedLinearCPOFunction` as a module."""

    function: Any = LigerFusedLinearCPOFunction
    defaults = {  # noqa: RUF012
        "ignore_index": -100, "beta": 0.1, "alpha": 1.0, "label_smoothing": 0.0, "compute_nll_loss": True,
        "compiled": True, "average_log_prob": False, "chunk_size": 1,
    }  # fmt: skip

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Result:
        """As the function's `apply`; the head's weight is first."""
        result: Result = self.call(_input, lin_weight, target, bias)
        return result


class LigerFusedLinearSimPOLoss(LigerFusedLinearCPOLoss):
    """`LigerFusedLinearSimPOFunction` as a module."""

    function: Any = LigerFusedLinearSimPOFunction
    defaults = {  # noqa: RUF012
        "ignore_index": -100, "beta": 0.1, "alpha": 1.0, "label_smoothing": 0.0, "compute_nll_loss": True,
        "compiled": True, "gamma": 0.5, "chunk_size": 1,
    }  # fmt: skip


class LigerFusedLinearORPOLoss(WithOptions):
    """`LigerFusedLinearORPOFunction` as a module."""

    function: Any = LigerFusedLinearORPOFunction
    defaults = {  # noqa: RUF012
        "ignore_index": -100, "beta": 0.1, "compute_nll_loss": True, "compiled": True, "chunk_size": 1,
    }  # fmt: skip

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> Result:
        """As `LigerFusedLinearORPOFunction.apply`; the head's weight is first."""
        result: Result = self.call(_input, lin_weight, target, bias, nll_target=nll_target)
        return result


class LigerFusedLinearKTOLoss(WithOptions):
    """`LigerFusedLinearKTOFunction` as a module."""

    function: Any = LigerFusedLinearKTOFunction
    defaults = {  # noqa: RUF012
        "ignore_index": -100, "beta": 0.1, "compiled": True, "use_ref_model": False, "average_log_prob": False,
        "chunk_size": 1,
    }  # fmt: skip

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> Result:
        """As `LigerFusedLinearKTOFunction.apply`, with the argument order of Liger's module."""
        if preference_labels is None:
            raise ValueError("preference_labels is missing: [B], True for desirable answers")
        result: Result = self.call(
            _input, lin_weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl
        )
        return result


liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
