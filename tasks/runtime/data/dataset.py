"""Dataset of prepared rows, read from memory-mapped safetensors files, and the collate functions."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Subset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tasks.runtime.data.formats.columns import PREFERENCES
from tasks.runtime.data.prepared_manifest import Manifest, Sample, Split
from tasks.runtime.data.shard_cache import ShardCache, cache_folder
from tasks.runtime.data.shard_store import ShardStore
from tasks.runtime.data.shards import Shards
from tasks.runtime.data.top_columns import TOP_COLUMNS, top_columns, with_one_width

TOKENIZER = "tokenizer"
SAMPLES = "samples.json"
IGNORE_INDEX = -100
"""Label of a token without loss; PyTorch: `F.cross_entropy(ignore_index=-100)`."""

MISMATCHED = "mismatched_"
"""Begins the names of columns with other completions."""
MEDIA_COLUMNS = ("media", "media_sizes", "document_media")
"""Of a row with images or audio: their bytes [N], uint8; how many each has [M], and how many of them each document has
[D], int64.
"""
ROPE_COLUMNS = ("rope_time", "rope_height", "rope_width")
"""Positions of a token in three dimensions, each [T], int64, for models that rotate by them (M-RoPE)."""
COLUMNS = "columns"
"""Of a prompt: what rewards get of its row, as JSON, [N], uint8: `where` it is, its `prompt`, and its `columns`."""
MODEL_INPUT = "model."
"""Begins the names of what a batch has for the model alone, such as `model.pixel_values`."""

Row = dict[str, Tensor]
Batch = dict[str, Tensor]


class ReferenceLogProbs(NamedTuple):
    """Log-probabilities of the reference model, one sum per document.

    log_probs: [D], fp32; or [D, 2], the second of the document with another completion. rows: [R + 1], int64; the
    documents of row i are `log_probs[rows[i] : rows[i + 1]]`.
    """

    log_probs: Tensor
    rows: Tensor

    def for_row(self, index: int) -> Tensor:
        """The log-probabilities of the row's documents."""
        return self.log_probs[int(self.rows[index]) : int(self.rows[index + 1])]


class RowDataset(Dataset[Row]):
    """Map-style dataset of rows with `input_ids`, `labels` and `position_ids`, each [T], int64.

    `labels[i]` is `input_ids[i]` for a token with loss and -100 otherwise. The first token of a document has no loss:
    models shift labels by one, and no token of the same document precedes it. `position_ids` restart at each document.
    With `length`, rows are padded to it; the padding is a separate document without labels.

    paired: each chosen answer is followed by the rejected one. `sides` [T], int64, is 1 for tokens of the chosen
    answer, -1 for those of the rejected one and 0 for padding.
    reference: `reference` [T], fp32, is the document's log-probability at its first token and 0 elsewhere.
    longest: tokens of a row without `length`.
    scored: `scored` [T], int64, is 1 at the last token of a document that is no padding token, whose hidden state
    transformers scores, and 0 elsewhere; `margin` [T], fp32, is a pair's margin at its first token.

    Data with a teacher's log-probabilities has the columns of `TOP_COLUMNS`.

    Documents with scores that are no pairs have `sides` 1 where the score is above 0, and -1 elsewhere. Their rows also
    have columns whose names begin with `mismatched_`: the same prompts with other completions; see `mismatched`.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        length: int | None,
        pad_token_id: int,
        paired: bool = False,
        reference: ReferenceLogProbs | None = None,
        longest: int | None = None,
        scored: bool = False,
    ) -> None:
        self.shards = shards
        # Where the known shards end; more may follow while data is prepared.
        self._row_ends: list[int] = []
        self._length = length
        self._pad_token_id = pad_token_id
        self._paired = paired
        self._reference = reference
        self._longest = length or longest
        self._scored = scored

    def __len__(self) -> int:
        """Rows of the shards that are known: all, unless the data is still being prepared."""
        return self.shards.known_rows

    def __getitem__(self, index: int) -> Row:
        number, row = self._find(index)
        shard = self.shards.tensors(number)
        bounds = shard["documents"][int(shard["rows"][row]) : int(shard["rows"][row + 1]) + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        tensors = self._tensors(shard["input_ids"][begin:end].long(), shard["targets"][begin:end], bounds.diff())
        if TOP_COLUMNS[0] in shard:
            tensors |= top_columns(shard, begin, end)
        reference = None if self._reference is None else self._reference.for_row(index)
        if "scores" in shard and not self._paired:
            scores = shard["scores"][int(shard["rows"][row]) : int(shard["rows"][row + 1])]
            tensors["sides"] = torch.where(scores > 0, 1, -1).repeat_interleave(bounds.diff())
            return self._with_mismatched(tensors, mismatched(shard, row, self._longest), reference)
        if reference is not None:
            tensors["reference"] = _at_starts(reference, tensors["position_ids"])
        if self._scored:
            tensors["scored"] = _ends(tensors["input_ids"], bounds - begin, self._pad_token_id)
            documents = slice(int(shard["rows"][row]), int(shard["rows"][row + 1]))
            margins = shard["scores"][documents] if "scores" in shard else torch.zeros(bounds.numel() - 1)
            tensors["margin"] = _at_starts(margins, tensors["position_ids"]).where(tensors["sides"] == 1, 0.0)
        if COLUMNS in shard:
            # Prompts are not packed: each row has one.
            ends = shard["column_ends"]
            return tensors | {COLUMNS: shard[COLUMNS][int(ends[row]) : int(ends[row + 1])]}
        padded = _pad(tensors, self._length - (end - begin) if self._length else 0, self._pad_token_id)
        return padded | _media(shard, int(shard["rows"][row]), int(shard["rows"][row + 1]))

    def _with_mismatched(self, matched: Row, other: Row, reference: Tensor | None) -> Row:
        """One row of both, padded to one length."""
        if reference is not None:
            for part, values in zip((matched, other), reference.unbind(dim=1), strict=True):
                part["reference"] = _at_starts(values, part["position_ids"])
        size = self._length or max(part["input_ids"].numel() for part in (matched, other))
        padded = [_pad(part, size - part["input_ids"].numel(), self._pad_token_id) for part in (matched, other)]
        return padded[0] | {f"{MISMATCHED}{name}": tensor for name, tensor in padded[1].items()}

    def by_source(self, manifest: Manifest) -> list[tuple[int, Shards]]:
        """The index of the first training row and the shards of each source that is trained on."""
        if len(manifest.trained) == 1:
            return [(0, self.shards)]
        first = accumulate((source.train.rows for source in manifest.trained), initial=0)
        return [(begin, self.shards.part(source.train)) for begin, source in zip(first, manifest.trained, strict=False)]

    def _find(self, index: int) -> tuple[int, int]:
        """The shard with a row, and the row's place in it."""
        while not self._row_ends or index >= self._row_ends[-1]:
            rows = self.shards.rows_of(len(self._row_ends))
            if rows is None:
                raise IndexError(f"row {index} of {len(self)}")
            self._row_ends.append(rows + (self._row_ends[-1] if self._row_ends else 0))
        if index < 0:
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._row_ends, index)
        return number, index - (self._row_ends[number - 1] if number else 0)

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


def _at_starts(values: Tensor, position_ids: Tensor) -> Tensor:
    """Each document's value at its first token, and 0 elsewhere."""
    found = torch.zeros(position_ids.numel())
    found[position_ids == 0] = values
    return found


def _ends(ids: Tensor, bounds: Tensor, pad_token_id: int) -> Tensor:
    """1 at the last token of each document that is no padding token."""
    found = torch.zeros_like(ids)
    for begin, end in pairwise(bounds.tolist()):
        real = (ids[begin:end] != pad_token_id).nonzero()
        found[begin + int(real[-1]) if real.numel() else begin] = 1
    return found


def mismatched(shard: Row, row: int, longest: int | None) -> Row:
    """Each prompt of a row with the completion of the document before it, of the first with that of the last.

    A row of one document takes the completion of the row before it in the shard. So the documents depend on neither
    micro-batches nor processes. What is longer than a row is cut off. `sides` is 1.
    """
    bounds = shard["documents"][int(shard["rows"][row]) : int(shard["rows"][row + 1]) + 1].tolist()
    documents = list(pairwise(bounds))
    before = documents[-1]
    if len(documents) == 1:
        last = int(shard["rows"][row]) if row else shard["documents"].numel() - 1
        before = (int(shard["documents"][last - 1]), int(shard["documents"][last]))
    parts: dict[str, list[Tensor]] = {"input_ids": [], "targets": []}
    positions: list[Tensor] = []
    for own in documents:
        pieces = (slice(own[0], _completion(shard, own)), slice(_completion(shard, before), before[1]))
        for name, found in parts.items():
            found += [shard[name][piece] for piece in pieces]
        positions.append(torch.arange(sum(piece.stop - piece.start for piece in pieces)))
        before = own
    ids, targets, position_ids = (torch.cat(found)[:longest] for found in (*parts.values(), positions))
    ids = ids.long()
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(~targets, IGNORE_INDEX),
        "position_ids": position_ids,
        "sides": torch.ones_like(ids),
    }


def _completion(shard: Row, document: tuple[int, int]) -> int:
    """Where the completion of a document begins: at its first token with loss."""
    return document[0] + int(shard["targets"][slice(*document)].to(torch.uint8).argmax())


def _media(shard: dict[str, Tensor], first: int, last: int) -> Row:
    """The columns of MEDIA_COLUMNS of the documents from `first` to before `last`; {} if they have none."""
    if "media" not in shard:
        return {}
    numbers = shard["document_media"][first : last + 1]
    ends = shard["media_ends"][int(numbers[0]) : int(numbers[-1]) + 1]
    if ends.numel() == 1:
        return {}
    content = shard["media"][int(ends[0]) : int(ends[-1])]
    return dict(zip(MEDIA_COLUMNS, (content, ends.diff(), numbers.diff()), strict=True))


def _pad(row: Row, padding: int, pad_token_id: int) -> Row:
    if padding == 0:
        return row
    return {name: torch.cat([tensor, _filler(name, padding, tensor, pad_token_id)]) for name, tensor in row.items()}


def _filler(name: str, size: int, like: Tensor, pad_token_id: int) -> Tensor:
    """Padding of a column: a separate document without labels."""
    column = name.removeprefix(MISMATCHED)
    if column == "position_ids":
        return torch.arange(size)
    value = {"labels": IGNORE_INDEX, "input_ids": pad_token_id}.get(column, 0)
    return torch.full((size, *like.shape[1:]), value, dtype=like.dtype)


def document_of(row: Row, number: int) -> Row:
    """The document of that number in a row, with its images or audio."""
    starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), row["position_ids"].numel()]
    own = slice(starts[number], starts[number + 1])
    alone = {name: tensor[own] for name, tensor in row.items() if name not in MEDIA_COLUMNS}
    counts = row["document_media"] if "media" in row else torch.zeros(0, dtype=torch.int64)
    if number >= counts.numel() or not counts[number]:
        return alone
    ends = torch.cat([row["media_sizes"].new_zeros(1), row["media_sizes"].cumsum(0)])
    first = int(counts[:number].sum())
    last = first + int(counts[number])
    columns = row["media"][int(ends[first]) : int(ends[last])], row["media_sizes"][first:last], counts[number][None]
    return alone | dict(zip(MEDIA_COLUMNS, columns, strict=True))


def collate(batch: list[Row]) -> Batch:
    """Stack rows to a batch, each tensor [B, T]. Rows that are not packed are padded to the longest of the batch.

    The token id of the padding does not matter: it has no label, and only padding attends to it.
    """
    _require_no_media(batch)
    columns, batch = _columns(with_one_width(batch))
    longest = max(row["input_ids"].numel() for row in batch)
    rows = [_pad(row, longest - row["input_ids"].numel(), 0) for row in batch]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} | columns


def _columns(batch: list[Row]) -> tuple[Batch, list[Row]]:
    """The columns of prompts, [B, N], padded with spaces, which JSON allows; and the rows without them."""
    if COLUMNS not in batch[0]:
        return {}, batch
    padded = pad_sequence([row[COLUMNS] for row in batch], batch_first=True, padding_value=ord(" "))
    return {COLUMNS: padded}, [{name: row[name] for name in row if name != COLUMNS} for row in batch]


def collate_flat(batch: list[Row]) -> Batch:
    """Concatenate rows to one long row, each tensor [1, sum of T], so that flash attention isolates documents.

    transformers' flash attention detects packed documents, by restarting position ids, only in batches of one row. In a
    larger batch a document would attend to the documents before it. transformers: `DataCollatorWithFlattening`.
    """
    _require_no_media(batch)
    if COLUMNS in batch[0]:
        # Prompts, which no model reads as a batch.
        return collate(batch)
    batch = with_one_width(batch)
    return {name: torch.cat([row[name] for row in batch])[None] for name in batch[0]}


def text_tokens(batch: Batch) -> Tensor:
    """[B, T], true for tokens and false for padding: documents of one token, however often repeated, without any label.

    Neither an id nor the end of a row tells padding: id 0 may be a text's last token, a tokenizer's padding have
    another id, and rows be joined to one.
    """
    ids = batch["input_ids"]
    starts = batch["position_ids"] == 0
    starts[:, 0] = True
    document = starts.flatten().cumsum(0) - 1
    marked = (batch["labels"] != IGNORE_INDEX) | ((ids != ids.roll(1, 1)) & ~starts)
    marks = torch.zeros(ids.numel(), device=ids.device).index_add(0, document, marked.flatten().float())
    return (marks[document] > 0).view(ids.shape)


def _require_no_media(batch: list[Row]) -> None:
    """Raise ValueError for rows with images or audio that were not removed before."""
    if any(name in row for row in batch for name in MEDIA_COLUMNS):
        raise ValueError(
            "data.source: its rows have images or audio, which are read only where all rows are prepared before "
            "training; set data.streaming to false"
        )


def collator(attention: str) -> Callable[[list[Row]], Batch]:
    """The collate function that isolates documents for a value of `model.attention`."""
    return collate_flat if attention.startswith("flash_attention") else collate


class PreparedData:
    """A folder of prepared data, read lazily. Its shards may be in an object store; see `shard_cache`.

    reference_log_probs: the reference model's log-probabilities, by split; the split's rows contain them.
    """

    rows_type = RowDataset
    cache_bytes = 32 << 30
    """Bytes that shards of an object store may take on this machine's disk."""
    cache_name: str | None = None
    """The name of a cache that other prepared data shares; by default one of its own."""

    def __init__(
        self, folder: Path, manifest: Manifest, reference_log_probs: dict[str, ReferenceLogProbs] | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.reference_log_probs = reference_log_probs or {}

    @classmethod
    def load(cls, folder: Path | str) -> PreparedData:
        """Raises ValueError when the folder has no prepared data or is incomplete."""
        folder = Path(folder)
        return cls(folder, Manifest.read(folder))

    @property
    def rows(self) -> int | None:
        """Number of training rows; None while they are being prepared."""
        return self.manifest.train.rows

    @property
    def train(self) -> RowDataset:
        """Rows of the training split."""
        return self._rows("train", self.manifest.train)

    @property
    def validation(self) -> RowDataset:
        """Rows of the validation split; empty when `data.validation_fraction` is 0 or there is only one sample."""
        return self._rows("validation", self.manifest.validation)

    def completed(self) -> PreparedData:
        """This data once all of it is prepared, after waiting for that."""
        return self

    def by_source(self) -> list[Self]:
        """The data of each single source, in the order of `manifest.single_sources`."""
        return [type(self)(self.folder, source) for source in self.manifest.single_sources]

    def validation_by_source(self) -> list[RowDataset | Subset[Row]]:
        """Rows of the validation split of each source, in the order of `manifest.single_sources`."""
        ends = list(accumulate(source.validation.rows for source in self.manifest.single_sources))
        if len(ends) == 1:
            return [self.validation]
        return [Subset(self.validation, range(first, end)) for first, end in pairwise([0, *ends])]

    def with_reference_log_probs(self, **reference_log_probs: ReferenceLogProbs) -> PreparedData:
        """The same data, with a tensor `reference` in the rows of the given splits."""
        found = type(self)(self.folder, self.manifest, self.reference_log_probs | reference_log_probs)
        found.cache_bytes = self.cache_bytes
        return found

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the data, including its chat template."""
        return AutoTokenizer.from_pretrained(str(self.folder / TOKENIZER), trust_remote_code=False)

    def samples(self, n: int | None = None) -> list[Sample]:
        """The first `n` samples of the validation split, or all; at most 64 of each source are stored."""
        stored = json.loads((self.folder / SAMPLES).read_text(encoding="utf-8"))
        return [Sample(**sample) for sample in stored[:n]]

    def _rows(self, name: str, split: Split) -> RowDataset:
        return self._dataset(Shards(self.folder, split, self.cache()), self.reference_log_probs.get(name))

    def _dataset(self, shards: Shards, reference: ReferenceLogProbs | None) -> RowDataset:
        manifest = self.manifest
        return self.rows_type(
            shards,
            length=manifest.sequence_length if manifest.packing else None,
            pad_token_id=manifest.pad_token_id,
            paired=manifest.format in PREFERENCES,
            reference=reference,
            longest=manifest.sequence_length,
            scored=manifest.recipe.get("objective") == "reward",
        )

    def cache(self) -> ShardCache | None:
        """The cache of the shards, if they are in an object store."""
        if self.manifest.url is None:
            return None
        own = self.manifest.recipe_hash
        prefix = "" if self.cache_name is None else f"{own}-"
        return ShardCache(ShardStore(self.manifest.url), cache_folder(self.cache_name or own), self.cache_bytes, prefix)
