"""LoRA adapters, with PEFT.

The model object stays the same; PEFT replaces its linear layers with layers that add the adapter. The model is patched,
sharded, saved and evaluated like any other. Checkpoints contain only the adapter: every start reads the base weights
again, and `base_fingerprint` detects that they changed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from strata_kernels import PatchReport
from strata_kernels.patch.discover_experts import has_experts
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Lora, NoAdapter
from tasks.runtime.checkpoint.state import has_adapter
from tasks.runtime.models.adapters.adapted_layers import ends_with, layers_left_out, require_targets, targets
from tasks.runtime.models.build import build_model_on_meta
from tasks.runtime.models.config import new_tokens

# Imported only for an adapter: PEFT imports every installed quantization library, which takes seconds.
if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

log = logging.getLogger(__name__)

# Values per tensor that the fingerprint reads; training a model further changes some of them.
_SAMPLED = 256
# Names that an error lists.
_SHOWN = 20


def add_adapter(model: PreTrainedModel, settings: Lora | NoAdapter, seed: int) -> LoraModel | None:
    """Add the adapter that `settings` describes to `model` and freeze all other parameters but `modules_to_save`.

    The adapter is initialized from `seed`, has no effect yet (see `pissa` for others), and has the dtype of the model.
    On a meta model it is on the meta device.

    Returns:
        PEFT's view of the same model, or None if `adapter.type` is none.

    Raises:
        ValueError: `adapter.target_modules` names no layer that can have an adapter, `adapter.target_parameters` no
            weight of experts, or `adapter.modules_to_save` no module.
    """
    if not isinstance(settings, Lora):
        return None
    from peft.tuners.lora import LoraModel

    _require_names(model, settings)
    if not settings.target_modules and (names := layers_left_out(model)):
        log.info(
            "adapter: not added to %s, whose weight other code reads or whose output is more than a product",
            ", ".join(names),
        )
    config = lora_config(settings, target_modules=targets(model, settings))
    torch.manual_seed(seed)
    empty = next(model.parameters()).is_meta
    with init_empty_weights(include_buffers=False) if empty else nullcontext(), _renaming_nothing():
        adapted = LoraModel(model, config, "default")
    if empty:
        # PEFT gives it the dtype of the weights when it moves it to their device, which it does not on meta.
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(model.dtype)
    # PEFT's own `modules_to_save` trains a copy beside the module, which fused operators and tied weights do not know.
    for path, module in saved_modules(model, settings):
        if any("lora_" in name for name, _ in module.named_parameters()):
            raise ValueError(
                f"adapter.modules_to_save: {path!r} has an adapter, too; leave it out of adapter.target_modules, or "
                "out of adapter.modules_to_save"
            )
        module.requires_grad_(True)
    return adapted


def lora_config(settings: Lora, **options: Any) -> LoraConfig:
    """PEFT's configuration of the adapter; `options` are those that the model decides."""
    from peft import LoraConfig

    own = {"r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora"}
    experts = list(settings.target_parameters) or None
    return LoraConfig(**settings.model_dump(include=own), target_parameters=experts, **options)


def require_adapter(spec: RunSpec) -> None:
    """Raises ValueError if the adapter names what the model does not have, or PEFT could not read its export.

    Reads no weights.
    """
    if not isinstance(spec.adapter, Lora):
        return
    model = build_model_on_meta(spec.model)
    _require_names(model, spec.adapter)
    _require_new_rows(model, new_tokens(spec.model), spec.adapter)
    renamed = _renamed(model.config.model_type)
    adapted = {path.rpartition(".")[2] for path in targets(model, spec.adapter)}
    if "adapter" in spec.export.formats and (clash := sorted(renamed.keys() & adapted)):
        raise ValueError(
            f"export.formats has 'adapter', but in a {model.config.model_type} PEFT takes {', '.join(clash)} for "
            "experts, not for linear layers, and could not read it; set adapter.target_modules to other layers, such "
            "as those of the attention, or leave 'adapter' out"
        )


def _require_new_rows(model: PreTrainedModel, tokens: Sequence[str], settings: Lora) -> None:
    """Raises ValueError if the adapter trains no row of new tokens; warns if it trains those of embeddings or head
    alone.
    """
    if not tokens:
        return
    trained = {path for path, _ in saved_modules(model, settings)} | {*targets(model, settings)}
    parts = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    named = {what: path for path, one in model.named_modules() for what, part in parts.items() if one is part}
    frozen = {what: path for what, path in named.items() if path not in trained}
    if frozen and len(frozen) == len(named):
        raise ValueError(
            f"adapter.modules_to_save {list(settings.modules_to_save)} leaves the rows of model.add_special_tokens "
            f"untrained; add {' and '.join(path.rpartition('.')[2] for path in frozen.values())}"
        )
    cost = {"head": "cannot learn to write them", "embeddings": "reads all of them as the same token"}
    for what, path in frozen.items():
        log.warning(
            "adapter.modules_to_save leaves the %s frozen, so the rows of model.add_special_tokens keep the mean of "
            "the others there, and the model %s; add %s, unless it should not", what, cost[what],
            path.rpartition(".")[2],
        )  # fmt: skip


def _renamed(model_type: str) -> dict[str, str]:
    """Names in `target_modules` that PEFT reads as experts of transformers 4 in mixtures of this type → new names."""
    try:
        from peft.utils import transformers_weight_conversion as peft_names

        family = peft_names._MODEL_TO_CONVERSION_PATTERN.get(model_type, "")
        found: dict[str, str] = peft_names._MOE_TARGET_MODULE_MAPPING.get(family, {})
    except (ImportError, AttributeError):
        # A version that renames nothing.
        return {}
    return found


@contextmanager
def _renaming_nothing() -> Iterator[None]:
    """Within the block, PEFT does not rename targets."""
    try:
        from peft.utils import transformers_weight_conversion as peft_names

        names = peft_names._MOE_TARGET_MODULE_MAPPING
    except (ImportError, AttributeError):
        names = {}
    kept = dict(names)
    names.clear()
    try:
        yield
    finally:
        names.update(kept)


def expert_weights(model: nn.Module) -> list[str]:
    """The names of the weights of experts, [E, ...]: parameters of one module for all experts of a layer."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if has_experts(module)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    ]


def describe_experts(model: nn.Module, settings: Lora, patched: PatchReport | None) -> str | None:
    """What the adapter does with the experts of `model`, for a line of the log; None without experts."""
    names = expert_weights(model)
    if not names:
        return None
    ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    if not settings.target_parameters:
        return f"adapter: experts are frozen; adapter.target_parameters [{ends}] adapts them"
    if patched is None or "experts" not in patched.replaced:
        return (
            "adapter: experts are adapted without the fused operator, so PEFT adds the adapter to a copy of all "
            "experts of a layer in every forward pass; see the line on kernels"
        )
    return "adapter: experts are adapted, and no sum of weights and adapter is made"


def saved_modules(model: PreTrainedModel, settings: Lora) -> list[tuple[str, nn.Module]]:
    """The modules of `adapter.modules_to_save` by their paths, and those that share a weight with one of them."""
    named = list(model.named_modules())
    chosen = [module for path, module in named if ends_with(path, settings.modules_to_save)]
    weights = {id(parameter) for module in chosen for parameter in module.parameters()}
    tied = (model.get_input_embeddings(), model.get_output_embeddings())
    chosen += [module for module in tied if module is not None and id(module.weight) in weights]
    return [(path, module) for path, module in named if any(module is other for other in chosen)]


def _require_saved_modules(model: PreTrainedModel, settings: Lora) -> None:
    named = [path for path, module in model.named_modules() if any(True for _ in module.parameters())]
    for name in settings.modules_to_save:
        if not any(ends_with(path, (name,)) for path in named):
            known = list(dict.fromkeys(path.rpartition(".")[2] for path in named if path))
            known = [part for part in known if not part.isdigit()]
            close = get_close_matches(name.rpartition(".")[2], known, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(known[:_SHOWN])}"
            raise ValueError(f"adapter.modules_to_save: {name!r} is not a module of the model{meant}")


def merge_adapter(adapted: LoraModel) -> PreTrainedModel:
    """The model with the adapter added to its weights, which keep their dtype. PEFT's layers are gone afterwards.

    Each weight is summed in fp32 and rounded once. PEFT's own merge rounds the adapter's part before it adds it, which
    is a second error as large as the first: `adapted.merge_and_unload()` with the layers in fp32 is the same.

    Raises:
        ValueError: a merged weight is not finite.
    """
    from peft.tuners.lora import LoraLayer

    _untie_adapted_embeddings(adapted.model)
    for name, module in adapted.model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        dtypes = [parameter.dtype for parameter in module.parameters()]
        module.float()
        module.merge()
        for parameter, dtype in zip(module.parameters(), dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)
            if not parameter.isfinite().all():
                raise ValueError(
                    f"adapter: {name} has weights that are not finite with the adapter merged; train it again with a "
                    "lower optimizer.lr"
                )
    merged: PreTrainedModel = adapted.unload()
    return merged


def _untie_adapted_embeddings(model: PreTrainedModel) -> None:
    """Give the head a copy of its weight if it is tied to embeddings that have an adapter.

    The adapter changes embeddings alone; merged into a tied weight it would change the head, too.
    """
    from peft.tuners.lora import LoraLayer

    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(embeddings, LoraLayer) and head is not None and head.weight is embeddings.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


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


def _require_names(model: PreTrainedModel, settings: Lora) -> None:
    require_targets(model, settings)
    _require_target_parameters(model, settings)
    _require_saved_modules(model, settings)


def _require_target_parameters(model: PreTrainedModel, settings: Lora) -> None:
    """Raises ValueError for a name that matches a parameter that belongs to no experts, or none at all."""
    experts = expert_weights(model)
    for target in settings.target_parameters:
        matched = [name for name, _ in model.named_parameters() if f".{name}".endswith(f".{target}")]
        if not matched or not set(matched) <= set(experts):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in experts))
            raise ValueError(
                f"adapter.target_parameters: {target!r} is not the weight of experts; "
                + (f"choose from {known}" if known else "the model has none, so leave adapter.target_parameters out")
            )
