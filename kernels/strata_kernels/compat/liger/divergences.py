"""Liger's divergences from a teacher, of log-probabilities and of hidden states: `jsd`, `kl_div` and `linear_jsd`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.divergence.given_logits import jsd, kl_div
from ...ops.linear_divergence.linear_jsd import linear_jsd


def _items(rows: Tensor, target: Tensor | None, ignore_index: int) -> Tensor | int:
    """The divisor of a mean over rows: Liger's mean over none is 0."""
    return len(rows) if target is None else (target != ignore_index).sum().clamp(min=1)


class LigerJSDFunction:
    """`jsd` of log-probabilities, its mean over rows."""

    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        beta: float = 0.5,
        ignore_index: int = -100,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> Tensor:
        """_input, target: [N, V], log-probabilities of student and teacher; shift_labels: [N] → a scalar."""
        items = _items(_input, shift_labels, ignore_index)
        loss = jsd(
            _input, target, shift_labels, beta=beta, normalized=True, ignore_index=ignore_index, num_items=items
        )  # fmt: skip
        return loss.to(_input.dtype)


class LigerKLDivLossFunction:
    """`torch.nn.functional.kl_div`; fused but for reduction="none", which keeps every element."""

    @staticmethod
    def apply(
        y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
    ) -> Tensor:
        """y_pred: [N, V], log-probabilities; y_true: [N, V], probabilities, or their logarithms with `log_target`."""
        teacher = y_true if log_target else y_true.clamp(min=eps).log()
        if reduction == "none":
            return nn.functional.kl_div(y_pred, teacher, reduction="none", log_target=True)
        divisors = {"batchmean": len(y_pred), "mean": y_pred.numel(), "sum": 1}
        if reduction not in divisors:
            raise ValueError(f"reduction must be one of {', '.join(divisors)}, none, got {reduction!r}")
        return kl_div(y_pred, teacher, normalized=True, num_items=divisors[reduction])


class LigerFusedLinearJSDFunction:
    """`linear_jsd`. The gradient of the weight is summed in fp32, whatever `accum_dtype`."""

    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> Tensor:
        """student_input: [N, H], student_weight: [V, H], teacher_input: [N, H'], teacher_weight: [V, H'] → a scalar."""
        return linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, beta=jsd_beta,
            temperature=temperature, ignore_index=ignore_index,
            num_items=_items(student_input, shift_labels, ignore_index),
        )  # fmt: skip


class LigerJSD(nn.Module):
    """`LigerJSDFunction` with its options."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """log_q, log_p: [N, V], of student and teacher → a scalar."""
        return LigerJSDFunction.apply(log_q, log_p, shift_labels, self.beta, self.ignore_index)


class LigerKLDIVLoss(nn.KLDivLoss):
    """`LigerKLDivLossFunction` with the options of `torch.nn.KLDivLoss`."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        """y_pred, y_true: [N, V] → a scalar, or [N, V] with reduction="none"."""
        return LigerKLDivLossFunction.apply(y_pred, y_true, self.reduction, self.log_target, self.eps)


class LigerFusedLinearJSD(nn.Module):
    """`LigerFusedLinearJSDFunction` with its options."""

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.jsd_beta, self.ignore_index, self.temperature = jsd_beta, ignore_index, temperature
        self.accum_dtype = accum_dtype

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """As `LigerFusedLinearJSDFunction.apply`."""
        return LigerFusedLinearJSDFunction.apply(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, self.jsd_beta,
            self.ignore_index, self.temperature,
        )  # fmt: skip


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """`LigerJSDFunction.apply`."""
    return LigerJSDFunction.apply(input, target, shift_labels, beta, ignore_index)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """`LigerKLDivLossFunction.apply`, with the arguments of `torch.nn.functional.kl_div`."""
    return LigerKLDivLossFunction.apply(input, target, reduction, log_target, eps)


liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
