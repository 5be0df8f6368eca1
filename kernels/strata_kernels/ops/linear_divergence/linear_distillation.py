"""linear_distillation: cross entropy of labels and divergence from a teacher, of the same logits.

    loss = label_weight · cross entropy + divergence_weight · divergence

One pass over the rows: the logits' gradients of both terms are added before the matrix products for dx and dW. 2·N·H'·V
FLOPs for the teacher and 6·N·H·V for the student. The operator is `strata::linear_distillation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from .._operator import is_transformed, operator
from ..cross_entropy.row_statistics import Options
from ..divergence.divergence_reference import Divergence, Form, reference_divergence
from ..divergence.given_logits import of_beta
from ..head.head_arguments import Accumulate, check_head
from ..head.head_pass import Wanted
from ..head.vocabulary_parallel import VocabularyShard
from .counted_rows import RowOptions
from .linear_jsd import TeacherOptions, check_teacher, counted_rows, local_heads
from .row_divergences import PassSettings, Scales, Teacher, distillation_and_gradients
from .summed_divergence import SummedDivergence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SETTINGS = (
    "str divergence, float beta, float temperature, float softcap, float teacher_softcap, float label_weight,"
    " float divergence_weight, int ignore_index, SymInt chunk_bytes, bool exact, str group, SymInt ranks,"
    " SymInt start, SymInt total, bool sum_dx, bool want_dx, bool want_dw, bool want_db"
)


class DistillationTerms(NamedTuple):
    """The results of `linear_distillation`.

    loss: scalar, differentiable.
    cross_entropy, divergence: scalars without gradient, the unweighted terms of the loss.
    """

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


@operator(
    "linear_distillation(Tensor divisor, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor teacher_x,"
    f" Tensor teacher_weight, Tensor? teacher_bias, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
class _LinearDistillation(SummedDivergence):
    """(loss, [cross entropy, divergence], dx, dW, db)."""

    @staticmethod
    def forward(
        divisor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, teacher_x: Tensor,
        teacher_weight: Tensor, teacher_bias: Tensor | None,
        divergence: Divergence, beta: float, temperature: float, softcap: float, teacher_softcap: float,
        label_weight: float, divergence_weight: float, ignore_index: int, chunk_bytes: int, exact: bool,
        group: str, ranks: int, start: int, total: int, sum_dx: bool, *wanted: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        one = divisor.reciprocal().expand(x.shape[0])
        scales = Scales(one * label_weight if label_weight else None, one * divergence_weight)
        losses, gradients = distillation_and_gradients(
            x, weight, bias, target, Teacher(teacher_x, teacher_weight, teacher_bias), scales,
            Form(divergence, beta, temperature, softcap, teacher_softcap, ignore_index=ignore_index),
            Options(ignore_index, 0.0, 0.0, softcap, 1.0),
            PassSettings(chunk_bytes, exact, Wanted(*wanted), VocabularyShard(group, ranks, start, total, sum_dx)),
        )  # fmt: skip
        parts = losses.sum(1) / divisor
        return label_weight * parts[0] + divergence_weight * parts[1], parts, *gradients

    @staticmethod
    def fake(divisor: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        loss, *gradients = SummedDivergence.fake(divisor, x, weight, *rest)
        return loss, loss.new_empty(2), *gradients


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor,
    *,
    label_weight: float = 0.5,
    divergence_weight: float = 0.5,
    beta: float = 0.0,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    num_items: int | Tensor | None = None,
    max_targets: int | None = None,
    group: ProcessGroup | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> DistillationTerms:
    """Cross entropy of labels plus divergence from a teacher, in one pass over the logits of both heads.

    Equivalent to::

        logits, teacher = F.linear(x, weight, bias), F.linear(teacher_x, teacher_weight, teacher_bias)
        both = min(logits.shape[-1], teacher.shape[-1])
        entropy = cross_entropy(logits, target, num_items=num_items)
        divergence = jsd(logits[..., :both], teacher[..., :both], target, beta=beta, temperature=temperature,
                         num_items=num_items)
        loss = label_weight * entropy + divergence_weight * divergence

    The temperature applies only to the divergence. If the heads have different numbers of classes, the divergence
    is over the first min(V, V') classes.

    Args:
        x: [..., H], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        weight: [V, H], x's dtype. Autocast casts all tensors. DTensors as in `linear_jsd`.
        teacher_x: [..., H'], x's dtype; the teacher's tensors get no gradients.
        teacher_weight: [V', H'], x's dtype.
        target: [...], int64: the label of each row; rows whose target is `ignore_index` are ignored.
        label_weight, divergence_weight: factors of the terms. There is no factor temperature².
        beta, temperature, bias, teacher_bias, softcap, teacher_softcap, ignore_index, num_items, max_targets,
            group, accumulate, chunk_bytes: as in `linear_jsd`.

    Returns:
        Scalars, fp32 (fp64 for fp64). If all rows are ignored, they are NaN, with zero gradients.

    Raises:
        ValueError: a wrong shape, dtype or option.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> labels = torch.randint(32, (2, 8))
        >>> linear_distillation(x, weight, torch.randn(2, 8, 24), torch.randn(32, 24), labels).loss.backward()
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta {beta} must be between 0 and 1")
    options = TeacherOptions(
        of_beta(beta), float(beta), float(temperature), softcap, teacher_softcap,
        RowOptions(ignore_index, "mean", num_items, max_targets, accumulate, chunk_bytes),
    )  # fmt: skip
    local, teacher = local_heads(x, weight, bias, target, Teacher(teacher_x, teacher_weight, teacher_bias), group)
    check_head(local.x, local.weight, local.bias)
    check_head(*teacher, prefix="teacher_")
    both = min(local.weight.shape[0], teacher.weight.shape[0])
    bias_of_both = None if local.bias is None else local.bias[:both]
    teacher = Teacher(teacher.x, teacher.weight[:both], None if teacher.bias is None else teacher.bias[:both])
    check_teacher(local.x, local.weight[:both], bias_of_both, local.target, teacher, options)
    rows, teacher = counted_rows(local, teacher, options.rows)
    softcaps = softcap or 0.0, teacher_softcap or 0.0
    if is_transformed():
        z, t = rows.logits(), functional.linear(*teacher)
        form = Form(*options[:3], *softcaps, ignore_index=ignore_index)
        wide = z.to(accumulator(z.dtype))
        wide = softcap * torch.tanh(wide / softcap) if softcap else wide
        entropy = functional.cross_entropy(wide, rows.labels, ignore_index=ignore_index, reduction="sum")
        divergence = reference_divergence(z[:, :both], t, rows.labels, form).sum()
        parts = rows.bounded(torch.stack([entropy, divergence]) / rows.divisor)
        return DistillationTerms(label_weight * parts[0] + divergence_weight * parts[1], *parts.detach())
    loss, parts, *_ = _LinearDistillation.apply(
        *rows.arguments(), teacher.weight, teacher.bias, *options[:3],
        *map(float, (*softcaps, label_weight, divergence_weight)), ignore_index,
        *rows.pass_settings(options.rows, heads=2, shard=local.shard),
    )  # fmt: skip
    terms = rows.finished(loss), *rows.finished(parts)
    return DistillationTerms(*map(local.to_dtensor, terms))
