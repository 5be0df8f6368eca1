"""Which layers get an adapter: those that `adapter.target_modules` selects."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from strata_platform.spec.sections.model import SCORE, Lora
from tasks.runtime.models.media.multimodal import is_multimodal
from tasks.runtime.models.score_head import scores

_PLAIN = (nn.Linear.forward, Conv1D.forward)
# Names of modules that an error lists.
_SHOWN = 5


def targets(model: PreTrainedModel, settings: Lora) -> list[str]:
    """The names in `target_modules` or what matches it, or all linear layers but the head; of a vision-language model,
    those of its language model.
    """
    # By their paths: what PEFT calls "all-linear" has experts and routers in it for some mixtures, and not for others.
    layers, given = _linear_layers(model), settings.target_modules
    if isinstance(given, str) or (given and is_multimodal(model.config)):
        # In Gemma 4's tower, modules around a linear layer have the names of those in the language model.
        return [path for path in (*layers, *_embeddings(model)) if _selects(given, path)]
    if given or not is_multimodal(model.config):
        return list(given or layers)
    decoder = {id(module) for module in model.get_decoder().modules()}
    return [name for name in layers if id(model.get_submodule(name)) in decoder]


def layers_left_out(model: PreTrainedModel) -> list[str]:
    """The last parts of the names of linear layers that cannot have an adapter, the head apart."""
    return sorted({path.rpartition(".")[2] for path in _all_linear_layers(model).keys() - {*_linear_layers(model)}})


def adapts_embeddings(model: PreTrainedModel, settings: Lora) -> bool:
    """Whether the embeddings of `model` get an adapter."""
    return any(_selects(settings.target_modules, path) for path in _embeddings(model))


def require_targets(model: PreTrainedModel, settings: Lora) -> None:
    """Raises ValueError for a name that matches no layer; PEFT ignores it as long as another name matches."""
    layers = [*_linear_layers(model), *_embeddings(model)]
    if isinstance(settings.target_modules, str):
        _require_match(model, settings.target_modules, layers)
        return
    for target in settings.target_modules:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
            raise ValueError(
                f"adapter.target_modules: {target!r} is not a linear layer of the model or its embeddings, is its "
                f"head, or is a layer whose weight other code reads, past an adapter; choose from {known}, or leave it "
                "out to adapt all linear layers"
            )


def _require_match(model: PreTrainedModel, regex: str, layers: list[str]) -> None:
    """Raises ValueError if `regex` matches nothing, or a module that is none of `layers`."""
    matched = [path for path, _ in model.named_modules() if path and _selects(regex, path)]
    others = [path for path in matched if path not in layers]
    if matched and not others:
        return
    examples: dict[str, str] = {}
    for path in layers:
        examples.setdefault(path.rpartition(".")[2], path)
    what = (
        f"also matches {', '.join(others[:_SHOWN])}{', ...' * (len(others) > _SHOWN)}, which cannot have an adapter"
        if others
        else "matches no whole name of a module"
    )
    raise ValueError(
        f"adapter.target_modules: the regular expression '{regex}' {what}; let it match linear layers other than the "
        f"head, or the embeddings, such as {', '.join(examples.values())}"
    )


def _selects(given: tuple[str, ...] | str, path: str) -> bool:
    """Whether `given`, names or a regular expression, selects the module at `path`."""
    return re.fullmatch(given, path) is not None if isinstance(given, str) else ends_with(path, given)


def ends_with(path: str, names: tuple[str, ...]) -> bool:
    """Whether the path of a module ends with one of `names`, which are whole parts of it."""
    return any(f".{path}".endswith(f".{name}") for name in names)


def _embeddings(model: PreTrainedModel) -> list[str]:
    """The path of the embeddings of tokens."""
    embeddings = model.get_input_embeddings()
    return [path for path, module in model.named_modules() if module is embeddings]


def _all_linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """All linear layers but the head, by path."""
    head = getattr(model, SCORE) if scores(model) else model.get_output_embeddings()
    return {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    }


def _linear_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """The paths of all linear layers that can have an adapter, but the head.

    An adapter needs a layer that computes what a linear layer does, which routers of Phi-MoE and Llama 4 do not, and
    whose result is used: Mamba's fast kernels take the weight of the output projection instead.
    """
    classes: dict[str, Any] = {path: type(module) for path, module in model.named_modules()}
    return tuple(
        path
        for path, layer in _all_linear_layers(model).items()
        if (type(layer).forward in _PLAIN or type(layer).__module__.startswith("bitsandbytes."))
        and path.rpartition(".")[2] not in weights_read_by(classes[path.rpartition(".")[0]])
    )


@cache
def weights_read_by(owner: type[nn.Module]) -> frozenset[str]:
    """The names of layers whose weights the code of a class of modules reads, beyond their dtype, device and shape."""
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):
        # A class that was made while the program runs.
        return frozenset()
    return frozenset(re.findall(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))", source))
