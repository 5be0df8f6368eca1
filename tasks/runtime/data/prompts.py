"""Rows that are prompts: how they come from the prepared data, and which answers a step asks for."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.runtime.data.dataset import COLUMNS, IGNORE_INDEX, Batch, Row, RowDataset
from tasks.runtime.data.mixture import RowOrder

ANSWER = "answer"
"""Column of a row that asks for one answer: its number in the endless stream of answers, [T], int64."""


class Prompt(NamedTuple):
    """A prompt of a batch.

    known: what rewards get of its row; see `dataset.COLUMNS`. answer: the number of the answer that is asked for, or
    None outside of training.
    """

    token_ids: tuple[int, ...]
    known: dict[str, Any]
    answer: int | None


# Numbers from here on are those of answers to replacements; steps read those below. Both are exact in fp64.
_REPLACEMENTS = 1 << 50


def replacement_of(answer: int, round_number: int, *, rounds: int, rows_per_step: int, group_size: int) -> int:
    """The number of the answer that replaces number `answer` of a step in a round, 1 to `rounds`.

    A pure function: no two answers have the same replacement, and a run that resumes draws the same ones. The answers
    of a group are replaced by those of another group.
    """
    step, place = divmod(answer, rows_per_step)
    first = _REPLACEMENTS // group_size * group_size
    return first + (step * rounds + round_number - 1) * rows_per_step + place


class AnswerRows(Dataset[Row]):
    """The rows of a data set of prompts by the numbers of their answers: `group_size` answers to each prompt in turn.

    order: the endless stream of indices of prompts.
    """

    def __init__(self, rows: RowDataset, order: RowOrder, group_size: int) -> None:
        self._rows, self._order, self._group_size = rows, order, group_size

    def __len__(self) -> int:
        """Answers of an epoch."""
        return len(self._rows) * self._group_size

    def __getitem__(self, answer: int) -> Row:
        row = self._rows[self._order[answer // self._group_size]]
        return row | {ANSWER: torch.full_like(row["input_ids"], answer)}

    def prompt(self, answer: int) -> Prompt:
        """The prompt that an answer is asked for."""
        (found,) = prompts_of({name: tensor[None] for name, tensor in self[answer].items()})
        assert found is not None
        return found


def known_of(row: Row) -> dict[str, Any]:
    """What rewards get of a row."""
    return _parsed(row[COLUMNS])


def prompts_of(batch: Batch) -> list[Prompt | None]:
    """The prompts of a batch on the host; None for a row that only fills it up."""
    found: list[Prompt | None] = []
    for row in range(batch["input_ids"].shape[0]):
        last = (batch["labels"][row] != IGNORE_INDEX).nonzero().flatten().tolist()
        if not last:
            found.append(None)
            continue
        ids = tuple(batch["input_ids"][row, : last[0] + 1].tolist())
        answer = int(batch[ANSWER][row, 0]) if ANSWER in batch else None
        found.append(Prompt(ids, _parsed(batch[COLUMNS][row]), answer))
    return found


def _parsed(columns: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(columns.numpy().tobytes())
    return found
