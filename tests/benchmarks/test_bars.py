"""The table of the bars: each is met or missed by what was measured, and what limits a missed one is named."""

from benchmarks.bars import bars
from benchmarks.first_step import Measured

ROW = {"request": 0.5, "start task": 4.0, "imports": 6.0, "first step": 0.1, "first step ends": 20.0,
       "rest of training": 11.0, "last task": 18.0, "run ends": 58.0}  # fmt: skip
CPU = {"list": 0.3, "submit": 0.5}


def table(rows=(ROW,), jobs=0, cpu=CPU):
    return [(row.bar, row.measured, row.met) for row in bars(Measured(list(rows), 8.4, jobs), cpu)]


def test_bars_that_are_met_have_the_medians_and_the_slowest_command():
    assert table([ROW, ROW | {"first step ends": 30.0}, ROW | {"first step ends": 22.0}]) == [
        ("35 s at most", "22.0 s, 20.0 to 30.0", True),
        ("75 s at most", "58.0 s, 58.0 to 58.0", True),
        ("starts no job", "0 jobs, 8.4 s", True),
        ("less than 1.0 s", "0.50 s, submit", True),
    ]


def test_missed_bars_name_what_takes_longest():
    slow = ROW | {"imports": 31.0, "first step ends": 45.0, "run ends": 83.0}
    found = list(bars(Measured([slow], 8.4, 1), CPU | {"submit": 1.24, "estimate": 1.0}))
    assert [row.met for row in found] == [False] * 4
    assert found[0].limits == "imports 31.0 s, start task 4.0 s, request 0.5 s"
    assert found[1].limits == "first step ends 45.0 s, last task 18.0 s, rest of training 11.0 s"
    assert found[3].limits == "submit 1.24 s, estimate 1.00 s"
