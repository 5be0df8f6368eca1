"""What one process of a run holds and computes: from which memory and time are estimated."""

from __future__ import annotations

from dataclasses import dataclass

from strata_platform.context_parallel import exchanges_heads, undivided_heads
from strata_platform.errors import Problem, SpecError
from strata_platform.estimate.shapes import ModelShape
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Lora, Model
from strata_platform.spec.sections.parallel import Ddp, Fsdp, Single
from strata_platform.spec.sections.training import Optimizer, Training

# Operators of the kernel layer that fuse the MLP's activation with the projection after it.
_ACTIVATIONS = frozenset({"swiglu", "geglu", "relu_squared", "gelu", "silu"})
# Ranks above it are multiplied by the vendor's products.
_LARGEST_RANK = 64
# bitsandbytes quantizes to nf4 in blocks of this many weights, each with a scale of one byte.
NF4_BLOCK = 64


@dataclass(frozen=True)
class Workload:
    """One process's part of a run.

    Attributes:
        shape: the model, or the shard of one rank under tensor parallelism.
        tokens: tokens of a micro-batch that this process computes.
        sequence_length: tokens of a whole row, also under context parallelism.
        dp_cp_size: processes that gradients are reduced over.
        shards: processes that FSDP shards weights, gradients and optimizer state over; 1 without FSDP.
        weight_bytes: bytes of a weight and of its gradient; also of a moment, unless the optimizer is AdamW 8-bit.
        compute_bytes: bytes of an activation and of a gathered weight.
        fused: whether norms, rotary embeddings and gates are fused operators.
        fused_gate: whether the activation is fused with the projection after it, so that its output is not kept.
        fused_loss: whether the loss is computed without materializing the logits.
        masked: whether attention computes with a mask of documents, instead of per document.
        quantized: whether linear layers are quantized to nf4.
        packs_experts: whether experts are, too.
        lora, training, optimizer, parallel: sections of the spec; `lora` is None when all weights are trained.
    """

    shape: ModelShape
    tokens: int
    sequence_length: int
    dp_cp_size: int
    shards: int
    weight_bytes: int
    compute_bytes: int
    fused: bool
    fused_gate: bool
    fused_loss: bool
    masked: bool
    quantized: bool
    packs_experts: bool
    lora: Lora | None
    training: Training
    optimizer: Optimizer
    parallel: Single | Ddp | Fsdp

    @classmethod
    def of(cls, spec: RunSpec, shape: ModelShape) -> Workload:
        """The workload of a process of `spec` for a model of `shape`.

        Raises SpecError for features that are not estimated.
        """
        parallel, kernels = spec.parallel, spec.kernels
        if parallel.type == "deepspeed":
            raise _not_estimated("parallel.type", "'deepspeed'", "'fsdp', which shards as much as stage 3 does")
        if spec.model.attention == "eager":
            raise _not_estimated("model.attention", "'eager', which keeps sequence_length² scores per row,", "'auto'")
        _require_divisible_experts(shape, parallel.expert_parallel)
        _require_recomputed_layers(shape, spec.training)
        lora = spec.adapter if isinstance(spec.adapter, Lora) else None
        weight_bytes = 4 if spec.model.dtype == "float32" else 2
        in_bfloat16 = isinstance(parallel, Fsdp) and parallel.compute_dtype == "bfloat16"
        compute_bytes = 2 if in_bfloat16 else weight_bytes
        several_documents = spec.data.packing or parallel.context_parallel > 1
        part = _shard_of(shape, parallel.tensor_parallel)
        _require_divisible_heads(part, parallel)
        return cls(
            shape=part,
            tokens=spec.training.micro_batch_size * spec.data.sequence_length // parallel.context_parallel,
            sequence_length=spec.data.sequence_length,
            dp_cp_size=spec.topology.world_size // parallel.tensor_parallel,
            shards=spec.model_shards // parallel.tensor_parallel,
            weight_bytes=weight_bytes,
            compute_bytes=compute_bytes,
            fused=bool(kernels.enabled),
            fused_gate=bool(kernels.enabled)
            and _ACTIVATIONS.isdisjoint(kernels.exclude)
            and (lora is None or _fuses_adapters(shape, lora, spec.training, compute_bytes)),
            fused_loss=spec.fused_loss,
            # In bfloat16, varlen attention computes each document by itself.
            masked=several_documents and spec.model.attention in ("auto", "sdpa") and compute_bytes == 4,
            quantized=spec.is_quantized,
            packs_experts=spec.packs_experts,
            lora=lora,
            training=spec.training,
            optimizer=spec.optimizer,
            parallel=parallel,
        )

    @property
    def exchanges_heads(self) -> bool:
        """Whether context parallelism exchanges slices of rows for heads (`ulysses`)."""
        method = self.fsdp.context_parallel_method if self.fsdp is not None else "all_gather"
        ways = self.parallel.context_parallel
        return ways > 1 and exchanges_heads(method, self.shape.heads, self.shape.kv_heads, ways)

    @property
    def attended_keys(self) -> int:
        """Width of the keys, for each token of this process, that attention under context parallelism keeps."""
        ways = self.parallel.context_parallel
        if self.exchanges_heads:
            # Ranks may share a head of keys.
            return max(self.shape.kv_heads, ways) * self.shape.head_dim
        return self.shape.keys * ways

    @property
    def fsdp(self) -> Fsdp | None:
        """The settings of FSDP; None for other strategies."""
        return self.parallel if isinstance(self.parallel, Fsdp) else None

    @property
    def recomputed_share(self) -> float:
        """Share of the layers that are recomputed, whole or in part."""
        every, kept = self.training.recomputed_every, self.training.gradient_checkpointing_except_last
        return (1 - kept / self.shape.layers) / every if every else 0.0

    @property
    def sum_bytes(self) -> int:
        """Bytes of a gradient between two micro-batches: more than those of a weight if they are added in float32."""
        return 4 if self.training.sums_in_float32 else self.weight_bytes

    @property
    def trained_parameters(self) -> int:
        """Parameters that are trained, before FSDP shards them."""
        if self.lora is None:
            return self.shape.parameters
        experts = self.shape.layers * sum(rows * columns for rows, columns in self.expert_adapters)
        return self.shape.lora_parameters(self.lora.r) + experts

    @property
    def expert_adapters(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the matrices that adapt the experts of a layer; empty where those are not adapted."""
        adapted = self.lora is not None and self.lora.target_parameters
        return self.shape.expert_adapters(self.lora.r) if self.lora and adapted else ()

    @property
    def nf4_weights(self) -> tuple[int, ...]:
        """Sizes of the quantized weights of a layer; bitsandbytes leaves out those that do not fill whole blocks."""
        if not self.quantized:
            return ()
        sizes = (*(inner * outer for inner, outer in self.shape.adapted_layers), *self.nf4_experts)
        return tuple(size for size in sizes if size % NF4_BLOCK == 0)

    @property
    def nf4_experts(self) -> tuple[int, ...]:
        """Of these, sizes of the two weights that hold all experts of a layer."""
        if not (self.packs_experts and self.shape.experts):
            return ()
        columns = self.shape.intermediate - self.shape.shared + self.shape.idle
        return (1 + self.shape.gated) * columns * self.shape.hidden, columns * self.shape.hidden

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer that a process computes with: all, or of the experts its part."""
        elsewhere = 1 - 1 / self.parallel.expert_parallel
        return self.shape.layer_parameters - self.shape.expert_parameters * elsewhere

    @property
    def layer_bytes(self) -> float:
        """Bytes of a layer's weights when they are gathered."""
        quantized = sum(self.nf4_weights)
        return quantized / 2 + (self.layer_parameters - quantized) * self.compute_bytes

    @property
    def attended(self) -> float:
        """Share of a row that attention computes for each token: half if it is causal, all of it under a mask.

        Under context parallelism the mask is causal as well.
        """
        return 1.0 if self.masked and self.parallel.context_parallel == 1 else 0.5


def with_head_of(model: Model, shape: ModelShape) -> ModelShape:
    """The shape of a model with the head that the objective gives `model`."""
    return shape.with_score() if model.head == "score" else shape


def _not_estimated(field: str, feature: str, instead: str) -> SpecError:
    return SpecError([Problem(field, f"{feature} is not estimated; set it to {instead}")], "estimate")


def _require_divisible_experts(shape: ModelShape, ways: int) -> None:
    if ways > 1 and (not shape.experts or shape.experts % ways):
        reason = f"{ways} does not divide the {shape.experts} experts of a layer; set it to a divisor"
        if not shape.experts:
            reason = "the model has no experts; set it to 1"
        raise SpecError([Problem("parallel.expert_parallel", reason)], "estimate")


def _require_recomputed_layers(shape: ModelShape, training: Training) -> None:
    kept = training.gradient_checkpointing_except_last
    if kept >= shape.layers:
        reason = f"{kept} leaves none of the model's {shape.layers} layers to recompute; lower it"
        raise SpecError([Problem("training.gradient_checkpointing_except_last", reason)], "estimate")


def _require_divisible_heads(shape: ModelShape, parallel: Single | Ddp | Fsdp) -> None:
    if isinstance(parallel, Fsdp):
        method = parallel.context_parallel_method
        reason = undivided_heads(method, shape.heads, shape.kv_heads, parallel.context_parallel)
        if reason is not None:
            raise SpecError([Problem("parallel.context_parallel_method", reason)], "estimate")


def _fuses_adapters(shape: ModelShape, lora: Lora, training: Training, compute_bytes: int) -> bool:
    """Whether one operator computes a gated layer with its adapters, so that the gate's output is not kept."""
    dense = shape.gated and not shape.active_experts
    alike = not lora.target_modules and not lora.use_dora and not lora.lora_dropout and lora.r <= _LARGEST_RANK
    return dense and alike and compute_bytes == 2 and not training.compile


def _shard_of(shape: ModelShape, tensor_parallel: int) -> ModelShape:
    try:
        return shape.part(tensor_parallel)
    except ValueError as error:
        problem = Problem("parallel.tensor_parallel", f"{error} of the model; set it to a divisor")
        raise SpecError([problem], "estimate") from None
