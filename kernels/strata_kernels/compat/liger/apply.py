"""`liger_kernel.transformers.monkey_patch`: the functions that patch models.

With a model, a function patches it by `strata_kernels.patch_model`. Without one, Liger replaces classes and functions
of transformers for all models of the process; here, each model of that type that is constructed afterwards is patched
in `post_init`, until `forget()`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from ...ops.cross_entropy import cross_entropy
from ...patch import PatchReport, patch_model
from ...patch.structure import unwrap
from .families import FAMILIES, FAMILY_OF, FLAGS, Family, excluded, settings_of

try:
    from transformers import PreTrainedModel
except ImportError as error:
    raise ImportError(
        "liger_kernel.transformers patches models of transformers, which is not installed: "
        "pip install 'transformers>=5.17,<5.25'"
    ) from error

_log = logging.getLogger(__name__)

# Model type → settings with which new models of this type are patched.
_requested: dict[str, dict[str, bool]] = {}
_post_init: Callable[[Any], None] | None = None


def _apply(family: Family, given: dict[str, Any]) -> None:
    model = given.pop("model", None)
    given |= given.pop("kwargs", {})
    _warn_of_unknown(given)
    settings = settings_of(family, given)
    if model is None:
        _requested.update({model_type: settings for model_type in family.types})
        _hook()
    else:
        _patch(unwrap(model), settings)


def _patch(model: Any, settings: dict[str, bool]) -> PatchReport:
    """`patch_model` by the flags; with `cross_entropy=True`, also sets the loss from logits."""
    _forget_loss(model)
    report = patch_model(model, exclude=excluded(settings))
    _log.log(logging.INFO if report.replaced else logging.WARNING, report.summary())
    if settings.get("cross_entropy") and _has_causal_loss(model):
        # For this model only; Liger replaces torch.nn.functional.cross_entropy.
        model.loss_function = causal_lm_loss
    return report


def _has_causal_loss(model: Any) -> bool:
    # Not by `model.loss_function`, which warns for models without a loss.
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    has_own = "_loss_function" in vars(model)
    return not has_own and LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss


def _forget_loss(model: nn.Module) -> None:
    """Remove the loss set by an earlier call: only the last call counts."""
    if vars(model).get("_loss_function") is causal_lm_loss:
        del model._loss_function


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' `ForCausalLMLoss` by `cross_entropy`, without an fp32 copy of the logits.

    logits: [B, T, V]; labels: [B, T], position t predicts label t + 1; or shift_labels: [B, T], already shifted.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels[..., 1:], (0, 1), value=ignore_index)
    target = shift_labels.reshape(-1).to(logits.device)
    rows = logits.reshape(-1, vocab_size)
    return cross_entropy(rows, target, ignore_index=ignore_index, num_items=num_items_in_batch)


# -- models constructed later


def _hook() -> None:
    """Wrap `post_init` of transformers' models to patch types in `_requested`."""
    global _post_init
    if _post_init is not None:
        return
    original: Callable[[Any], None] = PreTrainedModel.post_init
    _post_init = original

    @wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        if _type_of(self) not in _requested:
            return
        # Outermost model first, because patching a model unpatches its submodules.
        for module in list(self.modules()):
            settings = _requested.get(_type_of(module))
            if settings is not None:
                _patch(module, settings)

    PreTrainedModel.post_init = post_init


def _type_of(module: Any) -> str:
    return getattr(module.config, "model_type", "") if isinstance(module, PreTrainedModel) else ""


def forget() -> None:
    """Stop patching new models; patched models stay patched."""
    global _post_init
    _requested.clear()
    if _post_init is not None:
        PreTrainedModel.post_init = _post_init
        _post_init = None


# -- Liger's functions


def _function(family: Family) -> Callable[..., None]:
    signature = family.signature

    def apply_liger_kernel(*args: Any, **kwargs: Any) -> None:
        _apply(family, dict(signature.bind(*args, **kwargs).arguments))

    apply_liger_kernel.__name__ = apply_liger_kernel.__qualname__ = f"apply_liger_kernel_to_{family.name}"
    apply_liger_kernel.__doc__ = f"Patch `model`, or models of {', '.join(family.types)} that are built from now on."
    apply_liger_kernel.__signature__ = signature  # type: ignore[attr-defined]
    return apply_liger_kernel


APPLY = {f"apply_liger_kernel_to_{name}": _function(family) for name, family in FAMILIES.items()}
MODEL_TYPE_TO_APPLY_LIGER_FN = {
    model_type: APPLY[f"apply_liger_kernel_to_{family.name}"] for model_type, family in FAMILY_OF.items()
}


def __getattr__(name: str) -> Any:
    if name in APPLY:
        return APPLY[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patch models of `model_type` that are constructed from now on; ignores flags that the family does not have."""
    if not model_type:
        _log.warning("no model type was given, so nothing is patched")
        return
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is None:
        # Any family can be patched by structure.
        _requested[model_type] = settings_of(None, kwargs)
        _hook()
        return
    known = inspect.signature(function).parameters
    function(**{name: value for name, value in kwargs.items() if name in known})


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Patch `model`. Ignores flags of other families, because one configuration may serve several."""
    _warn_of_unknown(kwargs)
    model = unwrap(model)
    family = FAMILY_OF.get(_type_of(model))
    if family is not None:
        known = family.signature.parameters
        kwargs = {name: on for name, on in kwargs.items() if name in known or "kwargs" in known}
    _patch(model, settings_of(family, kwargs))


def _warn_of_unknown(given: dict[str, Any]) -> None:
    for name in given:
        if name not in FLAGS:
            near = get_close_matches(name, FLAGS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else f"; known are {', '.join(FLAGS)}"
            _log.warning("unknown flag %r has no effect%s", name, hint)
