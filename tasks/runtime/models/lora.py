"""LoRA adapters, with PEFT.

The model object stays the same; PEFT replaces its linear layers with layers that add the adapter. The model is patched,
sharded, saved and evaluated like any other. Checkpoints contain only the adapter: every start reads the base weights
again, and `base_fingerprint` detects that they changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from strata_platform.spec.model import Lora, NoAdapter
from tasks.runtime.checkpoint.state import has_adapter

# Imported only for an adapter: PEFT imports every installed quantization library, which takes seconds.
if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel

# Values per tensor that the fingerprint reads; training a model further changes some of them.
_SAMPLED = 256


def add_adapter(model: PreTrainedModel, settings: Lora | NoAdapter, seed: int) -> LoraModel | None:
    """Add the adapter that `settings` describes to `model` and freeze all other parameters.

    The adapter is initialized from `seed`, has no effect yet, and has the dtype of the model. On a meta model it is on
    the meta device.

    Returns:
        PEFT's view of the same model, or None if `adapter.type` is none.

    Raises:
        ValueError: `adapter.target_modules` names no linear layer of the model.
    """
    if not isinstance(settings, Lora):
        return None
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    _require_targets(model, settings)
    config = LoraConfig(
        **settings.model_dump(exclude={"type", "target_modules", "quantization"}),
        target_modules=list(settings.target_modules) or "all-linear",
    )
    torch.manual_seed(seed)
    empty = next(model.parameters()).is_meta
    with init_empty_weights(include_buffers=False) if empty else nullcontext():
        return LoraModel(model, config, "default")


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within the block, `model`, wrapped or not, computes without its adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "no adapter is switched off"
    # PEFT's own `enable_adapters` also changes requires_grad, and FSDP keeps the trainable parameters it saw at first.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def base_fingerprint(model: PreTrainedModel) -> str:
    """A digest of the names, shapes and some values of the base weights; the same in every dtype."""
    digest = hashlib.sha256()
    adapted = has_adapter(model)
    for name, parameter in model.named_parameters():
        if not (adapted and parameter.requires_grad):
            values = parameter.detach().flatten()[:_SAMPLED].to(torch.bfloat16).contiguous()
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def require_base(found: str, expected: str, name: str) -> None:
    """Raises ValueError if `found`, the fingerprint of the base weights, is not that of the adapter's training.

    `name`: the `model.name` of the base weights.
    """
    if found != expected:
        raise ValueError(
            f"model.name {name!r} has other weights than those that the adapter was trained with; restore them, pin a "
            "Hub model with model.revision, or choose another name and train again"
        )


def _require_targets(model: PreTrainedModel, settings: Lora) -> None:
    """Raises ValueError for a name that matches no layer; PEFT ignores it as long as another name matches."""
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    for target in settings.target_modules:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise ValueError(
                f"adapter.target_modules: {target!r} is not a linear layer of the model, or is its head; choose from "
                f"{known}"
            )
