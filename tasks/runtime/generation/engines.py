"""The engine that `objective.generation` names: one for the steps of a run and for every measurement of it."""

from __future__ import annotations

from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Objective
from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.objectives import Distill, Grpo, generates
from tasks.runtime.data import PreparedData
from tasks.runtime.generation.embedded import EmbeddedGenerator
from tasks.runtime.generation.generator import Generator
from tasks.runtime.generation.remote_engine import RemoteGenerator
from tasks.runtime.generation.serving import shared_token
from tasks.runtime.generation.vllm_engine import VllmGenerator, require_vllm
from tasks.runtime.models.config import compute_dtype, load_config
from tasks.runtime.parallel.whole_model import WholeModel
from tasks.runtime.process.ranks import Processes

# Families that keep the state of a text in their modules, or in a cache of another class than transformers' others:
# the embedded engine cannot give it to other rows, as it does for several answers to one prompt.
_OWN_STATE = frozenset({"minimax", "recurrent_gemma", "rwkv", "xlstm"})


def require_engine(objective: Objective) -> None:
    """Raises ValueError if the engine is not installed here, or the secret of its server is not set."""
    if not (isinstance(objective, Grpo | Distill) and generates(objective)):
        return
    generation = objective.generation
    if generation.server is not None:
        shared_token(generation.server.rpartition(":")[0])
    elif generation.engine == "vllm":
        require_vllm()


def require_shared_cache(model: Model, objective: Objective) -> None:
    """Raises ValueError if answers come from the embedded engine and the family has no cache that it can use."""
    if not (isinstance(objective, Grpo | Distill) and generates(objective)):
        return
    if objective.generation.engine == "embedded" and (family := load_config(model).model_type) in _OWN_STATE:
        raise ValueError(
            f"objective.generation.engine 'embedded' cannot generate with model.name {model.name!r}: models of type "
            f"{family} keep their state outside of transformers' common cache; choose a model of another family, or "
            "set objective.generation.engine to 'vllm' if vLLM has this one"
        )


def start_engine(spec: RunSpec, whole: WholeModel, data: PreparedData, processes: Processes) -> Generator:
    """The engine of the run, with the weights of `whole` after the first `update_weights`. A collective.

    Raises:
        ValueError: the engine cannot be used here.
        Unreachable: its server does not answer.
    """
    assert isinstance(spec.objective, Grpo | Distill)
    generation, tokenizer = spec.objective.generation, data.tokenizer()
    pad_token_id, size = data.manifest.pad_token_id, generation.batch_size
    if generation.engine == "embedded" and generation.server is None:
        return EmbeddedGenerator(whole.model, tokenizer, pad_token_id=pad_token_id, seed=spec.seed, batch_size=size)
    dtype, temperature = compute_dtype(spec.model, spec.parallel), generation.temperature
    length = spec.data.sequence_length
    if generation.server is None:
        return VllmGenerator(
            whole.model,
            tokenizer,
            processes,
            dtype=dtype,
            seed=spec.seed,
            temperature=temperature,
            length=length,
            batch_size=size,
            memory=generation.gpu_memory_utilization,
        )
    return RemoteGenerator(
        whole.model,
        tokenizer,
        processes,
        address=generation.server,
        run=spec.name,
        engine=generation.engine,
        dtype=dtype,
        seed=spec.seed,
        temperature=temperature,
        length=length,
        batch_size=size,
        pad_token_id=pad_token_id,
    )
