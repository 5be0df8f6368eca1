"""linear_topk_kl_div: KL divergence of an LM head from a teacher given by its top-k log-probabilities.

    loss = Σ_rows Σ_k q_k (log q_k - log p_k) / divisor        dz_v = ((Σ_k q_k) p_v - q_v) / (T · divisor)

with q_v = 0 for all other tokens. Inference servers and stored teacher outputs have this form. The operator is
`strata::linear_topk_kl_div`; the row kernel is that of cross entropy.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .._launch import accumulator, describe
from .._operator import is_transformed, operator
from ..cross_entropy.reduction import check_options
from ..cross_entropy.row_statistics import Options
from ..divergence.given_logits import check_temperature
from ..head.head_arguments import (
    Accumulate,
    check_devices,
    check_head,
    check_memory_options,
    check_target,
)
from ..head.head_pass import Wanted
from ..head.vocabulary_parallel import is_dtensor, unsharded
from .counted_rows import CountedRows, RowOptions
from .row_divergences import PassSettings, topk_and_gradients
from .summed_divergence import SummedDivergence

_SETTINGS = (
    "float temperature, float softcap, int ignore_index, SymInt chunk_bytes, bool exact, bool want_dx, bool want_dw,"
    " bool want_db"
)


@operator(
    "linear_topk_kl_div(Tensor divisor, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor tokens,"
    f" Tensor log_probs, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
class _LinearTopK(SummedDivergence):
    """(divergence, dx, dW, db), for K tokens per row."""

    @staticmethod
    def forward(
        divisor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, tokens: Tensor,
        log_probs: Tensor, temperature: float, softcap: float, ignore_index: int, chunk_bytes: int, exact: bool,
        *wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        losses, gradients = topk_and_gradients(
            x, weight, bias, target, tokens, log_probs, divisor.reciprocal().expand(x.shape[0]),
            Options(ignore_index, 0.0, 0.0, softcap, temperature),
            PassSettings(chunk_bytes, exact, Wanted(*wanted), unsharded(weight.shape[0])),
        )  # fmt: skip
        return losses.sum() / divisor, *gradients


def linear_topk_kl_div(
    x: Tensor,
    weight: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | Tensor | None = None,
    max_targets: int | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> Tensor:
    """KL(teacher || student) over the teacher's top-k tokens; logits are never all materialized.

    Equivalent to::

        log_p = (F.linear(x, weight, bias).float() / temperature).log_softmax(-1).gather(-1, tokens)
        loss = (log_probs.exp() * (log_probs - log_p)).sum(-1)
        loss = loss[target != ignore_index].sum() / (num_items or (target != ignore_index).sum())   # reduction="mean"

    Args:
        x: [..., H], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        weight: [V, H], x's dtype. Autocast casts both. No DTensor.
        tokens: [..., K], int64 in [0, V), distinct within each row.
        log_probs: [..., K], floating point, of the teacher at this temperature, without a gradient. Not normalized
            here: normalize them over the K tokens if they should sum to 1. -inf excludes a token.
        target, temperature, bias, softcap, ignore_index, reduction, num_items, max_targets, accumulate, chunk_bytes:
            as in `linear_jsd`, but chunk_bytes is 640 MiB by default.

    Returns:
        A scalar, fp32 (fp64 for fp64). If all rows are ignored, the mean is NaN, with zero
        gradients.

    Raises:
        ValueError: a wrong shape, dtype or option.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> log_probs, tokens = torch.randn(2, 8, 32).log_softmax(-1).topk(4)
        >>> linear_topk_kl_div(x, weight, tokens, log_probs).backward()
    """
    if target is None:
        # Any value other than ignore_index.
        target = torch.full(x.shape[:-1], ignore_index + 1, device=x.device)
    _check(x, weight, bias, target, tokens, log_probs)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction {reduction!r} must be mean or sum")
    check_options(0.0, softcap, reduction, num_items)
    check_temperature(temperature)
    check_memory_options(accumulate, chunk_bytes, max_targets)
    options = RowOptions(ignore_index, reduction, num_items, max_targets, accumulate, chunk_bytes)
    beside = tokens, log_probs.to(accumulator(x.dtype))
    rows = CountedRows.of(x, weight, bias, target, beside, options)
    if is_transformed():
        tokens, log_probs = rows.beside
        z = rows.logits().to(log_probs.dtype)
        z = softcap * torch.tanh(z / softcap) if softcap else z
        log_p = (z / temperature).log_softmax(-1).gather(1, tokens)
        terms = log_probs.exp() * (log_probs - log_p).masked_fill(log_probs == -torch.inf, 0.0)
        loss = terms.where((rows.labels != ignore_index)[:, None], 0.0).sum() / rows.divisor
        return rows.bounded(loss)
    loss, *_ = _LinearTopK.apply(
        *rows.arguments(), float(temperature), float(softcap or 0.0), ignore_index, *rows.pass_settings(options)
    )
    return rows.finished(loss)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
    if any(map(is_dtensor, (x, weight, bias))):
        raise ValueError("x, weight and bias must be plain tensors: pass DTensors as full_tensor()")
    check_head(x, weight, bias)
    check_target(x, target)
    if tokens.dim() != x.dim() or tokens.shape[:-1] != x.shape[:-1] or tokens.shape[-1:] == (0,):
        raise ValueError(f"tokens {describe(tokens)} must be [..., K] with K > 0, the leading shape of x {describe(x)}")
    if tokens.dtype != torch.int64 or log_probs.shape != tokens.shape or not log_probs.is_floating_point():
        raise ValueError(
            f"tokens {describe(tokens)} must be int64, and log_probs {describe(log_probs)} floating point of its shape"
        )
    if log_probs.requires_grad:
        raise ValueError("log_probs gets no gradient: detach it")
    check_devices(x, weight, target, bias, tokens, log_probs)
