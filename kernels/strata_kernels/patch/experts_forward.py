"""The forward functions of patched experts, and of PEFT's adapters around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..ops.experts.experts import experts
from ..ops.experts.experts_arguments import LowRank
from ..ops.head.vocabulary_parallel import is_dtensor
from .structure import activation_function, has_function, is_hooked
from .table import Experts

Forward = Callable[..., Any]
# Weight name → (left, right, scale) of its adapter scale · left · right, in the weight's layout.
Adapters = dict[str, tuple[Tensor, Tensor, float]]


def experts_forward(original: Forward, recipe: Experts) -> Forward:
    """Forward of experts by `experts`; the family's own forward if the weights are DTensors.

    A module with quantized weights may define `restore_weight(name)`, which returns a dequantized weight. It is not
    saved: backward dequantizes again and recomputes h. A module with a shard of the experts may define
    `local_weight(name)`, also for biases; its forward gets indices relative to its first expert, and `max_slots` of
    `experts`.
    """

    def forward(
        self: Any,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        adapters: Adapters | None = None,
        max_slots: int | None = None,
    ) -> Tensor:
        adapters = adapters or {}
        if hasattr(self, "restore_weight"):
            inputs = (self, hidden_states, top_k_index, top_k_weights, adapters, self.restore_weight, max_slots)
            if not torch.is_grad_enabled():
                return compute(*inputs)
            restored: Tensor = checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
            return restored
        if hasattr(self, "local_weight"):
            return compute(self, hidden_states, top_k_index, top_k_weights, adapters, self.local_weight, max_slots)
        if any(is_dtensor(getattr(self, name)) for name in (recipe.gate_up, recipe.down)):
            if adapters:
                raise ValueError("adapters of experts need unsharded weights, but these are sharded")
            own: Tensor = original(self, hidden_states, top_k_index, top_k_weights)
            return own
        activation = getattr(self, recipe.activation) if recipe.activation else None
        # Hooks and activations that were set after patching are called.
        if activation is not None and not adapters and (is_hooked(activation) or not has_function(activation)):
            called: Tensor = original(self, hidden_states, top_k_index, top_k_weights)
            return called
        return compute(self, hidden_states, top_k_index, top_k_weights, adapters, partial(getattr, self))

    def compute(
        self: Any,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Adapters,
        weight_of: Callable[[str], Tensor],
        max_slots: int | None = None,
    ) -> Tensor:
        weights = [weight_of(recipe.gate_up), weight_of(recipe.down)]
        biases = [_bias(self, f"{name}_bias") for name in (recipe.gate_up, recipe.down)]
        dtype = _product_dtype(hidden_states, weights[0])
        gate_up, down = ((w.transpose(1, 2) if recipe.transposed else w).to(dtype) for w in weights)
        gate_up_bias, down_bias = (None if b is None else b.to(dtype) for b in biases)
        of_up, of_down = (_low_rank(adapters.get(name), recipe, dtype) for name in (recipe.gate_up, recipe.down))
        y = experts(
            hidden_states.to(dtype), gate_up, down, top_k_index, top_k_weights,
            gate_up_bias=gate_up_bias, down_bias=down_bias, gate_up_adapter=of_up, down_adapter=of_down,
            activation="silu" if recipe.activation is None else activation_function(getattr(self, recipe.activation)),
            gate=recipe.gate, alpha=recipe.alpha, limit=recipe.limit, offset=recipe.offset, max_slots=max_slots,
        )  # fmt: skip
        return y.to(hidden_states.dtype)

    return forward


def _bias(module: Any, name: str) -> Tensor | None:
    """The module's bias, or its local shard; None if it has none."""
    bias: Tensor | None = getattr(module, name, None)
    if bias is not None and hasattr(module, "local_weight"):
        return module.local_weight(name)  # type: ignore[no-any-return]
    return bias


def _product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype of matrix products with `weight`: autocast's if enabled, else that of the weight."""
    # is_autocast_enabled does not accept "meta", for which autocast does not exist.
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype


def _low_rank(adapter: tuple[Tensor, Tensor, float] | None, recipe: Experts, dtype: torch.dtype) -> LowRank | None:
    if adapter is None:
        return None
    left, right, scale = adapter
    a, b = (left.transpose(1, 2), right.transpose(1, 2)) if recipe.transposed else (right, left)
    # PEFT's B is contiguous as [N, R, E]; strided loads of it in every tile would be slow.
    return LowRank(a.to(dtype), b.to(dtype).contiguous(), float(scale))


def experts_adapter_forward(original: Forward) -> Forward:
    """Forward of PEFT's `ParamWrapper` of a weight of patched experts: passes both factors, without merging weights.

    Wrappers of several weights are nested; each adds its factors.
    """

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or len(active) != 1 or kwargs.get("adapter_names") is not None:
            return original(self, x, *args, **kwargs)
        adapters = {**kwargs.pop("adapters", {}), self.parameter_name: _factors(self, active[0])}
        return self.base_layer(x, *args, adapters=adapters, **kwargs)

    return forward


def _factors(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    """PEFT's A, [E · R, in], and B, [out, R · E], as (left, right, scale) in the layout of the weight."""
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a = a.view(wrapper.num_experts, -1, a.shape[1])
    b = b.view(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    # Earlier versions of PEFT treat the first dimension of every weight as its inputs.
    swapped = getattr(wrapper, "_did_swap_in_out_features", False)
    left, right = (b, a) if swapped else (a.transpose(1, 2), b.transpose(1, 2))
    return left, right, wrapper.scaling[adapter]
