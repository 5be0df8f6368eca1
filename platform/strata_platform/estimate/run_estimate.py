"""The estimate of one spec: memory, time and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from strata_platform.estimate.gpus import USABLE, Gpu
from strata_platform.estimate.memory import Memory, compute_bytes, memory_of, paged_bytes
from strata_platform.estimate.shapes import ModelShape
from strata_platform.estimate.speed import Time, model_flops, time_of
from strata_platform.spec import RunSpec
from strata_platform.spec.model import Lora
from strata_platform.spec.parallel import Fsdp


@dataclass(frozen=True)
class Estimate:
    """What a run takes on each of its GPUs."""

    spec: RunSpec
    shape: ModelShape
    gpu: Gpu
    memory: Memory
    time: Time

    @property
    def fits(self) -> bool:
        """Whether the peak is within the GPU's memory, with some to spare for what an allocator cannot use."""
        return self.memory.peak <= USABLE * self.gpu.memory

    @property
    def paged(self) -> float:
        """Bytes of optimizer state in managed memory, which are not in `memory`."""
        return paged_bytes(self.spec, self.shape)

    @property
    def tokens_per_second(self) -> float:
        """Of each GPU."""
        tokens = self.spec.rows_per_step * self.spec.data.sequence_length
        return tokens / self.spec.topology.world_size / self.time.step

    @property
    def mfu(self) -> float:
        """Share of the GPU's peak that the model's own FLOPs are."""
        return self.tokens_per_second * model_flops(self.shape, self.spec.data.sequence_length) / self.gpu.peak

    @property
    def moves_to_host(self) -> bool:
        """Whether `memory` has what is the host's instead."""
        parallel = self.spec.parallel
        return isinstance(parallel, Fsdp) and parallel.cpu_offload

    @property
    def overestimated_because(self) -> str | None:
        """Why `memory` has more than the run takes, so that it may fit where `fits` is false; None where it has not."""
        if self.moves_to_host:
            return "what parallel.cpu_offload moves to the host is not counted"
        if isinstance(self.spec.adapter, Lora) and self.spec.adapter.target_modules:
            return "adapters are counted beside all layers, not those of adapter.target_modules"
        return None

    @property
    def underestimated_because(self) -> str | None:
        """Why `memory` has less than the run takes, so that it may not fit where `fits` is true; None where it has not.

        Of the run alone: other models beside it are told as `uncounted`.
        """
        if isinstance(self.spec.adapter, Lora):
            if self.spec.adapter.use_dora:
                return "what adapter.use_dora makes of weights is not counted"
            if self.spec.adapter.lora_dropout > 0:
                return "what adapter.lora_dropout leaves of inputs is not counted"
        return None

    @property
    def uncounted(self) -> tuple[str, ...]:
        """What the spec asks for and neither memory nor time has, in words; empty where all is counted."""
        objective, adapter = self.spec.objective, self.spec.adapter
        lora = adapter if isinstance(adapter, Lora) else Lora()
        return tuple(
            said
            for asked, said in (
                (
                    objective.type == "distill",
                    "the teacher of objective.type 'distill': its weights, and its forward pass in every step",
                ),
                (
                    objective.type == "dpo",
                    "the reference of objective.type 'dpo': a forward pass, in every step or once before the first",
                ),
                (
                    compute_bytes(self.spec) == 4,
                    "model.dtype 'float32': products are timed as those of bfloat16, and take several times as long",
                ),
                (
                    self.moves_to_host,
                    "parallel.cpu_offload: weights, gradients and optimizer are in host memory, and steps are slower",
                ),
                (
                    self.spec.optimizer.paged,
                    f"optimizer.paged: state of {self.paged / 2**30:.1f} GiB on each GPU, which move to the host "
                    "where the GPU's memory lacks, and make steps slower",
                ),
                (
                    lora.use_dora,
                    "adapter.use_dora: each weight with its adapter added, and its length, in every forward pass",
                ),
                (
                    lora.lora_dropout > 0,
                    "adapter.lora_dropout: what is left of the inputs, which every adapted layer keeps for itself",
                ),
                (
                    bool(lora.target_modules),
                    "adapter.target_modules: adapters are taken to be beside all linear layers but the head",
                ),
            )
            if asked
        )


def estimate(spec: RunSpec, shape: ModelShape, gpu: Gpu) -> Estimate:
    """What `spec` takes of a model of `shape` on GPUs of one kind."""
    return Estimate(spec, shape, gpu, memory_of(spec, shape), time_of(spec, shape, gpu))
