"""What a step of training computes, built once for training and for the kernel plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from strata_kernels import PatchReport
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import LABELLED, PAIRED
from tasks.runtime.data import PreparedData, collator
from tasks.runtime.data.dataset import Batch, Row
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.adapters.fused_adapters import fuse_adapters
from tasks.runtime.models.attention.varlen_attention import set_varlen_attention, uses_varlen, with_cu_seqlens
from tasks.runtime.models.build import freeze_by_name, freeze_non_text_parameters, has_fused_loss, patch_for_training
from tasks.runtime.models.dropout import turn_dropout_off
from tasks.runtime.models.float8 import use_float8
from tasks.runtime.models.media.media_inputs import with_model_inputs
from tasks.runtime.models.neftune import add_neftune
from tasks.runtime.models.score_head import score_positions
from tasks.runtime.objectives import build_objective
from tasks.runtime.objectives.objective import Objective


@dataclass(frozen=True)
class TrainingStep:
    """A model that is ready for training, the objective, and the batches that the model takes.

    The loop, the strategy that shards the model, and `torch.compile` come on top of it.
    """

    model: PreTrainedModel
    objective: Objective
    collate: Callable[[list[Row]], Batch]
    """Makes a batch of rows. With `varlen` it has the inputs of `add_cu_seqlens`."""
    patched: PatchReport | None
    """The operators that the kernel layer replaced; None if `kernels.enabled` is false."""
    varlen: bool
    """Whether attention runs from sequence to sequence of a packed row, without masks."""
    dropout_off: bool
    """Whether dropout of the model or its adapter is off because the objective compares answers."""


def build_training_step(
    model: PreTrainedModel, spec: RunSpec, device: torch.device, data: PreparedData | None = None
) -> TrainingStep:
    """Freeze, patch and configure `model` as `spec` asks, for training on `device`. Changes `model` in place.

    `model` has its adapter, and may be on the meta device. The kernel plan passes a meta model and the device that the
    run will have, and no data: it plans a batch without images or audio.

    Raises:
        ValueError: the kernel layer or `training.gradient_checkpointing` does not support the model.
    """
    if data is None or not data.manifest.has_media:
        freeze_non_text_parameters(model)
    freeze_by_name(model, spec.model)
    if (alpha := spec.training.neftune_noise_alpha) is not None:
        add_neftune(model, alpha)
    score_positions(model)
    patched = patch_for_training(model, spec.kernels)
    # After the kernel layer, which proves modules by the class that they have in the model's code.
    use_float8(model, spec.training)
    # Noise of the model alone would count as its difference from the reference model, or of one answer from the other.
    dropout_off = spec.objective.type in (*PAIRED, *LABELLED) and turn_dropout_off(model)
    if patched is not None:
        fuse_adapters(model)
    # It keeps the forward pass that a layer has now; fused adapters change the layers' classes.
    checkpoint_activations(model, spec.training)
    collate = with_model_inputs(collator(spec.model.attention), model, data)
    varlen = uses_varlen(spec.model, spec.parallel, model.config, device)
    if varlen:
        set_varlen_attention(model)
        collate = with_cu_seqlens(collate)
    objective = build_objective(spec, fused=has_fused_loss(patched))
    return TrainingStep(model, objective, collate, patched, varlen, dropout_off)
