"""Whether a model supports packed rows, and how many positions it has learned.

In a packed row, each sequence starts again at position 0; nothing else marks its start. Attention in transformers
honors that. Recurrent layers and the masks of a few families do not by themselves; `build.support_packed_rows` makes
them. What is left, such as positions that a family computes itself, is found by a probe and rejected.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from strata_kernels.patch.table import ROWS
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Objective
from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.objectives import PAIRED
from tasks.runtime.models.attention.attention_choice import choose_attention
from tasks.runtime.models.attention.recurrent_layers import needs_gpu, recurrent_layers
from tasks.runtime.models.build import build_model_on_meta, is_on_meta, support_packed_rows
from tasks.runtime.models.config import load_config, rope_sets
from tasks.runtime.models.media.multimodal import has_rope_index, is_multimodal
from tasks.runtime.models.score_head import scores

log = logging.getLogger(__name__)

# Lengths of the two sequences in the row of the probe.
_FIRST, _SECOND = 5, 4
# Families that are known to support packing, so that the probe, a pass on the CPU, can be skipped.
SUPPORTS_PACKING = frozenset(ROWS) - {"falcon_h1"} | {"mixtral", "qwen2_moe", "qwen3_moe"}

# Sizes of a small model.
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Parameters of a small model, at most.
_LARGEST = 10**7


def require_planned_packing_support(spec: RunSpec) -> None:
    """`require_packing_support` before data is prepared, for a small model of the same configuration.

    A configuration of which no small model can be built is left to the real one.
    """
    config = load_config(spec.model)
    _require_positions_of_sequences(config, spec)
    if _shares_rows(spec.data, spec.objective) and config.model_type not in SUPPORTS_PACKING:
        small = small_model(config)
        if small is not None:
            require_packing_support(small, spec)


def require_packing_support(model: PreTrainedModel, spec: RunSpec) -> None:
    """Raises ValueError if rows hold several sequences and `model` mixes them. Skips a model on the meta device."""
    if not _shares_rows(spec.data, spec.objective) or model.config.model_type in SUPPORTS_PACKING or is_on_meta(model):
        return
    recurrent = {type(layer).__name__ for layer in recurrent_layers(model).values()}
    if recurrent and spec.training.compile:
        raise ValueError(
            f"training.compile: {', '.join(sorted(recurrent))} of model.name {spec.model.name!r} gets each sequence of "
            "a packed row by itself, so its sizes differ from batch to batch; set training.compile to false"
        )
    # The model is on the CPU, where kernels of its recurrent layers do not run.
    probed = small_model(model.config) if needs_gpu(model) and model.device.type == "cpu" else model
    if probed is None:
        log.warning("packing: without a GPU it is not tested whether %s keeps samples apart", type(model).__name__)
        return
    if supports_packing(probed):
        return
    why = f"{type(model).__name__} mixes the sequences of a row, although their positions start again"
    if spec.objective.type in PAIRED:
        raise ValueError(
            f"objective.type {spec.objective.type!r} puts both answers of a pair into one row, but model.name "
            f"{spec.model.name!r} does not support packed rows: {why}; choose a model of another family"
        )
    raise ValueError(
        f"data.packing is true, but model.name {spec.model.name!r} does not support packed rows: {why}; set "
        "data.packing to false"
    )


def _require_positions_of_sequences(config: PretrainedConfig, spec: RunSpec) -> None:
    """Raises ValueError if layers scale attention by places in a row, as Llama 4's do from `floor_scale` on, or if
    transformers counts the chunks of attention from the start of a row.
    """
    text = config.get_text_config()
    if not _shares_rows(spec.data, spec.objective):
        return
    chunk = getattr(text, "attention_chunk_size", None)
    old = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
    if old and chunk is not None and spec.data.sequence_length > chunk:
        raise ValueError(
            f"data.sequence_length {spec.data.sequence_length}: model.name {spec.model.name!r} attends in chunks of "
            f"{chunk} tokens (attention_chunk_size), which transformers {transformers.__version__} counts from the "
            "start of a row, not of its sequences; install transformers 5.23 or newer, set data.sequence_length to at "
            f"most {chunk}, or data.packing to false"
        )
    least = getattr(text, "floor_scale", None) if getattr(text, "attn_temperature_tuning", False) else None
    if least is not None and spec.data.sequence_length >= least:
        raise ValueError(
            f"data.sequence_length {spec.data.sequence_length}: model.name {spec.model.name!r} scales attention by "
            f"places in a row, not in its sequences, from {least} on (floor_scale); set data.sequence_length to at "
            f"most {least - 1}, or data.packing to false"
        )


def _shares_rows(data: Data, objective: Objective) -> bool:
    """Whether a row holds several sequences."""
    return data.packing or objective.type in PAIRED


def small_model(config: PretrainedConfig) -> PreTrainedModel | None:
    """A model of few and narrow layers, one of each kind of `config`, with random weights; None if there is none."""
    try:
        text = config.get_text_config()
        fields = text.to_dict()
        sizes: dict[str, Any] = {name: size for name, size in _SMALL.items() if fields.get(name) is not None}
        # One layer of each kind, by both lists that may name kinds.
        names = [name for name in ("layer_types", "mlp_layer_types") if fields.get(name)]
        kinds = list(dict.fromkeys(zip(*(fields[name] for name in names), strict=True)))
        if kinds:
            sizes |= {name: list(column) for name, column in zip(names, zip(*kinds, strict=True), strict=True)}
            sizes["num_hidden_layers"] = len(kinds)
        small = type(text).from_dict({**fields, **sizes})
        with init_empty_weights():
            if AutoModelForCausalLM.from_config(small).num_parameters() > _LARGEST:
                return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
            if needs_gpu(model) and torch.cuda.is_available():
                model.to("cuda")
            # A pass finds sizes that do not fit together.
            tokens = torch.zeros(1, _FIRST + _SECOND, dtype=torch.int64, device=model.device)
            model(input_ids=tokens, use_cache=False)
        support_packed_rows(model)
    # Configurations have rules of their own, and their models any kind of error.
    except Exception as error:
        log.debug("no small model of %s: %s", config.model_type, error)
        return None
    return model


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether the second sequence of a row is independent of the first: its gradient there is exactly zero."""
    gradient = _gradient_of_embeddings(model, [*range(_FIRST), *range(_SECOND)], slice(_FIRST, None))
    return not bool(gradient[:, :_FIRST].any())


def is_causal(model: PreTrainedModel) -> bool:
    """Whether the first tokens of a text are independent of later ones: their gradient there is exactly zero."""
    gradient = _gradient_of_embeddings(model, [*range(_FIRST + _SECOND)], slice(_FIRST))
    return not bool(gradient[:, _FIRST:].any())


def _gradient_of_embeddings(model: PreTrainedModel, places: list[int], outputs: slice) -> Tensor:
    """The gradient of some `outputs` of a row by its embeddings: [1, T, H]. places: of its tokens in their sequences.

    Raises ValueError if the model does not embed tokens by `get_input_embeddings()`.
    """
    tokens = torch.arange(_FIRST + _SECOND).remainder(model.config.get_text_config().vocab_size)[None]
    positions = torch.tensor(places)[None]
    embedded: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        # Some families change their embeddings in place.
        return embedded[0].clone()

    training, attention = model.training, model.config._attn_implementation
    try:
        hook = model.get_input_embeddings().register_forward_hook(keep)
    except NotImplementedError as error:
        raise _no_embeddings(model) from error
    model.eval()
    # Flash attention does not run on the CPU, and the others derive their masks from the same inputs.
    model.set_attn_implementation(
        choose_attention("auto", model.config) if attention.startswith("flash") else attention
    )
    tokens, positions = tokens.to(model.device), positions.to(model.device)
    if has_rope_index(model):
        # Those in the text come first; a token that is no image's has the same in all three dimensions.
        positions = positions.expand(4, 1, -1)
    try:
        # Of a model that scores texts, logits are those of whole rows.
        scored = scores(model)
        run = getattr(model, model.base_model_prefix) if scored else model
        found = run(input_ids=tokens, position_ids=positions, use_cache=False)
        if not embedded:
            raise _no_embeddings(model)
        states = (found.last_hidden_state if scored else found.logits)[:, outputs]
        weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype, device=states.device).view_as(states)
        (gradient,) = torch.autograd.grad((states * weights).sum(), embedded)
    finally:
        hook.remove()
        model.set_attn_implementation(attention)
        model.train(training)
    return gradient


def _no_embeddings(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"model.name: {type(model).__name__} does not embed input_ids, the tokens of a text, by "
        "get_input_embeddings(); choose a causal language model, or define that method in the model's own code"
    )


def require_position_embeddings(model: Model, sequence_length: int) -> None:
    """Raises ValueError if rows are longer than the model's learned position embeddings; warns of a rotation that
    depends on the batch. Reads no weights.
    """
    _warn_of_shared_rotation(model, sequence_length)
    most = getattr(load_config(model), "max_position_embeddings", None)
    if most is None or sequence_length <= most:
        return
    learned = learned_position_count(build_model_on_meta(model))
    if learned is not None and sequence_length > learned:
        raise ValueError(
            f"data.sequence_length {sequence_length} exceeds the {learned} learned positions of model.name "
            f"{model.name!r}; set data.sequence_length to {learned} or less"
        )


def _warn_of_shared_rotation(model: Model, sequence_length: int) -> None:
    """transformers chooses the frequencies of these kinds of RoPE by the largest position of a batch."""
    config = load_config(model).get_text_config()
    kinds: dict[str, int] = {}
    for rope in rope_sets(config):
        if rope.get("rope_type") == "longrope":
            kinds["longrope"] = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        elif rope.get("rope_type") == "dynamic":
            kinds["dynamic"] = config.max_position_embeddings
    kind = min(kinds, key=kinds.__getitem__, default=None)
    if kind is not None and sequence_length > (most := kinds[kind]):
        log.warning(
            "model.name %r: its RoPE of type %r rotates a whole batch by other frequencies once one of its samples, or "
            "the padding of a row, has more than %d tokens. So losses depend on the samples in a batch; with "
            "data.sequence_length up to %d they do not", model.name, kind, most, most,
        )  # fmt: skip


def learned_position_count(model: PreTrainedModel) -> int | None:
    """The number of learned position embeddings; None if the model computes positions, which sets no limit."""
    # The encoder of audio has some of its own.
    reads_texts = model.get_decoder() if is_multimodal(model.config) else model.base_model
    for name, module in reads_texts.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in (
            "wpe",
            "embed_positions",
            "positions_embed",
        ):
            return int(model.config.get_text_config().max_position_embeddings)
    return None
