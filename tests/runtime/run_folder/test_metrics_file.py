"""Metrics survive kills: a torn line costs itself alone, a repeated step counts once."""

import json
import logging
from dataclasses import replace
from math import inf, nan

from strata_platform.runs import MetricPoint
from tasks.runtime.run_folder.metrics_file import MetricsFile, read_points

POINT = MetricPoint(
    step=1,
    attempt=0,
    time=1.0,
    loss=2.5,
    learning_rate=0.1,
    grad_norm=None,
    tokens=10,
    target_tokens=8,
    tokens_per_second=5.0,
    step_seconds=2.0,
    memory_bytes=1,
)


def write(path, *points):
    file = MetricsFile(path)
    file.write(list(points))
    file.close()


def test_points_round_trip_exactly(tmp_path):
    points = [replace(POINT, step=step, loss=1 / 3 + step) for step in (1, 2)]
    write(tmp_path / "m.jsonl", *points)
    assert read_points(tmp_path / "m.jsonl") == points


def test_every_line_is_json_and_numbers_that_are_not_finite_round_trip(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    point = replace(POINT, loss=nan, grad_norm=inf, metrics={"reward_margin": -inf, "accuracy": 0.5}, skipped=1)
    write(tmp_path / "m.jsonl", point)
    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert repr(read_points(tmp_path / "m.jsonl")) == repr([point])


def test_newest_attempt_of_a_step_counts(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, POINT, replace(POINT, step=2, loss=9.0))
    write(path, replace(POINT, step=2, loss=3.0, attempt=1))
    assert [point.loss for point in read_points(path)] == [2.5, 3.0]


def test_torn_line_is_reported_and_costs_only_itself(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    write(path, POINT)
    with path.open("a") as file:
        file.write('{"step": 2, "los')
    write(path, replace(POINT, step=3))
    with caplog.at_level(logging.WARNING):
        assert [point.step for point in read_points(path)] == [1, 3]
    assert f"{path}:2" in caplog.text


def test_unknown_fields_of_a_later_version_are_passed_over(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, POINT)
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "new": 1}) + "\n")
    assert read_points(path) == [POINT]


def test_a_line_that_is_of_no_point_is_passed_over(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({**POINT.to_dict(), "metrics": None}) + "\n")
    write(path, POINT)
    assert read_points(path) == [POINT]


def test_no_file_has_no_points(tmp_path):
    assert read_points(tmp_path / "none.jsonl") == []
