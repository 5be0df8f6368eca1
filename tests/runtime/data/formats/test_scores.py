"""Labels and margins as people's files have them."""

import pytest

from tasks.runtime.data.formats.scores import label_of, margin_of
from tasks.runtime.data.reading.rows import Row, RowError

# Of JSON, of CSV files, of pandas, and of people.
GOOD = [True, 1, 1.0, "true", "True", "TRUE", "1", "1.0", "yes", "Yes", " true "]
BAD = [False, 0, 0.0, "false", "False", "FALSE", "0", "0.0", "no", "No", " false\n"]


def row(value):
    return Row("rows.jsonl line 1", {"label": value})


@pytest.mark.parametrize(("values", "expected"), [(GOOD, 1.0), (BAD, -1.0)], ids=["good", "bad"])
def test_labels_as_people_write_them(values, expected):
    assert [label_of(row(value), "label") for value in values] == [expected] * len(values)


@pytest.mark.parametrize("value", [None, "", "desirable", 2, -1, 0.5, [], "nan"])
def test_what_says_neither_is_refused(value):
    with pytest.raises(RowError, match=r"line 1: column 'label' holds .*; it must be true for a good answer"):
        label_of(row(value), "label")


def test_margins_may_be_texts_and_missing():
    assert [margin_of(row(value), "label") for value in (2, 0.5, "-1.5", None)] == [2.0, 0.5, -1.5, 0.0]
    for value in (True, "much", float("inf"), []):
        with pytest.raises(RowError, match="a margin is a finite number"):
            margin_of(row(value), "label")
