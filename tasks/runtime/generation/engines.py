"""The engine that `objective.generation.engine` names."""

from __future__ import annotations

from strata_platform.spec import RunSpec
from strata_platform.spec.objectives import Distill, Grpo, generates
from strata_platform.spec.run_spec import Objective
from tasks.runtime.data import PreparedData
from tasks.runtime.generation.generator import Generator
from tasks.runtime.generation.vllm_engine import VllmGenerator, require_vllm
from tasks.runtime.models.build import compute_dtype
from tasks.runtime.parallel.whole_model import WholeModel
from tasks.runtime.process.ranks import Processes


def require_engine(objective: Objective) -> None:
    """Raises ValueError if the engine is not installed."""
    if isinstance(objective, Grpo | Distill) and generates(objective) and objective.generation.engine == "vllm":
        require_vllm()


def start_engine(spec: RunSpec, whole: WholeModel, data: PreparedData, processes: Processes) -> Generator | None:
    """An engine other than the embedded one, which objectives make by themselves: None. A collective."""
    assert isinstance(spec.objective, Grpo | Distill)
    generation = spec.objective.generation
    if generation.engine == "embedded":
        return None
    return VllmGenerator(
        whole.model,
        data.tokenizer(),
        processes,
        dtype=compute_dtype(spec.model, spec.parallel),
        seed=spec.seed,
        temperature=generation.temperature,
        length=spec.data.sequence_length,
        batch_size=generation.batch_size,
        memory=generation.gpu_memory_utilization,
    )
