"""An adapter as PEFT stores it: a folder with `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from strata_platform.file_io import require_regular_files
from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.model import Lora, Model
from tasks.runtime.models.adapters.lora import base_fingerprint, lora_config, require_base, saved_modules
from tasks.runtime.models.adapters.pissa import InitialMatrices
from tasks.runtime.models.media.multimodal import is_multimodal
from tasks.runtime.models.score_head import scores
from tasks.runtime.process.hub import asking_hub

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The last parts of the names of an adapter's matrices.
_IS_MATRIX = re.compile(r"\.lora_(embedding_)?[AB](\.weight)?$")
# Where PEFT's own model wraps ours.
_PREFIX = "base_model.model."
# Metadata of the weights: the fingerprint of the base model. PEFT does not read it.
_BASE = "strata_base"
# Settings of an adapter that change what its tensors mean, and that the spec has.
_SETTINGS = ("r", "lora_alpha", "use_dora", "use_rslora")
# Settings that the spec does not have, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # The others change the base model, unless PEFT has converted the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "eva"),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, True, None),
    "megatron_config": (None,),
    "trainable_token_indices": (None,),
    # These change what the adapter computes: from some token on, or as a mixture of several.
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False, None),
}
# Names that an error lists.
_SHOWN = 3


def write_adapter(
    model: PreTrainedModel,
    settings: Lora,
    base: Model,
    folder: Path,
    *,
    fingerprint: str | None = None,
    initial: InitialMatrices | None = None,
) -> None:
    """Write the adapter of `model`, for `PeftModel.from_pretrained(base_model, folder)`.

    A tied weight of `adapter.modules_to_save` is written under each of its names,
    because PEFT trains a copy of each module.

    Args:
        model: with its adapter, not merged.
        settings: the adapter's.
        base: the spec's `model`.
        folder: a new folder.
        fingerprint: that of the original weights, by default of those in `model`.
        initial: the initial matrices of PiSSA; the adapter is then written as one for the original weights.
    """
    local = Path(base.name).is_dir()
    whole = saved_modules(model, settings)
    config = lora_config(
        settings,
        target_modules=_targets(model, settings),
        modules_to_save=[path for path, _ in whole] or None,
        # A path would mean nothing to others.
        base_model_name_or_path=Path(base.name).absolute().name if local else base.name,
        revision=base.revision,
        inference_mode=True,
        task_type="SEQ_CLS" if scores(model) else "CAUSAL_LM",
    )
    tensors = {
        file_name(name): parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    for path, module in whole:
        for name, parameter in module.named_parameters():
            tensors[f"{_PREFIX}{path}.{name}"] = parameter.detach().clone().contiguous()
    if initial:
        tensors = _as_lora(tensors, {file_name(name): tensor for name, tensor in initial.items()})
        config.r *= 2
        config.lora_alpha *= 2**0.5 if config.use_rslora else 2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", _BASE: fingerprint or base_fingerprint(model)})
    config.save_pretrained(folder)


def _as_lora(tensors: dict[str, Tensor], initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """PiSSA's matrices as LoRA of twice the rank, relative to the original weights: [A, A0] and [B, -B0].

    PEFT's conversion (`path_initial_model_for_weight_conversion`). The adapter of embeddings, which began without an
    effect, gets zeros.
    """
    converted = dict(tensors)
    for name, tensor in tensors.items():
        if not _IS_MATRIX.search(name):
            continue
        other, is_first = initial.get(name, torch.zeros_like(tensor)), "_A" in name.removesuffix(".weight")[-2:]
        converted[name] = torch.cat([tensor, other if is_first else -other], dim=0 if is_first else 1).contiguous()
    return converted


def _targets(model: PreTrainedModel, settings: Lora) -> list[str]:
    """The layers that have an adapter, as PEFT finds them: by the last parts of their names where these tell.

    In a vision-language model a layer of the tower may have the name of one in the language model. Of a regular
    expression, PEFT keeps the last parts of names alone in some mixtures.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers = [
        path
        for path, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and not isinstance(layer, ParamWrapper)
    ]
    if is_multimodal(model.config) or isinstance(settings.target_modules, str):
        return layers
    return list(settings.target_modules) or sorted({path.rpartition(".")[2] for path in layers})


def file_name(name: str) -> str:
    """The name in PEFT's file of a parameter of an adapter.

    >>> file_name("model.q_proj.lora_A.default.weight")
    'base_model.model.model.q_proj.lora_A.weight'
    """
    return _PREFIX + name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector").replace(
        ".default", ""
    )


def load_initial_adapter(model: PreTrainedModel, settings: Adapter, base: Model) -> None:
    """Load the adapter of `adapter.init_from`, if it is set, into `model`, which has a new one, on the CPU.

    Raises:
        ValueError: there is no such adapter, it has other settings or tensors than this run's, or it was trained in
            another base model.
        Unreachable: the Hub does not answer.
    """
    if not isinstance(settings, Lora) or settings.init_from is None:
        return
    folder = _folder_of(settings.init_from)
    config = _read_config(folder)
    _require_same_settings(config, settings)
    trained_in = config.get("base_model_name_or_path")
    if trained_in and Path(trained_in).name != Path(base.name).name:
        log.warning(
            "adapter.init_from %r was trained in %r, and model.name is %r", settings.init_from, trained_in, base.name
        )
    parameters = {file_name(name): parameter for name, parameter in model.named_parameters() if "lora_" in name}
    for path, module in saved_modules(model, settings):
        parameters |= {f"{_PREFIX}{path}.{name}": parameter for name, parameter in module.named_parameters()}
    with safe_open(str(folder / WEIGHTS), framework="pt") as file:
        fingerprint = (file.metadata() or {}).get(_BASE)
    found = _without_frozen(load_file(folder / WEIGHTS), model)
    _require_same_tensors(found, {name: tuple(p.shape) for name, p in parameters.items()}, settings.init_from)
    if fingerprint is not None:
        require_base(base_fingerprint(model), fingerprint, base.name)
    for name, tensor in found.items():
        parameters[name].data.copy_(tensor)
    log.info("adapter: %d tensors of %s", len(found), settings.init_from)


def _without_frozen(found: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of an adapter, without the model's own: PEFT writes embeddings beside their adapter."""
    own = {
        file_name(name): parameter for name, parameter in model.named_parameters() if name.endswith("base_layer.weight")
    }
    return {
        name: tensor
        for name, tensor in found.items()
        if name not in own or not torch.equal(tensor.to(own[name].dtype), own[name])
    }


def _folder_of(name: str) -> Path:
    """The local folder of an adapter; one on the Hub is fetched."""
    if Path(name).is_dir():
        require_regular_files(Path(name))
        return Path(name)
    try:
        with asking_hub(f"adapter.init_from {name!r}"):
            return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS]))
    # An invalid name, or a repository that does not exist.
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"adapter.init_from {name!r} is not a folder, and cannot be read from the Hub: {reason}; "
            f"give a folder with {CONFIG} and {WEIGHTS}, or the Hub id of an adapter"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"adapter.init_from: {folder} has no {name}; give a folder that PEFT's save_pretrained wrote with "
                "safetensors, or the folder adapter of an exported model"
            )
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {**config}
    except (ValueError, TypeError) as error:
        raise ValueError(f"adapter.init_from: {folder / CONFIG} is not JSON of an adapter: {error}") from error


def _require_same_settings(config: dict[str, Any], settings: Lora) -> None:
    """Raises ValueError, with every difference, unless the spec states the adapter's settings."""
    given = {name: getattr(settings, name) for name in _SETTINGS}
    wrong = [
        f"adapter.{name} is {json.dumps(value)}, and the adapter has {json.dumps(config.get(name))}"
        for name, value in given.items()
        if config.get(name, False) != value
    ]
    unsupported = [
        f"{name} {json.dumps(config[name])} is not supported"
        for name, allowed in _UNSUPPORTED.items()
        if name in config and config[name] not in allowed
    ]
    if unsupported:
        raise ValueError(
            f"adapter.init_from {settings.init_from!r}: {'; '.join(unsupported)}. Start from an adapter that was "
            "trained without it, or leave adapter.init_from out"
        )
    if wrong:
        raise ValueError(
            f"adapter.init_from {settings.init_from!r}: {'; '.join(wrong)}. Set the fields to the adapter's values"
        )


def _require_same_tensors(found: dict[str, Tensor], wanted: dict[str, tuple[int, ...]], name: str) -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in found.items()}
    others = [
        f"{key} {list(shapes[key])}, not {list(shape)}"
        for key, shape in wanted.items()
        if key in shapes and shapes[key] != shape
    ]
    differences = [
        _listed(sorted(shapes.keys() - wanted.keys()), "tensors have no place in this run's adapter"),
        _listed(sorted(wanted.keys() - shapes.keys()), "tensors are missing"),
        _listed(others, "tensors have other shapes"),
    ]
    if any(differences):
        raise ValueError(
            f"adapter.init_from {name!r} does not fit: {'; '.join(filter(None, differences))}. Set "
            "adapter.target_modules, adapter.target_parameters and adapter.modules_to_save as they were for that "
            "adapter, and model.name to its base model"
        )


def _listed(names: list[str], meaning: str) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} {meaning} ({', '.join(names[:_SHOWN])}{more})" if names else ""
