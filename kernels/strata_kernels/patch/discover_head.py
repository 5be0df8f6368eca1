"""Proof that a causal model computes its loss from hidden states and a plain LM head, as `linear_cross_entropy`."""

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

from .forwards import LOSS_ARGUMENTS, causal_lm_forward
from .small_copy import SHAPE, WIDTH, NotEqual, copy_of, is_equal, random_linear, seeded
from .structure import original_class
from .table import Head

_VOCABULARY = 11
_LABELS = [[1, 4, -100], [-100, 2, 10]]
# Configuration fields for softcap, divisor and multiplier of logits.
_CAPS = ("final_logit_softcapping",)
_DIVISORS = ("logits_scaling",)
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


def prove_head(module: Any) -> Head:
    """The recipe by which a causal model computes its loss from hidden states.

    Raises:
        NotEqual: the operator does not support it.
    """
    cls: Any = original_class(module)
    if not {"inputs_embeds", "labels"} <= inspect.signature(cls.forward).parameters.keys():
        raise NotEqual("has a forward without inputs_embeds and labels")
    linear = module.get_output_embeddings()
    parts = [name for name, _ in module.named_children()]
    body = next((name for name in (cls.base_model_prefix, "model") if name in parts), None)
    head = next((name for name in parts if getattr(module, name) is linear), None)
    if body is None or head is None:
        raise NotEqual("has its body or its head in an unknown attribute")
    small = _small_copy(module, body, head, routed=False)
    output = type(cls.forward(small, **_all_inputs(cls.forward, small.config)))
    labelled = "labels" in getattr(small, body).calls[-1]
    # None for a family without a router loss.
    routed = getattr(module.config.get_text_config(), "output_router_logits", None)
    for variant in (replace(v, labelled=labelled) for v in _variants(module, body, head, output)):
        if not _has_loss_of(small, variant):
            continue
        balanced = replace(variant, balanced=True)
        if routed is not None and _is_balanced_as(_small_copy(module, body, head, routed=True), balanced):
            return balanced
        if routed:
            raise NotEqual("adds the loss of its routers in another way")
        return variant
    raise NotEqual("computes its loss from the hidden states in another way")


def _is_balanced_as(small: Any, balanced: Head) -> bool:
    """Whether the family adds its router loss as `balanced` does. If not, calls that request this loss run the family's
    own forward.
    """
    try:
        return _has_loss_of(small, balanced)
    except Exception:
        # Third-party code with its own routers.
        return False


def _variants(module: Any, body: str, head: str, output: type) -> Iterator[Head]:
    config = module.config.get_text_config()
    usual = import_module("transformers.modeling_outputs").CausalLMOutputWithPast

    def fields(names: tuple[str, ...]) -> list[str | None]:
        return [None, *(name for name in names if isinstance(getattr(config, name, None), int | float))]

    for softcap, divisor, multiplier in product(fields(_CAPS), fields(_DIVISORS), fields(_MULTIPLIERS)):
        yield Head(body, head, softcap, divisor, multiplier, output=None if output is usual else output)


def _small_copy(module: Any, body: str, head: str, *, routed: bool) -> Any:
    """A small copy of `module` with a mock body; routed: whether it adds its router loss."""
    small, random = copy_of(module, {}), seeded()
    small.config = deepcopy(module.config)
    if hasattr(small, "vocab_size"):
        small.vocab_size = _VOCABULARY
    for config in (small.config, small.config.get_text_config()):
        for name, value in (("vocab_size", _VOCABULARY), ("output_router_logits", routed)):
            if hasattr(config, name):
                setattr(config, name, value)
    experts = getattr(small, "num_experts", 4)
    routers = tuple(torch.randn(6, experts, generator=random) for _ in range(2)) if routed else None
    setattr(small, body, _Body(original_class(getattr(module, body)), routers))
    setattr(small, head, random_linear(WIDTH, _VOCABULARY, getattr(module, head), random))
    return small


def _has_loss_of(small: Any, variant: Head) -> bool:
    """Whether a small copy of a causal model has the loss of `variant`.

    Raises:
        NotEqual: the loss is equal, but arguments of the body or other outputs are not.
    """
    cls: Any = type(small)
    forwards = cls.forward, causal_lm_forward(cls.forward, variant)
    labels = torch.tensor(_LABELS)
    # Masks some targets.
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])

    def losses(forward: Callable[..., Any], hidden: Tensor) -> tuple[Any, ...]:
        """Losses for plain labels, with padding, with `num_items_in_batch`, and with `shift_labels`."""
        asked: tuple[dict[str, Any], ...] = (
            {},
            {"attention_mask": mask},
            {"num_items_in_batch": 7},
            {"num_items_in_batch": 7, "shift_labels": labels},
        )
        return tuple(forward(small, inputs_embeds=hidden, labels=labels, use_cache=False, **a).loss for a in asked)

    body, weights = getattr(small, variant.body), list(getattr(small, variant.head).parameters())
    original, ours = (partial(losses, forward) for forward in forwards)
    # Large hidden states reveal a softcap.
    for scale in (1.0, 100.0):
        if not is_equal(original, ours, scale * torch.randn(SHAPE, generator=seeded()), weights=weights):
            return False
    inputs = _all_inputs(cls.forward, small.config)
    expected, given = (forward(small, **inputs) for forward in forwards)
    if not _are_same(*body.calls[-2:]):
        raise NotEqual("passes other arguments to its body than it is called with")
    computed = {"loss": None, "logits": None, "aux_loss": None}
    if not _are_same({**expected, **computed}, {name: given.get(name) for name in expected} | computed):
        raise NotEqual(f"returns other things than its loss and what its body returns: {', '.join(expected)}")
    return True


def _all_inputs(forward: Callable[..., Any], config: Any) -> dict[str, Any]:
    """A value for each parameter of a causal model's forward that does not affect the loss.

    Values of the configuration where it has one, because a model may accept only some values.
    """
    known = {
        "inputs_embeds": torch.ones(SHAPE),
        "attention_mask": torch.ones(SHAPE[:2], dtype=torch.long),
        "position_ids": torch.arange(SHAPE[1])[None],
        "output_attentions": True,
        "output_hidden_states": True,
        "use_cache": False,
    }
    left = {"input_ids", "labels", "logits_to_keep", "return_dict", "output_router_logits", *LOSS_ARGUMENTS}
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD and p.name not in left]
    given = {name: known.get(name, getattr(config, name, f"the {name} of the caller")) for name in named}
    return {**given, "labels": torch.tensor(_LABELS)}


def _are_same(expected: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether both hold the same objects or equal placeholder strings."""
    return expected.keys() == given.keys() and all(
        given[name] is value or (isinstance(value, str) and given[name] == value) for name, value in expected.items()
    )


class _Body(nn.Module):
    """A mock body that returns its input embeddings as last hidden state and records its arguments."""

    def __init__(self, cls: type[nn.Module], router_logits: tuple[Tensor, ...] | None) -> None:
        super().__init__()
        self._arguments = list(inspect.signature(cls.forward).parameters.values())[1:]
        self._router_logits = router_logits
        self.calls: list[dict[str, Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return an output with all the fields that heads read."""
        passed = dict(zip((argument.name for argument in self._arguments), args, strict=False)) | kwargs
        defaults = {argument.name: argument.default for argument in self._arguments}
        # Bodies read these from the configuration too; either body or head may slice hidden states.
        left = {"return_dict", "output_router_logits", "logits_to_keep"}
        self.calls.append(
            {k: v for k, v in passed.items() if k not in left and v is not None and v is not defaults.get(k)}
        )
        return _Output(last_hidden_state=passed["inputs_embeds"], router_logits=self._router_logits)


class _Output(dict[str, Any]):
    """An output of the mock body, with a placeholder in every field."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # From transformers 5.24 on, outputs have the same cache under all of these names.
        found = "cache" if name in ("past_key_values", "cache_params") else name
        return self.get(name, f"the {found} of the body")

    def __getitem__(self, key: Any) -> Any:
        # Outputs of transformers are also indexable as tuples.
        return super().__getitem__("last_hidden_state" if key == 0 else key)
