"""Progress lines are decoded; text that only looks like one is not."""

import pytest

from strata_platform import progress_line
from strata_platform.runs import Stage


@pytest.mark.parametrize(
    "values",
    [
        {"stage": Stage.TRAINING, "steps": 10, "attempt": 0},
        {"point": {"step": 1}},
        {"invented later": [1]},
    ],
)
def test_values_survive_encoding(values):
    assert progress_line.decode(progress_line.encode(values)) == values


@pytest.mark.parametrize(
    "line",
    [
        "step 4/10",
        ' @strata {"stage": "training"}',
        "@strata {torn",
        '@strata ["stage"]',
        '@strata {"stage": "boom"}',
        '@strata {"stage": ["training"]}',
        '@strata {"stage": null}',
        '@strata {"stage": "training", "steps": "10"}',
        '@strata {"steps": -1}',
        '@strata {"attempt": true}',
        '@strata {"point": 4}',
    ],
)
def test_text_that_looks_like_progress_is_text(line):
    assert progress_line.decode(line) is None
