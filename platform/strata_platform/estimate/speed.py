"""Time of an optimizer step, part by part, each at the rate that bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from strata_platform.estimate.float8 import cast_traffic, products_rate
from strata_platform.estimate.gpus import Gpu
from strata_platform.estimate.memory import master_bytes, moment_bytes
from strata_platform.estimate.shapes import ModelShape
from strata_platform.estimate.workload import Workload

# Elementwise traffic of an unfused layer, relative to that of the fused operators.
_UNFUSED = 3.0
# Traffic over the logits outside of matrix products, in bytes per logit: fused and not.
_LOGIT_BYTES, _PLAIN_LOGIT_BYTES = 6, 44
# Bytes per value of queries, keys and values that context parallelism splits, joins and copies around attention.
_JOINED_BYTES = 12
# LoRA's dropout takes the time of moving this many bytes per value, in all passes: random numbers limit it, and
# products of adapters with one input run apart.
_DROPPED_BYTES = 28
# Rate of the products of experts, each of some hundred rows, relative to that of other products.
_EXPERTS = 0.65
# Seconds of a layer's router, of sorting its tokens, and of many small kernels around them, in all passes.
_ROUTING = 0.5e-3
# Rate of attention where a token attends to so many others or more, relative to that of shorter rows.
_LONG, _LONG_ROWS = 16384, 1.25
# Rate of a step with 8-bit moments, relative to that of others: where it rounds weights, arithmetic is what limits it.
_EIGHT_BITS = 0.79
# Share of a collective that overlaps with computation, if there is enough of it.
_HIDDEN = 0.85


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step of one process, by part; `waiting` is communication that nothing overlaps."""

    products: float
    attention: float
    elementwise: float
    loss: float
    optimizer: float
    waiting: float

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.products + self.attention + self.elementwise + self.loss + self.optimizer + self.waiting


def time_of(work: Workload, gpu: Gpu) -> Time:
    """The time of an optimizer step after the first one, which compiles."""
    shape, training, tokens = work.shape, work.training, work.tokens
    rounds = training.gradient_accumulation_steps
    # Recomputed share of the forward pass: of elementwise work, and of products and attention.
    light = work.recomputed_share
    again = 0.0 if training.gradient_checkpointing == "per_op" else light
    attends_again = 0.0 if training.gradient_checkpointing == "attention" else again
    # Forward pass, input gradients, and weight gradients where weights are trained.
    layer_flops = 2.0 * shape.layer_weights * ((2 if work.lora else 3) + again)
    # The products of attention are kept.
    layer_flops -= 2.0 * shape.hidden * (2 * shape.queries + 2 * shape.keys) * (again - attends_again)
    if work.lora is None:
        # Recomputation stops at the last tensor that the backward pass reads, before the last projection.
        layer_flops -= 2.0 * shape.hidden * shape.intermediate * again
    else:
        # That of fused experts alone: an adapter on a linear layer reads the input of its product.
        columns = shape.intermediate - shape.shared if shape.experts and work.fused else 0
        layer_flops -= 2.0 * shape.hidden * columns * again
        experts = sum(rows * columns for rows, columns in work.expert_adapters)
        used = shape.active_experts / shape.experts if shape.experts else 0.0
        layer_flops += 6 * (shape.lora_parameters(work.lora.r) / shape.layers + used * experts)
    # Products of experts take as long as so many more of other products.
    layer_flops += _expert_flops(work, again) * (1 / _EXPERTS - 1)
    head_flops = 2 * shape.head_parameters * (2 if work.lora else 3)
    products = tokens * (shape.layers * layer_flops / products_rate(work, gpu) + head_flops / gpu.products)
    attention_rate = gpu.masked if work.masked else gpu.causal
    if work.sequence_length * work.attended >= _LONG:
        attention_rate *= _LONG_ROWS
    attention = tokens * shape.layers * _attention_flops(work, attends_again) / attention_rate
    traffic = tokens * _layer_traffic(work, light) + _dequantization_traffic(work, again) + cast_traffic(work, again)
    elementwise = shape.layers * traffic / gpu.stream
    # Without the fused operator every tensor-parallel rank has the logits of the whole vocabulary.
    logit = _LOGIT_BYTES if work.fused_loss else _PLAIN_LOGIT_BYTES * work.parallel.tensor_parallel
    loss = tokens * shape.outputs * logit / gpu.stream
    # The host launches kernels ahead of the GPU, so the slower of the two counts.
    launched = shape.layers * gpu.layer * (1 + light / 3)
    routing = shape.layers * _ROUTING if shape.experts else 0.0
    device = products + attention + elementwise + routing + loss
    slower = max(device, launched) / device
    compute = rounds * device * slower
    return Time(
        products=rounds * products * slower,
        attention=rounds * attention * slower,
        elementwise=rounds * (elementwise + routing) * slower,
        loss=rounds * loss * slower,
        optimizer=_optimizer(work, gpu) + _gradient_sums(work, gpu),
        waiting=_waiting(work, gpu, compute),
    )


def _expert_flops(work: Workload, again: float) -> float:
    """FLOPs per token and layer of experts that a router chooses, and of their adapters; 0 without a mixture."""
    shape = work.shape
    if not shape.experts:
        return 0.0
    columns = shape.intermediate - shape.shared
    weights = (2 + shape.gated) * columns * shape.hidden
    flops = 2.0 * weights * ((2 if work.lora else 3) + again)
    if work.fused:
        flops -= 2.0 * columns * shape.hidden * again
    adapters = sum(rows * parts for rows, parts in work.expert_adapters)
    return flops + 6 * adapters * shape.active_experts / shape.experts


def model_flops(shape: ModelShape, sequence_length: int) -> float:
    """FLOPs per token that MFU counts: products and causal attention, forward and backward, without recomputation."""
    products = 6 * (shape.layers * shape.layer_weights + shape.head_parameters)
    return float(products + 6 * shape.layers * sequence_length * shape.queries)


def _attention_flops(work: Workload, again: float) -> float:
    """FLOPs per token and layer: two products forward, five backward. A mask that is not causal is computed whole."""
    return 2 * work.sequence_length * work.attended * work.shape.queries * (2 + 5 + 2 * again)


def _layer_traffic(work: Workload, again: float) -> float:
    """Bytes per token and layer: two norms, rotary embedding, gate, two residual sums, and their backward passes."""
    shape, size = work.shape, work.compute_bytes / 2
    forward = 2 * 4 * shape.hidden + 4 * (shape.queries + shape.keys) + 6 * shape.intermediate + 2 * 6 * shape.hidden
    backward = 2 * 6 * shape.hidden + 4 * (shape.queries + shape.keys) + 10 * shape.intermediate + 2 * 6 * shape.hidden
    traffic = (forward * (1 + again) + backward) * size
    if work.lora:
        # LoRA reads each linear layer's output, adds to it and writes it again; PEFT also copies that of quantized
        # weights.
        copied = 4 * (1 + again) if work.quantized else 0
        traffic += sum(b for _, b in shape.adapted_layers) * size * (6 * (2 + again) + copied)
        if work.lora.lora_dropout:
            traffic += sum(a for a, _ in shape.adapted_layers) * size * _DROPPED_BYTES
    if work.parallel.context_parallel > 1:
        # The queries of this rank, and the keys and values of the whole row; or all heads on the way there and back.
        joined = shape.queries * (2 if work.exchanges_heads else 1) + 2 * work.attended_keys
        traffic += joined * _JOINED_BYTES * size * (2 + again)
    return traffic * (1.0 if work.fused else _UNFUSED)


def _dequantization_traffic(work: Workload, again: float) -> float:
    """Bytes per layer and micro-batch: every product first dequantizes its nf4 weight."""
    return sum(work.nf4_weights) * (0.5 + work.compute_bytes) * (2 + again)


def _optimizer(work: Workload, gpu: Gpu) -> float:
    """Seconds of the optimizer step.

    It reads weight, gradient and moments and writes all but the gradient; clipping reads and scales the gradient once
    more. Muon adds its matrix products.
    """
    weights = work.trained_parameters * work.weight_bytes
    # The matrices that Muon multiplies move about as many bytes as a second moment.
    moments = 2 * weights if work.optimizer.type == "muon" else moment_bytes(work)
    moved = weights * (6 if work.optimizer.max_grad_norm else 3) + 2 * (moments + master_bytes(work))
    seconds = moved / work.shards / gpu.update
    if work.optimizer.type == "adamw_8bit" and work.optimizer.precision != "fp32_master":
        seconds /= _EIGHT_BITS
    if work.optimizer.type == "muon":
        # Five Newton-Schulz iterations: X Xᵀ, its square, and that times X, for each matrix.
        sizes = [(min(pair), max(pair)) for pair in work.shape.linear_layers]
        flops = work.shape.layers * sum(5 * (4 * a * a * b + 2 * a**3) for a, b in sizes)
        seconds += flops / work.shards / gpu.products
    return seconds


def _gradient_sums(work: Workload, gpu: Gpu) -> float:
    """Seconds to add gradients in fp32: each addition reads a gradient and the sum, and writes the sum."""
    if work.sum_bytes == work.weight_bytes:
        return 0.0
    moved = work.trained_parameters * (work.weight_bytes + 2 * work.sum_bytes) / work.shards
    return (work.training.gradient_accumulation_steps - 1) * moved / gpu.stream


def _waiting(work: Workload, gpu: Gpu, compute: float) -> float:
    """Seconds of collectives that do not overlap with computation, and of the copies that FSDP makes for them."""
    # The share of weights, or of reduced gradients, that other ranks hold.
    others = (work.dp_cp_size - 1) / work.dp_cp_size
    trained = work.trained_parameters
    if work.fsdp is None:
        # An all-reduce of gradients is a reduce-scatter and an all-gather.
        beside = 2 * trained * work.weight_bytes * others / gpu.link
        return beside - min(beside, compute) * _HIDDEN
    rounds, shape = work.training.gradient_accumulation_steps, work.shape
    layers = shape.layers * work.layer_bytes * (2 if work.fsdp.reshard_after_forward else 1)
    root = shape.root_parameters * work.compute_bytes
    reduced = 4 if work.fsdp.reduce_dtype == "float32" else 2
    # Nothing overlaps with the first all-gather and the last reduce-scatter, those of embedding and head.
    alone = root + (0 if work.lora else shape.root_parameters * reduced)
    # Gradients of experts on other ranks of a group are none of this rank's.
    if work.lora is None:
        trained = round(trained - shape.layers * (shape.layer_parameters - work.layer_parameters))
    beside = rounds * (layers + root + trained * reduced - alone) * others / gpu.link
    # FSDP copies weights into and out of flat buffers, and gradients in the type of their sum.
    copied = 2 * (layers + root) + trained * (work.compute_bytes + reduced)
    within = (alone * others + _sent_within_groups(work)) / gpu.link + copied / gpu.stream
    return beside - min(beside, compute) * _HIDDEN + rounds * within


def _sent_within_groups(work: Workload) -> float:
    """Bytes that a rank sends and waits for in a micro-batch under tensor, context and expert parallelism."""
    shape, tokens = work.shape, work.tokens
    again = work.recomputed_share
    ways, parts = work.parallel.tensor_parallel, work.parallel.context_parallel
    # Hidden states and their gradients are all-reduced around attention and the gate, once more in a recomputed layer,
    # after the embeddings and before the head. An all-reduce is a reduce-scatter and an all-gather.
    sums = shape.layers * (4 + again) + 2
    sent = sums * tokens * shape.hidden * 2 * (ways - 1) / ways
    if not work.fused_loss:
        sent += tokens * shape.outputs * (ways - 1)
    # Keys and values are gathered, once more in a recomputed layer, and their gradients are reduced; or queries, keys,
    # values and results are exchanged.
    width = 2 * shape.keys * (parts - 1)
    if work.exchanges_heads:
        width = 2 * (shape.queries + work.attended_keys) * (parts - 1) // parts
    sent += shape.layers * (2 + again) * tokens * width
    # Tokens go to the experts' ranks and back, in both passes; a recomputed layer sends them once more.
    sent += shape.layers * (4 + again) * tokens * shape.hidden * (work.parallel.expert_parallel - 1)
    return sent * work.compute_bytes
