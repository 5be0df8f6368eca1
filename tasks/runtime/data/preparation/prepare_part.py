"""Prepare one part of a source: tokenize its rows, hold out the validation split, pack, and write shards."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from tasks.runtime.data.formats.columns import PROMPTS
from tasks.runtime.data.formats.known_formats import Format
from tasks.runtime.data.media.kinds import MediaCounts
from tasks.runtime.data.preparation.document_buffer import SHARD_TOKENS, DocumentBuffer
from tasks.runtime.data.preparation.encode import Encoded, Encoder
from tasks.runtime.data.preparation.encode_rows import Report, encode_rows, numbered
from tasks.runtime.data.preparation.packing import Ints
from tasks.runtime.data.preparation.part_records import MAX_GENERATION_SAMPLES, PartRecord, weighted_median
from tasks.runtime.data.preparation.parts import Part
from tasks.runtime.data.preparation.validation import hold_out
from tasks.runtime.data.prepared_manifest import Sample, Split
from tasks.runtime.data.reading.rows import Row
from tasks.runtime.data.reading.sources import Source

# Samples of a part have numbers of their own, by which some are held out.
_NUMBERS = 1 << 40
# Of images or audio, or of a teacher's log-probabilities, in a file of rows, about.
_SHARD_BYTES = 1 << 28


def numbered_rows(part: Part, source: Source, recipe: DataRecipe) -> Iterator[tuple[int, Row]]:
    """The rows of a part with the numbers of their samples, which no other part has."""
    for number, row in numbered(part.rows(source), recipe.data.max_samples):
        yield part.place * _NUMBERS + number, row


class PartPreparer:
    """Prepares parts of one source.

    shard_tokens: tokens after which documents are packed and written. They bound the memory that a part takes.
    """

    def __init__(
        self,
        recipe: DataRecipe,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        row_format: Format,
        *,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self._recipe, self._source, self._tokenizer, self._format = recipe, source, tokenizer, row_format
        self._shard_tokens = shard_tokens
        # By split, the last sample that was written.
        self._last: dict[str, int] = {}
        splits = recipe.objective == "pretrain" or row_format.name == "text"
        self.encoder = Encoder(
            tokenizer,
            learn_all=recipe.data.train_on == "all",
            longest=None if splits else recipe.data.sequence_length,
            media_ids=row_format.media_ids,
        )

    def prepare(self, part: Part, folder: Path, suffix: str, report: Report) -> PartRecord:
        """Write the shards of a part to `folder`, as `train<suffix>-00000.safetensors` and so on.

        Raises:
            ValueError: a row is invalid and `data.invalid` is `error`, or overlong and `data.overlong` is `error`.
        """
        special = self._format.special_tokens
        special.found, special.example = 0, None
        media = self._format.media
        before = replace(media.counts) if media else MediaCounts()
        self.encoder.turn_end_ids.clear()
        record, self._last = PartRecord(), {}
        with DocumentBuffer(folder) as buffer:

            def write_full() -> None:
                if buffer.held_tokens >= self._shard_tokens or buffer.held_bytes >= _SHARD_BYTES:
                    self._write(buffer, folder, suffix, record)

            rows = numbered_rows(part, self._source, self._recipe)
            record.counts = encode_rows(self._recipe, rows, self._format, self.encoder, buffer, report, write_full)
            self._write(buffer, folder, suffix, record)
            record.largest_token_id = buffer.largest_token_id
        record.turn_end_ids = sorted(self.encoder.turn_end_ids)
        if media and media.used:
            record.medium = media.used.medium.name
            record.media_read = media.counts.read - before.read
            record.media_changed = media.counts.changed - before.changed
            record.media_reduced = media.counts.reduced - before.reduced
        record.special_found, record.special_example = special.found, special.example
        return record

    def _write(self, buffer: DocumentBuffer, folder: Path, suffix: str, record: PartRecord) -> None:
        """Pack the documents in the buffer into rows, write them, and empty the buffer."""
        if not buffer.held_tokens:
            return
        recipe, samples, lengths = self._recipe, buffer.samples, buffer.lengths
        text = self._format.name == "text"
        in_validation, ends = hold_out(
            samples, lengths, fraction=recipe.data.validation_fraction, seed=recipe.seed, divisible=text
        )
        if recipe.validation_only:
            in_validation = np.ones_like(in_validation)
        for name, chosen in (("train", ~in_validation), ("validation", in_validation)):
            before: Split = getattr(record, name)
            continued = self._continues(name, samples[chosen])
            written = buffer.write_shards(
                folder,
                f"{name}{suffix}",
                np.flatnonzero(chosen),
                first=len(before.shards),
                length=recipe.data.sequence_length if recipe.data.packing else None,
                seed=recipe.seed,
                group_size=2 if self._format.paired else 1,
                shard_tokens=buffer.held_tokens,
            )
            setattr(record, name, before + replace(written, samples=written.samples - continued))
        record.ends = record.ends or ends
        if text:
            _count_texts(record, samples, lengths, continued=self._continues("texts", samples))
        # The first document of each validation sample, or any end of a text.
        shown = np.flatnonzero(in_validation & (ends | (np.diff(samples, prepend=-1) != 0)))
        generates = self._format.name in PROMPTS
        for document in shown[: MAX_GENERATION_SAMPLES - len(record.samples)]:
            found = buffer.document(int(document))
            if generates:
                sample: Sample | None = Sample(self._tokenizer.decode(found.ids.tolist()), "", found.ids.tolist())
            else:
                sample = _generation_sample(found, self._tokenizer, self.encoder.prefix_ids, self._format.media_ids())
            record.samples += [sample] if sample else []
        buffer.clear()

    def _continues(self, name: str, samples: Ints) -> bool:
        """Whether the first sample was in the shard before, too."""
        continued = bool(samples.size) and self._last.get(name) == samples[0]
        if samples.size:
            self._last[name] = int(samples[-1])
        return continued


def _count_texts(record: PartRecord, samples: Ints, lengths: Ints, *, continued: bool) -> None:
    texts, pieces_of = np.unique(samples, return_inverse=True)
    # Each piece of a text repeats the last token of the one before.
    tokens = np.bincount(pieces_of, weights=lengths - 1) + 1
    record.median = weighted_median([(record.median, record.documents), (int(np.median(tokens)), texts.size)])
    record.documents += texts.size - continued


def _generation_sample(
    document: Encoded, tokenizer: PreTrainedTokenizerBase, prefix_ids: list[int], media_ids: Collection[int]
) -> Sample | None:
    """A document as prompt and completion; a document without a prompt is split in the middle."""
    begin, end = document.completion_span
    ids = document.ids.tolist()
    skipped = len(prefix_ids) if ids[: len(prefix_ids)] == prefix_ids else 0
    if begin <= skipped:
        begin = (begin + end + 1) // 2
    if not skipped < begin < end:
        return None
    if any(stands in media_ids for stands in ids[begin:]) and document.media:
        # The prompt has a part of the images or audio.
        return None
    # One token for each image or audio, which has hundreds.
    shown = [
        one
        for before, one in zip([None, *ids[skipped:begin]], ids[skipped:begin], strict=False)
        if not document.media or one != before or one not in media_ids
    ]
    return Sample(
        prompt=tokenizer.decode(shown, clean_up_tokenization_spaces=False),
        completion=tokenizer.decode(ids[begin:end], skip_special_tokens=True, clean_up_tokenization_spaces=False),
        prompt_ids=ids[:begin],
        media=tuple(base64.b64encode(content).decode() for content in document.media),
    )
