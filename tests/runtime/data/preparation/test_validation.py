"""What is held out: whole samples, or the ends of texts where whole ones would be too much."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.runtime.data.preparation.validation import hold_out

HELD_OUT = {
    # Samples of pieces, the fraction, and the pieces that are held out.
    "one piece": ([1], 0.5, []),
    "at least one": ([3], 0.05, [2]),
    "of each": ([20, 10, 1], 0.1, [18, 19, 29]),
    "none": ([9], 0.0, []),
}


@pytest.mark.parametrize(("counts", "fraction", "expected"), HELD_OUT.values(), ids=HELD_OUT)
def test_ends_are_held_out_where_whole_texts_are_too_much(
    counts: list[int], fraction: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = np.repeat(np.arange(len(counts)) * 3, counts)
    # The longest would be held out whole.
    monkeypatch.setattr("tasks.runtime.data.preparation.validation.uniform", lambda seed, sample: float(sample > 0))
    mask, ends = hold_out(samples, np.full(samples.size, 16), fraction=fraction, seed=0, divisible=True)
    assert np.flatnonzero(mask).tolist() == expected and ends == bool(expected)


def test_whole_texts_are_held_out_where_they_are_many() -> None:
    samples = np.repeat(np.arange(400), 2)
    mask, ends = hold_out(samples, np.full(800, 16), fraction=0.1, seed=0, divisible=True)
    assert not ends and (mask[::2] == mask[1::2]).all() and 20 <= mask[::2].sum() <= 60


def test_the_seed_decides_which_samples_are_held_out() -> None:
    """As chance would: samples that two seeds hold out are as many as of two draws."""
    samples = np.arange(4000)
    first, again, other = (
        hold_out(samples, np.full(4000, 16), fraction=0.1, seed=seed, divisible=False)[0] for seed in (0, 0, 256)
    )
    assert (first == again).all() and 300 < other.sum() < 500
    assert 10 < (first & other).sum() < 80
