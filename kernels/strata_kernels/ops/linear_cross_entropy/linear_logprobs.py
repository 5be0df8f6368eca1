"""Log-probabilities of target tokens, and entropies, from hidden states and an LM head; both differentiable.

    z       = softcap · tanh((x Wᵀ + b) / softcap) / T          lse = log Σ_v exp z_v          p = exp(z - lse)
    logp    = z_target - lse                                    entropy = -Σ_v p_v log p_v
    dz      = g (onehot(target) - p) - h p (log p + entropy)
    dlogits = dz (1 - tanh²) / T       dx = dlogits W           dW = dlogitsᵀ x                db = Σ_rows dlogits

with T the temperature, g and h the incoming gradients of logp and entropy. The losses of DPO, KTO and GRPO are
functions of these [N] log-probabilities (`strata_kernels.preference`, `strata_kernels.policy`).

Axes: N rows, H features, V vocabulary entries. logp is the negative cross entropy, so the operator is
`strata::linear_cross_entropy_rows`: see `rows_operator`.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from .._operator import is_transformed
from ..head.head_arguments import (
    Accumulate,
    autocast,
    check_devices,
    check_dtypes,
    check_head,
    check_memory_options,
    check_target,
    kept_rows,
    logits_bytes,
    nan_beyond,
    wanted_gradients,
)
from ..head.vocabulary_parallel import VocabularyShard, local_tensors
from .rows_operator import losses_by_row

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LogProbsAndEntropy(NamedTuple):
    """Two differentiable tensors of target's shape, fp32 (fp64 for fp64), 0 for ignored targets.

    log_probs: the result of `linear_logprobs`.
    entropy: entropy of each row's distribution over the vocabulary, in nats.
    """

    log_probs: Tensor
    entropy: Tensor


class _Options(NamedTuple):
    softcap: float
    temperature: float
    ignore_index: int
    max_targets: int | None
    accumulate: Accumulate
    chunk_bytes: int | None
    entropy: bool


def linear_logprobs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    max_targets: int | None = None,
    group: ProcessGroup | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> Tensor:
    """Log-probabilities of the targets under the softmax of `x @ weight.T + bias`; logits are never all materialized.

    Equivalent to::

        logits = F.linear(x, weight, bias).float()
        logits = softcap * torch.tanh(logits / softcap)                                             # if softcap
        log_probs = (logits / temperature).log_softmax(-1)
        log_probs = log_probs.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target != ignore_index)

    The backward pass recomputes the logits, in blocks of vocabulary columns, so that the gradient of weight is rounded
    once. Double backward is not supported.

    Args:
        x: [..., H], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.
        weight: [V, H], x's dtype; autocast casts both. DTensors and `group` as in `linear_cross_entropy`.
        target: [...], int64, each in [0, V) or `ignore_index`. On a GPU, any other value makes its row NaN; on a CPU it
            raises.
        bias: [V], x's dtype, or None.
        softcap: logits become softcap · tanh(logits / softcap); None for no softcap.
        temperature: divisor of the logits, after the softcap. A constexpr: each value compiles another kernel.
        ignore_index: rows with this target have zero log-probability and gradient.
        max_targets, group, accumulate, chunk_bytes: as in `linear_cross_entropy`. The backward pass uses
            half of `chunk_bytes` for logits; with accumulate="exact", a 16-bit weight gradient is rounded once.

    Returns:
        Same shape as target, fp32 (fp64 for fp64).

    Raises:
        ValueError: a wrong shape, dtype, placement or option.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_logprobs(x, weight, torch.randint(32, (2, 8)), temperature=0.9).sum().backward()
    """
    options = _Options(softcap or 0.0, temperature, ignore_index, max_targets, accumulate, chunk_bytes, False)
    return _linear_logprobs(x, weight, target, bias, softcap, group, options).log_probs


def linear_logprobs_with_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    max_targets: int | None = None,
    group: ProcessGroup | None = None,
    accumulate: Accumulate = "exact",
    chunk_bytes: int | None = None,
) -> LogProbsAndEntropy:
    """`linear_logprobs`, and the entropies of the rows' distributions from the same pass over the logits.

    Equivalent to::

        log_p = (logits / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1) * (target != ignore_index)

    Arguments and errors as in `linear_logprobs`; both results are differentiable.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_logprobs_with_entropy(x, weight, torch.randint(32, (2, 8))).entropy.shape
        torch.Size([2, 8])
    """
    options = _Options(softcap or 0.0, temperature, ignore_index, max_targets, accumulate, chunk_bytes, True)
    return _linear_logprobs(x, weight, target, bias, softcap, group, options)


def _linear_logprobs(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, softcap: float | None, group: ProcessGroup | None,
    options: _Options,
) -> LogProbsAndEntropy:  # fmt: skip
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap {softcap} must be positive, or None")
    if not options.temperature > 0.0:
        raise ValueError(f"temperature {options.temperature} must be positive")
    check_memory_options(options.accumulate, options.chunk_bytes, options.max_targets)
    local = local_tensors(x, weight, target, bias, None, group)
    x, weight, bias, target = local.x, local.weight, local.bias, local.target
    check_head(x, weight, bias)
    check_target(x, target)
    check_devices(x, weight, target, bias)
    x, weight, bias = autocast(x, weight, bias)
    check_dtypes(x, weight, bias)

    labels, rows = target.reshape(-1).contiguous(), x.reshape(-1, x.shape[-1])
    kept = kept_rows(labels, options.ignore_index, options.max_targets)
    if kept is None:
        found = _of_rows(rows, labels, weight, bias, local.shard, options)
    else:
        of_kept = _of_rows(rows.index_select(0, kept), labels[kept], weight, bias, local.shard, options)
        factor = nan_beyond(labels, options.ignore_index, kept.shape[0])
        spread = (v.new_zeros(labels.shape).index_copy(0, kept, v) * factor if v.numel() else v for v in of_kept)
        found = LogProbsAndEntropy(*spread)
    log_probs = local.to_dtensor(found.log_probs.view(target.shape))
    return LogProbsAndEntropy(
        log_probs, local.to_dtensor(found.entropy.view(target.shape)) if options.entropy else found.entropy
    )


def _of_rows(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard, options: _Options
) -> LogProbsAndEntropy:
    if is_transformed():
        return _reference(x, target, weight, bias, shard, options)
    # In the field order of Settings.
    settings = (
        options.ignore_index, 0.0, 0.0, float(options.softcap), float(options.temperature),
        logits_bytes(x, options.chunk_bytes), options.accumulate == "exact", False, options.entropy,
        *astuple(shard), *wanted_gradients(x, weight, bias),
    )  # fmt: skip
    losses, _, entropy, *_ = losses_by_row(x, weight, bias, target, None, *settings)
    return LogProbsAndEntropy(-losses, entropy)


def _reference(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard, options: _Options
) -> LogProbsAndEntropy:
    """Log-probabilities and entropies in plain PyTorch, for `torch.func` transforms."""
    if shard.group:
        raise NotImplementedError("torch.func is not supported for a vocabulary that is sharded over processes")
    z = functional.linear(x, weight, bias).to(accumulator(x.dtype))
    z = options.softcap * torch.tanh(z / options.softcap) if options.softcap else z
    log_p = (z / options.temperature).log_softmax(-1)
    counted = target != options.ignore_index
    log_probs = log_p.gather(1, target.where(counted, 0)[:, None])[:, 0].where(counted, 0.0)
    return LogProbsAndEntropy(log_probs, -(log_p.exp() * log_p).sum(1).where(counted, 0.0))
