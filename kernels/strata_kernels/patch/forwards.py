"""The forward functions that patched modules run, each the family's own with one step replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..ops.geglu import geglu, geglu_packed
from ..ops.linear_cross_entropy import linear_cross_entropy
from ..ops.linear_cross_entropy.vocabulary_parallel import is_dtensor
from ..ops.norm.rms_norm import rms_norm
from ..ops.relu_squared import relu_squared
from ..ops.rope import rope
from ..ops.swiglu import swiglu, swiglu_packed
from .structure import activation_options, linear_head, projected
from .table import Mlp, Norm, Row

Forward = Callable[..., Any]
# hidden states [B, T, H], the head's weight and bias, the cap on its logits → whatever the caller makes of them
HeadLoss = Callable[[Tensor, Tensor, Tensor | None, float | None], Any]

# What every family's attention calls for the rotation, and under which name patched ones find the operator.
ROTATION, _FUSED_ROTATION = "apply_rotary_pos_emb", "_strata_apply_rotary_pos_emb"

# The leading parameters of every causal model's forward, by which callers may pass arguments without naming them.
_PARAMETERS = (
    "self", "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache"
)  # fmt: skip


def norm_forward(norm: Norm) -> Forward:
    """RMSNorm as the family writes it."""
    eps, offset, cast = norm.eps, norm.offset, norm.cast

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, getattr(self, eps), offset=offset, cast=cast)

    return forward


def mlp_forward(mlp: Mlp) -> Forward:
    """The feed-forward layer with its activation fused, and with its projection where that is a plain one."""
    gated, packed = {"swiglu": (swiglu, swiglu_packed), "geglu": (geglu, geglu_packed)}.get(mlp.operator, (None, None))

    def activate(self: Any, x: Tensor, **projection: Any) -> Tensor:
        if gated is None or packed is None:
            return relu_squared(self.up_proj(x), **projection)
        options = activation_options(mlp.operator, getattr(self, mlp.activation))
        assert options is not None
        if mlp.gate_multiplier:
            options = {**options, "gate_multiplier": getattr(self, mlp.gate_multiplier)}
        if mlp.packed:
            return packed(self.gate_up_proj(x), **options, **projection)
        return gated(self.gate_proj(x), self.up_proj(x), **options, **projection)

    def forward(self: Any, x: Tensor) -> Tensor:
        y = projected(partial(activate, self, x), self.down_proj)
        # Not in the operator: the projection may have a bias.
        return y * getattr(self, mlp.multiplier) if mlp.multiplier else y

    return forward


def with_rope(original: Forward, interleaved: bool) -> Forward:
    """The attention's forward, where `apply_rotary_pos_emb` is the fused operator.

    The function's code is the family's own, and so is the module in which it looks up names; only that one name is
    another, which the module did not have, so that no other model is touched.
    """
    function = inspect.unwrap(original)
    assert isinstance(function, FunctionType) and ROTATION in function.__code__.co_names, original
    function.__globals__[_FUSED_ROTATION] = _ROTATIONS[interleaved]
    names = tuple(_FUSED_ROTATION if name == ROTATION else name for name in function.__code__.co_names)
    forward = FunctionType(
        function.__code__.replace(co_names=names),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    forward.__kwdefaults__ = function.__kwdefaults__
    return wraps(function, assigned=("__module__", "__doc__", "__qualname__", "__annotations__"))(forward)


def _apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return rope(q, k, cos, sin, layout="bhsd" if unsqueeze_dim == 1 else "bshd")


def _apply_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As above; also in these families cos and sin come with the angles once in each half."""
    width = cos.shape[-1]
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    return rope(q, k, cos, sin, layout="bhsd" if unsqueeze_dim == 1 else "bshd", rotary_dim=width, interleaved=True)


_ROTATIONS = {False: _apply_rotary_pos_emb, True: _apply_interleaved}


def causal_lm_forward(original: Forward, row: Row) -> Forward:
    """The model's forward; with labels, the loss is computed from the hidden states where logits are not asked for.

    With `head_loss`, it is what that makes of the hidden states and the head, inside the forward pass: where a strategy
    that splits weights has those of the head whole.
    """
    parameters = tuple(inspect.signature(original).parameters)
    assert parameters[: len(_PARAMETERS)] == _PARAMETERS, parameters
    output = import_module("transformers.modeling_outputs").CausalLMOutputWithPast
    can_return_tuple = import_module("transformers.utils").can_return_tuple

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        skip_logits: bool | None = None,
        head_loss: HeadLoss | None = None,
        **kwargs: Any,
    ) -> Any:
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
        }
        skip_logits = self.training if skip_logits is None else skip_logits
        # A loss function that was set on the model after it was patched is the one that counts.
        if head_loss is None and (labels is None or not skip_logits or hasattr(self, "_loss_function")):
            return original(self, **inputs, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        outputs = self.model(**inputs, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = outputs.last_hidden_state[:, kept, :]
        head, softcap = linear_head(self.lm_head), getattr(self.config, row.softcap) if row.softcap else None
        # The logits are scaled by scaling all that is added up in them.
        hidden = _scaled(hidden, self.config, row)
        bias = None if head.bias is None else _scaled(head.bias, self.config, row)
        cut = is_dtensor(head.weight) and not is_dtensor(hidden)
        if cut:
            hidden = _on_mesh_of(head.weight, hidden)
        loss: Any
        if head_loss is None:
            loss = _causal_lm_loss(hidden, head.weight, bias, labels, softcap=softcap, **kwargs)
        else:
            loss = head_loss(hidden, head.weight, bias, softcap)
        return output(
            # A copy: FSDP hooks on to what a model returns, and warns of views.
            loss=loss.to_local().clone() if cut else loss,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    patched: Forward = wraps(original)(can_return_tuple(forward))
    return patched


def _scaled(x: Tensor, config: Any, row: Row) -> Tensor:
    """x divided and multiplied as the family does it with the head's logits."""
    if row.divisor:
        x = x / getattr(config, row.divisor)
    if row.multiplier:
        x = x * getattr(config, row.multiplier)
    return x


def _on_mesh_of(weight: Any, hidden: Tensor) -> Tensor:
    """Hidden states that all processes which hold a head in parts have whole, as its DTensor needs them."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    return DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor | None,
    *,
    softcap: float | None,
    num_items_in_batch: int | Tensor | None = None,
    max_targets: int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What transformers' `ForCausalLMLoss` gives for the logits of a head: position t predicts label t + 1.

    A batch may bring `max_targets`: at most how many of its positions predict a label that is not ignored. The others
    are dropped before the head.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    return linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        shift_labels.reshape(-1).to(hidden.device),
        bias=bias,
        ignore_index=ignore_index,
        softcap=softcap,
        num_items=num_items_in_batch,
        max_targets=max_targets,
    )
