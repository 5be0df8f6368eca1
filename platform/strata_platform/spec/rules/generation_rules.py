"""Rules of objectives whose model writes answers in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strata_platform.spec.problems import Contradiction
from strata_platform.spec.sections.model import Lora, NoAdapter
from strata_platform.spec.sections.objectives import Distill, Generation, Grpo, generates
from strata_platform.spec.sections.training import Training

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import RunSpec


def generation_rules(spec: RunSpec) -> Iterator[Contradiction]:
    """Every rule, broken or not; none where the model writes nothing."""
    if not (isinstance(spec.objective, Grpo | Distill) and generates(spec.objective)):
        return
    field = "objective.type" if isinstance(spec.objective, Grpo) else "objective.on_policy"
    yield Contradiction(
        spec.data.packing,
        ("data.packing", field),
        "true, but rows are not packed where the model writes answers, because their lengths are not known; leave "
        "data.packing out",
    )
    yield Contradiction(
        spec.data.streaming,
        ("data.streaming", field),
        "begins before all rows are prepared, but rows are checked and get numbers first where the model writes "
        "answers; set data.streaming to false",
    )
    kind, stage = spec.parallel.type, getattr(spec.parallel, "stage", 3)
    yield Contradiction(
        spec.is_quantized and kind in ("fsdp", "deepspeed") and stage == 3,
        ("parallel.type", "adapter.quantization", field),
        f"'{kind}' shards packed weights, whose scales a copy for generation would lack; set parallel.type to 'ddp', "
        "where packed weights are whole, or adapter.quantization to 'none'",
    )
    yield Contradiction(
        spec.parallel.expert_parallel > 1,
        ("parallel.expert_parallel", field),
        f"{spec.parallel.expert_parallel} was not tested with generation, for which every process needs all experts; "
        "set parallel.expert_parallel to 1",
    )
    generation, ways = spec.objective.generation, spec.parallel.tensor_parallel
    yield Contradiction(
        ways > 1 and (generation.engine == "vllm" or generation.server is not None),
        ("parallel.tensor_parallel", f"objective.generation.{'engine' if generation.server is None else 'server'}"),
        f"{ways} was tested with the embedded engine alone; set parallel.tensor_parallel to 1, or leave "
        "objective.generation.engine and objective.generation.server out",
    )
    rows = spec.training.micro_batch_size * spec.training.gradient_accumulation_steps
    yield Contradiction(
        isinstance(spec.objective, Grpo) and rows % ways > 0,
        ("parallel.tensor_parallel", "training.micro_batch_size", "training.gradient_accumulation_steps"),
        f"{ways} processes share the answers that they read together, but it does not divide "
        f"training.micro_batch_size x training.gradient_accumulation_steps {rows}; set one of them to a multiple",
    )
    yield from _engine(generation)
    if generation.engine == "vllm" or generation.server is not None:
        yield from _weights(spec.adapter, spec.training, generation)


def _engine(generation: Generation) -> Iterator[Contradiction]:
    path, engine = "objective.generation", "objective.generation.engine"
    embedded = generation.engine == "embedded"
    yield Contradiction(
        embedded and generation.gpu_memory_utilization is not None,
        (f"{path}.gpu_memory_utilization", engine),
        "set, but the embedded engine generates in the memory of training; set objective.generation.engine to "
        f"'vllm', or leave {path}.gpu_memory_utilization out",
    )
    yield Contradiction(
        generation.server is not None and generation.gpu_memory_utilization is not None,
        (f"{path}.gpu_memory_utilization", f"{path}.server"),
        "set, but the server decides over its own GPUs; leave it out, and start the server with "
        "--gpu-memory-utilization",
    )
    cut = generation.top_k > 0 or generation.top_p < 1
    yield Contradiction(
        not embedded and cut and generation.temperature != 1,
        (f"{path}.temperature", f"{path}.top_k" if generation.top_k else f"{path}.top_p", engine),
        f"{generation.temperature}, but vLLM then reports log-probabilities among the tokens that top_k and top_p "
        "leave, not among all as training computes them; set the temperature to 1, or leave top_k and top_p out",
    )


def _weights(adapter: Lora | NoAdapter, training: Training, generation: Generation) -> Iterator[Contradiction]:
    """What cannot be handed over, to vLLM or a server, as the weights of a whole model."""
    served = generation.server is not None
    engine = "objective.generation.server" if served else "objective.generation.engine"
    taker = "the server" if served else "vLLM"
    other = "leave objective.generation.server out" if served else "set objective.generation.engine to 'embedded'"
    yield Contradiction(
        isinstance(adapter, Lora) and adapter.quantization != "none",
        ("adapter.quantization", engine),
        f"its packed weights cannot be handed over to {taker}; set adapter.quantization to 'none', or {other}",
    )
    yield Contradiction(
        isinstance(adapter, Lora) and (adapter.use_dora or bool(adapter.target_parameters)),
        (f"adapter.{'use_dora' if isinstance(adapter, Lora) and adapter.use_dora else 'target_parameters'}", engine),
        f"is not added to the weights that {taker} gets; leave it out, or {other}",
    )
    yield Contradiction(
        training.float8 != "none" and isinstance(adapter, Lora),
        ("training.float8", "adapter.type", engine),
        f"keeps frozen weights in FP8 with scales of its own, which cannot be handed over to {taker}; set "
        f"training.float8 to 'none', or {other}",
    )
