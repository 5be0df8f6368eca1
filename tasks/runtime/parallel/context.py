"""Context parallelism: rows cut over processes, each of which computes with its slice of every row.

All of a layer but attention goes token by token. In attention each process gathers the keys and values of the whole
row and attends to them from its own tokens; the backward pass sums their gradients over the processes. Documents that
share a row stay apart: a token attends from where its document begins up to itself. The slices are those of
`tasks.runtime.data.context_shards`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from strata_platform.spec import RunSpec
from tasks.runtime.data.context_shards import context_chunks
from tasks.runtime.models.build import load_config
from tasks.runtime.models.varlen_attention import VarlenLayout, packed_attention, unsupported_reason
from tasks.runtime.parallel.collectives import AllGather, Group
from tasks.runtime.process.ranks import Processes

_NAME = "strata_context"


def require_context_parallel_support(spec: RunSpec) -> None:
    """Raises ValueError when rows of the model cannot be cut by `parallel.context_parallel`. Reads no weights."""
    if spec.context_parallel > 1:
        reason = _unsupported_reason(load_config(spec.model))
        if reason is not None:
            raise ValueError(
                f"parallel.context_parallel {spec.context_parallel} cuts rows, and model.name {spec.model.name!r} "
                f"{reason}; set parallel.context_parallel to 1"
            )


def _unsupported_reason(config: PretrainedConfig) -> str | None:
    """What of the model needs more of a row than the keys and values of attention."""
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"} or any(
        name.startswith(("mamba", "linear_attn", "ssm")) for name in config.to_dict()
    ):
        return "has layers that are no attention and go through a row in order"
    reason = unsupported_reason(config)
    if reason is not None:
        return reason
    rope = getattr(config, "rope_parameters", None) or {}
    # For all layers, or by their type.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            kind = parameters["rope_type"]
            return f"has rotary embeddings that go by the length of a row (rope_type {kind!r})"
    return None


def apply_context_parallel(model: PreTrainedModel, mesh: DeviceMesh, processes: Processes) -> None:
    """Let the attention of `model` gather keys and values over the one dimension of `mesh`."""
    # No mask is registered under this name, so transformers, whose masks are for whole rows, makes none.
    AttentionInterface.register(_NAME, _Attention(Group.of(mesh), context_chunks(processes)))
    model.set_attn_implementation(_NAME)


class _Attention:
    """An attention function of transformers, for the tokens of this process."""

    def __init__(self, group: Group, chunks: tuple[int, int]) -> None:
        self._group, self._chunks = group, chunks

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        sequence_starts: Tensor,
        cu_seqlens: Tensor,
        late_cu_seqlens: Tensor,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query: [B, H, 2 L, D], key, value: [B, K, 2 L, D] → [B, 2 L, H, D]. The rest is of `shard_batch`."""
        # Token by token, as projections write them and attention by document reads them: copies are in one piece.
        whole = self._whole_rows(torch.stack((key.transpose(1, 2), value.transpose(1, 2))))
        keys, values = whole.transpose(2, 3).unbind()
        length = query.shape[2] // 2
        attended = []
        for chunk, (number, ends) in enumerate(zip(self._chunks, (cu_seqlens, late_cu_seqlens), strict=True)):
            own = slice(chunk * length, (chunk + 1) * length)
            seen = slice((number + 1) * length)
            rows = (query[:, :, own], keys[:, :, seen], values[:, :, seen])
            bounds = VarlenLayout(sequence_starts[:, own], ends, (length, seen.stop))
            attended.append(packed_attention(*rows, bounds, scaling, sliding_window, dropout))
        return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None

    def _whole_rows(self, slices: Tensor) -> Tensor:
        """[2, B, 2 L, K, D] → [2, B, T, K, D], from what all processes have, in the order of the row."""
        gathered: Tensor = AllGather.apply(slices, self._group)
        parts = gathered.unflatten(0, (self._group.size, 2)).unflatten(3, (2, -1))
        early, late = parts[:, :, :, 0], parts[:, :, :, 1].flip(0)
        return torch.cat([*early.unbind(), *late.unbind()], dim=2)
