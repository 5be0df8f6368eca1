"""Peak GPU memory of each process of a run, in bytes.

Weights, optimizer state and accumulated gradients exist all the time. The rest peaks at one of four moments:

1. the loss, with the activations of all layers;
2. the backward pass of the last layer, with all activations and what that layer recomputes;
3. the backward pass of the first layer, with the gradients of all layers;
4. the end of the backward pass, with the gradients of the embeddings.

The largest of the four is the peak.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from strata_platform.estimate.float8 import casts_beside, kept_beside, saved_weights
from strata_platform.estimate.workload import NF4_BLOCK, Workload

# Bytes of logits that linear_cross_entropy holds at a time.
_LOSS_BUDGET = 512 * 2**20
# Bytes per logit of the unfused loss: bf16, its fp32 copy, log-probabilities, and their gradients.
_PLAIN_LOGIT = 12
# Moments that share a scale in AdamW 8-bit.
_MOMENT_BLOCK = 256
# fp32 numbers of state for each weight, whatever the type of the weight.
_FP32_MOMENTS = {"lion": 1, "schedule_free": 2}
# Scales of nf4 blocks that share an fp32 scale.
_NF4_SCALES = 256
# Bytes that the allocator, cuBLAS and NCCL hold.
_BUFFERS = 0.6 * 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at its peak, by part; without what is in host memory or may move there."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    gathered: float
    buffers: float

    @property
    def peak(self) -> float:
        """The sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Bytes by the name of the part, in the order of the fields."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


def memory_of(work: Workload) -> Memory:
    """The memory of one process at its peak."""
    shape, training = work.shape, work.training
    on_host = work.fsdp is not None and work.fsdp.cpu_offload
    gradients = 0.0 if on_host else work.trained_parameters * work.weight_bytes / work.shards
    # All layers share one boolean mask.
    mask = _mask(work)
    held = mask + shape.layers * kept_by_layer(work) - offloaded_bytes(work)
    working = working_set(work)
    gathered = _gathered(work)
    # Earlier micro-batches leave gradients, and DDP's buckets exist from the start.
    before = gradients if training.gradient_accumulation_steps > 1 or work.parallel.type == "ddp" else 0.0
    if work.optimizer.in_backward:
        gradients /= shape.layers
    # The embedding gets its gradient last, when the activations of all layers are gone.
    table = 0.0 if work.lora or on_host else shape.table_parameters * work.weight_bytes / work.shards
    within = gradients - (0.0 if shape.tied else min(table, gradients))
    after = gradients + (table if shape.tied else 0.0)
    if work.sum_bytes > work.weight_bytes:
        # Sums exist in all passes but the last, DDP's buckets beside them. The embedding's gradient is added last.
        sums = gradients * work.sum_bytes / work.weight_bytes
        before = within = sums + (gradients if work.parallel.type == "ddp" else 0.0)
        after = before + table
    head, root = _unreduced_gradients(work)
    moments = (
        (before, held, _loss(work), gathered),
        (before, held + working, _kept_by_loss(work), gathered),
        (within, mask + working, head, gathered),
        (after, 0.0, root, _gathered_root(work)),
    )
    peak = max(moments, key=sum)
    return Memory(
        weights=0.0 if on_host else _weights(work),
        gradients=peak[0],
        optimizer=0.0 if work.optimizer.paged or on_host else optimizer_bytes(work) / work.shards,
        activations=peak[1],
        loss=peak[2],
        gathered=peak[3],
        buffers=_BUFFERS,
    )


def host_bytes(work: Workload) -> float:
    """Bytes that `parallel.cpu_offload` keeps in host memory: shards of weights, gradients and optimizer state."""
    if work.fsdp is None or not work.fsdp.cpu_offload:
        return 0.0
    gradients = work.trained_parameters * work.sum_bytes / work.shards
    return _weights(work) + gradients + optimizer_bytes(work) / work.shards


def offloaded_bytes(work: Workload) -> float:
    """Bytes of what recomputed layers keep that `training.activation_offloading` keeps in host memory.

    The last one stays, and another is on its way while a layer runs backward.
    """
    if not work.training.activation_offloading:
        return 0.0
    layers = work.shape.layers - work.training.gradient_checkpointing_except_last
    recomputed = -(-layers // work.training.recomputed_every)
    return max(0, recomputed - 2) * _kept_by_recomputed(work)


def paged_bytes(work: Workload) -> float:
    """Bytes of optimizer state in managed memory (`optimizer.paged`), which `Memory` leaves out."""
    return optimizer_bytes(work) / work.shards if work.optimizer.paged else 0.0


def _weights(work: Workload) -> float:
    """Bytes of the weights of the model and of the adapter that a process stores."""
    layers, quantized = work.shape.layers, work.nf4_weights
    exact = work.shape.parameters - layers * sum(quantized)
    if work.lora:
        exact += work.trained_parameters
    # One byte per block, and four per group of those bytes; FSDP does not shard them.
    blocks = [size // NF4_BLOCK for size in quantized]
    scales = layers * sum(count + 4 * -(-count // _NF4_SCALES) for count in blocks)
    return (exact * work.weight_bytes + layers * sum(quantized) / 2) / work.shards + scales - saved_weights(work)


def optimizer_bytes(work: Workload) -> float:
    """Bytes of optimizer state before FSDP shards it: moments, and the low bits of master weights."""
    return moment_bytes(work) + master_bytes(work)


def master_bytes(work: Workload) -> float:
    """Bytes of the 16 bits that extend each trained bfloat16 weight to an fp32 master weight."""
    extended = work.optimizer.precision == "fp32_master" and work.weight_bytes == 2
    return 2.0 * work.trained_parameters if extended else 0.0


def moment_bytes(work: Workload) -> float:
    """Bytes of the optimizer's moments of all trained weights."""
    trained, size = work.trained_parameters, work.weight_bytes
    if work.optimizer.type in _FP32_MOMENTS:
        return 4.0 * _FP32_MOMENTS[work.optimizer.type] * trained
    if work.optimizer.type == "adafactor":
        return 4.0 * _rows_and_columns(work)
    if work.optimizer.type == "muon":
        # Muon has one moment for matrices; embeddings and head have AdamW's two.
        return float((trained + work.shape.root_parameters) * size)
    in_8bit = _weights_with_8bit_moments(work) if work.optimizer.type == "adamw_8bit" else 0
    return 2.0 * ((trained - in_8bit) * size + in_8bit * (1 + 4 / _MOMENT_BLOCK))


def _rows_and_columns(work: Workload) -> int:
    """Rows and columns of all trained matrices, and elements of vectors: the numbers that Adafactor keeps."""
    shape = work.shape
    if work.lora is not None:
        experts = sum(rows + columns for rows, columns in work.expert_adapters)
        return shape.layers * (sum(inner + outer + 2 * work.lora.r for inner, outer in shape.linear_layers) + experts)
    matrices = sum(inner * outer for inner, outer in shape.linear_layers)
    vectors = shape.layers * (shape.layer_parameters - matrices) + shape.hidden
    tables = shape.vocabulary + shape.hidden + (0 if shape.tied else shape.outputs + shape.hidden)
    return shape.layers * sum(inner + outer for inner, outer in shape.linear_layers) + vectors + tables


def _weights_with_8bit_moments(work: Workload) -> int:
    """Weights whose moments AdamW 8-bit stores in one byte: those in rows of whole blocks."""
    shape = work.shape
    if work.lora:
        # Only LoRA's A has rows of the layer's input size; the rows of B have the rank.
        adapted = [inner for inner, _ in shape.adapted_layers if inner % _MOMENT_BLOCK == 0]
        experts = sum(rows * columns for rows, columns in work.expert_adapters if columns % _MOMENT_BLOCK == 0)
        return shape.layers * (sum(work.lora.r * inner for inner in adapted) + experts)
    linear_layers = [(inner, outer) for inner, outer in shape.stored_layers if inner % _MOMENT_BLOCK == 0]
    head = 0 if shape.tied or shape.hidden % _MOMENT_BLOCK else shape.head_parameters
    return shape.layers * sum(inner * outer for inner, outer in linear_layers) + head


def kept_by_layer(work: Workload) -> float:
    """Bytes of activations that a layer keeps for its backward pass, averaged over all layers."""
    whole = activations_of_layer(work)
    kept = work.recomputed_share
    return kept * _kept_by_recomputed(work) + (1 - kept) * whole


def _kept_by_recomputed(work: Workload) -> float:
    """Bytes that a recomputed layer keeps: its input; under `attention` queries, keys, values, what attention makes of
    them and its output; and under `per_op` the outputs of products and attention.
    """
    shape = work.shape
    width = shape.hidden
    if work.training.gradient_checkpointing == "attention":
        width += 2 * shape.queries + 2 * shape.keys + shape.hidden
    if work.training.gradient_checkpointing == "per_op":
        width += 2 * shape.hidden + 2 * shape.queries + 2 * shape.keys + 2 * shape.intermediate
    return float(work.tokens * width * work.compute_bytes)


def activations_of_layer(work: Workload) -> float:
    """Bytes that the backward pass of a layer reads: the inputs of norms, products, attention and the gate."""
    shape, parallel = work.shape, work.parallel.context_parallel
    # A mask needs keys and values repeated for every head. Context parallelism keeps those of the whole row, or of
    # this rank's heads.
    repeated = shape.queries * (1 if work.exchanges_heads else parallel)
    keys = repeated if work.masked else work.attended_keys
    # Context parallelism keeps attention's output twice: per part of the row, and joined for the next product.
    queries = shape.queries * (3 if parallel > 1 else 2)
    gate = 2 + shape.gated - work.fused_gate
    # Each expert of a token gets its hidden states, and returns others; fused experts keep neither. Expert parallelism
    # gathers those of the group.
    hidden = 4 + (0 if work.fused else 2 * shape.active_experts) + work.parallel.expert_parallel - 1
    width = hidden * shape.hidden + queries + 2 * keys + gate * shape.intermediate
    if not work.fused:
        # Norms keep an fp32 copy and the normalized value, rotary embeddings their inputs, the gate its activation.
        width += 2 * 3 * shape.hidden + shape.queries + shape.keys + shape.intermediate
    # PyTorch adds the mask to the scores as floats; each layer converts the booleans itself.
    return float((work.tokens * width + _mask(work)) * work.compute_bytes) + kept_beside(work)


def _mask(work: Workload) -> int:
    """Entries of the attention mask; 0 without one."""
    return int(work.tokens * work.sequence_length * work.attended) if work.masked else 0


def working_set(work: Workload) -> float:
    """Bytes of the backward pass of one layer: gradients of its activations, and the activations if recomputed.

    An nf4 weight also has a dequantized copy while it is multiplied; both weights of experts have theirs at once.
    """
    shape = work.shape
    # The unfused activation kept its output; the fused one recomputes it. That of adapters does so within its kernel.
    gate = 3 if work.fused_gate and shape.gated and work.lora is None else 2
    dequantized = max(*work.nf4_weights, sum(work.nf4_experts), 0)
    # Expert parallelism also has the output of its experts for all tokens of the group, and the gradient.
    group = 2 * (work.parallel.expert_parallel - 1)
    width = (2 + group) * shape.hidden + gate * shape.intermediate
    gradients = (work.tokens * width + dequantized) * work.compute_bytes + casts_beside(work)
    if not work.training.recomputed_every:
        return gradients
    return gradients + activations_of_layer(work) - _kept_by_recomputed(work)


def _loss(work: Workload) -> float:
    """Bytes of the last hidden states, the logits and the loss's intermediate results."""
    size = work.compute_bytes
    states = 2 * work.tokens * work.shape.hidden * size
    logits = work.tokens * work.shape.outputs
    if not work.fused_loss:
        # Every tensor-parallel rank gathers the logits of the whole vocabulary.
        return float(states + logits * work.parallel.tensor_parallel * _PLAIN_LOGIT)
    if work.lora:
        return float(states + min(logits * size, _LOSS_BUDGET))
    # The gradient of the head, and a second buffer of its size that sums several chunks exactly.
    head = work.shape.head_parameters * size
    chunked = logits * size > _LOSS_BUDGET
    return float(states + head + min(logits * size, _LOSS_BUDGET) + head * chunked)


def _kept_by_loss(work: Workload) -> float:
    """Bytes of the gradients of the last hidden states and of the head, which the loss computes."""
    head = 0 if work.lora else work.shape.head_parameters
    return float((work.tokens * work.shape.hidden + head) * work.compute_bytes)


def _gathered(work: Workload) -> float:
    """Bytes of all weights that FSDP has gathered."""
    if work.fsdp is None:
        return 0.0
    layers = 2 if work.fsdp.reshard_after_forward else work.shape.layers
    return layers * work.layer_bytes + _gathered_root(work)


def _gathered_root(work: Workload) -> float:
    """Bytes of embedding, head and last norm, which FSDP gathers together."""
    return 0.0 if work.fsdp is None else float(work.shape.root_parameters * work.compute_bytes)


def _unreduced_gradients(work: Workload) -> tuple[float, float]:
    """Bytes of the gradients that FSDP is about to reduce-scatter: of head and one layer, then outside of layers."""
    if work.fsdp is None or work.lora:
        return 0.0, 0.0
    shape, size, reduced = work.shape, work.compute_bytes, 4 if work.fsdp.reduce_dtype == "float32" else 2
    layer = work.layer_parameters * (size + reduced)
    return float(shape.head_parameters * size + layer), float(shape.root_parameters * (size + reduced))
