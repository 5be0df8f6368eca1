"""Whether a model supports packed rows, and how many positions it has learned.

In a packed row, each sequence starts again at position 0; nothing else marks its start. Attention in transformers
honors that. State-space layers, convolutions and a few families with their own masks do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_kernels.patch.table import ROWS
from strata_platform.spec import RunSpec
from strata_platform.spec.model import Model
from tasks.runtime.models.build import build_model_on_meta, is_on_meta, load_config

# Lengths of the two sequences in the row of the probe.
_FIRST, _SECOND = 5, 4
# Families that are known to support packing, so that the probe, a pass on the CPU, can be skipped.
SUPPORTS_PACKING = frozenset(ROWS) - {"falcon_h1"} | {"mixtral", "qwen2_moe", "qwen3_moe"}


def require_packing_support(model: PreTrainedModel, spec: RunSpec) -> None:
    """Raises ValueError if rows hold several sequences and `model` mixes them. Skips a model on the meta device."""
    pairs = spec.objective.type == "dpo"
    if not (pairs or spec.data.packing) or model.config.model_type in SUPPORTS_PACKING or is_on_meta(model):
        return
    if supports_packing(model):
        return
    why = f"{type(model).__name__} mixes the sequences of a row, although their positions start again"
    if pairs:
        raise ValueError(
            f"objective.type 'dpo' puts both answers of a pair into one row, but model.name {spec.model.name!r} does "
            f"not support packed rows: {why}; choose a model of another family"
        )
    raise ValueError(
        f"data.packing is true, but model.name {spec.model.name!r} does not support packed rows: {why}; set "
        "data.packing to false"
    )


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether the second sequence of a row is independent of the first: its gradient there is exactly zero."""
    tokens = torch.arange(_FIRST + _SECOND).remainder(model.config.get_text_config().vocab_size)[None]
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    embedded: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        # Some families change their embeddings in place.
        return embedded[0].clone()

    training, attention = model.training, model.config._attn_implementation
    hook = model.get_input_embeddings().register_forward_hook(keep)
    model.eval()
    # Flash attention does not run on the CPU, and sdpa derives its mask from the same inputs.
    model.set_attn_implementation("sdpa" if attention.startswith("flash") else attention)
    try:
        states = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False)[0][:, _FIRST:]
        weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
        (gradient,) = torch.autograd.grad((states * weights).sum(), embedded)
    finally:
        hook.remove()
        model.set_attn_implementation(attention)
        model.train(training)
    return not bool(gradient[:, :_FIRST].any())


def require_position_embeddings(model: Model, sequence_length: int) -> None:
    """Raises ValueError if rows are longer than the model's learned position embeddings. Reads no weights."""
    most = getattr(load_config(model), "max_position_embeddings", None)
    if most is None or sequence_length <= most:
        return
    learned = learned_position_count(build_model_on_meta(model))
    if learned is not None and sequence_length > learned:
        raise ValueError(
            f"data.sequence_length {sequence_length} exceeds the {learned} learned positions of model.name "
            f"{model.name!r}; set data.sequence_length to {learned} or less"
        )


def learned_position_count(model: PreTrainedModel) -> int | None:
    """The number of learned position embeddings; None if the model computes positions, which sets no limit."""
    for name, module in model.base_model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in (
            "wpe",
            "embed_positions",
            "positions_embed",
        ):
            return int(model.config.max_position_embeddings)
    return None
