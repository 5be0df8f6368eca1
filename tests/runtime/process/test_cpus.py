"""The processors of a container are those that its limit leaves, not those of the machine."""

import os
from pathlib import Path

import pytest

from tasks.runtime.process.cpus import available_cpus


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 16)],
)
def test_the_limit_of_a_container_counts(
    tmp_path: Path, limit: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert available_cpus(tmp_path / "cpu.max") == expected
    assert available_cpus(tmp_path / "missing") == 16
