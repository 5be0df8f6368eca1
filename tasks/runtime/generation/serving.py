"""What a server of generation is asked and answers: JSON, without a class of Python in it."""

from __future__ import annotations

import base64
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.runtime.generation.generator import Request, Sample, Sampling

TOKEN = "STRATA_GENERATION_TOKEN"  # noqa: S105
"""The environment variable with the secret that both ends share."""
LOOPBACK = frozenset({"127.0.0.1", "localhost"})
PORT = 8471

# Configuration and tokenizer: no code, no folders, no weights.
_FILE = re.compile(r"\w[\w-]*(\.[\w-]+)*\.(json|jinja|txt|model|tiktoken)")


@dataclass(frozen=True)
class ServedModel:
    """The model of a run, without its weights.

    files: those of the configuration and the tokenizer by name, in base64. dtype: of weights and passes. temperature:
    the one that log-probabilities are asked at. length: the most tokens of a prompt and its answer.
    """

    run: str
    engine: str
    files: dict[str, str]
    dtype: str
    seed: int
    temperature: float
    length: int
    batch_size: int
    pad_token_id: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ServedModel:
        """Raises ValueError unless the fields are there, with values that may be used."""
        try:
            made = cls(**values)
        except TypeError as error:
            raise ValueError(f"the model has other fields: {error}") from None
        bad = [name for name in made.files if not _FILE.fullmatch(name)]
        if bad:
            raise ValueError(f"file {bad[0]!r} is none of a configuration or a tokenizer")
        if not isinstance(getattr(torch, made.dtype, None), torch.dtype):
            raise ValueError(f"dtype {made.dtype!r} is unknown")
        return made

    def write(self, folder: Path) -> None:
        """Write the files."""
        for name, content in self.files.items():
            (folder / name).write_bytes(base64.b64decode(content))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and passes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def files_of(folder: Path) -> dict[str, str]:
    """The files of a configuration and a tokenizer, for `ServedModel`."""
    return {
        path.name: base64.b64encode(path.read_bytes()).decode()
        for path in sorted(folder.iterdir())
        if _FILE.fullmatch(path.name)
    }


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """The fields of `Sampling`."""
    return asdict(sampling)


def sampling_from_json(values: Mapping[str, Any]) -> Sampling:
    """Raises ValueError unless the fields are those of `Sampling`."""
    try:
        lists = {name: tuple(values[name]) for name in ("stop_token_ids", "stop_strings")}
        return Sampling(**{**values, **lists})
    except (TypeError, KeyError) as error:
        raise ValueError(f"sampling has other fields: {error}") from None


def requests_to_json(requests: Sequence[Request]) -> list[Any]:
    """`[[key, [token ids]], ...]`."""
    return [[request.key, list(request.prompt)] for request in requests]


def requests_from_json(values: Sequence[Any], length: int) -> list[Request]:
    """Raises ValueError unless each has a key and a prompt of 1 to `length` - 1 token ids."""
    requests = [Request(tuple(prompt), key) for key, prompt in values]
    for request in requests:
        if not 0 < len(request.prompt) < length:
            raise ValueError(f"a prompt has {len(request.prompt)} tokens, and rows have {length}")
        if not all(isinstance(number, int) and number >= 0 for number in (request.key, *request.prompt)):
            raise ValueError("keys and token ids are integers from 0 on")
    return requests


def samples_to_json(samples: Sequence[Sample]) -> list[Any]:
    """`[[[token ids], [log-probabilities], finished], ...]`; a log-probability survives bit for bit."""
    return [[sample.token_ids.tolist(), sample.log_probs.tolist(), sample.finished] for sample in samples]


def samples_from_json(values: Sequence[Any]) -> list[Sample]:
    """The samples of `samples_to_json`."""
    return [
        Sample(torch.tensor(ids, dtype=torch.int64), torch.tensor(log_probs, dtype=torch.float32), finished)
        for ids, log_probs, finished in values
    ]


def shared_token(host: str) -> str:
    """The secret of the environment; "" where none is set and `host` is this machine alone.

    Raises:
        ValueError: none is set, and others can reach `host`; or it cannot be sent.
    """
    # Files that Secrets are made of often end with a line break.
    token = os.environ.get(TOKEN, "").strip()
    # Here: http.client would put the secret into its error.
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"{TOKEN} has characters that no header of HTTP may have; use printable ASCII alone")
    if not token and host not in LOOPBACK:
        raise ValueError(
            f"{TOKEN} is not set, and anyone who can reach {host} could replace the weights; set it to the same secret "
            "where the server and the run start, from a Secret of the cluster"
        )
    return token


def is_open(connection: Any) -> bool:
    """Whether more is to come over a connection, or a response: the other end has neither ended it nor is it gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        try:
            own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False
