"""Prepared data with most targets removed, so that rows have very different numbers of targets."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from tasks.runtime.data import PreparedData, RowDataset
from tasks.runtime.data.dataset import IGNORE_INDEX, Row
from tasks.runtime.data.prepared_manifest import Split
from tasks.runtime.data.row_order import shuffled_sources


class UnevenRows(RowDataset):
    """The first row that is read of each source keeps all its targets, the others only the last of each document.

    A loss that weighs rows or micro-batches equally, instead of targets, then has another value.
    """

    first: frozenset[int] = frozenset()

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        return row if index in self.first else {**row, "labels": _thinned(row)}


class UnevenData(PreparedData):
    """Prepared data with `UnevenRows`."""

    rows_type = UnevenRows

    def _rows(self, name: str, split: Split) -> RowDataset:
        rows = super()._rows(name, split)
        assert isinstance(rows, UnevenRows)
        if name == "train":
            first = list(accumulate((source.train.rows for source in self.manifest.trained), initial=0))
            orders = shuffled_sources(self.manifest, self.manifest.recipe["seed"])
            rows.first = frozenset(begin + order[0] for begin, order in zip(first, orders, strict=False))
        return rows


def _thinned(row: Row) -> Tensor:
    documents = (row["position_ids"] == 0).cumsum(0)
    learned = (row["labels"] != IGNORE_INDEX).nonzero().flatten()
    last = {int(documents[place]): int(place) for place in learned}
    kept = torch.tensor(list(last.values()), dtype=torch.int64)
    labels = torch.full_like(row["labels"], IGNORE_INDEX)
    labels[kept] = row["labels"][kept]
    return labels


def targets(row: Row) -> int:
    """Tokens of the row that carry loss."""
    return int((row["labels"] != IGNORE_INDEX).sum())
