"""Varlen attention with sinks: a learned score of each head that takes a share of every softmax and has no value.

    p = softmax([q k' · scale, sink])        result = p without its last column · v

With L the logarithm of the sum of exponentials of a query's scores, this is attention without sinks times
sigmoid(L - sink). Flash attention returns L. Its backward pass takes the result only for Σ grad · result of a query, so
that given sigmoid(L - sink) · grad, and the result with sinks, it returns the gradients with sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.runtime.models.attention import flash_attention_4 as flash_4

MODEL_TYPES = frozenset(("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"))
"""Families whose sinks are passed to attention as `s_aux`."""


def varlen_attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    ends: Tensor,
    longest: tuple[int, int],
    scale: float | None = None,
    window: int | None = None,
    *,
    by_flash_4: bool = False,
) -> Tensor:
    """Causal attention of packed sequences, query [N, H, D] against key and value [M, K, D] → [N, H, D].

    The equivalent, for one sequence with heads before tokens, and K = H:

        scores = torch.cat([(q @ k.mT * scale).masked_fill(later, -inf), sinks[:, None, None].expand(H, N, 1)], -1)
        scores.softmax(-1)[..., :-1] @ v

    Args:
        query, key, value: bf16 | fp16, on a GPU.
        sinks: [H], scores.
        ends: [2, sequences + 1], int32, cumulative lengths of queries and of keys.
        longest: upper bounds of the lengths of a sequence, of queries and of keys.
        scale: of q k'; None is 1 / √D.
        window: how many tokens a query sees, with its own; None is all before it.
        by_flash_4: by FlashAttention 4 instead of PyTorch's flash attention.
    """
    result: Tensor = _forward(query, key, value, sinks, *ends.unbind(), *longest, scale, window, by_flash_4)[0]
    return result


def masked_attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor, scale: float | None, dropout: float
) -> Tensor:
    """The same in plain PyTorch, query, key and value [B, H, T, D], for a mask [B, 1, L, T] of the pairs that count."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.mT * scale).masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    shares = scores.softmax(-1)[..., :-1]
    return torch.dropout(shares, dropout, train=dropout > 0) @ value


def _window(window: int | None) -> dict[str, int | None]:
    """PyTorch's flash attention is causal, or has bounds on both sides."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


@torch.library.custom_op("strata_runtime::varlen_attention_with_sinks", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, query_ends: Tensor, key_ends: Tensor,
    longest_query: int, longest_key: int, scale: float | None, window: int | None, by_flash_4: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and the logarithms of the sums of exponentials without sinks, fp32, [H, N]."""
    sizes = query_ends, key_ends, longest_query, longest_key
    if by_flash_4:
        result, sums = flash_4.forward(query, key, value, *sizes, scale, window)
    else:
        result, sums, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *sizes, 0.0, window is None, False, scale=scale, **_window(window)
        )
    return result.mul_(_gate(sums, sinks)), sums


def _gate(sums: Tensor, sinks: Tensor) -> Tensor:
    """The share of a softmax that its sink leaves to values, fp32, [N, H, 1]."""
    return (sums - sinks.float()[:, None]).sigmoid().t()[..., None]


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_settings: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("strata_runtime::varlen_attention_with_sinks_bwd", mutates_args=())
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, result: Tensor, sums: Tensor,
    query_ends: Tensor, key_ends: Tensor, longest_query: int, longest_key: int, scale: float | None,
    window: int | None, by_flash_4: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, value and sinks."""
    gate, wide = _gate(sums, sinks), grad.to(torch.float32, copy=True)
    of_sinks = -((1 - gate[..., 0]) * (wide * result).sum(-1)).sum(0).to(sinks.dtype)
    scaled = wide.mul_(gate).to(grad.dtype)
    sizes = query_ends, key_ends, longest_query, longest_key
    if by_flash_4:
        gradients = flash_4.backward(scaled, query, key, value, result, sums, *sizes, scale, window)
    else:
        # Random numbers are those of dropout, which there is none of.
        unused = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)
        gradients = torch.ops.aten._flash_attention_backward(
            scaled, query, key, value, result, sums, *sizes, 0.0, window is None, *unused, scale=scale,
            **_window(window),
        )  # fmt: skip
    return gradients[0], gradients[1], gradients[2], of_sinks


@_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *_settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        sinks.new_empty(sinks.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, query_ends, key_ends, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, query_ends, key_ends)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, grad_sums: None) -> tuple[Tensor | None, ...]:
    assert grad_sums is None, "varlen_attention_with_sinks returns the result alone"
    return (*_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 7)


_forward.register_autograd(_differentiate, setup_context=_save)
