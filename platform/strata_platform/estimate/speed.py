"""Seconds of an optimizer step, part by part, each at the rate that bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from strata_platform.estimate.gpus import Gpu
from strata_platform.estimate.memory import compute_bytes, moment_bytes, trained_parameters, weight_bytes
from strata_platform.estimate.shapes import ModelShape
from strata_platform.spec import RunSpec
from strata_platform.spec.model import Lora
from strata_platform.spec.parallel import Ddp, Fsdp

# Of an unfused layer's elementwise traffic to that of the fused operators.
_UNFUSED = 3.0
# Passes over the logits outside of their products, in bytes for each logit.
_LOGIT_BYTES, _PLAIN_LOGIT_BYTES = 6, 44
# Share of a collective that is hidden behind computation where there is enough of it.
_HIDDEN = 0.85


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step of one process, by part; `waiting` is communication that nothing hides."""

    products: float
    attention: float
    elementwise: float
    loss: float
    optimizer: float
    waiting: float

    @property
    def step(self) -> float:
        """All parts."""
        return self.products + self.attention + self.elementwise + self.loss + self.optimizer + self.waiting


def time_of(spec: RunSpec, shape: ModelShape, gpu: Gpu) -> Time:
    """The time of an optimizer step, from the second one on."""
    tokens = spec.training.micro_batch_size * spec.data.sequence_length
    rounds = spec.training.gradient_accumulation_steps
    lora = spec.adapter if isinstance(spec.adapter, Lora) else None
    every = spec.training.recomputed_every
    # Of the forward pass: what is cheap, and what is not.
    light = 1 / every if every else 0.0
    again = 0.0 if spec.training.gradient_checkpointing == "per_op" else light
    # Forward, gradient of the inputs, and gradient of the weights where they learn.
    layer_flops = 2.0 * shape.layer_weights * ((2 if lora else 3) + again)
    if lora is None:
        # Recomputation ends with the last tensor that is read again, before the last projection.
        layer_flops -= 2.0 * shape.hidden * shape.intermediate * again
    else:
        layer_flops += 6 * shape.lora_parameters(lora.r) / shape.layers
    head_flops = 2 * shape.head_parameters * (2 if lora else 3)
    products = tokens * (shape.layers * layer_flops + head_flops) / gpu.products
    attention = tokens * shape.layers * _attention_flops(spec, shape, again) / _attention_rate(spec, gpu)
    elementwise = tokens * shape.layers * _layer_traffic(spec, shape, light) / gpu.stream
    fused_loss = spec.kernels.enabled and "linear_cross_entropy" not in spec.kernels.exclude
    loss = tokens * shape.vocabulary * (_LOGIT_BYTES if fused_loss else _PLAIN_LOGIT_BYTES) / gpu.stream
    # The host launches ahead, so the slower of the two counts.
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
    """FLOPs for a token that MFU counts: forward and backward of products and causal attention, nothing twice."""
    products = 6 * (shape.layers * shape.layer_weights + shape.head_parameters)
    return float(products + 6 * shape.layers * sequence_length * shape.queries)


def _attention_flops(spec: RunSpec, shape: ModelShape, again: float) -> float:
    """For a token and layer: two products forward, five backward; a mask that is not causal is computed whole."""
    pairs = spec.data.sequence_length * (1.0 if spec.data.packing else 0.5)
    return 2 * pairs * shape.queries * (2 + 5 + 2 * again)


def _attention_rate(spec: RunSpec, gpu: Gpu) -> float:
    return gpu.masked if spec.data.packing else gpu.causal


def _layer_traffic(spec: RunSpec, shape: ModelShape, again: float) -> float:
    """Bytes for a token and layer: two norms, rotary embedding, gate, two residual sums and their backward passes."""
    size = compute_bytes(spec) / 2
    forward = 2 * 4 * shape.hidden + 4 * (shape.queries + shape.keys) + 6 * shape.intermediate + 2 * 6 * shape.hidden
    backward = 2 * 6 * shape.hidden + 4 * (shape.queries + shape.keys) + 10 * shape.intermediate + 2 * 6 * shape.hidden
    traffic = (forward * (1 + again) + backward) * size
    if isinstance(spec.adapter, Lora):
        # Beside each linear map its output is read, added to and written again.
        traffic += sum(b for _, b in shape.linear_layers) * 6 * size * (2 + again)
    return traffic * (1.0 if spec.kernels.enabled else _UNFUSED)


def _optimizer(spec: RunSpec, shape: ModelShape, gpu: Gpu) -> float:
    """Reading weight, gradient and moments and writing all but the gradient; clipping reads and scales that once.

    And what Muon multiplies.
    """
    split = spec.model_parts
    weights = trained_parameters(spec, shape) * weight_bytes(spec)
    # What Muon multiplies instead of a second moment moves about as much as that.
    moments = moment_bytes(spec, shape) if spec.optimizer.type == "adamw_8bit" else 2 * weights
    moved = weights * (6 if spec.optimizer.max_grad_norm else 3) + 2 * moments
    seconds = moved / split / gpu.update
    if spec.optimizer.type == "muon":
        # Five times X Xᵀ, its square, and that times X, of each matrix.
        sizes = [(min(pair), max(pair)) for pair in shape.linear_layers]
        flops = shape.layers * sum(5 * (4 * a * a * b + 2 * a**3) for a, b in sizes)
        seconds += flops / split / gpu.products
    return seconds


def _waiting(spec: RunSpec, shape: ModelShape, gpu: Gpu, compute: float) -> float:
    """Seconds of collectives that computation does not hide."""
    processes = spec.topology.world_size
    if processes == 1:
        return 0.0
    share, size = (processes - 1) / processes, weight_bytes(spec)
    trained = trained_parameters(spec, shape)
    if isinstance(spec.parallel, Ddp):
        sent = 2 * trained * size * share
    else:
        assert isinstance(spec.parallel, Fsdp)
        gathers = 2 if spec.parallel.reshard_after_forward else 1
        reduced = 4 if spec.parallel.reduce_dtype == "float32" else 2
        once = shape.parameters * compute_bytes(spec) * gathers + trained * reduced
        sent = once * share * spec.training.gradient_accumulation_steps
    seconds = sent / gpu.link
    return seconds - min(seconds * _HIDDEN, compute * _HIDDEN)
