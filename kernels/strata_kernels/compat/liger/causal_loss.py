"""Functions for programs with a custom forward: the loss from hidden states, and a call inside FSDP's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cross_entropies import (
    CrossEntropyOutput,
    LigerFusedLinearCrossEntropyFunction,
    Losses,
    liger_fused_linear_cross_entropy,
)

_OPTIONS = inspect.signature(liger_fused_linear_cross_entropy).parameters


def unpack_cross_entropy_result(result: Tensor | tuple[Any, ...] | CrossEntropyOutput) -> Losses:
    """(loss, z-loss, accuracy, predictions) from the result of a loss; None for missing ones."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    found = result if isinstance(result, tuple) else (result,)
    loss, z_loss, accuracy, predictions = (*found, None, None, None)[:4]
    return loss, z_loss, accuracy, predictions


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """`linear_cross_entropy`: the mean, or the sum / `num_items_in_batch`. hidden_states: [N, H], target: [N].

    The weight gradient is rounded once; `accum_dtype` is ignored.
    """
    result = liger_fused_linear_cross_entropy(
        hidden_states, lm_head_weight, target, ignore_index=ignore_index, softcap=final_logit_softcapping,
        reduction="mean" if num_items_in_batch is None else "sum", return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, **kwargs,
    )  # fmt: skip
    loss, _, accuracy, predictions = unpack_cross_entropy_result(result)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    if return_token_accuracy or return_predicted_tokens:
        return CrossEntropyOutput(loss, token_accuracy=accuracy, predicted_tokens=predictions)
    return loss


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """transformers' `ForCausalLMLoss` from hidden states [B, T, H]: position t predicts label t + 1 of [B, T].

    Ignores keywords that `liger_fused_linear_cross_entropy` does not have: callers pass all keywords of the model.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("labels and shift_labels are None: pass one of them")
        shift_labels = pad(labels[..., 1:], (0, 1), value=ignore_index)
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size), lm_head_weight, shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch, ignore_index, final_logit_softcapping, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in _OPTIONS},
    )  # fmt: skip


class _FSDPForwardRedirection:
    """Calls `method(*args)` inside the forward of an FSDP-wrapped module, where its weights are gathered."""

    def __call__(self, wrapper_module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `method`."""
        wrapped = wrapper_module._fsdp_wrapped_module

        def once(*given: Any, **named: Any) -> Any:
            # First restore forward, because the method may call it.
            del wrapped.forward
            return method(*given, **named)

        wrapped.forward = once
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            vars(wrapped).pop("forward", None)


def fused_linear_cross_entropy_forward(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    ce_weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """The results of `LigerFusedLinearCrossEntropyFunction.apply`, and the gradients of input, weight and bias.

    Further arguments as in `apply`.
    """
    learning = [t.detach().requires_grad_() for t in (_input, weight, bias) if t is not None]
    with torch.enable_grad():
        loss, *others = LigerFusedLinearCrossEntropyFunction.apply(
            learning[0], learning[1], target, learning[2] if bias is not None else None, ce_weight, *args, **kwargs
        )
        gradients = torch.autograd.grad(loss.sum(), learning)
    return loss.detach(), *others, *gradients, *([None] if bias is None else [])


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients times grad_output."""
    return tuple(None if grad is None else grad * grad_output for grad in (grad_input, grad_weight, grad_bias))
