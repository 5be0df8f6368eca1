"""linear_jsd, linear_kl_div, linear_cosine_distance: distances of an LM head's logits from a teacher's.

The forward pass computes the gradients: those of a scalar loss are linear in the incoming gradient, so the backward
pass only scales them. Formulas: see the package. The operator is `strata::linear_divergence`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .._operator import is_transformed, operator
from ..cross_entropy.reduction import check_options
from ..divergence.divergence_reference import Divergence, Form, reference_divergence
from ..divergence.given_logits import Direction, check_temperature, of_beta, of_direction
from ..head.head_arguments import (
    Accumulate,
    autocast,
    check_devices,
    check_dtypes,
    check_head,
    check_memory_options,
    check_target,
)
from ..head.head_pass import Wanted
from ..head.vocabulary_parallel import LocalTensors, VocabularyShard, is_dtensor, local_tensors, rows_of_shard
from .counted_rows import CountedRows, RowOptions
from .row_divergences import PassSettings, Teacher, divergences_and_gradients
from .summed_divergence import SummedDivergence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SETTINGS = (
    "str divergence, float beta, float temperature, float softcap, float teacher_softcap, int ignore_index,"
    " SymInt chunk_bytes, bool exact, str group, SymInt ranks, SymInt start, SymInt total, bool sum_dx,"
    " bool want_dx, bool want_dw, bool want_db"
)


@operator(
    "linear_divergence(Tensor divisor, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor teacher_x,"
    f" Tensor teacher_weight, Tensor? teacher_bias, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
class _LinearDivergence(SummedDivergence):
    """(divergence, dx, dW, db), for a teacher with a head."""

    @staticmethod
    def forward(
        divisor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, teacher_x: Tensor,
        teacher_weight: Tensor, teacher_bias: Tensor | None,
        divergence: Divergence, beta: float, temperature: float, softcap: float, teacher_softcap: float,
        ignore_index: int, chunk_bytes: int, exact: bool, group: str, ranks: int, start: int, total: int, sum_dx: bool,
        *wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        losses, gradients = divergences_and_gradients(
            x, weight, bias, target, Teacher(teacher_x, teacher_weight, teacher_bias),
            divisor.reciprocal().expand(x.shape[0]),
            Form(divergence, beta, temperature, softcap, teacher_softcap, ignore_index=ignore_index),
            PassSettings(chunk_bytes, exact, Wanted(*wanted), VocabularyShard(group, ranks, start, total, sum_dx)),
        )  # fmt: skip
        return losses.sum() / divisor, *gradients


class TeacherOptions(NamedTuple):
    """Common arguments of the functions for a teacher with a head."""

    divergence: Divergence
    beta: float
    temperature: float
    softcap: float | None
    teacher_softcap: float | None
    rows: RowOptions


def linear_jsd(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | Tensor | None = None,
    max_targets: int | None = None,
    group: ProcessGroup | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> Tensor:
    """Generalized Jensen-Shannon divergence of a head from a teacher's; logits are never all materialized.

    Equivalent to `jsd` of the logits::

        logits, teacher = F.linear(x, weight, bias), F.linear(teacher_x, teacher_weight, teacher_bias)
        logits = softcap * torch.tanh(logits.float() / softcap)                                     # if softcap
        loss = jsd(logits, teacher, target, beta=beta, temperature=temperature)

    The forward pass computes the required gradients of x, weight and bias. Double backward is not supported.

    Args:
        x: [..., H], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        weight: [V, H], x's dtype. Autocast casts all tensors. With a `group`, the shard of this rank. DTensors as in
            `linear_cross_entropy`; a plain teacher_weight, or one with other placements, then has all V rows.
        teacher_x: [..., H'], x's dtype; the teacher's tensors get no gradients.
        teacher_weight: [V, H'], x's dtype. If vocabularies are padded to different sizes, pass the common rows.
        target: [...], int64: rows whose target is `ignore_index` are ignored; None: no row is.
        beta: in [0, 1]; 0 is KL(teacher || student), 1 is KL(student || teacher).
        temperature: divisor of both logits, after the softcap. A constexpr: each value compiles another kernel.
        bias, teacher_bias: [V], x's dtype, or None.
        softcap, teacher_softcap: logits become softcap · tanh(logits / softcap); None for no softcap.
        ignore_index: see target.
        reduction: "mean" or "sum".
        num_items: divisor of "mean", instead of the number of rows that are not ignored. A tensor causes no host
            synchronization.
        max_targets: upper bound of the rows that are not ignored; only this many enter the matrix products. If more
            rows are not ignored, the result and its gradients are NaN.
        accumulate: "exact" rounds a 16-bit weight gradient once: chunks of dz are kept in the gradient's buffer for one
            product, or accumulated in fp32, with up to 2·V·H more bytes. "lean" rounds after every chunk of rows.
        group: process group over which the vocabulary is sharded, equal shards in rank order, for the heads of student
            and teacher alike. All ranks call this with the same rows; divergences then run in plain PyTorch.
        chunk_bytes: bytes per chunk of both logits; default 1 GiB, on a CPU 16 MiB.

    Returns:
        A scalar, fp32 (fp64 for fp64). If all rows are ignored, the mean is NaN, with zero
        gradients.

    Raises:
        ValueError: a wrong shape, dtype or option.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_jsd(x, weight, torch.randn(2, 8, 24), torch.randn(32, 24)).backward()
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta {beta} must be between 0 and 1")
    options = TeacherOptions(
        of_beta(beta), float(beta), float(temperature), softcap, teacher_softcap,
        RowOptions(ignore_index, reduction, num_items, max_targets, accumulate, chunk_bytes),
    )  # fmt: skip
    teacher = Teacher(teacher_x, teacher_weight, teacher_bias)
    return _linear_divergence(x, weight, bias, target, teacher, options, group)


def linear_kl_div(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    direction: Direction = "forward",
    temperature: float = 1.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | Tensor | None = None,
    max_targets: int | None = None,
    group: ProcessGroup | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> Tensor:
    """Kullback-Leibler divergence of a head from a teacher's; logits are never all materialized.

    Equivalent to `kl_div` of the logits::

        logits, teacher = F.linear(x, weight, bias), F.linear(teacher_x, teacher_weight, teacher_bias)
        loss = kl_div(logits, teacher, target, direction=direction, temperature=temperature)

    Arguments, result and errors as in `linear_jsd`; direction: "forward", KL(teacher || student), or "reverse".

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_kl_div(x, weight, torch.randn(2, 8, 24), torch.randn(32, 24), temperature=2.0).backward()
    """
    options = TeacherOptions(
        of_direction(direction), 0.0, float(temperature), softcap, teacher_softcap,
        RowOptions(ignore_index, reduction, num_items, max_targets, accumulate, chunk_bytes),
    )  # fmt: skip
    teacher = Teacher(teacher_x, teacher_weight, teacher_bias)
    return _linear_divergence(x, weight, bias, target, teacher, options, group)


def linear_cosine_distance(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | Tensor | None = None,
    max_targets: int | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> Tensor:
    """One minus the cosine similarity of a head's logits and a teacher's, which are never all materialized.

    Equivalent to::

        logits, teacher = F.linear(x, weight, bias), F.linear(teacher_x, teacher_weight, teacher_bias)
        loss = 1 - F.cosine_similarity(logits.float(), teacher.float(), dim=-1)
        loss = loss[target != ignore_index].sum() / (num_items or (target != ignore_index).sum())   # reduction="mean"

    The cosine is scale-invariant, so there is no temperature. Arguments, result and errors as in `linear_jsd`, but no
    DTensors and no `group`.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_cosine_distance(x, weight, torch.randn(2, 8, 24), torch.randn(32, 24)).backward()
    """
    options = TeacherOptions(
        "cosine", 0.0, 1.0, None, None,
        RowOptions(ignore_index, reduction, num_items, max_targets, accumulate, chunk_bytes),
    )  # fmt: skip
    teacher = Teacher(teacher_x, teacher_weight, teacher_bias)
    if any(map(is_dtensor, (x, weight, bias, *teacher))):
        raise ValueError("x, weight and the teacher's tensors must be plain tensors: pass DTensors as full_tensor()")
    return _linear_divergence(x, weight, bias, target, teacher, options, None)


def _linear_divergence(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None, teacher: Teacher, options: TeacherOptions,
    group: ProcessGroup | None,
) -> Tensor:  # fmt: skip
    ignore_index = options.rows.ignore_index
    if target is None:
        # Any value other than ignore_index.
        target = torch.full(x.shape[:-1], ignore_index + 1, device=x.device)
    if is_dtensor(weight) and teacher.weight.shape[0] != weight.shape[0]:
        # Checked before sharding, while both have all classes.
        raise ValueError(
            f"teacher_weight {list(teacher.weight.shape)} must have the classes of weight {list(weight.shape)}"
        )
    local, teacher = local_heads(x, weight, bias, target, teacher, group)
    check_teacher(local.x, local.weight, local.bias, local.target, teacher, options)
    rows, teacher = counted_rows(local, teacher, options.rows)
    softcaps = options.softcap or 0.0, options.teacher_softcap or 0.0
    if is_transformed():
        form = Form(*options[:3], *softcaps, ignore_index=ignore_index)
        losses = reference_divergence(rows.logits(), functional.linear(*teacher), rows.labels, form)
        return rows.bounded(losses.sum() / rows.divisor)
    loss, *_ = _LinearDivergence.apply(
        *rows.arguments(), teacher.weight, teacher.bias, *options[:3], *map(float, softcaps), ignore_index,
        *rows.pass_settings(options.rows, heads=2, shard=local.shard),
    )  # fmt: skip
    return local.to_dtensor(rows.finished(loss))


def local_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, teacher: Teacher, group: ProcessGroup | None
) -> tuple[LocalTensors, Teacher]:
    """The local tensors of the student and of the teacher on this rank.

    Raises:
        ValueError: tensors and group do not match, as in `linear_cross_entropy`; only the teacher's are DTensors.
        NotImplementedError: a sharded vocabulary under `torch.func`.
    """
    if any(map(is_dtensor, teacher)) and not is_dtensor(weight):
        raise ValueError("the teacher's tensors are DTensors, but weight is not: pass them as full_tensor()")
    local = local_tensors(x, weight, target, bias, teacher.x, group)
    if group is not None and teacher.weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_weight {list(teacher.weight.shape)} must have the classes of weight {list(weight.shape)} if "
            "the vocabulary is sharded over a group"
        )
    if local.shard.group and is_transformed():
        raise NotImplementedError("torch.func is not supported for a vocabulary that is sharded over processes")
    assert local.beside is not None
    bias_of_shard = None if teacher.bias is None else rows_of_shard(teacher.bias, local.shard, weight)
    return local, Teacher(local.beside, rows_of_shard(teacher.weight, local.shard, weight), bias_of_shard)


def counted_rows(local: LocalTensors, teacher: Teacher, options: RowOptions) -> tuple[CountedRows, Teacher]:
    """The rows of both that are not ignored. Raises ValueError for different dtypes."""
    teacher = Teacher(*autocast(*teacher))
    check_dtypes(*teacher, prefix="teacher_")
    rows = CountedRows.of(
        local.x, local.weight, local.bias, local.target, (teacher.x,), options, local.sum_over_row_shards
    )
    if teacher.x.dtype != rows.x.dtype:
        raise ValueError(f"teacher_x is {teacher.x.dtype} and x is {rows.x.dtype}: cast one of them")
    return rows, teacher._replace(x=rows.beside[0])


def check_teacher(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, teacher: Teacher, options: TeacherOptions
) -> None:  # fmt: skip
    """Raise ValueError for a wrong shape or option; student and teacher must have the same classes."""
    check_head(x, weight, bias)
    check_head(*teacher, prefix="teacher_")
    check_target(x, target)
    if teacher.x.shape[:-1] != x.shape[:-1] or teacher.weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_x {list(teacher.x.shape)} must have the leading shape of x {list(x.shape)}, and teacher_weight "
            f"{list(teacher.weight.shape)} the classes of weight {list(weight.shape)}: pass the rows that both have"
        )
    check_devices(x, weight, target, bias, *teacher)
    if any(t is not None and t.requires_grad for t in teacher):
        raise ValueError("the teacher's tensors get no gradient: detach them")
    if options.rows.reduction not in ("mean", "sum"):
        raise ValueError(f"reduction {options.rows.reduction!r} must be mean or sum")
    for name, softcap in (("softcap", options.softcap), ("teacher_softcap", options.teacher_softcap)):
        if softcap is not None and not softcap > 0.0:
            raise ValueError(f"{name} {softcap} must be positive, or None")
    check_options(0.0, None, options.rows.reduction, options.rows.num_items)
    check_temperature(options.temperature)
    check_memory_options(options.rows.accumulate, options.rows.chunk_bytes, options.rows.max_targets)
