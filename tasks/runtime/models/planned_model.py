"""What the configuration of a model says about its training, before data are prepared; weights take no memory here."""

from __future__ import annotations

import inspect

from strata_kernels.patch.structure import unwrap
from strata_platform.spec.sections.kernels import Kernels
from strata_platform.spec.sections.model import Model
from tasks.runtime.models.build import build_model_on_meta, freeze_by_name, has_fused_loss, patch, require_shared_loss
from tasks.runtime.models.config import load_config
from tasks.runtime.models.pretrained import readable
from tasks.runtime.models.score_head import class_of


def require_kernels(model: Model, kernels: Kernels) -> None:
    """Raises ValueError if `kernels.enabled` is true and an operator cannot be put where it has a place, if the model's
    loss is neither fused nor computed by transformers' `loss_function`, or if transformers has no such model.
    """
    config = load_config(model)
    cls = class_of(model.head, config)._model_mapping.get(type(config), None)
    shares_loss = cls is not None and "loss_function" in inspect.unwrap(cls.forward).__code__.co_names
    if shares_loss and kernels.enabled is not True:
        return
    with readable(model.name):
        built = build_model_on_meta(model)
    if not has_fused_loss(patch(built, kernels)):
        require_shared_loss(unwrap(built))


def require_names_of_weights(model: Model) -> None:
    """Raises ValueError if a pattern of `model.freeze` or `model.trainable` matches no weight, or none is left to
    train.
    """
    if model.freeze or model.trainable:
        freeze_by_name(build_model_on_meta(model), model)
