"""Shapes of models, from a Hugging Face configuration or from a table of well-known models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from strata_platform.errors import Problem, SpecError
from strata_platform.model_config import read_config_file


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder with grouped-query attention and a gated MLP; memory and time follow from it.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_dim, vocabulary: sizes, as in Hugging Face configurations.
        layers: number of decoder layers, all alike.
        tied: whether the head shares the embedding's weight.
        biased: whether queries, keys and values have biases.
        qk_norm: whether queries and keys are normalized per head.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    biased: bool = False
    qk_norm: bool = False

    @property
    def queries(self) -> int:
        """Width of the queries over all heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of the keys over all heads, also that of the values."""
        return self.kv_heads * self.head_dim

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """(in, out) features of the linear layers of a decoder layer."""
        attention = ((self.hidden, self.queries), (self.hidden, self.keys), (self.hidden, self.keys))
        mlp = ((self.hidden, self.intermediate),) * 2 + ((self.intermediate, self.hidden),)
        return (*attention, (self.queries, self.hidden), *mlp)

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of a decoder layer."""
        return sum(a * b for a, b in self.linear_layers)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer."""
        biases = (self.queries + 2 * self.keys) * self.biased
        return self.layer_weights + biases + 2 * self.hidden + 2 * self.head_dim * self.qk_norm

    @property
    def head_parameters(self) -> int:
        """Parameters of the head, tied or not."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the decoder layers: embedding, head, last norm."""
        return self.head_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer_parameters + self.root_parameters

    def lora_parameters(self, rank: int) -> int:
        """Parameters of LoRA matrices of all linear layers but the head."""
        return self.layers * sum(rank * (a + b) for a, b in self.linear_layers)

    def part(self, ways: int) -> ModelShape:
        """The shape of one tensor-parallel shard: its heads, columns and vocabulary at the same hidden size.

        Raises ValueError if heads or columns do not divide evenly. The vocabulary is that of the largest shard.
        """
        sharded = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        for name, size in {**sharded, "intermediate_size": self.intermediate}.items():
            if size % ways:
                raise ValueError(f"{ways} does not divide {name} {size}")
        return replace(
            self,
            heads=self.heads // ways,
            kv_heads=self.kv_heads // ways,
            intermediate=self.intermediate // ways,
            vocabulary=-(-self.vocabulary // ways),
        )


_qwen2 = partial(ModelShape, biased=True)
_qwen3 = partial(ModelShape, vocabulary=151936, qk_norm=True)
_llama = partial(ModelShape, vocabulary=128256)

# Keys are Hub ids without their owner and without endings such as -Instruct.
KNOWN: dict[str, ModelShape] = {
    "tiny-llama": ModelShape(256, 704, 4, 4, 2, 64, 4096, tied=True),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 64, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128, tied=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128),
    "meta-llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64, 8, 128),
    "mistral-7b-v0.3": ModelShape(4096, 14336, 32, 32, 8, 128, 32768),
    "smollm2-135m": ModelShape(576, 1536, 30, 9, 3, 64, 49152, tied=True),
    "smollm2-360m": ModelShape(960, 2560, 32, 15, 5, 64, 49152, tied=True),
    "smollm2-1.7b": ModelShape(2048, 8192, 24, 32, 32, 64, 49152, tied=True),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 64, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 128, 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 128, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 128, 152064),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 128, 152064),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 128, 152064),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 128, 152064),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, 128, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, 128, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, 128, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, 128),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8, 128),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8, 128),
}
_ENDINGS = ("-instruct", "-base", "-chat", "-it")
# Values of model_type whose decoder ModelShape describes.
_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def shape_of(name: str, config: Path | None = None) -> ModelShape:
    """The shape of `model.name`, a folder, a preset, or a Hub id of KNOWN; or of the given config.json.

    Raises SpecError if it is none of them, or another kind of model.
    """
    file = config or Path(name) / "config.json"
    if config is not None or file.exists():
        return _read(file)
    plain = name.rpartition("/")[2].lower()
    for ending in _ENDINGS:
        plain = plain.removesuffix(ending)
    if plain in KNOWN:
        return KNOWN[plain]
    raise SpecError(
        [
            Problem(
                "model.name",
                "is neither a folder with a config.json nor a model whose shape is known; name the model's "
                "config.json with --config",
                given=repr(name),
                allowed=", ".join(KNOWN),
            )
        ],
        "estimate",
    )


def _read(file: Path) -> ModelShape:
    try:
        config = read_config_file(file)
    except ValueError as error:
        raise SpecError([Problem("model.name", str(error))], "estimate") from None
    try:
        return from_config(config)
    except (ValueError, KeyError) as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise SpecError([Problem("model.name", f"{file}: {reason}")], "estimate") from None


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Raises:
        ValueError: another kind of model, or an invalid size.
        KeyError: a field is missing.
    """
    kind = config["model_type"]
    if kind not in _TYPES:
        raise ValueError(f"model_type {kind!r} is not supported by the estimate; supported: {', '.join(_TYPES)}")
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"num_attention_heads {heads} does not divide hidden_size {hidden}, and there is no head_dim")
    return ModelShape(
        hidden=hidden,
        intermediate=_size(config, "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        vocabulary=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        biased=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The size in the field `name`; the default if it is null or missing."""
    value = config[name] if default is None else config.get(name, default)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {json.dumps(value)}, not a whole number of at least 1")
    return value
