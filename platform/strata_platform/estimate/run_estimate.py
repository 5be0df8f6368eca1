"""The estimate of one spec: memory, time, and the figures that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from strata_platform.estimate.float8 import require_float8
from strata_platform.estimate.gpus import USABLE, Gpu
from strata_platform.estimate.memory import Memory, host_bytes, memory_of, offloaded_bytes, paged_bytes
from strata_platform.estimate.shapes import ModelShape
from strata_platform.estimate.speed import Time, model_flops, time_of
from strata_platform.estimate.workload import Workload, with_head_of
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import SCORE, Lora
from strata_platform.spec.sections.objectives import WITH_REFERENCE, generates


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a run on each of its GPUs."""

    spec: RunSpec
    shape: ModelShape
    gpu: Gpu
    workload: Workload
    memory: Memory
    time: Time

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the GPU the memory that an allocator cannot use."""
        return self.memory.peak <= USABLE * self.gpu.memory

    @property
    def paged(self) -> float:
        """Bytes of optimizer state in managed memory, which may move to the host and is not in `memory`."""
        return paged_bytes(self.workload)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of each GPU."""
        tokens = self.spec.rows_per_step * self.spec.data.sequence_length
        return tokens / self.spec.topology.world_size / self.time.step

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's own FLOPs as a share of the GPU's peak."""
        return self.tokens_per_second * model_flops(self.shape, self.spec.data.sequence_length) / self.gpu.peak

    @property
    def moves_to_host(self) -> bool:
        """Whether weights, gradients and optimizer state are in host memory, which is not in `memory`."""
        return self.workload.fsdp is not None and self.workload.fsdp.cpu_offload

    @property
    def overestimated_because(self) -> str | None:
        """Why `memory` is more than the run takes, so that it may fit although `fits` is false; None if it is not."""
        if self.workload.lora and self.workload.lora.target_modules:
            return "the estimate counts adapters for all layers, not only for those of adapter.target_modules"
        if self.spec.model.freeze or self.spec.model.trainable:
            return "the estimate counts gradients and optimizer state of all weights, also of frozen ones"
        return None

    @property
    def underestimated_because(self) -> str | None:
        """Why `memory` is less than the run takes, so that it may not fit although `fits` is true; None if it is not.

        This covers the trained model alone; `uncounted` lists other models of the run.
        """
        if self.workload.lora and self.workload.lora.use_dora:
            return "the estimate does not count the weights that adapter.use_dora computes"
        if self._saved_modules:
            return "the estimate does not count gradients and optimizer state of adapter.modules_to_save"
        if self.workload.lora and self.workload.lora.lora_dropout > 0:
            return "the estimate does not count the inputs that adapter.lora_dropout copies"
        return None

    @property
    def _saved_modules(self) -> set[str]:
        """Modules that are trained whole beside the adapter, without the score of a text, which is one vector."""
        return set(self.workload.lora.modules_to_save if self.workload.lora else ()) - {SCORE}

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Features of the spec that memory or time do not include, as texts; empty if everything is counted."""
        objective, lora, shape = self.spec.objective, self.workload.lora or Lora(), self.shape
        return tuple(
            feature
            for used, feature in (
                (
                    objective.type == "distill" and objective.teacher is not None,
                    "objective.type 'distill': the teacher's weights, and its forward pass in every step",
                ),
                (
                    objective.type in WITH_REFERENCE,
                    f"objective.type '{objective.type}': the reference's forward pass, in every step or once before "
                    "the first",
                ),
                (
                    objective.type == "kto" and objective.loss == "kto",
                    "objective.type 'kto': a forward pass over prompts with other rows' answers in every step, and of "
                    "the reference over them; objective.loss 'apo_zero_unpaired' needs neither",
                ),
                (
                    generates(objective),
                    f"objective.type '{objective.type}': keys and values of objective.generation.batch_size answers, "
                    "and the time that generation takes",
                ),
                (
                    objective.type == "grpo" and objective.beta > 0,
                    "objective.beta: the reference's weights and forward pass",
                ),
                (
                    objective.type == "grpo" and any(term.model for term in objective.rewards),
                    "objective.rewards: weights of reward models, and their forward passes",
                ),
                (
                    objective.type == "custom",
                    "objective.type 'custom': what objective.object computes; a `BatchObjective` holds all logits",
                ),
                (
                    self.workload.compute_bytes == 4,
                    "model.dtype 'float32': products are timed as in bfloat16, but take several times as long",
                ),
                (
                    self.moves_to_host,
                    f"parallel.cpu_offload: {host_bytes(self.workload) / 2**30:.1f} GiB of weights, gradients and "
                    "optimizer state of each process in host memory; copying them makes steps slower",
                ),
                (
                    self.spec.optimizer.paged,
                    f"optimizer.paged: {self.paged / 2**30:.1f} GiB of optimizer state on each GPU, which move to the "
                    "host when GPU memory runs out, and then slow down every step",
                ),
                (
                    self.spec.training.activation_offloading,
                    f"training.activation_offloading: {offloaded_bytes(self.workload) / 2**30:.1f} GiB of pinned host "
                    "memory for each process, and the time of copies that computation does not hide",
                ),
                (
                    shape.experts > 0,
                    f"model.name: how unevenly the {shape.experts} experts of a layer, {shape.active_experts} for a "
                    "token, are used; times were fitted to 128 experts of which a token uses 8",
                ),
                (shape.unread is not None, str(shape.unread)),
                (
                    lora.use_dora,
                    "adapter.use_dora: each weight with its adapter added, and its norm, in every forward pass",
                ),
                (
                    bool(self._saved_modules),
                    "adapter.modules_to_save: gradients and optimizer state of these modules",
                ),
                (
                    lora.lora_dropout > 0,
                    "adapter.lora_dropout: the inputs after dropout, which every adapted layer keeps",
                ),
                (
                    bool(self.spec.model.freeze or self.spec.model.trainable),
                    "model.freeze and model.trainable: the estimate assumes that all weights are trained",
                ),
                (
                    bool(lora.target_modules),
                    "adapter.target_modules: the estimate assumes adapters for all linear layers but the head",
                ),
                (
                    bool(lora.target_parameters),
                    "adapter.target_parameters: the estimate assumes adapters for all weights of experts",
                ),
            )
            if used
        )


def estimate(spec: RunSpec, shape: ModelShape, gpu: Gpu) -> Estimate:
    """Estimate `spec` for a model of `shape` on GPUs of one model."""
    shape = with_head_of(spec.model, shape)
    work = Workload.of(spec, shape)
    require_float8(work, gpu)
    return Estimate(spec, shape, gpu, work, memory_of(work), time_of(work, gpu))
