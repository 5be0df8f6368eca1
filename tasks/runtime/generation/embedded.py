"""The embedded engine: the weights that are trained, in the process that trains them.

Answers of similar length of prompt are generated together, one token of each at a time. Rows that have ended leave the
batch when half of them have. What a row draws depends on its request's key alone, and its logits on the rest of the
batch only by rounding; the same requests in the same order give the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.runtime.generation.decoders import (
    Decoder,
    Forward,
    StaticDecoder,
    decode_attention,
    needs_equal_lengths,
    supports_static_cache,
)
from tasks.runtime.generation.generator import Request, Sample, Sampling
from tasks.runtime.generation.sampling import draw, uniform_numbers
from tasks.runtime.models.attention.varlen_attention import has_varlen_attention, plain_attention

# Tokens between two looks at which rows have ended: each waits for the GPU.
_LOOK_EVERY = {"cuda": 16, "cpu": 1}
_TEXT_EVERY = 8


class EmbeddedGenerator:
    """Generates with `model` as it is, its adapter included.

    model: not sharded; patched or not. seed: of the run. batch_size: the most answers that are generated together.
    static: whether the cache has a fixed size; by default on a GPU, where the model allows it, and for answers that are
    drawn. The likeliest answers are those of measurements, a few at a time: no graph would be replayed often enough.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pad_token_id: int,
        seed: int,
        batch_size: int = 128,
        static: bool | None = None,
    ) -> None:
        self._model, self._tokenizer, self._pad_token_id = model, tokenizer, pad_token_id
        self._seed, self._batch_size = seed, batch_size
        self._static = static
        self._equal_lengths = needs_equal_lengths(model)
        self._kept: tuple[Sampling, StaticDecoder, _Rows] | None = None

    def update_weights(self) -> None:
        """Do nothing: the weights are the model's own."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """An answer to each request, in order. See `Generator`."""
        samples: dict[int, Sample] = {}
        with without_training(self._model):
            for batch in self._batches(requests):
                found = self._answers([requests[index] for index in batch], sampling)
                samples.update(zip(batch, found, strict=True))
        return [samples[index] for index in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices of requests that are generated together: the longest prompts first."""
        batch: list[int] = []
        for index in sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt)):
            shorter = batch and len(requests[batch[0]].prompt) > len(requests[index].prompt)
            if len(batch) == self._batch_size or (self._equal_lengths and shorter):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _answers(self, requests: list[Request], sampling: Sampling) -> list[Sample]:
        decoder = Decoder(self._model, [request.prompt for request in requests], self._pad_token_id)
        fixed = self._has_fixed_size(sampling)
        if fixed:
            static, rows = self._kept_for(len(requests), decoder.mask.shape[1], sampling)
            static.fill(decoder)
        else:
            rows = _Rows(len(requests), sampling, self._model.device)
        rows.begin(uniform_numbers(self._seed, [request.key for request in requests], sampling.max_new_tokens))
        rows.add(decoder.first_logits)
        with decode_attention(self._model) if fixed else nullcontext():
            found = self._finish(rows, static if fixed else decoder, sampling)
        return [self._sample(found[index], sampling) for index in range(len(requests))]

    def _has_fixed_size(self, sampling: Sampling) -> bool:
        """Whether the cache has. Decided now: a run moves its model to the GPU after it has made this."""
        if self._static is not None:
            return self._static
        return sampling.temperature > 0 and self._model.device.type == "cuda" and supports_static_cache(self._model)

    def _kept_for(self, size: int, width: int, sampling: Sampling) -> tuple[StaticDecoder, _Rows]:
        """The cache of a fixed size and the rows that its graphs read, of earlier batches if they suffice."""
        length = width + sampling.max_new_tokens
        if self._kept is not None:
            known, decoder, rows = self._kept
            if known == sampling and decoder.rows >= size and decoder.length >= length:
                return decoder, rows
            size, length = max(size, decoder.rows), max(length, decoder.length)
            # Before the new ones are allocated.
            self._kept = None
            del decoder, rows
        self._kept = (
            sampling,
            StaticDecoder(self._model, size, length),
            _Rows(size, sampling, self._model.device),
        )
        return self._kept[1:]

    def _finish(
        self, rows: _Rows, decoder: Decoder | StaticDecoder, sampling: Sampling
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """The tokens and log-probabilities that each row has drawn, also those after its end."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        every = max(_LOOK_EVERY.get(self._model.device.type, 1), _TEXT_EVERY if sampling.stop_strings else 1)
        for drawn in range(1, sampling.max_new_tokens):
            if drawn % every == 0:
                ended = rows.ended() | self._completed(rows, drawn, sampling)
                living = (~ended).nonzero().flatten()
                if not living.numel():
                    break
                if 2 * living.numel() <= ended.numel():
                    kept = living
                    if isinstance(decoder, StaticDecoder):
                        # Few sizes: each has graphs of its own.
                        kept = torch.cat([living, ended.nonzero().flatten()])[: ended.numel() // 2]
                    found.update(rows.results(drawn))
                    kept = kept.to(self._model.device)
                    rows.keep(kept)
                    decoder.keep(kept)
            decoder.run(rows.step, rows.count)
        return found | rows.results(sampling.max_new_tokens)

    def _completed(self, rows: _Rows, drawn: int, sampling: Sampling) -> Tensor:
        """Rows whose text has a stop string: [B], bool."""
        if not sampling.stop_strings:
            return torch.zeros(rows.count, dtype=torch.bool)
        texts = [self._decode(ids) for ids in rows.tokens[: rows.count, :drawn].tolist()]
        return torch.tensor([any(stop in text for stop in sampling.stop_strings) for text in texts])

    def _sample(self, drawn: tuple[Tensor, Tensor], sampling: Sampling) -> Sample:
        """The tokens up to the first end."""
        tokens, log_probs = drawn
        ends = torch.isin(tokens, torch.tensor(sampling.stop_token_ids, dtype=tokens.dtype)).nonzero().flatten()
        size = int(ends[0]) + 1 if ends.numel() else tokens.numel()
        finished = bool(ends.numel())
        ids = tokens[:size].tolist()
        if sampling.stop_strings and self._stops(ids, sampling):
            low, size, finished = 1, size, True
            while low < size:
                middle = (low + size) // 2
                low, size = (low, middle) if self._stops(ids[:middle], sampling) else (middle + 1, size)
        return Sample(tokens[:size].clone(), log_probs[:size].clone(), finished)

    def _stops(self, ids: list[int], sampling: Sampling) -> bool:
        text = self._decode(ids)
        return any(stop in text for stop in sampling.stop_strings)

    def _decode(self, ids: list[int]) -> str:
        decoded: Any = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return str(decoded)


class _Rows:
    """What the rows of a batch have drawn. The first `count` rows are in use; the tensors stay where they are."""

    def __init__(self, size: int, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        shape = size, sampling.max_new_tokens
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(shape, device=device)
        self._uniform = torch.zeros(shape, dtype=torch.float64, device=device)
        self._last = torch.zeros(size, dtype=torch.int64, device=device)
        self._ended = torch.zeros(size, dtype=torch.bool, device=device)
        self._drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self.count = 0
        self._places: list[int] = []

    def begin(self, uniform: Tensor) -> None:
        """Start a batch with these random numbers [B, max_new_tokens]."""
        self.count = uniform.shape[0]
        self._places = list(range(self.count))
        self._uniform[: self.count] = uniform.to(self._uniform.device)
        self._ended.zero_()
        self._drawn.zero_()

    def step(self, forward: Forward) -> None:
        """Draw one more token, without waiting for the device."""
        self.add(forward(self._last[: self.count]))

    def add(self, logits: Tensor) -> None:
        """Draw the next token of each row from its logits [B, V]."""
        rows = slice(self.count)
        uniform = self._uniform[rows].index_select(1, self._drawn)[:, 0]
        tokens, log_probs = draw(logits, uniform, self._sampling)
        self.tokens[rows].index_copy_(1, self._drawn, tokens[:, None])
        self._log_probs[rows].index_copy_(1, self._drawn, log_probs[:, None])
        self._last[rows].copy_(tokens)
        self._ended[rows].logical_or_((tokens[:, None] == self._stops).any(-1))
        self._drawn.add_(1)

    def ended(self) -> Tensor:
        """Rows that have drawn a stop token: [B], bool, on the host."""
        return self._ended[: self.count].cpu()

    def results(self, drawn: int) -> dict[int, tuple[Tensor, Tensor]]:
        """The `drawn` tokens of each row and their log-probabilities, on the host, by its place in the batch."""
        # Copies: the rows go on being written.
        tensors = (own[: self.count, :drawn].to("cpu", copy=True) for own in (self.tokens, self._log_probs))
        return dict(zip(self._places, zip(*tensors, strict=True), strict=True))

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, as the first ones."""
        size = rows.numel()
        for tensor in (self.tokens, self._log_probs, self._uniform, self._last, self._ended):
            tensor[:size] = tensor[rows]
        self._places = [self._places[row] for row in rows.tolist()]
        self.count = size


@contextmanager
def without_training(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, `model` computes without dropout, and attends without the inputs of packed rows."""
    training = model.training
    model.eval()
    try:
        with plain_attention(model, varlen=has_varlen_attention(model)):
            yield
    finally:
        model.train(training)
