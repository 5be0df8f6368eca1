"""Which rows a step reads depends on the seed and the step alone."""

from types import SimpleNamespace

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime.data.dataset import collate
from tasks.runtime.data.loader import MicroBatchSampler, training_loader
from tasks.runtime.data.row_order import ShuffledRows
from tasks.runtime.process.ranks import Processes

ROWS = 10


def rows_of_step(step, *, size, accumulation, processes, seed=0):
    """All rows of a step, over its micro-batches and processes."""
    spec = RunSpec.model_validate(
        {
            "seed": seed,
            "training": {"micro_batch_size": size, "gradient_accumulation_steps": accumulation},
            "topology": {"nproc_per_node": processes},
            "parallel": {"type": "ddp"},
        }
    )
    shares = [
        MicroBatchSampler(
            spec, Processes(rank, rank, processes), ShuffledRows(ROWS, spec.seed), start=step, stop=step + 1
        )
        for rank in range(processes)
    ]
    assert all(len(share) == accumulation == len(list(share)) for share in shares)
    return [row for micro_batches in zip(*shares, strict=True) for rows in micro_batches for row in rows]


def test_every_epoch_has_every_row_once_in_another_order():
    order = ShuffledRows(ROWS, seed=3)
    epochs = [[order[epoch * ROWS + index] for index in range(ROWS)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [ShuffledRows(ROWS, seed=4)[index] for index in range(ROWS)] not in epochs


@pytest.mark.parametrize(
    ("size", "accumulation", "processes"),
    [(4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)],
    ids=lambda value: str(value),
)
def test_a_step_has_the_same_rows_however_they_are_spread(size, accumulation, processes):
    order = ShuffledRows(ROWS, seed=0)
    for step in range(6):
        rows = rows_of_step(step, size=size, accumulation=accumulation, processes=processes)
        assert rows == [order[position] for position in range(4 * step, 4 * step + 4)]


def test_steps_follow_each_other_wherever_one_begins():
    spec = RunSpec.model_validate({"training": {"micro_batch_size": 3}})
    whole = list(MicroBatchSampler(spec, Processes(), ShuffledRows(ROWS, spec.seed), start=0, stop=9))
    assert list(MicroBatchSampler(spec, Processes(), ShuffledRows(ROWS, spec.seed), start=4, stop=9)) == whole[4:]


def test_reading_rows_draws_no_random_number_that_training_may_draw():
    """A resumed run begins to read once more than an undisturbed one."""

    class Rows(list):
        def by_source(self, manifest):
            return [(0, None)]

    rows = Rows([{name: torch.zeros(8, dtype=torch.int64) for name in ("input_ids", "labels", "position_ids")}] * ROWS)
    source = SimpleNamespace(train=SimpleNamespace(rows=ROWS))
    data = SimpleNamespace(train=rows, manifest=SimpleNamespace(trained=[source], has_media=False))
    loader = training_loader(RunSpec(), data, Processes(), collate=collate, start=0, stop=2)
    before = torch.get_rng_state()
    assert len(list(loader)) == 2
    assert torch.equal(torch.get_rng_state(), before)
