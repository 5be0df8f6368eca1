"""Forward passes of generation: of the prompts, then of one token of each row at a time, from cached keys and values.

`Decoder` serves every model whose cache is one of transformers'. `StaticDecoder` writes into a cache of a fixed size,
so that a GPU replays the pass of a token as a CUDA graph: launching its kernels one by one takes several times as long
as running them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tasks.runtime.models.attention.packing_support import SUPPORTS_PACKING
from tasks.runtime.models.attention.recurrent_layers import recurrent_layers
from tasks.runtime.models.attention.varlen_attention import unsupported_reason
from tasks.runtime.models.cache_names import cache_name

log = logging.getLogger(__name__)

_NAME = "strata_decode"
# Cached positions that a CUDA graph attends to: a multiple of this.
_BUCKET = 128

Forward = Callable[[Tensor], Tensor]
"""From the tokens that are appended to the rows [B] to the logits of the next ones [B, V]."""


def needs_equal_lengths(model: PreTrainedModel) -> bool:
    """Whether the prompts of a batch must have one length: recurrent layers would read the padding before a shorter
    one.
    """
    return bool(recurrent_layers(model))


def supports_static_cache(model: PreTrainedModel) -> bool:
    """Whether each layer of the model attends to all earlier tokens, and does nothing else across tokens."""
    config: Any = model.config
    layers = getattr(config, "layer_types", None) or ()
    return (
        config.model_type in SUPPORTS_PACKING
        and unsupported_reason(config) is None
        and not recurrent_layers(model)
        and set(layers) <= {"full_attention"}
        and (bool(layers) or getattr(config, "sliding_window", None) is None)
        # Attention sinks and compressed keys are no arguments of plain attention.
        and not any(hasattr(config, name) for name in ("kv_lora_rank", "swiglu_limit"))
    )


class Decoder:
    """The rows of a batch while they are generated, with a cache that grows. Prompts are padded on the left.

    prompts: of each row; equal ones are computed once.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], pad_token_id: int) -> None:
        self._model, device = model, model.device
        self._unpadded = needs_equal_lengths(model)
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        longest = max(map(len, numbers))
        ids = torch.full((len(numbers), longest), pad_token_id)
        mask = torch.zeros_like(ids)
        for number, prompt in enumerate(numbers):
            ids[number, longest - len(prompt) :] = torch.tensor(prompt)
            mask[number, longest - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        rows = torch.tensor([numbers[prompt] for prompt in prompts], device=device)
        self.cache: Cache = DynamicCache(config=model.config)
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0))
        self.first_logits = logits[rows]
        """[B, V], of the first token of each answer."""
        self.mask = mask[rows]
        self._keep_in_cache(rows)

    def run(self, step: Callable[[Forward], None], rows: int) -> None:
        """Call `step` with a function that computes the logits after one more token of each of the `rows` rows."""
        step(self._append)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only: [B'], int64."""
        self.mask = self.mask[rows]
        self._keep_in_cache(rows)

    def _append(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        # Mamba's layers would multiply the one token by the mask of all.
        mask = None if self._unpadded else self.mask
        return self._forward(tokens[:, None], mask, self.mask.sum(-1, keepdim=True) - 1)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        return last_logits(self._model, self.cache, input_ids=ids, attention_mask=mask, position_ids=positions)

    def _keep_in_cache(self, rows: Tensor) -> None:
        for layer in self.cache.layers:
            layer.reorder_cache(rows)


class StaticDecoder:
    """The same with a cache of a fixed size, which is kept from batch to batch, as are its CUDA graphs.

    rows, length: the most rows and positions, prompts included.
    """

    def __init__(self, model: PreTrainedModel, rows: int, length: int) -> None:
        self._model, self._device = model, model.device
        self.rows, self.length = rows, -(-length // _BUCKET) * _BUCKET
        self._cache: _StaticCache | None = None
        # Positions of padding before each prompt, and the position that is written next.
        self._begins = torch.zeros(rows, 1, dtype=torch.int64, device=self._device)
        self._slot = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._host_slot = 0
        self._places = torch.arange(self.length, device=self._device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def fill(self, decoder: Decoder) -> None:
        """Continue a batch whose prompts `decoder` has read."""
        layers = [(layer.keys, layer.values) for layer in decoder.cache.layers]
        if self._cache is None:
            self._cache = _StaticCache(layers, self.rows, self.length, self._slot)
        self._cache.fill(layers)
        rows, width = decoder.mask.shape
        self._begins[:rows] = width - decoder.mask.sum(-1, keepdim=True)
        self._slot.fill_(width)
        self._host_slot = width

    def run(self, step: Callable[[Forward], None], rows: int) -> None:
        """As `Decoder.run`. `step` reads and writes the same tensors in each call with this number of rows."""
        bucket = (self._host_slot // _BUCKET + 1) * _BUCKET
        self._host_slot += 1

        def body() -> None:
            step(lambda tokens: self._append(tokens, bucket))
            self._slot.add_(1)

        key = rows, bucket
        if self._pool is None or key not in self._graphs:
            # What the first call compiles or allocates for good has no place in a graph.
            self._graphs[key] = None
            return body()
        graph = self._graphs[key] or self._captured(body)
        if graph is None:
            return body()
        self._graphs[key] = graph
        graph.replay()

    def _captured(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """A graph of `body`; None, with a warning, if it cannot be captured. Then no other is tried."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that save a checkpoint may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                body()
        except RuntimeError as error:
            self._pool = None
            log.warning("generation: slower without CUDA graphs, because a pass cannot be captured: %s", error)
            return None
        return graph

    def keep(self, rows: Tensor) -> None:
        """As `Decoder.keep`."""
        assert self._cache is not None
        self._cache.keep(rows)
        self._begins[: rows.numel()] = self._begins[rows]

    def _append(self, tokens: Tensor, bucket: int) -> Tensor:
        assert self._cache is not None
        rows = tokens.shape[0]
        places, begins = self._places[:bucket], self._begins[:rows]
        seen = (places >= begins) & (places <= self._slot)
        # Attention on GPUs adds masks: made once for all layers.
        mask = torch.zeros(seen.shape, dtype=self._cache.dtype, device=seen.device).masked_fill(~seen, -math.inf)
        return last_logits(
            self._model,
            self._cache.of(rows, bucket),
            input_ids=tokens[:, None],
            attention_mask=mask[:, None, None],
            position_ids=self._slot - begins,
        )


class _StaticCache(Cache):
    """Keys and values of each layer, [R, K, L, D]; `update` writes one position of the first rows."""

    def __init__(self, like: Sequence[tuple[Tensor, Tensor]], rows: int, length: int, slot: Tensor) -> None:
        super().__init__(layers=[DynamicLayer() for _ in like])
        self._stored = [
            tuple(states.new_zeros(rows, states.shape[1], length, states.shape[3]) for states in layer)
            for layer in like
        ]
        self.dtype = like[0][0].dtype
        self._slot, self._rows, self._bucket = slot, 0, 0

    def of(self, rows: int, bucket: int) -> _StaticCache:
        """This cache, for a pass of that many rows that attends to that many positions."""
        self._rows, self._bucket = rows, bucket
        return self

    def fill(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write keys and values of prompts at the first positions."""
        for stored, layer in zip(self._stored, layers, strict=True):
            for own, states in zip(stored, layer, strict=True):
                own[: states.shape[0], :, : states.shape[2]] = states

    def keep(self, rows: Tensor) -> None:
        """Make these rows the first ones."""
        for own in chain.from_iterable(self._stored):
            own[: rows.numel()] = own[rows]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the token's keys and values; return all up to the bucket's end."""
        found = []
        for own, states in zip(self._stored[layer_idx], (key_states, value_states), strict=True):
            own[: self._rows].index_copy_(2, self._slot, states)
            found.append(own[: self._rows, :, : self._bucket])
        return found[0], found[1]


def last_logits(model: PreTrainedModel, cache: Cache, **inputs: Any) -> Tensor:
    """The logits of each row's last token: [B, V]."""
    output: Any = model(**inputs, **{cache_name(model.forward): cache}, use_cache=True, logits_to_keep=1)
    logits: Tensor = output.logits[:, -1]
    return logits


@contextmanager
def decode_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, `model` attends as `StaticDecoder` needs it."""
    before: str = model.config._attn_implementation
    AttentionInterface.register(_NAME, _attention)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor,
    *, scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function for transformers, for one query of each row: [B, H, 1, D] and [B, K, L, D] → [B, 1, H, D].

    The heads that share keys become the queries of one head, so that keys are not copied for each of them.
    """
    rows, heads = query.shape[:2]
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[3])
    mask = attention_mask.expand(-1, -1, grouped.shape[2], -1)
    attended = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return attended.reshape(rows, 1, heads, value.shape[-1]), None
