"""The estimate of one spec: memory, time and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from strata_platform.estimate.gpus import Gpu
from strata_platform.estimate.memory import Memory, memory_of
from strata_platform.estimate.shapes import ModelShape
from strata_platform.estimate.speed import Time, model_flops, time_of
from strata_platform.spec import RunSpec


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
        """Whether the peak is within the GPU's memory, with 3 % to spare for what an allocator cannot use."""
        return self.memory.peak <= 0.97 * self.gpu.memory

    @property
    def tokens_per_second(self) -> float:
        """Of each GPU."""
        tokens = self.spec.rows_per_step * self.spec.data.sequence_length
        return tokens / self.spec.topology.world_size / self.time.step

    @property
    def mfu(self) -> float:
        """Share of the GPU's peak that the model's own FLOPs are."""
        return self.tokens_per_second * model_flops(self.shape, self.spec.data.sequence_length) / self.gpu.peak


def estimate(spec: RunSpec, shape: ModelShape, gpu: Gpu) -> Estimate:
    """What `spec` takes of a model of `shape` on GPUs of one kind."""
    return Estimate(spec, shape, gpu, memory_of(spec, shape), time_of(spec, shape, gpu))
