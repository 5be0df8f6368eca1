"""The estimate of one spec: memory, time and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from strata_platform.estimate.gpus import USABLE, Gpu
from strata_platform.estimate.memory import Memory, compute_bytes, memory_of
from strata_platform.estimate.shapes import ModelShape
from strata_platform.estimate.speed import Time, model_flops, time_of
from strata_platform.spec import RunSpec
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
        """Whether `memory` has what is the host's instead, so that `fits` says too little."""
        parallel = self.spec.parallel
        return isinstance(parallel, Fsdp) and parallel.cpu_offload

    @property
    def uncounted(self) -> tuple[str, ...]:
        """What the spec asks for and neither memory nor time has, in words; empty where all is counted."""
        objective = self.spec.objective
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
            )
            if asked
        )


def estimate(spec: RunSpec, shape: ModelShape, gpu: Gpu) -> Estimate:
    """What `spec` takes of a model of `shape` on GPUs of one kind."""
    return Estimate(spec, shape, gpu, memory_of(spec, shape), time_of(spec, shape, gpu))
