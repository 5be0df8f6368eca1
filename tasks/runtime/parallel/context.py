"""Context parallelism: every rank of a group computes with a slice of each row.

All operations of a layer except attention work token by token. Attention has two methods:

- `all_gather`: each rank gathers the keys and values of the whole row and attends to them from its own tokens; the
  backward pass sums their gradients over the group.
- `ulysses`: the ranks exchange slices of the row for heads. Each attends with its share of the heads over the whole
  row, and they exchange the result back.

Packed sequences stay separate: a token attends from the start of its sequence to itself.
`tasks.runtime.data.context_shards` defines the slices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from strata_platform.context_parallel import exchanges_heads, undivided_heads
from strata_platform.spec.run_spec import Parallel
from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.parallel import Fsdp
from tasks.runtime.data.context_shards import context_chunks
from tasks.runtime.models.attention.attention_choice import choose_attention
from tasks.runtime.models.attention.varlen_attention import VarlenLayout, packed_attention, unsupported_reason
from tasks.runtime.models.config import load_config, rope_sets
from tasks.runtime.models.layer_configs import layer_configs
from tasks.runtime.parallel.collectives import AllGather, AllToAll, Group
from tasks.runtime.process.ranks import Processes

_NAME = "strata_context"


def require_context_parallel_support(model: Model, parallel: Parallel) -> None:
    """Raises ValueError if `parallel.context_parallel` does not support the model. Reads only its configuration."""
    if parallel.context_parallel > 1:
        reason = _unsupported_reason(load_config(model))
        if reason is not None:
            raise ValueError(
                f"parallel.context_parallel {parallel.context_parallel} splits rows, but model.name {model.name!r} "
                f"{reason}; set parallel.context_parallel to 1"
            )
        _require_heads(model, parallel)


def _require_heads(model: Model, parallel: Parallel) -> None:
    """Raises ValueError if the method is `ulysses` and the ranks cannot divide the model's heads."""
    if not isinstance(parallel, Fsdp):
        return
    for config in layer_configs(load_config(model).get_text_config()):
        queries = config.num_attention_heads // parallel.tensor_parallel
        keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // parallel.tensor_parallel
        reason = undivided_heads(parallel.context_parallel_method, queries, keys, parallel.context_parallel)
        if reason is not None:
            raise ValueError(f"parallel.context_parallel_method {reason} (model.name: {model.name!r})")


def _unsupported_reason(config: PretrainedConfig) -> str | None:
    """The operation of the model that needs more of a row than the keys and values of attention; None if there
    is none.
    """
    # A multimodal model has its text configuration in a part of its own.
    config = config.get_text_config()
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"} or any(
        name.startswith(("mamba", "linear_attn", "ssm")) for name in config.to_dict()
    ):
        return "has layers other than attention that process a row in order"
    reason = unsupported_reason(config)
    if reason is not None:
        return reason
    if choose_attention("auto", config) != "sdpa":
        return "has attention that PyTorch's sdpa does not compute"
    for parameters in rope_sets(config):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            kind = parameters["rope_type"]
            return f"has rotary embeddings that depend on the length of a row (rope_type {kind!r})"
    return None


def apply_context_parallel(model: PreTrainedModel, mesh: DeviceMesh, processes: Processes, method: str) -> None:
    """Make the attention of `model` see whole rows over `mesh`, which has one dimension.

    method: that of `parallel.context_parallel_method`.
    """
    # transformers makes masks for whole rows. It makes none for an attention name without a registered mask function.
    AttentionInterface.register(_NAME, _Attention(Group.of(mesh), context_chunks(processes), method))
    model.set_attn_implementation(_NAME)


class _Attention:
    """An attention function for transformers that computes the tokens of this rank."""

    def __init__(self, group: Group, chunks: tuple[int, int], method: str) -> None:
        self._group, self._chunks, self._method = group, chunks, method

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
        row_starts: Tensor,
        row_cu_seqlens: Tensor,
        max_seqlen: Tensor,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query: [B, H, 2 L, D], key, value: [B, K, 2 L, D] → [B, 2 L, H, D]. `shard_batch` makes the other inputs."""
        if exchanges_heads(self._method, query.shape[1], key.shape[1], self._group.size):
            layout = VarlenLayout(row_starts, row_cu_seqlens, (max_seqlen.shape[0], max_seqlen.shape[0]))
            return self._by_heads((query, key, value), layout, scaling, sliding_window, dropout), None
        # [B, L, K, D] is the layout that projections write and varlen attention reads, so one contiguous copy is
        # enough.
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

    def _by_heads(
        self,
        slices: tuple[Tensor, Tensor, Tensor],
        layout: VarlenLayout,
        scaling: float | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        """Queries, keys and values [B, H or K, 2 L, D] → [B, 2 L, H, D], by this rank's heads over whole rows."""
        ways = self._group.size
        # Each rank needs a head of keys.
        parts = [part.repeat_interleave(max(1, ways // part.shape[1]), dim=1) for part in slices]
        # [B, 2 L, ways, heads of one rank, D]: one message for all three.
        joined = torch.cat([part.transpose(1, 2).unflatten(2, (ways, -1)) for part in parts], dim=3)
        received: Tensor = AllToAll.apply(joined.movedim(2, 0), self._group)
        heads = [part.shape[1] // ways for part in parts]
        rows = _in_row_order(received, 2).transpose(1, 2).split(heads, dim=1)
        attended = packed_attention(rows[0], rows[1], rows[2], layout, scaling, window, dropout).transpose(1, 2)
        returned: Tensor = AllToAll.apply(_in_slices(attended, ways), self._group)
        return returned.movedim(0, 2).flatten(2, 3).contiguous()

    def _whole_rows(self, slices: Tensor) -> Tensor:
        """[2, B, 2 L, K, D] → [2, B, T, K, D]: gather the slices of all ranks and put them in the order of the row."""
        gathered: Tensor = AllGather.apply(slices, self._group)
        return _in_row_order(gathered.unflatten(0, (self._group.size, 2)), 3)


def _in_row_order(slices: Tensor, dim: int) -> Tensor:
    """[ranks, ..., 2 L, ...] → [..., T, ...]: join the two chunks of each rank's slice at `dim`, in the row's order."""
    early, late = slices.unflatten(dim, (2, -1)).unbind(dim)
    return torch.cat([*early.unbind(), *late.flip(0).unbind()], dim=dim - 1)


def _in_slices(rows: Tensor, ways: int) -> Tensor:
    """[B, T, ...] → [ranks, B, 2 L, ...]: the inverse of `_in_row_order`."""
    chunks = rows.unflatten(1, (2, ways, -1))
    return torch.stack((chunks[:, 0], chunks[:, 1].flip(1)), dim=2).movedim(1, 0).flatten(2, 3)
