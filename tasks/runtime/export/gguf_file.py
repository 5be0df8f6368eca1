"""Write an exported model folder as one GGUF file, for llama.cpp and what builds on it.

Tensor names are those of gguf's own tables. Weights are read, converted and written one at a time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tasks.runtime.export.gguf_families import Family, context_length, family_of, rope_of
from tasks.runtime.export.gguf_vocabulary import add_vocabulary
from tasks.runtime.models.layer_configs import head_width

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

log = logging.getLogger(__name__)

# Methods of GGUFWriter, and the setting of the configuration that each writes.
_HYPERPARAMETERS = {
    "add_block_count": "num_hidden_layers",
    "add_embedding_length": "hidden_size",
    "add_feed_forward_length": "intermediate_size",
    "add_head_count": "num_attention_heads",
    "add_head_count_kv": "num_key_value_heads",
    "add_layer_norm_rms_eps": "rms_norm_eps",
    "add_vocab_size": "vocab_size",
}
# Values of a row that share a scale in q8_0.
_BLOCK = 32
_LARGEST_F16 = torch.finfo(torch.float16).max
# A matrix of one expert of many, which GGUF stores together, and the router.
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_ROUTER = "ffn_gate_inp.weight"


def write_gguf(folder: Path, file: Path, name: str, gguf_type: str) -> None:
    """Write the model in `folder` to `file`.

    Args:
        folder: config.json, generation_config.json, tokenizer, and weights as safetensors, not quantized.
        file: a new file, ending in `.gguf`.
        name: the model's name.
        gguf_type: `f32`, `f16`, `bf16` or `q8_0`, of the matrices; vectors are stored in f32. Matrices whose rows are
            not whole blocks of 32 values are stored in f16 instead of q8_0.

    Raises:
        ValueError: the model is of a family, or has a tokenizer, that llama.cpp does not compute alike; or a weight is
            too large for f16.
    """
    from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGUFType, GGUFWriter, LlamaFileType

    config = AutoConfig.from_pretrained(folder)
    family = family_of(config)
    writer = GGUFWriter(file, family.architecture)
    writer.add_type(GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.ALL_F32 if gguf_type == "f32" else LlamaFileType[f"MOSTLY_{gguf_type.upper()}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    _add_hyperparameters(writer, config, family)
    stops = GenerationConfig.from_pretrained(folder).eos_token_id
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    add_vocabulary(writer, AutoTokenizer.from_pretrained(folder), stops, config.vocab_size)
    plan = list(_plan(folder, config, family, gguf_type))
    try:
        # The header holds all sizes and comes before the first tensor.
        for tensor in plan:
            block, size = GGML_QUANT_SIZES[tensor.kind]
            bytes_of_tensor = prod(tensor.shape) // block * size
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), bytes_of_tensor, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in plan:
            writer.write_tensor_data(_converted(tensor, config, family))
    finally:
        writer.close()


def _add_hyperparameters(writer: GGUFWriter, config: PretrainedConfig, family: Family) -> None:
    from gguf import RopeScalingType

    for method, setting in {**_HYPERPARAMETERS, **family.hyperparameters}.items():
        getattr(writer, method)(getattr(config, setting))
    width, rope = head_width(config), rope_of(config)
    writer.add_context_length(window := context_length(config, family))
    if window < config.max_position_embeddings:
        log.warning(
            "export.formats gguf: the file's context length is the sliding window of %d tokens, not %d; llama.cpp has "
            "no window in this family", window, config.max_position_embeddings,
        )  # fmt: skip
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    # Those of llama3 are a tensor.
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


class _Tensor(NamedTuple):
    """A tensor to write: where its parts lie, and its name, shape and type in GGUF.

    Attributes:
        parts: files and names in the folder, one for each expert; {} for rotary frequencies, which are computed.
        stacked: whether the parts are the first dimension.
    """

    parts: dict[int, tuple[Path, str]]
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    stacked: bool = False


def _plan(folder: Path, config: PretrainedConfig, family: Family, gguf_type: str) -> Iterator[_Tensor]:
    """The tensors to write, from the headers of the safetensors files."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map

    [architecture] = [arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == family.architecture]
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    if rope_of(config)["rope_type"] == "llama3":
        yield _Tensor({}, "rope_freqs.weight", (head_width(config) // 2,), GGMLQuantizationType.F32)
    found: dict[str, _Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for path in sorted(tensors.keys()):
                expert = _EXPERT.fullmatch(path)
                whole = f"{expert[1]}.{expert[3]}.weight" if expert else path
                name = names.get_name(whole, try_suffixes=(".weight", ".bias"))
                assert name is not None, f"{path} is not a tensor of the architecture {family.architecture}"
                shape = tuple(tensors.get_slice(path).get_shape())
                exact = len(shape) == 1 or name.endswith(_ROUTER)
                kind = GGMLQuantizationType.F32 if exact else GGMLQuantizationType[gguf_type.upper()]
                if kind is GGMLQuantizationType.Q8_0 and shape[-1] % _BLOCK:
                    kind = GGMLQuantizationType.F16
                tensor = found.setdefault(name, _Tensor({}, name, shape, kind, bool(expert)))
                tensor.parts[int(expert[2]) if expert else 0] = file, path
    for tensor in found.values():
        yield tensor._replace(shape=(len(tensor.parts), *tensor.shape)) if tensor.stacked else tensor


def _converted(tensor: _Tensor, config: PretrainedConfig, family: Family) -> np.ndarray[Any, Any]:
    """The values of a tensor in its type."""
    from gguf import GGMLQuantizationType, quantize

    if not tensor.parts:
        return _frequency_factors(config).numpy()
    parts = []
    for _, (file, path) in sorted(tensor.parts.items()):
        with safe_open(str(file), framework="pt") as tensors:
            values = tensors.get_tensor(path).float()
        if family.interleaved_rope:
            values = _interleaved(path, values, config)
        if family.norm_offset and path.endswith("norm.weight"):
            values = values + 1
        if tensor.kind is GGMLQuantizationType.F16 and (largest := float(values.abs().max())) > _LARGEST_F16:
            raise ValueError(
                f"export.gguf_type: {path} has a value of {largest:.3g}, and f16 ends at {_LARGEST_F16:.0f}; set "
                "export.gguf_type to 'bf16'"
            )
        parts.append(quantize(values.numpy(), tensor.kind))
    return np.stack(parts) if tensor.stacked else parts[0]


def _interleaved(path: str, tensor: Tensor, config: PretrainedConfig) -> Tensor:
    """The rows of a query or key projection with the two halves of each head interleaved; other tensors unchanged.

    transformers rotates value i of a head with value i + head_dim / 2, llama.cpp value 2i with 2i + 1.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(path.split(".")[-2])
    if heads is None:
        return tensor
    rows, *columns = tensor.shape
    halves = tensor.reshape(heads, 2, rows // heads // 2, *columns)
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _frequency_factors(config: PretrainedConfig) -> Tensor:
    """By how much each frequency of llama3's rotary embedding is lower than without scaling: [head_dim / 2], fp32."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = head_width(config)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    factors: Tensor = plain / scaled
    return factors
