"""`python -m tasks.runtime.teacher SPEC FOLDER`: write what a teacher says of the data, to distill from it later.

The files are Parquet, a row for each document: its `input_ids`, its `labels`, and for each token with loss the
teacher's likeliest tokens, `target_token_ids`, with their log-probabilities, `logprobs`. Under torchrun each process
writes files of its own. A second start writes the files that are missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from strata_platform.errors import SpecError
from strata_platform.file_io import write_atomic
from strata_platform.outcomes import BAD_INPUT, PREEMPTED, UNREACHABLE, Outcome
from strata_platform.redact import redacted
from strata_platform.spec import RunSpec, load_spec
from strata_platform.spec.sections.objectives import Distill
from tasks.runtime.process.log import configure_logging

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.runtime.data import PreparedData, RowDataset
    from tasks.runtime.data.dataset import Batch
    from tasks.runtime.objectives.head_sums import Head
    from tasks.runtime.objectives.teacher_model import Teacher

log = logging.getLogger("tasks.runtime.teacher")

DESCRIPTION = "teacher.json"
TOP_K = 64
# Of the log-probabilities in a file, at most.
_FILE_BYTES = 1 << 27
# A token id and its log-probability.
_PLACE_BYTES = 8


def main() -> int:
    """Write the files. Exit codes as of `python -m tasks.runtime`."""
    parser = argparse.ArgumentParser(prog="python -m tasks.runtime.teacher", description=__doc__)
    parser.add_argument("spec", help="a run spec of objective.type distill with a teacher, YAML or JSON")
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--top-k", type=int, default=TOP_K, help=f"tokens at each position; by default {TOP_K}")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="set a field of the spec")
    arguments = parser.parse_args()
    try:
        spec = load_spec(arguments.spec, arguments.set)
    except SpecError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT.exit_code
    configure_logging()
    from tasks.runtime.process.errors import Unreachable
    from tasks.runtime.process.signals import Preempted, raise_on_sigterm

    try:
        with raise_on_sigterm():
            write_teacher_data(spec, arguments.folder, arguments.top_k)
    except Unreachable as error:
        return _failed(error, UNREACHABLE)
    except ValueError as error:
        return _failed(error, BAD_INPUT)
    except Preempted as signal_name:
        print(f"stopped by {signal_name}; start it again to write the files that are missing", file=sys.stderr)
        return PREEMPTED.exit_code
    return 0


def write_teacher_data(spec: RunSpec, folder: Path, top_k: int = TOP_K) -> None:
    """Write the files of both splits of the spec's data to `folder`, without those that are there.

    Raises:
        ValueError: the spec has no teacher, the teacher does not fit the data, or the folder has files of other data,
            of another teacher or another `top_k`.
        Unreachable: the Hub does not answer.
    """
    if not isinstance(spec.objective, Distill) or spec.objective.teacher is None:
        raise ValueError("objective.teacher: missing; set objective.type to 'distill' and name the teacher")
    if top_k < 1:
        raise ValueError(f"--top-k {top_k} must be at least 1")
    from tasks.runtime.data import prepare, recipe_of
    from tasks.runtime.objectives.teacher_model import Teacher, require_same_tokens
    from tasks.runtime.parallel.single import Single
    from tasks.runtime.process.ranks import Processes
    from tasks.runtime.run_folder.folder import data_folder

    processes = Processes.from_environment()
    recipe = recipe_of(spec)
    data = prepare(recipe, data_folder(spec.output, recipe), report=log.info)
    require_same_tokens(spec.objective, data)
    teacher = Teacher(spec)
    # Each process has the whole teacher and waits for no other.
    alone = replace(processes, rank=0, world_size=1)
    teacher.load(alone, data, Single(alone))
    writer = _Writer(spec, folder, teacher, data, top_k, alone.device)
    for split in ("train", "validation"):
        writer.write(split, getattr(data, split), processes.rank, processes.world_size)


class _Document(NamedTuple):
    """A row of a file."""

    input_ids: list[int]
    labels: list[int]
    target_token_ids: list[list[int]]
    logprobs: list[list[float]]


class _Writer:
    def __init__(
        self, spec: RunSpec, folder: Path, teacher: Teacher, data: PreparedData, top_k: int, device: Any
    ) -> None:
        from tasks.runtime.data import collator
        from tasks.runtime.models.attention.varlen_attention import with_cu_seqlens

        self._folder, self._teacher, self._device = folder, teacher, device
        collate = collator(spec.model.attention)
        self._collate = with_cu_seqlens(collate) if teacher.varlen else collate
        self._rows = spec.training.micro_batch_size
        # Tokens of the data. A teacher's head may be padded.
        self._vocabulary = max(data.tokenizer().get_vocab().values()) + 1
        self._top_k = min(top_k, self._vocabulary)
        longest = spec.data.sequence_length * self._top_k * _PLACE_BYTES
        self._rows_per_file = max(1, _FILE_BYTES // longest)
        self._describe(
            {
                "teacher": teacher.name,
                "fingerprint": teacher.fingerprint,
                "data": data.manifest.content_hash,
                "top_k": self._top_k,
                "rows_per_file": self._rows_per_file,
            }
        )

    def _describe(self, found: dict[str, Any]) -> None:
        """Raises ValueError if the folder is of something else."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / DESCRIPTION
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if other := [name for name in found if before.get(name) != found[name]]:
                raise ValueError(
                    f"{self._folder} has files of {other[0]} {before.get(other[0])!r}, not {found[other[0]]!r}; give "
                    "another folder, or remove it"
                )
        write_atomic(path, json.dumps(found, indent=2).encode(), durable=True)

    def write(self, split: str, rows: RowDataset, rank: int, world_size: int) -> None:
        """Write every `world_size`-th file of a split, from number `rank` on."""
        files = -(-len(rows) // self._rows_per_file)
        for number in range(rank, files, world_size):
            path = self._folder / f"{split}-{number:05d}-of-{files:05d}.parquet"
            if path.is_file():
                continue
            first = number * self._rows_per_file
            documents = list(self._documents(rows, range(first, min(first + self._rows_per_file, len(rows)))))
            write_atomic(path, _parquet(documents), durable=True)
            log.info("%s: %d documents", path, len(documents))

    def _documents(self, rows: RowDataset, numbers: range) -> Iterator[_Document]:
        for begin in range(0, len(numbers), self._rows):
            batch = self._collate([rows[index] for index in numbers[begin : begin + self._rows]])
            batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
            hidden, head = self._teacher.run(batch)
            for index in range(hidden.shape[0]):
                yield from self._of_row({name: batch[name][index] for name in _COLUMNS}, hidden[index], head)

    def _of_row(self, row: Batch, hidden: Tensor, head: Head) -> Iterator[_Document]:
        import torch

        from tasks.runtime.data.dataset import IGNORE_INDEX

        # A row's first token has no label.
        targets = (row["labels"] != IGNORE_INDEX).nonzero().flatten()
        if not targets.numel():
            return
        parts = [self._likeliest(head.logits(part)) for part in hidden[targets - 1].split(_ROWS_OF_LOGITS)]
        tokens, log_probs = (torch.cat(column).tolist() for column in zip(*parts, strict=True))
        starts = (row["position_ids"] == 0).nonzero().flatten()
        bounds = [*starts.tolist(), row["position_ids"].numel()]
        known = [*torch.searchsorted(targets, starts).tolist(), targets.numel()]
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        for (begin, end), (first, last) in zip(pairwise(bounds), pairwise(known), strict=True):
            # What has no label is padding.
            if first < last:
                yield _Document(ids[begin:end], labels[begin:end], tokens[first:last], log_probs[first:last])

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = logits.log_softmax(-1)[:, : self._vocabulary].topk(self._top_k)
        return tokens, values


_COLUMNS = ("input_ids", "labels", "position_ids")
_ROWS_OF_LOGITS = 256


def _parquet(documents: list[_Document]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    integers, numbers = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())
    types = (integers, integers, pyarrow.list_(integers), pyarrow.list_(numbers))
    columns = zip(*documents, strict=True)
    table = pyarrow.table(
        [pyarrow.array(column, type=kind) for column, kind in zip(columns, types, strict=True)],
        names=list(_Document._fields),
    )
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())


def _failed(error: Exception, outcome: Outcome) -> int:
    print(f"error: {redacted(str(error))}", file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
