"""Liger's divergences from a teacher: of probabilities, log-probabilities, logits and hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.cross_entropy import cross_entropy
from ...ops.divergence.given_logits import jsd, kl_div, tvd
from ...ops.linear_divergence.linear_jsd import linear_jsd


def _items(rows: Tensor, target: Tensor | None, ignore_index: int) -> Tensor | int:
    """The divisor of the mean over rows; 1 if all are ignored: Liger's mean is then 0."""
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
        # Liger accepts a teacher that requires grad, without computing its gradient.
        loss = jsd(
            _input, target.detach(), shift_labels, beta=beta, normalized=True, ignore_index=ignore_index,
            num_items=items,
        )  # fmt: skip
        return loss.to(_input.dtype)


class LigerKLDivLossFunction:
    """`torch.nn.functional.kl_div`; fused except for reduction="none", which returns all elements."""

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
        return kl_div(y_pred, teacher.detach(), normalized=True, num_items=divisors[reduction])


class LigerTVDLossFunction:
    """`tvd` of probabilities; fused except for reduction="none", which returns all elements."""

    @staticmethod
    def apply(
        p: Tensor,
        q: Tensor,
        shift_labels: Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
    ) -> Tensor:
        """p, q: [N, V], of student and teacher; shift_labels: [N] → a scalar, or [N, V]; in fp32."""
        if reduction == "none":
            found = 0.5 * (p.float() - q.float()).abs()
            return found if shift_labels is None else found.where((shift_labels != ignore_index)[:, None], 0.0)
        items = _items(p, shift_labels, ignore_index)
        divisors = {"batchmean": items, "mean": items * p.shape[1], "sum": 1}
        if reduction not in divisors:
            raise ValueError(f"reduction must be one of {', '.join(divisors)}, none, got {reduction!r}")
        options: dict[str, Any] = {"probabilities": True, "ignore_index": ignore_index}
        return tvd(p, q.detach(), shift_labels, num_items=divisors[reduction], **options)


class LigerFusedCETVDFunction:
    """`cross_entropy` and `tvd` of logits, per row."""

    @staticmethod
    def apply(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor]:
        """student_logits, teacher_logits: [N, V], target: [N] → two tensors [N], fp32."""
        labels = cross_entropy(student_logits, target, ignore_index=ignore_index, reduction="none")
        return labels, tvd(student_logits, teacher_logits.detach(), target, ignore_index=ignore_index, reduction="none")


class LigerFusedLinearJSDFunction:
    """`linear_jsd`. The weight gradient is accumulated in fp32; `accum_dtype` is ignored."""

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
            student_input, student_weight, teacher_input.detach(), teacher_weight.detach(), shift_labels, beta=jsd_beta,
            temperature=temperature, ignore_index=ignore_index,
            num_items=_items(student_input, shift_labels, ignore_index),
        )  # fmt: skip


class LigerJSD(nn.Module):
    """`LigerJSDFunction` as a module."""

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


class LigerTVDLoss(nn.Module):
    """`LigerTVDLossFunction` as a module."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """As `LigerTVDLossFunction.apply`."""
        return LigerTVDLossFunction.apply(p, q, shift_labels, self.reduction, self.ignore_index)


class LigerFusedCETVDLoss(nn.Module):
    """`LigerFusedCETVDFunction` as a module."""

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """As `LigerFusedCETVDFunction.apply`."""
        return LigerFusedCETVDFunction.apply(student_logits, teacher_logits, target, self.ignore_index)


class LigerFusedLinearJSD(nn.Module):
    """`LigerFusedLinearJSDFunction` as a module."""

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


def liger_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """`LigerTVDLossFunction.apply`, with the mean over elements."""
    return LigerTVDLossFunction.apply(input, target, shift_labels, reduction, ignore_index)


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
