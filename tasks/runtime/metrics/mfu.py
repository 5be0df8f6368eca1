"""Model FLOPs utilization: what the model needs by arithmetic alone, as a share of what the GPUs could do meanwhile.

    flops per token = 6 N + 12 x layers x heads x head size x keys

N is what a token is multiplied with: all weights but the table it is looked up in, and of a mixture's experts those
that it is sent to. Weights that do not learn count 4, because their gradient is not computed. `keys` is how many
positions a token attends to, on average: half the row under a causal mask, less where there is a window. That documents
packed into a row do not attend to each other is left aside, and so is what is computed once more to save memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from strata_platform.estimate.gpus import PEAKS
from strata_platform.spec import RunSpec
from tasks.runtime.models.build import compute_dtype
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mfu:
    """From a rate to a utilization."""

    flops_per_token: float
    peak: float
    """FLOP/s of all devices of the job."""

    def of(self, tokens_per_second: float) -> float:
        """Share of the peak, 0 to 1."""
        return tokens_per_second * self.flops_per_token / self.peak


def build_mfu(model: PreTrainedModel, spec: RunSpec, processes: Processes, device: str) -> Mfu | None:
    """What measures `model`, whole and before it is split; None, and said why, where no peak is known.

    `device` is the name its maker gave it. A CPU has no peak to speak of.
    """
    if not torch.cuda.is_available():
        return None
    peak, flops = peak_flops(device), flops_per_token(model, spec.data.sequence_length)
    if peak is None:
        log.info(
            "mfu: not measured, because the peak of %s is not in strata_platform/estimate/gpus.py",
            device,
        )
    elif compute_dtype(spec) != torch.bfloat16:
        log.info("mfu: not measured, because the peak of %s is known for bfloat16 alone", device)
        return None
    elif flops is None:
        log.info("mfu: not measured, because %s does not say how many experts a token is sent to", type(model).__name__)
    return Mfu(flops, peak * processes.world_size) if peak and flops else None


def peak_flops(device: str) -> float | None:
    """FLOP/s of a device in dense bfloat16, if it is in the table.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    names = [name for name in PEAKS if device.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float | None:
    """Of a training step, by the formula above; None for a mixture of experts whose configuration is not understood."""
    config = model.config.get_text_config()
    share = _share_of_experts(config)
    lookup = model.get_input_embeddings().weight
    # A table that is the head, too, is multiplied with as the head.
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is lookup
    multiplied = 0.0
    for name, parameter in model.named_parameters():
        if parameter is lookup and not tied:
            continue
        count = float(parameter.numel())
        if ".experts." in name:
            if share is None:
                return None
            count *= share
        multiplied += count * (6 if parameter.requires_grad else 4)
    return multiplied + 12 * _attended(config, sequence_length)


def _share_of_experts(config: PretrainedConfig) -> float | None:
    chosen = getattr(config, "num_experts_per_tok", None)
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((count for count in counts if count), None)
    return chosen / experts if chosen and experts else None


def _attended(config: PretrainedConfig, row: int) -> float:
    """Heads x head size x keys, summed over the layers, for rows of so many tokens."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = min(getattr(config, "sliding_window", None) or row, row)
    chunk = min(getattr(config, "attention_chunk_size", None) or row, row)
    keys = {
        "full_attention": row / 2,
        # The first tokens of a row see less than the window.
        "sliding_attention": window - window**2 / (2 * row),
        "chunked_attention": chunk / 2,
    }
    # Without a list every layer has the window, if there is one: of the whole row it is full attention.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    # Layers of other kinds, such as linear attention, have no such products.
    return float(config.num_attention_heads * size * sum(keys.get(kind, 0.0) for kind in kinds))
