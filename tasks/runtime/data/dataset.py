"""Prepared data as training reads it: rows of tokens from memory-mapped files."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tasks.runtime.data.formats import PREFERENCES
from tasks.runtime.data.prepared_manifest import Manifest, Split

TOKENIZER = "tokenizer"
SAMPLES = "samples.json"
IGNORE_INDEX = -100
"""The label of a token that is not learned."""

Row = dict[str, Tensor]
Batch = dict[str, Tensor]


class Sample(NamedTuple):
    """A prompt, what followed it in the data, and the tokens a model is to continue: the prompt as it is trained on."""

    prompt: str
    completion: str
    prompt_ids: list[int]


class ReferenceLogProbs(NamedTuple):
    """Log-probabilities that a model gave to the targets of documents: of row i those from `rows[i]` to `rows[i + 1]`.

    log_probs: [D], fp32, a sum for each document; rows: [R + 1], int64.
    """

    log_probs: Tensor
    rows: Tensor

    def for_row(self, index: int) -> Tensor:
        """A value for each document of the row."""
        return self.log_probs[int(self.rows[index]) : int(self.rows[index + 1])]


class RowDataset(Dataset[Row]):
    """Rows of `input_ids`, `labels`, `position_ids`, each [T], int64.

    `labels[i]` is `input_ids[i]` where that token is learned and -100 elsewhere, so at the first token of each document
    too: the model shifts labels by one, and nothing before a document predicts its start. `position_ids` restart with
    each document. With `length`, rows are padded to it; the padding is a document of its own, without labels.

    Where documents are `paired`, two answers follow each other, and `sides` [T], int64, tell whose a token is: 1 of the
    chosen one, -1 of the rejected one, 0 of none. With `reference`, the sum of a document's log-probabilities is in
    `reference` [T], fp32, at its first token; it is 0 elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        *,
        length: int | None,
        pad_token_id: int,
        paired: bool = False,
        reference: ReferenceLogProbs | None = None,
    ) -> None:
        self._files = [folder / shard.file for shard in split.shards]
        self._row_offsets = list(accumulate(shard.rows for shard in split.shards))
        self._length = length
        self._pad_token_id = pad_token_id
        self._paired = paired
        self._reference = reference
        self._open: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self._row_offsets[-1] if self._row_offsets else 0

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._row_offsets, index)
        shard = self._shard(number)
        row = index - (self._row_offsets[number - 1] if number else 0)
        bounds = shard["documents"][int(shard["rows"][row]) : int(shard["rows"][row + 1]) + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        tensors = self._tensors(shard["input_ids"][begin:end].long(), shard["targets"][begin:end], bounds.diff())
        if self._reference is not None:
            tensors["reference"] = torch.zeros(end - begin)
            tensors["reference"][bounds[:-1] - begin] = self._reference.for_row(index)
        return _pad(tensors, self._length - (end - begin) if self._length else 0, self._pad_token_id)

    def __getstate__(self) -> dict[str, object]:
        # Each worker of a loader maps the files itself.
        return {**self.__dict__, "_open": {}}

    def _tensors(self, ids: Tensor, targets: Tensor, lengths: Tensor) -> Row:
        row = {
            "input_ids": ids,
            "labels": ids.masked_fill(~targets, IGNORE_INDEX),
            "position_ids": torch.cat([torch.arange(int(length)) for length in lengths]),
        }
        if self._paired:
            sides = torch.tensor([1, -1]).repeat(lengths.numel() // 2)
            row["sides"] = sides.repeat_interleave(lengths)
        return row

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._open:
            with safe_open(str(self._files[number]), framework="pt") as file:
                self._open[number] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return self._open[number]


def _pad(row: Row, padding: int, pad_token_id: int) -> Row:
    if padding == 0:
        return row
    filled = {
        name: torch.full((padding,), IGNORE_INDEX if name == "labels" else 0, dtype=tensor.dtype)
        for name, tensor in row.items()
    }
    filled |= {"input_ids": torch.full((padding,), pad_token_id), "position_ids": torch.arange(padding)}
    return {name: torch.cat([tensor, filled[name]]) for name, tensor in row.items()}


def collate(batch: list[Row]) -> Batch:
    """Rows to a batch, each tensor [B, T]. Rows that were not packed are padded to the longest of the batch.

    The id of that padding does not matter: it has no label, and nothing but padding attends to it.
    """
    longest = max(row["input_ids"].numel() for row in batch)
    rows = [_pad(row, longest - row["input_ids"].numel(), 0) for row in batch]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def collate_flat(batch: list[Row]) -> Batch:
    """Rows to one long row, each tensor [1, sum of T]: what keeps documents apart under flash attention.

    transformers' flash attention looks for restarting position ids only in batches of one row; in larger ones a
    document would attend to those before it.
    """
    return {name: torch.cat([row[name] for row in batch])[None] for name in batch[0]}


def collator(attention: str) -> Callable[[list[Row]], Batch]:
    """The collate function under which documents stay apart, for a value of `model.attention`."""
    return collate_flat if attention.startswith("flash_attention") else collate


class PreparedData:
    """A prepared folder. Nothing is read into memory before it is asked for.

    `reference_log_probs` are what the first model gave the documents of a split, by its name; its rows bring them.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, reference_log_probs: dict[str, ReferenceLogProbs] | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.reference_log_probs = reference_log_probs or {}

    @classmethod
    def load(cls, folder: Path | str) -> PreparedData:
        """Raises ValueError when the folder holds no prepared data, or not all of it."""
        folder = Path(folder)
        return cls(folder, Manifest.read(folder))

    @property
    def train(self) -> RowDataset:
        """The rows to train on."""
        return self._rows("train", self.manifest.train)

    @property
    def validation(self) -> RowDataset:
        """The rows held out; none when the fraction is 0 or there is but one sample."""
        return self._rows("validation", self.manifest.validation)

    def with_reference_log_probs(self, **reference_log_probs: ReferenceLogProbs) -> PreparedData:
        """The same data; rows of the splits named bring `reference`."""
        return PreparedData(self.folder, self.manifest, self.reference_log_probs | reference_log_probs)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the data was made with, its chat template included."""
        return AutoTokenizer.from_pretrained(str(self.folder / TOKENIZER), trust_remote_code=False)

    def samples(self, n: int) -> list[Sample]:
        """The first `n` samples of the validation split, or as many as there are, at most 64."""
        stored = json.loads((self.folder / SAMPLES).read_text(encoding="utf-8"))
        return [Sample(**sample) for sample in stored[:n]]

    def _rows(self, name: str, split: Split) -> RowDataset:
        manifest = self.manifest
        return RowDataset(
            self.folder,
            split,
            length=manifest.sequence_length if manifest.packing else None,
            pad_token_id=manifest.pad_token_id,
            paired=manifest.format in PREFERENCES,
            reference=self.reference_log_probs.get(name),
        )
