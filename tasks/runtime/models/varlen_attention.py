"""Attention over rows of several documents: a token sees those of its own document up to itself, and no others.

transformers' `sdpa` is told so by a mask of [T, T] values: of every row all pairs are computed, also those of different
documents, and the host waits for the GPU to see what mask it needs. Here the host counts where documents end, and
attention goes from one to the next by PyTorch's `varlen_attn`; where no row has more than one, it is plainly causal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from strata_platform.spec import RunSpec
from tasks.runtime.data.context_shards import document_ends
from tasks.runtime.data.dataset import Batch, Row
from tasks.runtime.data.slices import cu_seqlens
from tasks.runtime.models.build import compute_dtype
from tasks.runtime.models.packing_support import SUPPORTS_PACKING

_NAME = "strata_documents"
# Flash attention starts a program for each block of so many queries that a document may have, whether or not it has.
_LEAST_ROOM = 128
# Said to later versions of PyTorch; earlier ones see it by the shapes.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def uses_varlen(spec: RunSpec, config: PretrainedConfig, device: torch.device) -> bool:
    """Whether the attention of such a model goes by document in training, and its batches have to say where they end.

    Of families that are known to keep documents apart, on GPUs in `bfloat16`, in place of `sdpa`.
    """
    return (
        _has_flash(device)
        and spec.model.attention == "sdpa"
        and compute_dtype(spec) == torch.bfloat16
        # It has slices of rows, and an attention for these.
        and spec.context_parallel == 1
        and config.model_type in SUPPORTS_PACKING
        and unsupported_reason(config) is None
    )


def _has_flash(device: torch.device) -> bool:
    """Whether PyTorch's flash attention runs there; on any GPU, as far as is known where a run is planned without."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return device.type == "cuda"
    return torch.cuda.get_device_capability(device) >= (8, 0)


def unsupported_reason(config: PretrainedConfig) -> str | None:
    """What the attention of a model does that is told to masks alone, or that PyTorch's does not do."""
    if getattr(config, "attn_logit_softcapping", None):
        return "caps the scores of attention (attn_logit_softcapping)"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return "attends to later tokens (is_causal, use_bidirectional_attention)"
    # These layers do not tell their windows to attention; those of SmolLM3 do where windows are said to be on.
    silent = config.model_type == "qwen2_moe" or (config.model_type == "smollm3" and not config.use_sliding_window)
    if silent and "sliding_attention" in (config.layer_types or ()):
        return "has windows in its masks alone (layer_types)"
    return None


def set_varlen_attention(model: PreTrainedModel) -> None:
    """Let the attention of `model` go by document; its batches come by `with_cu_seqlens`."""
    # No mask is registered under this name, so transformers makes none.
    AttentionInterface.register(_NAME, _attention)
    model.set_attn_implementation(_NAME)


def with_cu_seqlens(collate: Callable[[list[Row]], Batch]) -> Callable[[list[Row]], Batch]:
    """`collate`, and where documents begin and end in its batch."""
    return lambda rows: add_cu_seqlens(collate(rows))


def add_cu_seqlens(batch: Batch) -> Batch:
    """A batch, and where the document of each token begins in its row, and documents end in all rows.

    `sequence_starts`: [B, T], int64. `cu_seqlens`: [2, documents + 1], int32, of `cu_seqlens`. `max_seqlen`:
    [longest, 0], without values: how long the longest document is at most, which a host reads without its GPU.
    """
    positions = batch["position_ids"]
    begins = torch.arange(positions.shape[1]) - positions
    # Of few sizes, so that a compiled layer sees few.
    room = max(_LEAST_ROOM, 1 << int(positions.max()).bit_length())
    return {
        **batch,
        "sequence_starts": begins,
        "cu_seqlens": cu_seqlens(begins, 0, 1),
        # Of whole numbers: others would be converted where layers compute in another type.
        "max_seqlen": torch.empty(min(room, positions.shape[1]), 0, dtype=torch.int32),
    }


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_starts: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers. query: [B, H, T, D], key, value: [B, K, T, D] → [B, T, H, D]."""
    rows, length = query.shape[0], query.shape[2]
    one_each = cu_seqlens.shape[1] == rows + 1
    if one_each and (sliding_window is None or sliding_window >= length):
        attended = scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
    else:
        bounds = VarlenLayout(sequence_starts, cu_seqlens, (max_seqlen.shape[0], max_seqlen.shape[0]))
        attended = packed_attention(query, key, value, bounds, scaling, sliding_window, dropout)
    return attended.transpose(1, 2).contiguous(), None


class VarlenLayout(NamedTuple):
    """Documents of L queries of each row, the last of T positions.

    begins: [B, L], where in its row the document of a query begins. ends: [2, documents + 1], int32, where documents
    end among the queries and among the keys, both counted over all rows. longest: how many of each a document has at
    most.
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
) -> Tensor:
    """[B, H, L, D] against [B, K, T, D] → [B, H, L, D]; a query sees `window` tokens at most."""
    size = query.shape[-1]
    # What flash attention takes.
    if query.device.type != "cpu" and query.dtype != torch.float32 and size <= 256 and size % 8 == 0 and not dropout:
        return _varlen(query, key, value, bounds, scale, window)
    return _masked(query, key, value, bounds.begins, scale, window, dropout)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: VarlenLayout, scale: float | None, window: int | None
) -> Tensor:
    """A document at a time, by flash attention."""
    rows = query.shape[0]
    inputs = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    left = -1 if window is None else window - 1
    # Its signature is not the same in every version. Ends come as two tensors even where they are equal: for one and
    # the same later versions take cuDNN's attention, whose gradients were wrong in PyTorch 2.11.
    varlen: Any = varlen_attn
    attended: Tensor = varlen(
        *inputs, *bounds.ends.unbind(), *bounds.longest, scale=scale, window_size=(left, 0), **_GROUPED
    )
    return attended.unflatten(0, (rows, -1)).transpose(1, 2)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, scale: float | None, window: int | None, dropout: float
) -> Tensor:
    """The same on any device and in any type, with a mask of [B, L, T] values."""
    places = torch.arange(key.shape[2], device=key.device)
    own = places[key.shape[2] - query.shape[2] :, None]
    first = begins[..., None] if window is None else begins[..., None].maximum(own - window + 1)
    # Not every implementation takes fewer heads of keys than of queries beside a mask.
    groups = query.shape[1] // key.shape[1]
    return scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        attn_mask=((places >= first) & (places <= own))[:, None],
        dropout_p=dropout,
        scale=scale,
    )
