"""Adapters: a few weights that learn inside a model whose own weights do not, by PEFT.

The model stays the object it was, its linear layers replaced by ones that add the adapter: it is patched, split, saved
and evaluated like any other. Its own weights are in no checkpoint; every start reads them where the first one did, and
`base_fingerprint` tells whether they are still the same.
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

from strata_platform.spec import RunSpec
from strata_platform.spec.model import Lora
from tasks.runtime.checkpoint.state import has_adapter

# Imported where there is an adapter: PEFT loads every quantization library that is installed, which takes seconds.
if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel

# Of every tensor so many values are looked at: any further training of a model moves some of them.
_SAMPLED = 256


def add_adapter(model: PreTrainedModel, spec: RunSpec) -> LoraModel | None:
    """Put the adapter that the spec wants into `model` and freeze the rest; None when it wants none.

    It starts from `seed` as an adapter that changes nothing, in the dtype of the model; in an empty model it is empty.
    Returns PEFT's view of the same model. Raises ValueError when `adapter.target_modules` names no linear layer of it.
    """
    settings = spec.adapter
    if not isinstance(settings, Lora):
        return None
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    _require_targets(model, settings)
    config = LoraConfig(
        **settings.model_dump(exclude={"type", "target_modules", "quantization"}),
        target_modules=list(settings.target_modules) or "all-linear",
    )
    torch.manual_seed(spec.seed)
    empty = next(model.parameters()).is_meta
    with init_empty_weights(include_buffers=False) if empty else nullcontext():
        return LoraModel(model, config, "default")


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """What `model`, wrapped or not, computes in this block is what it would without its adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "no adapter is switched off"
    # PEFT's own switch, but for the freezing that `enable_adapters` adds: FSDP remembers which weights learn.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def base_fingerprint(model: PreTrainedModel) -> str:
    """A digest of names, shapes and some values of the weights but the adapter's; the same in every dtype."""
    digest = hashlib.sha256()
    adapted = has_adapter(model)
    for name, parameter in model.named_parameters():
        if not (adapted and parameter.requires_grad):
            values = parameter.detach().flatten()[:_SAMPLED].to(torch.bfloat16).contiguous()
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def require_base(model: PreTrainedModel, spec: RunSpec, expected: str) -> None:
    """Raises ValueError when an adapter was trained in a model of other weights than `model` has."""
    if base_fingerprint(model) != expected:
        raise ValueError(
            f"model.name {spec.model.name!r} has other weights now than those that the adapter was trained in; restore "
            "them, pin a Hub model by model.revision, or choose another name and train anew"
        )


def _require_targets(model: PreTrainedModel, settings: Lora) -> None:
    """PEFT passes over a name that matches nothing as long as another one matches."""
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    for target in settings.target_modules:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise ValueError(
                f"adapter.target_modules: {target!r} is no linear layer of the model, its head aside; it has {known}"
            )
