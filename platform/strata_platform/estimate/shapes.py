"""The shape of a decoder, from which memory and time follow, and those of well-known models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder with grouped-query attention and an MLP or experts; memory and time follow from it.

    Attributes:
        hidden, heads, kv_heads, head_dim, vocabulary: sizes, as in Hugging Face configurations.
        intermediate: columns of the MLP that a token computes with; in a mixture those of its experts together.
        layers: number of decoder layers, all alike.
        tied: whether the head shares the embedding's weight.
        scores: whether the head is the score of a text, one output, in place of logits.
        biased: whether queries, keys and values have biases.
        gated: whether the MLP has a gate beside the first projection.
        packed: whether queries, keys and values are one linear layer, and gate and first projection another.
        experts, active_experts: of a layer, and of these for a token; 0 without a mixture.
        idle: columns of the experts of a layer that a token does not use.
        shared: columns of the expert that all tokens use, which are part of `intermediate`.
        vectors: parameters of a layer's norms and of its biases, other than those of queries, keys and values; by
            default those of two norms of the hidden states.
        root_vectors: parameters of the last norm, and of biases outside of the layers.
        unread: parts of the model that the shape leaves out; None if there are none.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    scores: bool = False
    biased: bool = False
    gated: bool = True
    packed: bool = False
    experts: int = 0
    active_experts: int = 0
    idle: int = 0
    shared: int = 0
    vectors: int = 0
    root_vectors: int = 0
    unread: str | None = None

    def __post_init__(self) -> None:
        # The object is frozen, but this is a part of its construction.
        object.__setattr__(self, "vectors", self.vectors or 2 * self.hidden)
        object.__setattr__(self, "root_vectors", self.root_vectors or self.hidden)

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
        """(in, out) features of the matrices of a decoder layer that a token is multiplied with; experts as one."""
        return (*self._attention, *self._mlp(self.intermediate), *self._router)

    @property
    def stored_layers(self) -> tuple[tuple[int, int], ...]:
        """`linear_layers` with the experts that a token does not use."""
        return (*self._attention, *self._mlp(self.intermediate + self.idle), *self._router)

    @property
    def adapted_layers(self) -> tuple[tuple[int, int], ...]:
        """(in, out) features of the linear layers, which get adapters and are quantized: not experts and routers."""
        # The gate of a shared expert is a linear layer with one output.
        gate = ((self.hidden, 1),) if self.shared else ()
        return (*self._attention, *self._mlp(self.shared if self.experts else self.intermediate), *gate)

    @property
    def _attention(self) -> tuple[tuple[int, int], ...]:
        output = (self.queries, self.hidden)
        if self.packed:
            return ((self.hidden, self.queries + 2 * self.keys), output)
        return ((self.hidden, self.queries), (self.hidden, self.keys), (self.hidden, self.keys), output)

    def _mlp(self, columns: int) -> tuple[tuple[int, int], ...]:
        if not columns:
            return ()
        first = ((self.hidden, 2 * columns),) if self.packed else ((self.hidden, columns),) * (1 + self.gated)
        return (*first, (columns, self.hidden))

    @property
    def _router(self) -> tuple[tuple[int, int], ...]:
        """The router, and the gate of an expert that all tokens use."""
        return ((self.hidden, self.experts + bool(self.shared)),) if self.experts else ()

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of a decoder layer that a token is multiplied with."""
        return sum(a * b for a, b in self.linear_layers)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer."""
        biases = (self.queries + 2 * self.keys) * self.biased
        return sum(a * b for a, b in self.stored_layers) + biases + self.vectors

    @property
    def expert_parameters(self) -> int:
        """Of these, those of the experts that a router chooses from."""
        if not self.experts:
            return 0
        return (2 + self.gated) * (self.intermediate - self.shared + self.idle) * self.hidden

    @property
    def outputs(self) -> int:
        """Outputs of the head: logits of a token, or its score."""
        return 1 if self.scores else self.vocabulary

    @property
    def table_parameters(self) -> int:
        """Parameters of the embeddings."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the head, tied or not."""
        return self.outputs * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the decoder layers: embedding, head, last norm."""
        return self.table_parameters + (0 if self.tied else self.head_parameters) + self.root_vectors

    def with_score(self) -> ModelShape:
        """The shape of the model with the score of a text in place of its head."""
        return replace(self, tied=False, scores=True)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is computed with: all but those of other experts."""
        return self.parameters - self.layers * (sum(a * b for a, b in self.stored_layers) - self.layer_weights)

    def lora_parameters(self, rank: int) -> int:
        """Parameters of LoRA matrices of all linear layers but the head."""
        return self.layers * sum(rank * (a + b) for a, b in self.adapted_layers)

    def expert_adapters(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the matrices that adapt all experts of a layer."""
        if not self.experts:
            return ()
        ranks, inner = self.experts * rank, (self.intermediate - self.shared + self.idle) // self.experts
        return (ranks, self.hidden), ((1 + self.gated) * inner, ranks), (ranks, inner), (self.hidden, ranks)

    def part(self, ways: int) -> ModelShape:
        """The shape of one tensor-parallel shard: its heads, columns and vocabulary at the same hidden size.

        Raises ValueError if heads or columns do not divide evenly. The vocabulary is that of the largest shard.
        """
        sharded = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        columns = {"intermediate_size": self.intermediate, "width of the other experts": self.idle}
        for name, size in {**sharded, **columns}.items():
            if size % ways:
                raise ValueError(f"{ways} does not divide {name} {size}")
        return replace(
            self,
            heads=self.heads // ways,
            kv_heads=self.kv_heads // ways,
            intermediate=self.intermediate // ways,
            idle=self.idle // ways,
            vocabulary=-(-self.vocabulary // ways),
        )


_qwen2 = partial(ModelShape, biased=True)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool = False) -> ModelShape:
    # Two norms of the hidden states, and one of each head's 128 values for queries and for keys.
    vectors = 2 * hidden + 2 * 128
    return ModelShape(hidden, intermediate, layers, heads, kv_heads, 128, 151936, tied=tied, vectors=vectors)


_llama = partial(ModelShape, vocabulary=128256)

# Keys are Hub ids without their owner and without parts such as -Instruct.
KNOWN: dict[str, ModelShape] = {
    "tiny-llama": ModelShape(256, 704, 4, 4, 2, 64, 4096, tied=True),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 64, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128, tied=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64, 8, 128),
    **dict.fromkeys(("mistral-7b-v0.1", "mistral-7b-v0.2"), ModelShape(4096, 14336, 32, 32, 8, 128, 32000)),
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
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
}
# Qwen2 has the shapes of Qwen2.5, and Llama those of its first releases, under which copies are published.
KNOWN |= {f"qwen2-{size}": KNOWN[f"qwen2.5-{size}"] for size in ("0.5b", "1.5b", "7b", "72b")}
KNOWN |= {f"meta-llama-{version}-8b": KNOWN["llama-3.1-8b"] for version in ("3", "3.1")}
KNOWN |= {f"meta-llama-{version}-70b": KNOWN["llama-3.1-70b"] for version in ("3", "3.1")}
