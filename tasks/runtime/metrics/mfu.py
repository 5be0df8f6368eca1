"""Model FLOPs utilization: the FLOP/s that the model needs, as a fraction of the GPUs' peak.

    flops per token = 6 N + 12 x layers x heads x head size x keys

N counts the weights that a token is multiplied with: all except embedding tables, and of a mixture of experts only
the experts that a token is routed to. Frozen weights count 4 instead of 6, because they have no gradient. `keys` is the
average number of positions that a token attends to: half the row under a causal mask, less with a sliding window. The
formula ignores that packed sequences do not attend to each other, and it does not count recomputation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from strata_platform.estimate.gpus import PEAKS
from tasks.runtime.models.layer_configs import head_width, layer_configs
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mfu:
    """Converts throughput to utilization."""

    flops_per_token: float
    peak: float
    """FLOP/s of all devices of the job together."""

    def of(self, tokens_per_second: float) -> float:
        """Fraction of the peak, 0 to 1."""
        return tokens_per_second * self.flops_per_token / self.peak


def build_mfu(
    model: PreTrainedModel, sequence_length: int, dtype: torch.dtype, processes: Processes, device: str
) -> Mfu | None:
    """Utilization of `model`, which must not be sharded yet; None, with a log line, if the device's peak is unknown.

    `dtype`: the compute dtype. `device`: the name that its vendor gives it. A CPU has no entry.
    """
    if not torch.cuda.is_available():
        return None
    peak, flops = peak_flops(device), flops_per_token(model, sequence_length)
    if peak is None:
        log.info(
            "mfu: not measured, because the peak of %s is not in strata_platform/estimate/gpus.py",
            device,
        )
    elif dtype != torch.bfloat16:
        log.info("mfu: not measured, because only the bfloat16 peak of %s is known", device)
        return None
    elif flops is None:
        log.info(
            "mfu: not measured, because %s does not configure the number of experts per token", type(model).__name__
        )
    return Mfu(flops, peak * processes.world_size) if peak and flops else None


def peak_flops(device: str) -> float | None:
    """FLOP/s of a device in dense bfloat16; None if it is not in the table.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    names = [name for name in PEAKS if device.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float | None:
    """FLOPs of a training step per token; None for a mixture of experts whose configuration lacks the number of
    experts.
    """
    config = model.config.get_text_config()
    share = _share_of_experts(config)
    # Also those of positions, and of each layer of Gemma 4.
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    # A tied embedding table is also the head, which a token is multiplied with.
    if model.get_output_embeddings() is not None:
        tables.discard(model.get_output_embeddings().weight)
    multiplied = 0.0
    for name, parameter in model.named_parameters():
        if parameter in tables:
            continue
        count = float(parameter.numel())
        if ".experts." in name:
            if share is None:
                return None
            count *= share
        multiplied += count * (6 if parameter.requires_grad else 4)
    return multiplied + 12 * _attended(config, sequence_length)


def _share_of_experts(config: PretrainedConfig) -> float | None:
    """The share that a token is routed to; None if it is not configured, or differs from layer to layer."""
    found = {_share_in_layer(layer) for layer in layer_configs(config)} - {None}
    return found.pop() if len(found) == 1 else None


def _share_in_layer(config: PretrainedConfig) -> float | None:
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk")
    chosen = next((count for name in names if isinstance(count := getattr(config, name, None), int)), None)
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((count for count in counts if count), None)
    return chosen / experts if chosen and experts else None


def _attended(config: PretrainedConfig, row: int) -> float:
    """Heads x head size x keys, summed over the layers, for rows of `row` tokens."""
    # Without `layer_types`, every layer has the window if there is one. A window of the whole row is full attention.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    layers = zip(layer_configs(config), kinds, strict=False)
    return sum(_queries(layer) * _keys(layer, kind, row) for layer, kind in layers)


def _queries(config: PretrainedConfig) -> float:
    """Heads x head size; where keys have another size than values, as in latent attention, the mean of both."""
    parts: list[Any] = [getattr(config, f"{name}_head_dim", None) for name in ("qk_nope", "qk_rope", "v")]
    size = head_width(config) if None in parts else sum(parts) / 2
    return float(config.num_attention_heads * size)


def _keys(config: PretrainedConfig, kind: str, row: int) -> float:
    """The average number of positions that a token of a row attends to in a layer of this kind."""
    window = min(getattr(config, "sliding_window", None) or row, row)
    chunk = min(getattr(config, "attention_chunk_size", None) or row, row)
    # Other layers, such as linear attention, have no such products.
    return {
        "full_attention": row / 2,
        # The first tokens of a row attend to less than the window.
        "sliding_attention": window - window**2 / (2 * row),
        "chunked_attention": chunk / 2,
    }.get(kind, 0.0)
