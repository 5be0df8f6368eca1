"""Buffer on disk for tokenized documents, until they are packed into rows and written as shards.

Memory holds a few numbers per document and one shard at a time, whatever the size of the data.
"""

from __future__ import annotations

import hashlib
from array import array
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tasks.runtime.data.formats.teacher_columns import TopTokens
from tasks.runtime.data.preparation.encode import Encoded
from tasks.runtime.data.preparation.packing import Ints, pack
from tasks.runtime.data.prepared_manifest import Shard, Split

# About 84 MB in a file: enough for a fast download, little enough to keep some on any machine.
SHARD_TOKENS = 1 << 24


class DocumentBuffer:
    """Tokenized documents in order of arrival, in temporary files in `folder`. A context manager.

    tokens: of all documents so far. held_tokens, and held_bytes of media, of columns and of a teacher's tokens: of
    those that `clear` has not removed.
    """

    def __init__(self, folder: Path) -> None:
        names = ("ids", "targets", "media", "top-ids", "top-log-probs", "columns")
        self._paths = tuple(folder / f"{name}.spool" for name in names)
        # Closed in __exit__.
        self._files = tuple(open(path, "wb") for path in self._paths)  # noqa: SIM115
        self._ids, self._targets, self._media, self._top_ids, self._top_log_probs, self._columns = self._files
        self._column_sizes = array("q")
        # Of each document, the targets that a teacher's tokens are known of, and how many of these each has.
        self._top_counts, self._top_widths = array("q"), array("q")
        self._media_sizes, self._media_counts = array("q"), array("q")
        self._lengths, self._samples = array("q"), array("q")
        self._completion_spans, self._scores = array("q"), array("f")
        self.tokens = self.held_tokens = self.held_bytes = 0
        self.largest_token_id = 0

    def __enter__(self) -> DocumentBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
        for path in self._paths:
            path.unlink()

    def add(self, encoded: Encoded, sample: int) -> None:
        """Append a document of sample number `sample`."""
        self._ids.write(encoded.ids.tobytes())
        self._targets.write(encoded.targets.tobytes())
        self._lengths.append(len(encoded))
        self._samples.append(sample)
        self._completion_spans.extend(encoded.completion_span)
        if encoded.score is not None:
            self._scores.append(encoded.score)
        # All documents have a score, or none.
        assert len(self._scores) in (0, len(self._lengths))
        if encoded.columns is not None:
            self._columns.write(encoded.columns)
            self._column_sizes.append(len(encoded.columns))
            self.held_bytes += len(encoded.columns)
        for content in encoded.media:
            self._media.write(content)
            self._media_sizes.append(len(content))
        self._media_counts.append(len(encoded.media))
        self.held_bytes += sum(map(len, encoded.media))
        self._add_top_tokens(encoded)
        self.tokens += len(encoded)
        self.held_tokens += len(encoded)
        self.largest_token_id = max(self.largest_token_id, int(encoded.ids.max()))

    def _add_top_tokens(self, encoded: Encoded) -> None:
        top = encoded.top_tokens
        if top is None:
            # All documents have a teacher's tokens, or none.
            assert not self._top_counts
            return
        assert len(self._top_counts) == len(self._lengths) - 1
        self._top_ids.write(np.ascontiguousarray(top.token_ids).tobytes())
        self._top_log_probs.write(np.ascontiguousarray(top.log_probs).tobytes())
        self._top_counts.append(top.token_ids.shape[0])
        self._top_widths.append(top.token_ids.shape[1])
        self.held_bytes += top.token_ids.nbytes + top.log_probs.nbytes
        given = top.token_ids[~np.isneginf(top.log_probs)]
        self.largest_token_id = max(self.largest_token_id, int(given.max(initial=0)))

    def clear(self) -> None:
        """Forget the documents, but not the counts of tokens."""
        for file in self._files:
            file.seek(0)
            file.truncate()
        self._lengths, self._samples, self._completion_spans = array("q"), array("q"), array("q")
        self._scores, self._column_sizes = array("f"), array("q")
        self._media_sizes, self._media_counts = array("q"), array("q")
        self._top_counts, self._top_widths = array("q"), array("q")
        self.held_tokens = self.held_bytes = 0

    @property
    def samples(self) -> Ints:
        """Sample number of each document: [D], int64."""
        return np.array(self._samples, dtype=np.int64)

    @property
    def lengths(self) -> Ints:
        """Tokens of each document: [D], int64."""
        return np.array(self._lengths, dtype=np.int64)

    def document(self, index: int) -> Encoded:
        """The document that was added as number `index`."""
        ids, targets = self._memory_map()
        begin = int(np.sum(np.array(self._lengths[:index], dtype=np.int64)))
        end = begin + self._lengths[index]
        return Encoded(
            ids[begin:end],
            targets[begin:end],
            (self._completion_spans[2 * index], self._completion_spans[2 * index + 1]),
            media=tuple(content.tobytes() for content in self._media_of(np.array([index]))),
        )

    def write_shards(
        self,
        folder: Path,
        name: str,
        documents: Ints,
        *,
        length: int | None,
        seed: int,
        group_size: int = 1,
        first: int = 0,
        shard_tokens: int = SHARD_TOKENS,
    ) -> Split:
        """Pack `documents` into rows and write the rows to files `<name>-<number>.safetensors`, from the
        number `first` on.

        Groups of `group_size` consecutive documents share a row, next to each other. With `length`, groups are packed
        into rows of that length; otherwise each group is a row. Rows are shuffled with the seed, because packing sorts
        them by the lengths of their documents.

        A file holds `input_ids` [N] (int32) and `targets` [N] (bool) of all its rows, concatenated; `documents` [D + 1]
        (int64), the offset of each document; `rows` [R + 1] (int64), the first document of each row; and `scores` [D]
        (float32), if documents have them. With a teacher's tokens, also `top_token_ids` [targets, K] (int32) and
        `top_log_probs` [targets, K] (float32) of all targets, concatenated; see `TopTokens`. With images or
        audio, also `media` [bytes] (uint8) of all of them, concatenated; `media_ends` [M + 1] (int64), the offset of
        each; `document_media` [D + 1] (int64), the first one of each document. With prompts, `columns` [bytes] (uint8)
        of all documents and `column_ends` [D + 1] (int64), the offset of each.
        """
        lengths = self.lengths
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        chosen = lengths[documents]
        groups = chosen.reshape(-1, group_size).sum(axis=1)
        row_of = np.repeat(pack(groups, length) if length else np.arange(groups.size), group_size)
        count = int(row_of.max()) + 1 if row_of.size else 0
        row_of = np.random.default_rng(seed).permutation(count)[row_of]
        order = np.argsort(row_of, kind="stable")
        documents, row_of = documents[order], row_of[order]
        ids, targets = self._memory_map()
        scores = np.array(self._scores, dtype=np.float32)
        shards: list[Shard] = []
        target_tokens = media = 0
        row_tokens = np.bincount(row_of, weights=lengths[documents], minlength=count).astype(np.int64)
        for begin, end in _shard_ranges(row_tokens, shard_tokens):
            in_shard = slice(*np.searchsorted(row_of, [begin, end]))
            spans = [slice(offsets[document], offsets[document + 1]) for document in documents[in_shard]]
            tensors: dict[str, npt.NDArray[np.generic]] = {
                "input_ids": np.concatenate([ids[span] for span in spans]),
                "targets": np.concatenate([targets[span] for span in spans]),
                "documents": np.concatenate([[0], np.cumsum(lengths[documents[in_shard]])]).astype(np.int64),
                "rows": np.searchsorted(row_of[in_shard], np.arange(begin, end + 1)).astype(np.int64),
            }
            if scores.size:
                tensors["scores"] = scores[documents[in_shard]]
            tensors |= self._top_tensors(documents[in_shard])
            tensors |= self._media_tensors(documents[in_shard]) | self._column_tensors(documents[in_shard])
            media += tensors["media_ends"].size - 1 if "media_ends" in tensors else 0
            path = folder / f"{name}-{first + len(shards):05d}.safetensors"
            save_file(tensors, path)
            shards.append(Shard(path.name, end - begin, path.stat().st_size, _digest(tensors)))
            target_tokens += int(tensors["targets"].sum())
        return Split(
            samples=np.unique(self.samples[documents]).size,
            documents=documents.size,
            tokens=int(chosen.sum()),
            target_tokens=target_tokens,
            rows=count,
            shards=tuple(shards),
            media=media,
        )

    def _top_tensors(self, documents: Ints) -> dict[str, npt.NDArray[np.generic]]:
        """The tensors of a shard for a teacher's tokens; {} without one."""
        if not self._top_counts:
            return {}
        counts, widths = (np.array(values, dtype=np.int64) for values in (self._top_counts, self._top_widths))
        ends = np.concatenate([[0], np.cumsum(counts * widths)])
        self._top_ids.flush()
        self._top_log_probs.flush()
        ids, log_probs = np.memmap(self._paths[3], np.int32, "r"), np.memmap(self._paths[4], np.float32, "r")
        parts, width = [], int(widths[documents].max())
        for document in documents:
            span, shape = slice(ends[document], ends[document + 1]), (counts[document], widths[document])
            part = TopTokens(ids[span].reshape(shape), log_probs[span].reshape(shape))
            parts.append(part.widened(width))
        names = ("top_token_ids", "top_log_probs")
        return dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))

    def _media_tensors(self, documents: Ints) -> dict[str, npt.NDArray[np.generic]]:
        """The tensors of a shard for the images or audio of its documents; {} without any."""
        counts = np.array(self._media_counts, dtype=np.int64)[documents]
        if not counts.sum():
            return {}
        found = self._media_of(documents)
        return {
            "media": np.concatenate(found),
            "media_ends": np.concatenate([[0], np.cumsum([content.size for content in found])]).astype(np.int64),
            "document_media": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        }

    def _column_tensors(self, documents: Ints) -> dict[str, npt.NDArray[np.generic]]:
        """The tensors of a shard for the columns of its documents; {} without any."""
        if not self._column_sizes:
            return {}
        self._columns.flush()
        content = np.memmap(self._paths[-1], np.uint8, "r")
        ends = np.concatenate([[0], np.cumsum(np.array(self._column_sizes, dtype=np.int64))])
        found = [content[ends[document] : ends[document + 1]] for document in documents]
        sizes = [columns.size for columns in found]
        return {
            "columns": np.concatenate(found),
            "column_ends": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        }

    def _media_of(self, documents: Ints) -> list[npt.NDArray[np.uint8]]:
        """The bytes of the images or audio of some documents, in order."""
        if not self._media_sizes:
            return []
        self._media.flush()
        content = np.memmap(self._paths[2], np.uint8, "r")
        ends = np.concatenate([[0], np.cumsum(np.array(self._media_sizes, dtype=np.int64))])
        first = np.concatenate([[0], np.cumsum(np.array(self._media_counts, dtype=np.int64))])
        return [
            content[ends[number] : ends[number + 1]]
            for document in documents
            for number in range(first[document], first[document + 1])
        ]

    def _memory_map(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        self._ids.flush()
        self._targets.flush()
        return np.memmap(self._paths[0], np.int32, "r"), np.memmap(self._paths[1], np.bool_, "r")


def _digest(tensors: dict[str, npt.NDArray[np.generic]]) -> str:
    result = hashlib.sha256()
    for name, tensor in tensors.items():
        result.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        result.update(np.ascontiguousarray(tensor).data)
    return result.hexdigest()


def _shard_ranges(row_tokens: Ints, shard_tokens: int) -> list[tuple[int, int]]:
    """Ranges of rows, as (first, last + 1), with about `shard_tokens` tokens each."""
    shard_of = (np.cumsum(row_tokens) - row_tokens) // shard_tokens
    bounds = [0, *(np.flatnonzero(np.diff(shard_of)) + 1).tolist(), row_tokens.size]
    return [(a, b) for a, b in pairwise(bounds) if b > a]
