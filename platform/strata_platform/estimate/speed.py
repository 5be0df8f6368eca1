"""Time of an optimizer step, part by part, each at the rate that bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from strata_platform.estimate.gpus import Gpu
from strata_platform.estimate.memory import (
    attended,
    compute_bytes,
    layer_bytes,
    moment_bytes,
    packed_weights,
    part_of,
    remainder_bytes,
    shards,
    tokens_at_once,
    trained_parameters,
    under_mask,
    weight_bytes,
)
from strata_platform.estimate.shapes import ModelShape
from strata_platform.spec import RunSpec
from strata_platform.spec.model import Lora
from strata_platform.spec.parallel import Fsdp

# Elementwise traffic of an unfused layer, relative to that of the fused operators.
_UNFUSED = 3.0
# Traffic over the logits outside of matrix products, in bytes per logit: fused and not.
_LOGIT_BYTES, _PLAIN_LOGIT_BYTES = 6, 44
# Bytes per value of queries, keys and values that context parallelism splits, joins and copies around attention.
_JOINED_BYTES = 12
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


def time_of(spec: RunSpec, shape: ModelShape, gpu: Gpu) -> Time:
    """The time of an optimizer step after the first one, which compiles."""
    shape = part_of(spec, shape)
    tokens = tokens_at_once(spec)
    rounds = spec.training.gradient_accumulation_steps
    lora = spec.adapter if isinstance(spec.adapter, Lora) else None
    every = spec.training.recomputed_every
    # Recomputed share of the forward pass: of elementwise work, and of products and attention.
    light = 1 / every if every else 0.0
    again = 0.0 if spec.training.gradient_checkpointing == "per_op" else light
    # Forward pass, input gradients, and weight gradients where weights are trained.
    layer_flops = 2.0 * shape.layer_weights * ((2 if lora else 3) + again)
    if lora is None:
        # Recomputation stops at the last tensor that the backward pass reads, before the last projection.
        layer_flops -= 2.0 * shape.hidden * shape.intermediate * again
    else:
        layer_flops += 6 * shape.lora_parameters(lora.r) / shape.layers
    head_flops = 2 * shape.head_parameters * (2 if lora else 3)
    products = tokens * (shape.layers * layer_flops + head_flops) / gpu.products
    attention = tokens * shape.layers * _attention_flops(spec, shape, again) / _attention_rate(spec, gpu)
    traffic = tokens * _layer_traffic(spec, shape, light) + _unpacking_traffic(spec, shape, again)
    elementwise = shape.layers * traffic / gpu.stream
    # Without the fused operator every tensor-parallel rank has the logits of the whole vocabulary.
    logit = _LOGIT_BYTES if spec.fused_loss else _PLAIN_LOGIT_BYTES * spec.tensor_parallel
    loss = tokens * shape.vocabulary * logit / gpu.stream
    # The host launches kernels ahead of the GPU, so the slower of the two counts.
    launched = shape.layers * gpu.layer * (1 + light / 3)
    device = products + attention + elementwise + loss
    slower = max(device, launched) / device
    compute = rounds * device * slower
    return Time(
        products=rounds * products * slower,
        attention=rounds * attention * slower,
        elementwise=rounds * elementwise * slower,
        loss=rounds * loss * slower,
        optimizer=_optimizer(spec, shape, gpu),
        waiting=_waiting(spec, shape, gpu, compute),
    )


def model_flops(shape: ModelShape, sequence_length: int) -> float:
    """FLOPs per token that MFU counts: products and causal attention, forward and backward, without recomputation."""
    products = 6 * (shape.layers * shape.layer_weights + shape.head_parameters)
    return float(products + 6 * shape.layers * sequence_length * shape.queries)


def _attention_flops(spec: RunSpec, shape: ModelShape, again: float) -> float:
    """FLOPs per token and layer: two products forward, five backward. A mask that is not causal is computed whole."""
    return 2 * spec.data.sequence_length * attended(spec) * shape.queries * (2 + 5 + 2 * again)


def _attention_rate(spec: RunSpec, gpu: Gpu) -> float:
    return gpu.masked if under_mask(spec) else gpu.causal


def _layer_traffic(spec: RunSpec, shape: ModelShape, again: float) -> float:
    """Bytes per token and layer: two norms, rotary embedding, gate, two residual sums, and their backward passes."""
    size = compute_bytes(spec) / 2
    forward = 2 * 4 * shape.hidden + 4 * (shape.queries + shape.keys) + 6 * shape.intermediate + 2 * 6 * shape.hidden
    backward = 2 * 6 * shape.hidden + 4 * (shape.queries + shape.keys) + 10 * shape.intermediate + 2 * 6 * shape.hidden
    traffic = (forward * (1 + again) + backward) * size
    if isinstance(spec.adapter, Lora):
        # LoRA reads each linear layer's output, adds to it and writes it again; PEFT also copies that of packed
        # weights.
        copied = 4 * (1 + again) if spec.is_quantized else 0
        traffic += sum(b for _, b in shape.linear_layers) * size * (6 * (2 + again) + copied)
    if spec.context_parallel > 1:
        # The queries of this rank, and the keys and values of the whole row.
        joined = shape.queries + 2 * shape.keys * spec.context_parallel
        traffic += joined * _JOINED_BYTES * size * (2 + again)
    return traffic * (1.0 if spec.kernels.enabled else _UNFUSED)


def _unpacking_traffic(spec: RunSpec, shape: ModelShape, again: float) -> float:
    """Bytes per layer and micro-batch: every product first unpacks its quantized weight."""
    return sum(packed_weights(spec, shape)) * (0.5 + compute_bytes(spec)) * (2 + again)


def _optimizer(spec: RunSpec, shape: ModelShape, gpu: Gpu) -> float:
    """Seconds of the optimizer step.

    It reads weight, gradient and moments and writes all but the gradient; clipping reads and scales the gradient once
    more. Muon adds its matrix products.
    """
    split = shards(spec)
    weights = trained_parameters(spec, shape) * weight_bytes(spec)
    # The matrices that Muon multiplies move about as many bytes as a second moment.
    moments = moment_bytes(spec, shape) if spec.optimizer.type == "adamw_8bit" else 2 * weights
    moved = weights * (6 if spec.optimizer.max_grad_norm else 3) + 2 * (moments + remainder_bytes(spec, shape))
    seconds = moved / split / gpu.update
    if spec.optimizer.type == "muon":
        # Five Newton-Schulz iterations: X Xᵀ, its square, and that times X, for each matrix.
        sizes = [(min(pair), max(pair)) for pair in shape.linear_layers]
        flops = shape.layers * sum(5 * (4 * a * a * b + 2 * a**3) for a, b in sizes)
        seconds += flops / split / gpu.products
    return seconds


def _waiting(spec: RunSpec, shape: ModelShape, gpu: Gpu, compute: float) -> float:
    """Seconds of collectives that do not overlap with computation, and of the copies that FSDP makes for them."""
    if not isinstance(spec.parallel, Fsdp):
        # An all-reduce of gradients is a reduce-scatter and an all-gather.
        beside = 2 * trained_parameters(spec, shape) * weight_bytes(spec) * _others(spec) / gpu.link
        return beside - min(beside, compute) * _HIDDEN
    rounds, settings = spec.training.gradient_accumulation_steps, spec.parallel
    layers = shape.layers * layer_bytes(spec, shape) * (2 if settings.reshard_after_forward else 1)
    root = shape.root_parameters * compute_bytes(spec)
    reduced = 4 if settings.reduce_dtype == "float32" else 2
    trained = trained_parameters(spec, shape)
    # Nothing overlaps with the first all-gather and the last reduce-scatter, those of embedding and head.
    alone = root + (0 if isinstance(spec.adapter, Lora) else shape.root_parameters * reduced)
    beside = rounds * (layers + root + trained * reduced - alone) * _others(spec) / gpu.link
    # FSDP copies weights into and out of flat buffers, and gradients in the type of their sum.
    copied = 2 * (layers + root) + trained * (compute_bytes(spec) + reduced)
    within = (alone * _others(spec) + _sent_within(spec, shape)) / gpu.link + copied / gpu.stream
    return beside - min(beside, compute) * _HIDDEN + rounds * within


def _others(spec: RunSpec) -> float:
    """The share of weights, or of reduced gradients, that other ranks hold."""
    processes = spec.topology.world_size // spec.tensor_parallel
    return (processes - 1) / processes


def _sent_within(spec: RunSpec, shape: ModelShape) -> float:
    """Bytes that a rank sends and waits for in a micro-batch under tensor and context parallelism."""
    tokens, size = tokens_at_once(spec), compute_bytes(spec)
    every = spec.training.recomputed_every
    again = 1 / every if every else 0.0
    ways, parts = spec.tensor_parallel, spec.context_parallel
    # Hidden states and their gradients are all-reduced around attention and the gate, once more in a recomputed layer,
    # after the embeddings and before the head. An all-reduce is a reduce-scatter and an all-gather.
    sums = shape.layers * (4 + again) + 2
    sent = sums * tokens * shape.hidden * 2 * (ways - 1) / ways
    if not spec.fused_loss:
        sent += tokens * shape.vocabulary * (ways - 1)
    # Keys and values are gathered, once more in a recomputed layer, and their gradients are reduced.
    sent += shape.layers * (2 + again) * tokens * 2 * shape.keys * (parts - 1)
    return sent * size
