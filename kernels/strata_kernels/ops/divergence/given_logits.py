"""kl_div, jsd and tvd of materialized logits or log-probabilities.

The gradient of a scalar divergence is linear in the incoming gradient, so the forward pass also writes the gradient,
and the backward pass scales it: 6 bytes of traffic per pair of bf16 logits. With reduction="none", and in fp16, where
gradients would underflow without the loss scale, the backward pass reads both logits again.
Formulas: see the package. Operators: `strata::divergence`, `strata::divergence_rows` and its backward operator.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .._launch import DTYPES, accumulator, as_rows, describe, has_dtype
from .._operator import Operator, is_transformed, operator, refuse_double_backward
from ..cross_entropy.reduction import Reduction, check_options, scaled
from .divergence_reference import Divergence, Form, reference_divergence
from .divergence_rows import divergence_rows

Direction = Literal["forward", "reverse"]

_FORM = "str divergence, float beta, float temperature, bool normalized, int ignore_index"


def _form(divergence: Divergence, beta: float, temperature: float, normalized: bool, ignore_index: int) -> Form:
    return Form(divergence, beta, temperature, normalized=normalized, ignore_index=ignore_index)


@operator(
    f"divergence(Tensor divisor, Tensor logits, Tensor teacher, Tensor target, {_FORM}, bool want_gradient)"
    " -> (Tensor, Tensor)"
)
class _ScalarDivergence(Operator):
    """(Σ_rows loss / divisor, dlogits for an incoming gradient of 1; empty if not requested)."""

    @staticmethod
    def forward(
        divisor: Tensor, logits: Tensor, teacher: Tensor, target: Tensor, divergence: Divergence, beta: float,
        temperature: float, normalized: bool, ignore_index: int, want_gradient: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        loss = logits.new_empty(target.numel(), dtype=accumulator(logits.dtype))
        divisor = divisor.to(loss.dtype)
        dlogits = logits.new_empty(logits.shape if want_gradient else 0)
        form = _form(divergence, beta, temperature, normalized, ignore_index)
        divergence_rows(
            as_rows(logits), as_rows(teacher), target.reshape(-1).contiguous(), divisor.reciprocal().expand(loss.shape),
            loss, form, dlogits.view(-1, logits.shape[-1]) if want_gradient else None,
        )  # fmt: skip
        return loss.sum() / divisor, dlogits

    @staticmethod
    def fake(divisor: Tensor, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        loss = logits.new_empty((), dtype=accumulator(logits.dtype))
        return loss, logits.new_empty(logits.shape if rest[-1] else 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.n_inputs = len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a divergence")
        dlogits = None if grad is None else scaled(ctx.saved_tensors[0], grad)
        return None, dlogits, *(None,) * (ctx.n_inputs - 2)


@operator(f"divergence_rows_bwd(Tensor grad, Tensor logits, Tensor teacher, Tensor target, {_FORM}) -> Tensor")
class _RowDivergencesBackward(Operator):
    """dlogits; reads both logits again."""

    @staticmethod
    def forward(grad: Tensor, logits: Tensor, teacher: Tensor, target: Tensor, *form: Any) -> Tensor:
        loss = logits.new_empty(target.numel(), dtype=accumulator(logits.dtype))
        dlogits = logits.new_empty(logits.shape)
        divergence_rows(
            as_rows(logits), as_rows(teacher), target.reshape(-1).contiguous(), grad.reshape(-1).to(loss.dtype), loss,
            _form(*form), dlogits.view(-1, logits.shape[-1]),
        )  # fmt: skip
        return dlogits

    @staticmethod
    def fake(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
        return logits.new_empty(logits.shape)


@operator(f"divergence_rows(Tensor logits, Tensor teacher, Tensor target, {_FORM}) -> Tensor")
class _RowDivergences(Operator):
    """The divergences of the rows."""

    @staticmethod
    def forward(logits: Tensor, teacher: Tensor, target: Tensor, *form: Any) -> Tensor:
        loss = _RowDivergences.fake(logits, teacher, target)
        divergence_rows(
            as_rows(logits), as_rows(teacher), target.reshape(-1).contiguous(), None, loss.view(-1), _form(*form)
        )
        return loss

    @staticmethod
    def fake(logits: Tensor, teacher: Tensor, target: Tensor, *_: Any) -> Tensor:
        return logits.new_empty(target.shape, dtype=accumulator(logits.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.form = inputs[3:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a divergence")
        return _RowDivergencesBackward.apply(grad, *ctx.saved_tensors, *ctx.form), *(None,) * 7


def jsd(
    logits: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    normalized: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Generalized Jensen-Shannon divergence of a student from a teacher; one kernel for loss and gradient.

    Equivalent to::

        log_p, log_q = (x.float().div(temperature).log_softmax(-1) for x in (logits, teacher))
        m = (1 - beta) * log_p.exp() + beta * log_q.exp()
        loss = beta * F.kl_div(m.log(), log_q, reduction="none", log_target=True)
        loss = (loss + (1 - beta) * F.kl_div(m.log(), log_p, reduction="none", log_target=True)).sum(-1)
        loss = loss[target != ignore_index].sum() / (num_items or (target != ignore_index).sum())   # reduction="mean"

    beta=0 is KL(teacher || student) and beta=1 is KL(student || teacher), as in GKD (arXiv:2306.13649). The loss is not
    multiplied by temperature². Double backward is not supported. Under `torch.func` transforms, it runs in plain
    PyTorch.

    Args:
        logits: [..., V], logits of the student, bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        teacher: [..., V], logits of the teacher, any of these dtypes, without a gradient.
        target: [...], int64: rows whose target is `ignore_index` are ignored; None: no row is.
        beta: in [0, 1].
        temperature: divisor of both logits.
        normalized: whether logits and teacher are log-probabilities, at temperature 1: the PyTorch lines above without
            log_softmax. The gradient is with respect to them.
        ignore_index: see target.
        reduction: "mean", "sum" or "none".
        num_items: divisor of "mean", instead of the number of rows that are not ignored. A tensor causes no host
            synchronization.

    Returns:
        fp32 (fp64 for fp64), a scalar, or [...] for "none". If all rows are ignored, the mean is NaN, with
        zero gradients.

    Raises:
        ValueError: a wrong shape, dtype or option.

    Example:
        >>> logits = torch.randn(2, 8, 32, requires_grad=True)
        >>> jsd(logits, torch.randn(2, 8, 32)).backward()
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta {beta} must be between 0 and 1")
    return _divergence(
        logits, teacher, target, of_beta(beta), beta, temperature, normalized, ignore_index, reduction, num_items
    )


def kl_div(
    logits: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    direction: Direction = "forward",
    temperature: float = 1.0,
    normalized: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Kullback-Leibler divergence: KL(teacher || student) forward, KL(student || teacher) reverse.

    Equivalent to::

        log_p, log_q = (x.float().div(temperature).log_softmax(-1) for x in (logits, teacher))
        loss = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)                    # forward
        loss = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)                    # reverse

    Arguments, reductions and errors as in `jsd`; direction: "forward" or "reverse".

    Example:
        >>> logits = torch.randn(2, 8, 32, requires_grad=True)
        >>> kl_div(logits, torch.randn(2, 8, 32), temperature=2.0).backward()
    """
    return _divergence(
        logits, teacher, target, of_direction(direction), 0.0, temperature, normalized, ignore_index, reduction,
        num_items,
    )  # fmt: skip


def tvd(
    logits: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    normalized: bool = False,
    probabilities: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Total variation distance of a student's and a teacher's distribution: half the sum of |p - q|.

    Equivalent to::

        p, q = (x.float().div(temperature).softmax(-1) for x in (logits, teacher))
        loss = 0.5 * (p - q).abs().sum(-1)

    Arguments, reductions and errors as in `jsd`. With `probabilities=True`, logits and teacher are probabilities, and
    the gradient is sign(p - q) / 2.

    Example:
        >>> logits = torch.randn(2, 8, 32, requires_grad=True)
        >>> tvd(logits, torch.randn(2, 8, 32)).backward()
        >>> tvd(torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5]), probabilities=True)
        tensor(0.2500)
    """
    if normalized and probabilities:
        raise ValueError("normalized (log-probabilities) and probabilities exclude each other: pass one of them")
    divergence: Divergence = "tvd_probabilities" if probabilities else "tvd"
    return _divergence(
        logits, teacher, target, divergence, 0.0, temperature, normalized or probabilities, ignore_index, reduction,
        num_items,
    )  # fmt: skip


def of_beta(beta: float) -> Divergence:
    """The kind of `jsd` at this beta."""
    return "forward_kl" if beta == 0 else "reverse_kl" if beta == 1 else "jsd"


def of_direction(direction: Direction) -> Divergence:
    """The kind of `kl_div` in this direction. Raises ValueError for an unknown direction."""
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction {direction!r} must be forward, KL(teacher || student), or reverse")
    return "forward_kl" if direction == "forward" else "reverse_kl"


def row_divisor(
    target: Tensor, ignore_index: int, reduction: Reduction, num_items: int | Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The divisor of the sum over rows: a 0-d tensor, computed without host synchronization."""
    if reduction != "mean":
        return torch.ones((), dtype=dtype, device=target.device)
    if isinstance(num_items, Tensor):
        return num_items.detach().to(target.device, dtype, non_blocking=True).reshape(())
    if num_items is not None:
        return torch.full((), num_items, dtype=dtype, device=target.device)
    return (target != ignore_index).sum().to(dtype)


def _divergence(
    logits: Tensor, teacher: Tensor, target: Tensor | None, divergence: Divergence, beta: float, temperature: float,
    normalized: bool, ignore_index: int, reduction: Reduction, num_items: int | Tensor | None,
) -> Tensor:  # fmt: skip
    _check(logits, teacher, target, temperature, normalized)
    check_options(0.0, None, reduction, num_items)
    if target is None:
        # Any value other than ignore_index.
        target = torch.full(logits.shape[:-1], ignore_index + 1, device=logits.device)
    form = (divergence, float(beta), float(temperature), normalized, ignore_index)
    dtype = accumulator(logits.dtype)
    trained = torch.is_grad_enabled() and logits.requires_grad
    by_row = reduction == "none" or (trained and logits.dtype == torch.float16)
    divisor = row_divisor(target, ignore_index, reduction, num_items, dtype)
    if not by_row and not is_transformed():
        loss: Tensor = _ScalarDivergence.apply(divisor, logits, teacher, target, *form, trained)[0]
        return loss
    if is_transformed():
        losses = reference_divergence(logits, teacher, target, _form(*form))
    else:
        losses = _RowDivergences.apply(logits, teacher, target, *form)
    return losses if reduction == "none" else losses.sum() / divisor


def _check(logits: Tensor, teacher: Tensor, target: Tensor | None, temperature: float, normalized: bool) -> None:
    for name, x in (("logits", logits), ("teacher", teacher)):
        if not has_dtype(x) or x.dim() == 0 or x.shape[-1] == 0:
            raise ValueError(f"{name} must be {DTYPES} of shape [..., V] with V > 0, got {describe(x)}")
    if teacher.shape != logits.shape:
        raise ValueError(f"teacher {describe(teacher)} must have the shape of logits {describe(logits)}")
    if target is not None and (target.shape != logits.shape[:-1] or target.dtype != torch.int64):
        raise ValueError(f"target {describe(target)} must be int64 {list(logits.shape[:-1])}")
    if teacher.requires_grad:
        raise ValueError("teacher gets no gradient: detach it")
    check_temperature(temperature)
    if normalized and temperature != 1:
        raise ValueError(
            f"temperature {temperature} applies to logits, not to normalized values; divide before the softmax"
        )
    tensors = [logits, teacher] if target is None else [logits, teacher, target]
    if any(t.device != logits.device for t in tensors):
        devices = ", ".join(str(t.device) for t in tensors)
        raise ValueError(f"logits, teacher and target must be on one device, not {devices}")


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless the temperature is positive."""
    if not temperature > 0.0:
        raise ValueError(f"temperature {temperature} must be positive")
