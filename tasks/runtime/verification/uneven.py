"""The prepared data with targets taken away, so that rows have very different numbers of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.runtime.data import PreparedData, Rows
from tasks.runtime.data.dataset import IGNORED, Row
from tasks.runtime.data.order import RowOrder
from tasks.runtime.data.prepared_manifest import Split


class UnevenRows(Rows):
    """The row that the first step begins with has all of its targets, others the last one of each document.

    A loss that weighs rows or micro-batches alike, and not targets, is then another one.
    """

    first: int | None = None

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        return row if index == self.first else {**row, "labels": _thinned(row)}


class UnevenData(PreparedData):
    """Prepared data with such rows."""

    rows_type = UnevenRows

    def _rows(self, name: str, split: Split) -> Rows:
        rows = super()._rows(name, split)
        assert isinstance(rows, UnevenRows)
        rows.first = RowOrder(len(rows), self.manifest.recipe["seed"])[0] if len(rows) else None
        return rows


def _thinned(row: Row) -> Tensor:
    documents = (row["position_ids"] == 0).cumsum(0)
    learned = (row["labels"] != IGNORED).nonzero().flatten()
    last = {int(documents[place]): int(place) for place in learned}
    kept = torch.tensor(list(last.values()), dtype=torch.int64)
    labels = torch.full_like(row["labels"], IGNORED)
    labels[kept] = row["labels"][kept]
    return labels


def targets(row: Row) -> int:
    """Tokens of the row that carry loss."""
    return int((row["labels"] != IGNORED).sum())
