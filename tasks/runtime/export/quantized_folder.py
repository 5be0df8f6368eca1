"""Write an exported model folder once more with quantized linear layers, in the format of compressed-tensors.

vLLM and transformers read it. Weights are rounded to the nearest value; no data is used to calibrate them.
"""

from __future__ import annotations

import warnings
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from strata_platform.spec.sections.export import Format
from tasks.runtime.models.pretrained import load_pretrained

# Schemes of compressed-tensors: weights of float8_e4m3 with a scale for each output, and inputs of float8 with one for
# each token; or weights of four bits with a scale for each group of an output's inputs.
SCHEMES: dict[Format, str] = {"fp8": "FP8_DYNAMIC", "int4": "W4A16"}
# Weights that share a scale under int4, the first that divides all rows. Kernels have no others.
_GROUPS = (128, 64, 32)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The layers that are quantized: all linear ones but the head."""
    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def group_size(model: PreTrainedModel) -> int:
    """How many weights share a scale under int4.

    Raises ValueError if the rows of the model's linear layers are no whole groups.
    """
    common = gcd(*(layer.in_features for layer in linear_layers(model).values()))
    found = next((size for size in _GROUPS if common % size == 0), None)
    if found is None:
        raise ValueError(f"rows of its linear layers are multiples of {common}, and int4 needs those of {_GROUPS[-1]}")
    return found


def write_quantized(folder: Path, target: Path, form: Format) -> None:
    """Write the model in `folder` to the folder `target`, with tokenizer and generation configuration.

    Args:
        folder: an exported model in Hugging Face format, not quantized.
        target: a new folder.
        form: a key of SCHEMES.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    model = load_pretrained(str(folder), dtype="auto")
    scheme = preset_name_to_scheme(SCHEMES[form], ["Linear"])
    if form == "int4":
        scheme.weights.group_size = group_size(model)
    quantized = linear_layers(model)
    ignored = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in quantized]
    config = QuantizationConfig(
        config_groups={"linear": scheme}, ignore=ignored, quantization_status=QuantizationStatus.FROZEN
    )
    apply_quantization_config(model, config)
    for layer in quantized.values():
        _set_scales(layer)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(target)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(target)


@torch.no_grad()
def _set_scales(layer: Any) -> None:
    """Set the scales of a layer's weights such that the largest of each group is the largest value of the type."""
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = layer.quantization_scheme.weights
    groups = layer.weight.unflatten(-1, (-1, weights.group_size or layer.in_features))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
    layer.weight_scale.copy_(scale.reshape(layer.weight_scale.shape))
    layer.weight_zero_point.copy_(zero.reshape(layer.weight_zero_point.shape))


def read_quantized(folder: Path, *, dequantized: bool) -> PreTrainedModel:
    """The model of a folder of `write_quantized`; `dequantized` has plain weights, and inputs that are not rounded."""
    from transformers import CompressedTensorsConfig

    options: dict[str, Any] = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantized else {}
    with warnings.catch_warnings():
        # The folder has a configuration of its own, of which this changes how it is read.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        return load_pretrained(str(folder), dtype="auto", **options)
