"""An engine in another process, on this machine or another one: `tasks.runtime.generation.server`.

Rank 0 sends the weights; every rank asks for its answers. A server that is gone is waited for: the rank that misses it
sends the weights to the new one, and asks again for the answers that it lacks, so that the step loses nothing.
"""

from __future__ import annotations

import http.client
import json
import logging
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.runtime.generation.checkpoint_weights import checkpoint_weights
from tasks.runtime.generation.compare import FirstAnswer
from tasks.runtime.generation.generator import Request, Sample, Sampling
from tasks.runtime.generation.serving import (
    LOOPBACK,
    TOKEN,
    ServedModel,
    files_of,
    is_open,
    requests_to_json,
    samples_from_json,
    sampling_to_json,
    shared_token,
)
from tasks.runtime.generation.vllm_engine import save_configuration
from tasks.runtime.generation.weight_stream import GroupAddress, TransferBroken, WeightGroup, gpu_of, send_weights
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# Until a server that is gone, or not there yet, answers: less than `faults.hang_timeout` is by default.
_PATIENCE = 480.0
_PAUSE = 1.0
_CONNECT_SECONDS = 30.0
# A machine that vanishes is noticed by probes: 30 s without a packet, then one each 10 s, six times.
_PROBES = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))

T = TypeVar("T")


class _Gone(Exception):
    """The server does not answer, or has been started again since and has no weights."""


class RemoteGenerator:
    """Generates by a server. Made by all ranks together.

    model: whose weights `update_weights` sends; whole on each rank. address: `host:port`. engine: that the server must
    run. patience: seconds that a server may be gone.

    Raises:
        ValueError: the server runs another engine, serves another run, or has another secret.
        Unreachable: the server does not answer in time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        processes: Processes,
        *,
        address: str,
        run: str,
        engine: str,
        dtype: torch.dtype,
        seed: int,
        temperature: float,
        length: int,
        batch_size: int,
        pad_token_id: int,
        patience: float = _PATIENCE,
    ) -> None:
        self._model, self._processes, self._dtype = model, processes, dtype
        self._first_answer = FirstAnswer(model, dtype)
        self._host, _, port = address.rpartition(":")
        self._port, self._patience = int(port), patience
        self._token = shared_token(self._host)
        # Of this attempt: an earlier one, should it still run somewhere, is refused from now on.
        # Keys sort by when their processes started.
        self._key: str = processes.on_main(lambda: f"{time.time_ns():020d}-{secrets.token_hex(16)}")
        self._version = 0
        with tempfile.TemporaryDirectory() as folder:
            save_configuration(model, tokenizer, Path(folder), dtype)
            self._served = ServedModel(
                run=run,
                engine=engine,
                files=files_of(Path(folder)),
                dtype=str(dtype).removeprefix("torch."),
                seed=seed,
                temperature=temperature,
                length=length,
                batch_size=batch_size,
                pad_token_id=pad_token_id,
            )
        processes.on_main(lambda: self._patiently(self._open))

    def update_weights(self) -> None:
        """Send the weights of the model. A collective.

        Raises:
            Unreachable: the server does not answer in time.
        """
        self._version += 1
        self._processes.on_main(lambda: self._patiently(self._send))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order. See `Generator`.

        Raises:
            Unreachable: the server does not answer in time, or its engine failed.
        """
        samples = self._patiently(lambda: self._ask(requests, sampling))
        self._first_answer.compare(requests, samples, sampling)
        return samples

    def generate_while_training(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample] | None:
        """As `generate`, in a thread beside the one that trains the model. None if the server is gone.

        A server that is gone is not waited for: the weights that its successor would need are changing.
        """
        try:
            return self._ask(requests, sampling)
        except _Gone as error:
            log.warning("%s: %s; the next step generates its answers itself", self._where, error)
            return None

    def _ask(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        if not requests:
            return []
        asked = {
            "version": self._version,
            "sampling": sampling_to_json(sampling),
            "requests": requests_to_json(requests),
        }
        samples = samples_from_json(self._post("/generate", asked)["samples"])
        if len(samples) != len(requests):
            raise ValueError(f"{self._where}: {len(samples)} answers to {len(requests)} prompts")
        return samples

    @property
    def _where(self) -> str:
        return f"objective.generation.server {self._host}:{self._port}"

    def _patiently(self, work: Callable[[], T]) -> T:
        """Do `work`; if the server is gone, give its successor the weights and do it again."""
        missed: float | None = None
        while True:
            try:
                if missed is not None:
                    self._restore()
                return work()
            except _Gone as error:
                if missed is None:
                    log.warning("%s: %s; waiting for it for up to %.0f s", self._where, error, self._patience)
                missed = missed or time.monotonic()
                if time.monotonic() - missed >= self._patience:
                    raise Unreachable(
                        f"{self._where} was gone for {self._patience:.0f} s: {error}; when it is there again, the run "
                        "continues from its last checkpoint"
                    ) from error
                time.sleep(_PAUSE)

    def _open(self) -> int | None:
        """Become the process that the server serves. The version of its weights."""
        model = {name: getattr(self._served, name) for name in ServedModel.__dataclass_fields__}
        found: int | None = self._post("/session", {"model": model})["weights"]
        return found

    def _restore(self) -> None:
        if self._open() != self._version and self._version:
            self._send()

    def _send(self) -> None:
        """Send the weights of this version, unless another rank has."""
        connection = self._connection()
        try:
            # Now: a run moves its model to the GPU after it has made this.
            device = self._model.device
            gpus = [gpu_of(device)] if device.type == "cuda" else []
            asked = {"version": self._version, "device": device.type, "gpus": gpus}
            response = self._request(connection, "/weights", asked)
            group = _line(response)["group"]
            if group is not None:
                address = GroupAddress(host=self._host, loopback=self._host in LOOPBACK, **group)
                weights = checkpoint_weights(self._model, self._dtype)
                with WeightGroup(address, 0, device, is_whole=lambda: is_open(response)) as members:
                    send_weights(weights, members)
            ended = _line(response)
        except (OSError, http.client.HTTPException, TransferBroken) as error:
            raise _Gone(f"a transfer of weights broke off: {error}") from error
        finally:
            connection.close()
        match ended.get("code"):
            case "broken":
                raise _Gone(f"a transfer of weights broke off: {ended['error']}")
            case "failed":
                raise self._engine_failed(ended["error"])
            case "weights":
                raise ValueError(f"{self._where} cannot load the weights: {ended['error']}")

    def _post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        connection = self._connection()
        try:
            answer: dict[str, Any] = json.loads(self._request(connection, path, asked).read())
            return answer
        except (OSError, http.client.HTTPException) as error:
            raise _Gone(str(error) or type(error).__name__) from error
        finally:
            connection.close()

    def _request(self, connection: http.client.HTTPConnection, path: str, asked: dict[str, Any]) -> Any:
        """The response with status 200. An answer may take as long as it takes: a server that is gone is noticed."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        connection.connect()
        connection.sock.settimeout(None)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES:
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.request("POST", path, json.dumps({"key": self._key, **asked}), headers)
        response = connection.getresponse()
        if response.status == HTTPStatus.OK:
            return response
        try:
            refused = json.loads(response.read())
            code, reason = refused["code"], refused["error"]
        except (ValueError, KeyError, TypeError):
            # Something on the way answers for a server that is not there.
            raise _Gone(f"status {response.status}") from None
        match code:
            case "no_session":
                raise _Gone(reason)
            case "failed":
                raise self._engine_failed(reason)
            case "token":
                raise ValueError(f"{self._where}: {reason} in {TOKEN} than this process; set both to the same")
        raise ValueError(f"{self._where}: {reason}")

    def _engine_failed(self, reason: str) -> Unreachable:
        return Unreachable(f"{self._where}: its engine failed: {reason}; its log has the whole error")

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)


def _line(response: Any) -> dict[str, Any]:
    line = response.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the server ended")
    found: dict[str, Any] = json.loads(line)
    return found
