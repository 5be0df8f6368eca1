"""`liger_kernel.chunked_loss`: distillation from a teacher's head, plus the cross entropy of labels.

`chunk_size` and `compiled` are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.linear_cross_entropy import linear_cross_entropy
from ...ops.linear_divergence.linear_jsd import linear_cosine_distance, linear_jsd
from .options import WithOptions

# The loss, or the loss and its two terms.
Result = Tensor | tuple[Tensor, Tensor, Tensor]


def _distilled(
    distance: Callable[..., Tensor], x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor,
    labels: Tensor, bias: Tensor | None, teacher_bias: Tensor | None, hard: float, soft: float, ignore_index: int,
    separate: bool,
) -> Result:  # fmt: skip
    """`hard` · cross entropy of the labels + `soft` · distance, means over the same rows."""
    if teacher_weight.shape[0] > weight.shape[0]:
        # In Liger, the student's logit of a token that it lacks is 0.
        missing = teacher_weight.shape[0] - weight.shape[0]
        padded = torch.cat((weight, weight.new_zeros(missing, weight.shape[1])))
        padded_bias = None if bias is None else torch.cat((bias, bias.new_zeros(missing)))
    else:
        padded, padded_bias = weight, bias
    items = (labels != ignore_index).sum().clamp(min=1)
    options: dict[str, Any] = {"ignore_index": ignore_index, "num_items": items}
    teacher = (t if t is None else t.detach() for t in (teacher_x, teacher_weight, teacher_bias))
    given_teacher = dict(zip(("teacher_x", "teacher_weight", "teacher_bias"), teacher, strict=True))
    of_teacher = distance(x, padded, target=labels, bias=padded_bias, **given_teacher, **options)
    of_labels = torch.zeros_like(of_teacher)
    if hard or separate:
        of_labels = linear_cross_entropy(x, weight, labels, bias=bias, **options)
    loss = hard * of_labels + soft * of_teacher
    return (loss, of_teacher.detach(), of_labels.detach()) if separate else loss


class LigerFusedLinearCosineSimilarityFunction:
    """`beta` · `linear_cosine_distance`, and the cross entropy of labels."""

    @staticmethod
    def apply(
        student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100,
        temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False,
    ) -> Result:  # fmt: skip
        """Inputs: [N, H] and [N, H'], weights: [V, H] and [V, H'], true_labels: [N]."""

        def distance(*args: Any, **kwargs: Any) -> Tensor:
            return beta * linear_cosine_distance(*args, **kwargs)

        return _distilled(
            distance, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias,
            teacher_bias, weight_hard_loss, weight_soft_loss, ignore_index, return_soft_hard_loss,
        )  # fmt: skip


class LigerFusedLinearJSDFunction:
    """`linear_jsd`, and the cross entropy of labels."""

    @staticmethod
    def apply(
        student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100,
        temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024, return_soft_hard_loss: bool = False,
    ) -> Result:  # fmt: skip
        """Inputs: [N, H] and [N, H'], weights: [V, H] and [V, H'], true_labels: [N]."""

        def distance(*args: Any, **kwargs: Any) -> Tensor:
            return linear_jsd(*args, beta=beta, temperature=temperature, **kwargs)

        return _distilled(
            distance, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias,
            teacher_bias, weight_hard_loss, weight_soft_loss, ignore_index, return_soft_hard_loss,
        )  # fmt: skip


class LigerFusedLinearCosineSimilarityLoss(WithOptions):
    """`LigerFusedLinearCosineSimilarityFunction` as a module."""

    function: Any = LigerFusedLinearCosineSimilarityFunction
    defaults = {  # noqa: RUF012
        "weight_hard_loss": 0.5, "weight_soft_loss": 0.5, "beta": 0.5, "ignore_index": -100, "temperature": 1.0,
        "compiled": True, "chunk_size": 1024, "return_soft_hard_loss": False,
    }  # fmt: skip

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Result:
        """As the function's `apply`."""
        result: Result = self.call(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias
        )
        return result


class LigerFusedLinearJSDLoss(LigerFusedLinearCosineSimilarityLoss):
    """`LigerFusedLinearJSDFunction` as a module."""

    function: Any = LigerFusedLinearJSDFunction


liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
