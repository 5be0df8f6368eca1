"""The interface of engines that generate answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn, with the meaning that transformers' `GenerationConfig` gives these names.

    temperature: logits are divided by it; 0 takes the likeliest token. top_k: only that many tokens are drawn from, 0
    for all. top_p: only the likeliest tokens that have this probability together. An answer ends with a token of
    `stop_token_ids`, with a token that completes a text of `stop_strings`, or after `max_new_tokens`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


class Request(NamedTuple):
    """A prompt that one answer is asked for.

    prompt: at least one token id. key: the stream of random numbers that the answer is drawn with, 0 to 2^64 - 1. With
    another key a prompt gets another answer; which other requests there are does not matter.
    """

    prompt: tuple[int, ...]
    key: int


class Sample(NamedTuple):
    """An answer, on the host.

    token_ids: [T], int64, at least one, the stop token included. log_probs: [T], fp32, of the tokens under the model's
    distribution at the temperature, from which top_k and top_p have removed nothing; at temperature 0, under that at 1.
    finished: whether it ended by itself, before `max_new_tokens` cut it.
    """

    token_ids: Tensor
    log_probs: Tensor
    finished: bool


class Generator(Protocol):
    """Generates answers with the weights of the model."""

    def update_weights(self) -> None:
        """Generate with the weights that the model has now. A collective."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order."""
