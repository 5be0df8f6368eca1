"""Bytes that each process of a run holds at its fullest moment.

Weights, moments and kept gradients are there all the time. What comes and goes is fullest when the loss is computed,
with the activations of all layers in memory; in the backward pass of the last layer, which is the first, with what that
computes again; in that of the first layer, with the gradients of all layers; or after it, with those of the embeddings.
The largest of the four is the peak.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from strata_platform.errors import Problem, SpecError
from strata_platform.estimate.shapes import ModelShape
from strata_platform.spec import RunSpec
from strata_platform.spec.model import Lora
from strata_platform.spec.parallel import Fsdp

# Of logits that linear_cross_entropy holds at a time.
_LOSS_BUDGET = 512 * 2**20
# Without it, bytes for each logit: bf16, its fp32 copy, log-probabilities, and their gradients.
_PLAIN_LOGIT = 12
# Operators of the kernel layer that fuse the gate.
_GATES = frozenset({"swiglu", "geglu", "relu_squared"})
# Weights that share the scales of their moments of eight bits.
_BLOCK = 256
# Weights of four bits that share a scale of a byte, and scales that share one of their own.
_PACKED_BLOCK, _PACKED_SCALES = 64, 256
# What the allocator, cuBLAS and NCCL hold beside.
_BUFFERS = 0.6 * 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at its peak, by part; without optimizer state in managed memory (`optimizer.paged`)."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    gathered: float
    buffers: float

    @property
    def peak(self) -> float:
        """All parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By name, in order."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


def memory_of(spec: RunSpec, shape: ModelShape) -> Memory:
    """The peak of one process of `spec`. Raises SpecError for what is not estimated."""
    shape = part_of(spec, shape)
    tokens, size, split = tokens_at_once(spec), weight_bytes(spec), shards(spec)
    trained = trained_parameters(spec, shape)
    gradients = trained * size / split
    # Of booleans, made once for all layers.
    mask = _mask(spec, tokens)
    held = mask + shape.layers * kept_by_layer(spec, shape, tokens)
    working = working_set(spec, shape, tokens)
    gathered = _gathered(spec, shape)
    # Gradients that are there before the backward pass: of micro-batches before, or where DDP's buckets keep them.
    before = gradients if spec.training.gradient_accumulation_steps > 1 or spec.parallel.type == "ddp" else 0.0
    if spec.optimizer.in_backward:
        gradients /= shape.layers
    # The table of the embeddings gets its gradient last, when no layer is left.
    table = 0.0 if isinstance(spec.adapter, Lora) else shape.head_parameters * size / split
    head, root = _whole_gradients(spec, shape)
    moments = (
        (before, held, _loss(spec, shape, tokens), gathered),
        (before, held + working, _kept_by_loss(spec, shape, tokens), gathered),
        (gradients - (0.0 if shape.tied else min(table, gradients)), mask + working, head, gathered),
        (gradients + (table if shape.tied else 0.0), 0.0, root, _root(spec, shape)),
    )
    now = max(moments, key=sum)
    return Memory(
        weights=_weights(spec, shape),
        gradients=now[0],
        optimizer=0.0 if spec.optimizer.paged else optimizer_bytes(spec, shape) / split,
        activations=now[1],
        loss=now[2],
        gathered=now[3],
        buffers=_BUFFERS,
    )


def part_of(spec: RunSpec, shape: ModelShape) -> ModelShape:
    """What a process has of a model of `shape` before FSDP splits it. Raises SpecError for what is not estimated."""
    if spec.parallel.type == "deepspeed":
        said = "'deepspeed' is not estimated; set it to 'fsdp', which splits as much as stage 3 does"
        raise SpecError([Problem("parallel.type", said)], "estimate")
    if spec.model.attention == "eager":
        said = "'eager', which keeps the square of data.sequence_length, is not estimated; set it to 'sdpa'"
        raise SpecError([Problem("model.attention", said)], "estimate")
    try:
        return shape.part(spec.tensor_parallel)
    except ValueError as error:
        said = f"{error} of the model; set it to a number that does"
        raise SpecError([Problem("parallel.tensor_parallel", said)], "estimate") from None


def paged_bytes(spec: RunSpec, shape: ModelShape) -> float:
    """Bytes of optimizer state in managed memory (`optimizer.paged`), which the peak is without."""
    return optimizer_bytes(spec, part_of(spec, shape)) / shards(spec) if spec.optimizer.paged else 0.0


def shards(spec: RunSpec) -> int:
    """Processes that FSDP splits over what tensor parallelism leaves of a copy."""
    return spec.model_shards // spec.tensor_parallel


def tokens_at_once(spec: RunSpec) -> int:
    """Of a micro-batch, in each process."""
    return spec.training.micro_batch_size * spec.data.sequence_length // spec.context_parallel


def weight_bytes(spec: RunSpec) -> int:
    """Bytes of a weight, its gradient, and each of its two moments, unless the optimizer says otherwise."""
    return 4 if spec.model.dtype == "float32" else 2


def compute_bytes(spec: RunSpec) -> int:
    """Bytes of an activation."""
    if isinstance(spec.parallel, Fsdp) and spec.parallel.compute_dtype == "bfloat16":
        return 2
    return weight_bytes(spec)


def trained_parameters(spec: RunSpec, shape: ModelShape) -> int:
    """How many learn."""
    return shape.lora_parameters(spec.adapter.r) if isinstance(spec.adapter, Lora) else shape.parameters


def packed_weights(spec: RunSpec, shape: ModelShape) -> tuple[int, ...]:
    """Sizes of a layer's weights that have four bits; bitsandbytes leaves those of no whole blocks as they are."""
    sizes = [inner * outer for inner, outer in shape.linear_layers] if spec.is_quantized else []
    return tuple(size for size in sizes if size % _PACKED_BLOCK == 0)


def _weights(spec: RunSpec, shape: ModelShape) -> float:
    """Bytes of the model's own weights and of an adapter's, as a process keeps them."""
    packed = packed_weights(spec, shape)
    exact = shape.parameters - shape.layers * sum(packed)
    if isinstance(spec.adapter, Lora):
        exact += trained_parameters(spec, shape)
    # A byte for each block, and four for so many of those; FSDP leaves them whole.
    blocks = [size // _PACKED_BLOCK for size in packed]
    scales = shape.layers * sum(count + 4 * -(-count // _PACKED_SCALES) for count in blocks)
    return (exact * weight_bytes(spec) + shape.layers * sum(packed) / 2) / shards(spec) + scales


def layer_bytes(spec: RunSpec, shape: ModelShape) -> float:
    """Of a layer's weights where they are whole, as they travel and wait to be read."""
    packed = sum(packed_weights(spec, shape))
    return packed / 2 + (shape.layer_parameters - packed) * compute_bytes(spec)


def optimizer_bytes(spec: RunSpec, shape: ModelShape) -> float:
    """Bytes of optimizer state, before it is split: moments, and the low bits of master weights."""
    return moment_bytes(spec, shape) + remainder_bytes(spec, shape)


def remainder_bytes(spec: RunSpec, shape: ModelShape) -> float:
    """Bytes of the 16 bits that make an fp32 master weight of each bfloat16 weight that learns."""
    exact = spec.optimizer.precision == "fp32_master" and weight_bytes(spec) == 2
    return 2.0 * trained_parameters(spec, shape) if exact else 0.0


def moment_bytes(spec: RunSpec, shape: ModelShape) -> float:
    """Bytes of the moments of all weights that learn."""
    trained, size = trained_parameters(spec, shape), weight_bytes(spec)
    if spec.optimizer.type == "muon":
        # One moment of the matrices between embeddings and head.
        return float((trained + shape.root_parameters) * size)
    packed = _in_eight_bits(spec, shape) if spec.optimizer.type == "adamw_8bit" else 0
    return 2.0 * ((trained - packed) * size + packed * (1 + 4 / _BLOCK))


def _in_eight_bits(spec: RunSpec, shape: ModelShape) -> int:
    """Weights whose moments have eight bits, and a scale for each block: those in rows of whole blocks."""
    rows = [(inner, outer) for inner, outer in shape.linear_layers if inner % _BLOCK == 0]
    if isinstance(spec.adapter, Lora):
        # Of a layer's two matrices the first has its rows, and the second has rows of the rank.
        return shape.layers * sum(spec.adapter.r * inner for inner, _ in rows)
    head = 0 if shape.tied or shape.hidden % _BLOCK else shape.head_parameters
    return shape.layers * sum(inner * outer for inner, outer in rows) + head


def kept_by_layer(spec: RunSpec, shape: ModelShape, tokens: int) -> float:
    """Bytes of activations that a layer keeps for its backward pass, on average over the layers."""
    whole = activations_of_layer(spec, shape, tokens)
    every = spec.training.recomputed_every
    return (_kept_by_recomputed(spec, shape, tokens) + (every - 1) * whole) / every if every else whole


def _kept_by_recomputed(spec: RunSpec, shape: ModelShape, tokens: int) -> float:
    """Bytes that a recomputed layer keeps: what goes into it, and what its products and attention gave if told to."""
    width = shape.hidden
    if spec.training.gradient_checkpointing == "per_op":
        width += 2 * shape.hidden + 2 * shape.queries + 2 * shape.keys + 2 * shape.intermediate
    return float(tokens * width * compute_bytes(spec))


def activations_of_layer(spec: RunSpec, shape: ModelShape, tokens: int) -> float:
    """Bytes that the backward pass of a layer reads: what goes into norms, products, attention and the gate."""
    # Under a mask, keys and values are repeated for every head before attention sees them; those of a row that is cut
    # are there whole.
    keys = (shape.queries if under_mask(spec) else shape.keys) * spec.context_parallel
    # Of a row that is cut, what attention gives is kept by itself, and put together for the product behind it.
    queries = shape.queries * (3 if spec.context_parallel > 1 else 2)
    gate = 2 if _fuses_gate(spec) else 3
    width = 4 * shape.hidden + queries + 2 * keys + gate * shape.intermediate
    if not spec.kernels.enabled:
        # Norms keep an fp32 copy and the normalized value, rotary embeddings their inputs, the gate its activation.
        width += 2 * 3 * shape.hidden + shape.queries + shape.keys + shape.intermediate
    # PyTorch's attention adds a mask of numbers to the scores, and each layer makes its own of the booleans.
    return float((tokens * width + _mask(spec, tokens)) * compute_bytes(spec))


def under_mask(spec: RunSpec) -> bool:
    """Whether attention computes pairs that a mask takes away; in bfloat16 it goes by document."""
    several = spec.data.packing or spec.context_parallel > 1
    return several and spec.model.attention == "sdpa" and compute_bytes(spec) == 4


def attended(spec: RunSpec) -> float:
    """Share of a row that attention computes with for each of its tokens: half without a mask, and in cut rows."""
    return 1.0 if under_mask(spec) and spec.context_parallel == 1 else 0.5


def _mask(spec: RunSpec, tokens: int) -> int:
    """Pairs of tokens that a mask tells apart; 0 where attention needs none."""
    return int(tokens * spec.data.sequence_length * attended(spec)) if under_mask(spec) else 0


def _fuses_gate(spec: RunSpec) -> bool:
    """Whether the gate and the projection behind it are one, and nothing is kept between; adapters take its place."""
    return spec.kernels.enabled and not isinstance(spec.adapter, Lora) and _GATES.isdisjoint(spec.kernels.exclude)


def working_set(spec: RunSpec, shape: ModelShape, tokens: int) -> float:
    """Bytes of one layer's backward pass: its activations, if they were recomputed, and their gradients.

    And a weight of four bits, of which there is an exact copy while it is multiplied with.
    """
    # What the gate lets through is written once more where it was not kept.
    gate = 3 if _fuses_gate(spec) else 2
    unpacked = max(packed_weights(spec, shape), default=0)
    gradients = (tokens * (2 * shape.hidden + gate * shape.intermediate) + unpacked) * compute_bytes(spec)
    if not spec.training.recomputed_every:
        return gradients
    return gradients + activations_of_layer(spec, shape, tokens) - _kept_by_recomputed(spec, shape, tokens)


def _loss(spec: RunSpec, shape: ModelShape, tokens: int) -> float:
    """Bytes of the last hidden states, the logits and what the loss makes of them."""
    size = compute_bytes(spec)
    states = 2 * tokens * shape.hidden * size
    logits = tokens * shape.vocabulary
    if not spec.fused_loss:
        # Every process gathers those of the whole vocabulary.
        return float(states + logits * spec.tensor_parallel * _PLAIN_LOGIT)
    if isinstance(spec.adapter, Lora):
        return float(states + min(logits * size, _LOSS_BUDGET))
    # The gradient of the head, and as much again where its sum is kept exact over several chunks.
    head = shape.head_parameters * size
    chunked = logits * size > _LOSS_BUDGET
    return float(states + head + min(logits * size, _LOSS_BUDGET) + head * chunked)


def _kept_by_loss(spec: RunSpec, shape: ModelShape, tokens: int) -> float:
    """Bytes of what the loss leaves for the backward pass: the gradients of the last hidden states and of the head."""
    head = 0 if isinstance(spec.adapter, Lora) else shape.head_parameters
    return float((tokens * shape.hidden + head) * compute_bytes(spec))


def _splits(spec: RunSpec) -> bool:
    return isinstance(spec.parallel, Fsdp) and spec.topology.world_size > 1


def _root(spec: RunSpec, shape: ModelShape) -> float:
    """Bytes of the weights beside the layers that FSDP holds whole."""
    return float(shape.root_parameters * compute_bytes(spec)) if _splits(spec) else 0.0


def _gathered(spec: RunSpec, shape: ModelShape) -> float:
    """Bytes of all weights that FSDP holds whole."""
    if not isinstance(spec.parallel, Fsdp) or not _splits(spec):
        return 0.0
    layers = 2 if spec.parallel.reshard_after_forward else shape.layers
    return layers * layer_bytes(spec, shape) + _root(spec, shape)


def _whole_gradients(spec: RunSpec, shape: ModelShape) -> tuple[float, float]:
    """Bytes of whole gradients that FSDP is about to split: of the head and a layer, then of all beside the layers."""
    if not isinstance(spec.parallel, Fsdp) or not _splits(spec) or isinstance(spec.adapter, Lora):
        return 0.0, 0.0
    size, reduced = compute_bytes(spec), 4 if spec.parallel.reduce_dtype == "float32" else 2
    layer = shape.layer_parameters * (size + reduced)
    return float(shape.head_parameters * size + layer), float(shape.root_parameters * (size + reduced))
