"""Whether a causal model computes its loss by a plain head on hidden states, as `linear_cross_entropy` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .forwards import causal_lm_forward
from .small_copy import SHAPE, WIDTH, NotEqual, copy_of, is_equal, random_linear, seeded
from .structure import original_class
from .table import Head

_VOCABULARY = 11
# Fields of a configuration by which families cap, divide and multiply logits.
_CAPS = ("final_logit_softcapping",)
_DIVISORS = ("logits_scaling",)
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")


def prove_head(module: Any) -> Head:
    """How a causal model computes its loss from hidden states.

    Raises:
        NotEqual: it does so in a way that the operator does not know.
    """
    cls: Any = original_class(module)
    if not {"inputs_embeds", "labels"} <= inspect.signature(cls.forward).parameters.keys():
        raise NotEqual("has a forward without inputs_embeds and labels")
    output = module.get_output_embeddings()
    parts = [name for name, _ in module.named_children()]
    body = next((name for name in (cls.base_model_prefix, "model") if name in parts), None)
    head = next((name for name in parts if getattr(module, name) is output), None)
    if body is None or head is None:
        raise NotEqual("has its body or its head in another place")
    routed = hasattr(module.config.get_text_config(), "output_router_logits")
    for variant in _variants(module, body, head):
        if not _has_loss_of(module, variant, routed=False):
            continue
        balanced = replace(variant, balanced=True)
        try:
            return balanced if routed and _has_loss_of(module, balanced, routed=True) else variant
        except Exception:
            # Where the loss of its routers is asked for, it runs its own forward.
            return variant
    raise NotEqual("computes its loss from the hidden states in another way")


def _variants(module: Any, body: str, head: str) -> Iterator[Head]:
    config = module.config.get_text_config()

    def fields(names: tuple[str, ...]) -> list[str | None]:
        return [None, *(name for name in names if isinstance(getattr(config, name, None), int | float))]

    for softcap, divisor, multiplier in product(fields(_CAPS), fields(_DIVISORS), fields(_MULTIPLIERS)):
        yield Head(body=body, head=head, softcap=softcap, divisor=divisor, multiplier=multiplier)


def _has_loss_of(module: Any, variant: Head, *, routed: bool) -> bool:
    """Whether a small copy of `module` has the loss of `variant`, with the loss of its routers or without."""
    cls: Any = original_class(module)
    random = seeded()
    small = copy_of(module, {})
    small.config = deepcopy(module.config)
    if hasattr(small, "vocab_size"):
        small.vocab_size = _VOCABULARY
    for config in (small.config, small.config.get_text_config()):
        for name, value in (("vocab_size", _VOCABULARY), ("output_router_logits", routed)):
            if hasattr(config, name):
                setattr(config, name, value)
    experts = getattr(small, "num_experts", 4)
    routers = tuple(torch.randn(6, experts, generator=random) for _ in range(2)) if routed else None
    setattr(small, variant.body, _Body(routers))
    linear = random_linear(WIDTH, _VOCABULARY, getattr(module, variant.head), random)
    setattr(small, variant.head, linear)
    labels = torch.tensor([[1, 4, -100], [-100, 2, 10]])

    def losses(forward: Callable[..., Any], hidden: Tensor) -> tuple[Any, ...]:
        """Of labels as users pass them, with the items of a whole step, and of labels that are shifted already."""
        asked: tuple[dict[str, Any], ...] = (
            {},
            {"num_items_in_batch": 7},
            {"num_items_in_batch": 7, "shift_labels": labels},
        )
        return tuple(forward(small, inputs_embeds=hidden, labels=labels, use_cache=False, **a).loss for a in asked)

    original, ours = partial(losses, cls.forward), partial(losses, causal_lm_forward(cls.forward, variant))
    return is_equal(original, ours, torch.randn(SHAPE, generator=random), weights=list(linear.parameters()))


class _Body(nn.Module):
    """A model's body whose last hidden state is the embeddings that it is given."""

    def __init__(self, router_logits: tuple[Tensor, ...] | None) -> None:
        super().__init__()
        self._router_logits = router_logits

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Return an output with the fields that heads read."""
        output = import_module("transformers.modeling_outputs").MoeModelOutputWithPast
        fields = output(last_hidden_state=inputs_embeds, router_logits=self._router_logits)
        fields.cross_attentions = None  # What GPT-2 returns besides.
        return fields
