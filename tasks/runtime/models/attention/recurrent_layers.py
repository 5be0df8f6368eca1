"""Packed rows in models with recurrent layers: Mamba, gated DeltaNet, linear attention, short convolutions.

Such a layer passes a state, or the last inputs of a convolution, from token to token, and so from one sequence of a
packed row to the next. Here it gets one sequence per row instead, padded at the end. The layer is causal, so padding
after a sequence changes nothing in it. The layer's own code runs, by the fast kernels of its library where they are
installed, and no sequence sees another one, in any family.

Sequences of similar length share a call, so that padding adds at most a third to what the layers compute for sequences
of more than 64 tokens. Shorter ones all share a call, padded to the longest: libraries compute chunks of 64 anyway.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from tasks.runtime.models.cache_names import has_cache
from tasks.runtime.models.position_hook import on_positions

# The shortest sequence of a call, as a part of the longest.
_SHORTEST = 0.75
# Sequences up to that length share a call; libraries compute chunks of 64 tokens.
_SHORT = 64
# Parameters and buffers of layers that have a state but no convolution.
_STATE_NAMES = frozenset({"A_log", "slope_rate"})
# Arguments for attention: a layer that gets one sequence per row must not read them.
_OF_PACKED_ROWS = frozenset(
    {"cu_seqlens", "late_cu_seqlens", "max_seqlen", "sequence_starts", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}
)


class _FastPath(NamedTuple):
    """A package with fast kernels, and what transformers computes in PyTorch without it."""

    module: str
    package: str
    instead: str


_SCAN = _FastPath("mamba_ssm", "mamba-ssm", "a loop over tokens")
_DELTA = _FastPath("fla", "flash-linear-attention", "a loop over chunks of 64 tokens")
# By the function of the layer's module that falls back to PyTorch.
_FAST_PATHS = {
    "causal_conv1d_fn": _FastPath("causal_conv1d", "causal-conv1d", "PyTorch's convolution"),
    "mamba2_chunk_scan": _FastPath("mamba_ssm", "mamba-ssm", "products over whole chunks of tokens in fp32"),
    "mamba_selective_scan": _SCAN,
    "selective_scan_fn": _SCAN,
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "chunk_kda": _DELTA,
}


def recurrent_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the text decoder that mix the tokens of a row in order, by name, without attention.

    They own a depthwise convolution over time, or the decay of a state. Parts of such a layer are not listed.
    """
    decoder = model.get_decoder()
    found: dict[str, nn.Module] = {}
    for name, module in () if decoder is None else decoder.named_modules():
        if _is_recurrent(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _is_recurrent(module: nn.Module) -> bool:
    convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
    names = {*module._parameters, *module._buffers}
    return bool(names & _STATE_NAMES) or any(conv.groups == conv.in_channels > 1 for conv in convolutions)


def missing_fast_paths(model: PreTrainedModel) -> dict[str, str]:
    """Packages that would compute the recurrent layers of `model` by fast kernels and are not installed, sorted, each
    with what runs in its place.
    """
    missing = {path.package: path.instead for path in _fast_paths(model) if not _installed(path)}
    return dict(sorted(missing.items()))


def describe_recurrent_layers(model: PreTrainedModel) -> str | None:
    """The recurrent layers of `model` and what computes them, one line for the log; None if it has none."""
    layers = recurrent_layers(model)
    if not layers:
        return None
    line = f"{len(layers)} {', '.join(sorted({type(layer).__name__ for layer in layers.values()}))}"
    if missing := missing_fast_paths(model):
        line += (
            f"; {' and '.join(missing)} not installed, so transformers' slower PyTorch code runs: "
            f"{' and '.join(missing.values())}"
        )
    return line


def needs_gpu(model: PreTrainedModel) -> bool:
    """Whether recurrent layers of `model` run the kernels of an installed package, which need a GPU."""
    return any(_installed(path) for path in _fast_paths(model))


def _fast_paths(model: PreTrainedModel) -> list[_FastPath]:
    """What the recurrent layers of `model` use where it is installed."""
    modules = {sys.modules[type(layer).__module__] for layer in recurrent_layers(model).values()}
    return [path for name, path in _FAST_PATHS.items() if any(hasattr(module, name) for module in modules)]


def _installed(path: _FastPath) -> bool:
    return importlib.util.find_spec(path.module) is not None


def isolate_sequences(model: PreTrainedModel) -> None:
    """Make the recurrent layers of `model` compute each sequence of a packed row by itself. Changes `model` in place.

    A sequence starts where `position_ids` [B, T] is 0. A call without several sequences in a row, or with a cache,
    changes nothing. Otherwise the host reads the lengths, and waits for the device once per forward pass.
    """
    layers = recurrent_layers(model)
    if not layers:
        return
    layout = _Layout()
    # Recomputation in a backward pass, which calls layers alone, finds the layout of the forward pass before it.
    on_positions(model, layout.read)
    for layer in layers.values():
        layer.forward = partial(_forward, layout, layer.forward)


@dataclass
class _Layout:
    """How the tokens of a packed batch are regrouped; `groups` is empty if each row is one sequence."""

    shape: tuple[int, ...] = ()
    """B and T of the batch."""
    groups: list[Tensor] = field(default_factory=list)
    """For each call of a layer, [D, L]: the flat index in the batch of each token of D sequences. Places after the end
    of a sequence repeat its last token.
    """
    places: Tensor | None = None
    """[B T], the place of each token of the batch in the concatenated groups."""

    def read(self, positions: Tensor | None) -> None:
        """Called with the positions [B, T] of a batch before each forward pass of the model."""
        self.groups, self.places = [], None
        if positions is None or positions.is_meta:
            return
        starts = positions == 0
        starts[:, 0] = True
        self.shape = tuple(starts.shape)
        first = starts.flatten().nonzero().flatten().cpu()
        if first.numel() == starts.shape[0]:
            return
        lengths = first.diff(append=torch.tensor([starts.numel()]))
        self.groups, places = [], torch.empty(starts.numel(), dtype=torch.int64)
        begin = 0
        for members in _similar(lengths):
            steps = torch.arange(int(lengths[members].max()))
            index = first[members, None] + torch.minimum(steps, lengths[members, None] - 1)
            real = steps < lengths[members, None]
            places[index[real]] = begin + real.flatten().nonzero().flatten()
            begin += index.numel()
            self.groups.append(index.to(positions.device, non_blocking=True))
        self.places = places.to(positions.device, non_blocking=True)


def _similar(lengths: Tensor) -> list[Tensor]:
    """Indices of sequences, in groups of similar lengths."""
    order = lengths.argsort(descending=True, stable=True).tolist()
    groups: list[list[int]] = []
    for number in order:
        length = int(lengths[number])
        longest = int(lengths[groups[-1][0]]) if groups else 0
        if groups and (length >= _SHORTEST * longest or longest <= _SHORT):
            groups[-1].append(number)
        else:
            groups.append([number])
    return [torch.tensor(group) for group in groups]


def _forward(layout: _Layout, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` of a recurrent layer, once for each group of sequences."""
    if has_cache(kwargs):
        return forward(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_PACKED_ROWS}
    if not layout.groups:
        return forward(*args, **kwargs)
    results = [forward(*_rows(layout, index, args), **_rows(layout, index, kwargs)) for index in layout.groups]
    assert layout.places is not None
    if isinstance(results[0], Tensor):
        return _merge(layout, results)
    # A layer that returns a tuple, with its state or weights after its result.
    return (_merge(layout, [result[0] for result in results]), *(None for _ in results[0][1:]))


def _rows(layout: _Layout, index: Tensor, values: Any) -> Any:
    """Arguments of a layer, with [B, T, ...] regrouped to [D, L, ...]."""

    def regrouped(value: Tensor) -> Tensor:
        return value.flatten(0, 1)[index] if value.shape[:2] == layout.shape else value

    return tree_map_only(Tensor, regrouped, values)


def _merge(layout: _Layout, results: list[Tensor]) -> Tensor:
    """The results [D, L, ...] of all groups, back in the order of the batch: [B, T, ...]."""
    flat = torch.cat([result.flatten(0, 1) for result in results])
    return flat[layout.places].unflatten(0, layout.shape)
