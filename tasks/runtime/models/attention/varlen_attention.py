"""Varlen attention for packed rows: a token attends to its own sequence, up to itself.

transformers tells `sdpa` so with a mask of [T, T] values. It computes all pairs of a row, also across sequences, and
the host waits for the GPU to find out which mask is needed. Here the host computes `cu_seqlens`, and PyTorch's
`varlen_attn` runs over the sequences. If every row has one sequence, attention is plainly causal. Where FlashAttention
4 is installed, it computes both. Attention with sinks, which `sdpa` lacks, is `attention_sinks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from strata_platform.spec.run_spec import Parallel
from strata_platform.spec.sections.model import Model
from tasks.runtime.data.context_shards import cu_seqlens, max_seqlen
from tasks.runtime.data.dataset import Batch, Row
from tasks.runtime.data.media.media_packing import MEDIA_PACKING
from tasks.runtime.models.attention import attention_sinks
from tasks.runtime.models.attention.attention_choice import VARLEN, choose_attention
from tasks.runtime.models.attention.flash_attention_4 import flash_attention_4, installed_version, takes
from tasks.runtime.models.attention.packing_support import SUPPORTS_PACKING
from tasks.runtime.models.config import compute_dtype
from tasks.runtime.models.media.image_masks import sees_later_tokens
from tasks.runtime.models.media.multimodal import is_multimodal

FAMILIES = SUPPORTS_PACKING | attention_sinks.MODEL_TYPES | {
    "afmoe", "bamba", "bitnet", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
    "exaone_moe", "falcon_h1", "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox", "granitemoe",
    "granitemoehybrid", "hunyuan_v1_moe", "jamba", "jetmoe", "kimi_linear", "lfm2", "lfm2_moe", "minimax",
    "minimax_m2", "muse_glimmer", "nanochat", "nemotron_h", "olmo", "olmo_hybrid", "olmoe", "persimmon", "phi",
    "phimoe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "seed_oss", "solar_open",
    "starcoder2", "youtu", "zamba2",
}  # fmt: skip
"""Families whose masks only say that a token attends to its own sequence, up to itself, and which pass to attention
their sliding windows; except for configurations with an `unsupported_reason`."""
# Language models of vision-language families, beside those of `SUPPORTS_PACKING`.
_IN_MULTIMODAL = frozenset((
    "glm4v_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text",
))  # fmt: skip
VARLEN_INPUTS = ("sequence_starts", "cu_seqlens", "max_seqlen")
"""What `with_cu_seqlens` adds to a batch."""
# Newer versions of PyTorch need this argument; older ones derive it from the shapes.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def uses_varlen(settings: Model, parallel: Parallel, config: PretrainedConfig, device: torch.device) -> bool:
    """Whether training uses varlen attention with these sections, model configuration and device. If so, batches need
    `cu_seqlens`.

    True for families of which a test shows that it computes the same, on a GPU in bfloat16, in place of `sdpa`, or of
    `auto` for attention with sinks. Of a vision-language model, the language model attends so.
    """
    with_sinks = settings.attention == "auto" and config.model_type in attention_sinks.MODEL_TYPES
    return (
        _has_flash(device)
        and (with_sinks or choose_attention(settings.attention, config) == "sdpa")
        and compute_dtype(settings, parallel) == torch.bfloat16
        # Context parallelism has its own attention function.
        and parallel.context_parallel == 1
        and _known_family(config)
        and unsupported_reason(config.get_text_config()) is None
    )


def _known_family(config: PretrainedConfig) -> bool:
    """Whether a test shows that the sequences of a packed row need no mask to be kept apart."""
    if not is_multimodal(config):
        return config.model_type in FAMILIES
    language = config.get_text_config().model_type
    return (
        config.model_type in MEDIA_PACKING
        and not sees_later_tokens(config)
        and language in SUPPORTS_PACKING | _IN_MULTIMODAL
    )


def _has_flash(device: torch.device) -> bool:
    """Whether PyTorch's flash attention runs on `device`. Assumes it for a plan that is made without a GPU."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return device.type == "cuda"
    return torch.cuda.get_device_capability(device) >= (8, 0)


def unsupported_reason(config: PretrainedConfig) -> str | None:
    """The property of the model's attention that varlen attention lacks, or that only masks express; None if there is
    none.
    """
    if getattr(config, "attn_logit_softcapping", None):
        return "caps the scores of attention (attn_logit_softcapping)"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return "attends to later tokens (is_causal, use_bidirectional_attention)"
    # These layers do not pass their sliding window to attention. SmolLM3 does if `use_sliding_window` is true.
    silent = config.model_type == "qwen2_moe" or (config.model_type == "smollm3" and not config.use_sliding_window)
    if silent and "sliding_attention" in (config.layer_types or ()):
        return "has sliding windows only in its masks (layer_types)"
    if config.model_type == "phimoe" and config.sliding_window:
        return "has sliding windows only in its masks (sliding_window)"
    return None


def set_varlen_attention(model: PreTrainedModel) -> None:
    """Make the attention of `model` varlen. Its batches need the inputs of `with_cu_seqlens`."""
    # transformers makes no mask for an attention name without a registered mask function.
    # One function for all models, such as a student and its teacher: `takes` checks the heads.
    AttentionInterface.register(VARLEN, partial(_attention, flash_4=installed_version() is not None))
    _attending(model).set_attn_implementation(VARLEN)
    if is_multimodal(model.config):
        _pass_by_tower(model)


def _attending(model: PreTrainedModel) -> PreTrainedModel:
    """The part of the model that reads text: in a vision-language model, the language model without its tower."""
    decoder: PreTrainedModel = model.get_decoder()
    return decoder if is_multimodal(model.config) else model


def _pass_by_tower(model: PreTrainedModel) -> None:
    """Give the inputs of varlen attention only to the language model: towers have their own `cu_seqlens`."""
    decoder = model.get_decoder()
    if any(isinstance(getattr(hook, "__self__", None), _Passed) for hook in decoder._forward_pre_hooks.values()):
        return
    passed = _Passed()
    model.register_forward_pre_hook(passed.take, with_kwargs=True)
    model.base_model.register_forward_pre_hook(passed.take, with_kwargs=True)
    decoder.register_forward_pre_hook(passed.give, with_kwargs=True)


@dataclass
class _Passed:
    inputs: Batch = field(default_factory=dict)

    def take(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A hook before the forward pass of the whole model."""
        self.inputs |= {name: kwargs[name] for name in VARLEN_INPUTS if name in kwargs}
        return args, {name: value for name, value in kwargs.items() if name not in self.inputs}

    def give(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A hook before that of the language model."""
        inputs, self.inputs = self.inputs, {}
        return args, {**kwargs, **inputs}


def has_varlen_attention(model: PreTrainedModel) -> bool:
    """Whether the attention of `model` is varlen."""
    return bool(_attending(model).config._attn_implementation == VARLEN)


@contextmanager
def plain_attention(model: PreTrainedModel, *, varlen: bool) -> Iterator[None]:
    """Inside the block, `model` attends without the inputs of `with_cu_seqlens`, as generation calls it."""
    if varlen:
        _attending(model).set_attn_implementation(choose_attention("auto", model.config))
    try:
        yield
    finally:
        if varlen:
            set_varlen_attention(model)


def with_cu_seqlens(collate: Callable[[list[Row]], Batch]) -> Callable[[list[Row]], Batch]:
    """Make `collate` add the inputs of varlen attention to its batches."""
    return lambda rows: add_cu_seqlens(collate(rows))


def add_cu_seqlens(batch: Batch) -> Batch:
    """Add the inputs of varlen attention to a batch.

    `sequence_starts`: [B, T], int64, the position in its row at which the sequence of each token starts. `cu_seqlens`:
    [2, sequences + 1], int32, for queries and keys, counted over all rows. `max_seqlen`: [bound, 0], int32, without
    values: its first dimension is an upper bound of the longest sequence, which the host reads without waiting for the
    GPU.
    """
    positions = batch["position_ids"]
    begins = torch.arange(positions.shape[1]) - positions
    return {
        **batch,
        "sequence_starts": begins,
        "cu_seqlens": cu_seqlens(begins, 0, 1),
        "max_seqlen": max_seqlen(positions),
    }


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    flash_4: bool = False,
    sequence_starts: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers. query: [B, H, T, D], key, value: [B, K, T, D] → [B, T, H, D].

    s_aux: transformers' name of sinks, [H].
    """
    rows, length = query.shape[0], query.shape[2]
    one_each = cu_seqlens.shape[1] == rows + 1
    longest = max_seqlen.shape[0], max_seqlen.shape[0]
    if flash_4 and takes(query, value, dropout):
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if one_each and s_aux is None:
            return flash_attention_4(q, k, v, scale=scaling, window=sliding_window), None
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        if s_aux is None:
            attended = flash_attention_4(q, k, v, cu_seqlens, longest, scaling, sliding_window)
        else:
            attended = attention_sinks.varlen_attention_with_sinks(
                q, k, v, s_aux, cu_seqlens, longest, scaling, sliding_window, by_flash_4=True
            )
        return attended.unflatten(0, (rows, -1)), None
    if one_each and s_aux is None and (sliding_window is None or sliding_window >= length):
        grouped = query.shape[1] != key.shape[1]
        if grouped and not key.shape[-1] == value.shape[-1] <= 256:
            # With grouped heads, only the implementation that keeps all scores takes such sizes.
            key, value = _repeated(query, key, value)
            grouped = False
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=grouped,
        )
    else:
        bounds = VarlenLayout(sequence_starts, cu_seqlens, longest)
        attended = packed_attention(query, key, value, bounds, scaling, sliding_window, dropout, s_aux)
    return attended.transpose(1, 2).contiguous(), None


class VarlenLayout(NamedTuple):
    """The sequences of packed rows, for L queries of each row, the last of its T positions.

    begins: [B, L], the position in its row at which the sequence of a query starts. ends: [2, sequences + 1], int32,
    cumulative lengths over all rows, of queries and of keys. longest: upper bounds of the two lengths of a sequence.
    """

    begins: Tensor
    ends: Tensor
    longest: tuple[int, int]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: VarlenLayout,
    scale: float | None,
    window: int | None,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, H, L, D] against [B, K, T, D] → [B, H, L, D]; a query attends to at most `window` tokens.

    Values may have fewer features than keys, and so has the result. sinks: [H].
    """
    size, fits = query.shape[-1], query.dtype != torch.float32 and not dropout
    # The conditions of flash attention.
    if query.device.type != "cpu" and fits and value.shape[-1] <= size <= 256 and size % 8 == 0:
        return _varlen(query, key, value, bounds, scale, window, sinks)
    return _masked(query, key, value, bounds.begins, scale, window, dropout, sinks)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: VarlenLayout, scale: float | None, window: int | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """With flash attention, sequence by sequence."""
    rows, features = query.shape[0], value.shape[-1]
    # Flash attention has one size for keys and values. Features that are 0 add nothing, in either direction.
    value = pad(value, (0, query.shape[-1] - features))
    inputs = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    if sinks is not None:
        attended = attention_sinks.varlen_attention_with_sinks(
            inputs[0], inputs[1], inputs[2], sinks, bounds.ends, bounds.longest, scale, window
        )
        return attended[..., :features].unflatten(0, (rows, -1)).transpose(1, 2)
    left = -1 if window is None else window - 1
    # The signature differs between versions. Both rows of `ends` are passed as separate tensors, even if they are
    # equal: for one tensor twice, newer versions choose cuDNN, whose gradients were wrong in PyTorch 2.11.
    varlen: Any = varlen_attn
    attended = varlen(*inputs, *bounds.ends.unbind(), *bounds.longest, scale=scale, window_size=(left, 0), **_GROUPED)
    return attended[..., :features].unflatten(0, (rows, -1)).transpose(1, 2)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, scale: float | None, window: int | None, dropout: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same on any device and in any dtype, with a mask of [B, L, T] values."""
    places = torch.arange(key.shape[2], device=key.device)
    own = places[key.shape[2] - query.shape[2] :, None]
    first = begins[..., None] if window is None else begins[..., None].maximum(own - window + 1)
    # Some implementations do not support grouped heads together with a mask.
    key, value = _repeated(query, key, value)
    mask = ((places >= first) & (places <= own))[:, None]
    if sinks is not None:
        return attention_sinks.masked_attention_with_sinks(query, key, value, sinks, mask, scale, dropout)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, K, T, D], once for each head of query [B, H, T, D]."""
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
