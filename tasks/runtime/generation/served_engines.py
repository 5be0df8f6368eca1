"""The engines that a server of generation runs, each with weights that come from another process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tasks.runtime.generation.embedded import EmbeddedGenerator
from tasks.runtime.generation.generator import Request, Sample, Sampling
from tasks.runtime.generation.serving import ServedModel
from tasks.runtime.generation.vllm_engine import VllmEngine, end_reload, pack_for_cpu
from tasks.runtime.generation.weight_stream import GroupAddress, TransferBroken, WeightGroup, receive_weights

log = logging.getLogger(__name__)


class LoadingFailed(Exception):
    """Weights that were sent are not loaded.

    code: `broken` if another transfer may succeed, `weights` if they are not those of the model, `failed` if the engine
    is of no more use.
    """

    # A process that fails breaks the transfer of the others, whose errors say less.
    CODES = ("failed", "weights", "broken")

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def of(cls, error: Exception) -> LoadingFailed:
        """What `error`, raised while weights came, means."""
        if isinstance(error, LoadingFailed):
            return error
        if isinstance(error, TransferBroken):
            return cls("broken", str(error))
        # vLLM compares shapes by assertions.
        of_weights = isinstance(error, ValueError | KeyError | TypeError | RuntimeError | AssertionError)
        lacks_memory = isinstance(error, torch.OutOfMemoryError)
        code = "weights" if of_weights and not lacks_memory else "failed"
        return cls(code, f"{type(error).__name__}: {error}")


class ServedEngine(Protocol):
    """Generates with the weights that it has got last."""

    receivers: int
    """Processes that get weights."""

    def receive(self, address: GroupAddress) -> None:
        """Get the weights, as a model's files have them, in a group of `receivers` + 1 processes.

        Raises:
            Exception: they are not loaded. `LoadingFailed.of` says what it means.
        """

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order. See `Generator`."""


class ServedEmbedded:
    """The embedded engine in this process.

    folder: with the files of `model`; kept, for the weights of each transfer.
    """

    receivers = 1

    def __init__(self, model: ServedModel, folder: Path) -> None:
        self._served, self._folder = model, folder
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)  # type: ignore[no-untyped-call]
        self._model: PreTrainedModel | None = None
        self._generator: EmbeddedGenerator | None = None

    def receive(self, address: GroupAddress) -> None:
        """Load the weights by transformers, so that it does with their names and forms what it does with files'.

        Raises:
            ValueError: the model lacks some of them, or has others.
        """
        with WeightGroup(address, 1, self._device) as group:
            load_received(group, self._load)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order. See `Generator`."""
        assert self._generator is not None
        return self._generator.generate(requests, sampling)

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        file = self._folder / "model.safetensors"
        try:
            # A part of a transfer is one tensor, of which these are views.
            save_file({name: weight.to("cpu", copy=True) for name, weight in weights}, file, metadata={"format": "pt"})
            loaded, found = AutoModelForCausalLM.from_pretrained(
                self._folder, dtype=self._served.torch_dtype, output_loading_info=True
            )
        finally:
            file.unlink(missing_ok=True)
        wrong = [*found["missing_keys"], *found["unexpected_keys"]]
        if wrong:
            raise ValueError(f"{len(wrong)} weights are missing, or not those of the model, among them {wrong[0]!r}")
        if self._model is None:
            self._model = loaded.to(self._device).eval()
            self._generator = EmbeddedGenerator(
                self._model,
                self._tokenizer,
                pad_token_id=self._served.pad_token_id,
                seed=self._served.seed,
                batch_size=self._served.batch_size,
            )
            return
        # To where CUDA graphs read them.
        with torch.no_grad():
            for own, new in zip(self._model.state_dict().values(), loaded.state_dict().values(), strict=True):
                own.copy_(new)


class ServedVllm:
    """vLLM, whose workers get the weights and load their shards.

    folder: with the files of `model`. tensor_parallel: GPUs that share a model. memory: share of each GPU's memory.
    """

    def __init__(self, model: ServedModel, folder: Path, *, tensor_parallel: int, memory: float) -> None:
        self.receivers = tensor_parallel
        # Forked, workers would keep the server's port open after it was killed, and locks that its other threads hold.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self._engine = VllmEngine(
            folder,
            dtype=model.torch_dtype,
            seed=model.seed,
            temperature=model.temperature,
            length=model.length,
            batch_size=model.batch_size,
            memory=memory,
            tensor_parallel_size=tensor_parallel,
            worker_extension_cls=f"{WeightReceiver.__module__}.{WeightReceiver.__name__}",
        )

    def receive(self, address: GroupAddress) -> None:
        """Let the workers load the weights. Cached keys and values of the old ones are dropped.

        Raises:
            LoadingFailed: a worker has not loaded them, or is gone.
        """
        try:
            replies = self._engine.llm.collective_rpc("receive_from_training", kwargs={"address": asdict(address)})
        except Exception as error:
            # Workers return their own.
            raise LoadingFailed("failed", f"{type(error).__name__}: {error}") from error
        failures = [LoadingFailed(*failure) for failure in replies if failure is not None]
        if failures:
            raise min(failures, key=lambda failure: failure.CODES.index(failure.code))
        self._engine.forget_prefixes()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order. See `Generator`."""
        return self._engine.generate(requests, sampling)


class WeightReceiver:
    """What vLLM's workers can do beside their own: `worker_extension_cls`."""

    rank: int
    device: torch.device
    reload_weights: Callable[..., Any]

    def receive_from_training(self, address: dict[str, Any]) -> tuple[str, str] | None:
        """Get the weights from the process that trains, and load this worker's shard of each.

        Returns None, or code and message of a `LoadingFailed`. Of an error in a worker process vLLM passes on the text
        alone, of one worker, and then takes the errors of the others for answers to its next call.
        """
        try:
            group = WeightGroup(GroupAddress(**address), 1 + self.rank, self.device)
            try:
                with group:
                    load_received(group, lambda weights: self.reload_weights(weights_iterator=weights))
            except Exception:
                end_reload(self)
                raise
            pack_for_cpu(self)
        except Exception as error:
            log.warning("the weights are not loaded", exc_info=error)
            failure = LoadingFailed.of(error)
            return failure.code, str(failure)
        return None


def load_received(group: WeightGroup, load: Callable[[Iterator[tuple[str, Tensor]]], Any]) -> None:
    """Call `load` with the weights that come. If it fails, the others are received first: the sender must not wait."""
    weights = receive_weights(group)
    try:
        load(weights)
    except BaseException:
        # The sender may be gone by now, which must not hide why loading failed.
        with suppress(TransferBroken):
            _drop(weights)
        raise
    _drop(weights)


def _drop(weights: Iterator[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass
