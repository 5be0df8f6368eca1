"""A large source is prepared in parts: by any number of processes to the same rows, and none of it twice."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, fingerprint, prepare
from tasks.runtime.data.preparation import pipeline

TEXTS = [f"def name_{number}(value): return value * {number}\n" * (1 + number % 5) for number in range(120)]
PART = 2000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PART_BYTES", PART)


def write(path: Path, texts: list[object]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def recipe_for(path: Path, **data: object) -> DataRecipe:
    values = {"source": str(path), "sequence_length": 32, "validation_fraction": 0.1, **data}
    spec = RunSpec.model_validate({"data": values, "objective": {"type": "pretrain"}})
    return DataRecipe.from_spec(spec, fingerprint(spec))


@pytest.fixture
def recipe(tmp_path: Path) -> DataRecipe:
    write(tmp_path / "rows.jsonl", TEXTS)
    return recipe_for(tmp_path / "rows.jsonl")


def contents(data: PreparedData) -> list[str]:
    """The documents of both splits, sorted: their tokens without the one that pieces of a text repeat."""
    tokenizer, found = data.tokenizer(), []
    for rows in (data.train, data.validation):
        for row in (rows[index] for index in range(len(rows))):
            starts = [*torch.nonzero(row["position_ids"] == 0).flatten().tolist(), row["input_ids"].numel()]
            found += [tokenizer.decode(row["input_ids"][a + 1 : b]) for a, b in pairwise(starts)]
    return sorted(text for text in found if text.replace("<|pad|>", ""))


def test_any_number_of_processes_makes_the_same_rows(tmp_path: Path, recipe: DataRecipe) -> None:
    lines: list[str] = []
    one = prepare(recipe, tmp_path / "one", report=lines.append, processes=1)
    two = prepare(recipe, tmp_path / "two", report=lines.append, processes=2)
    assert any("parts in 1 processes" in line for line in lines) and any(
        "parts in 2 processes" in line for line in lines
    )
    assert len(one.manifest.train.shards) > 5
    assert one.manifest == two.manifest
    # Of all texts, as in one part.
    assert (one.manifest.samples_read, one.manifest.samples_used) == (120, 120)
    tokenizer = two.tokenizer()
    whole = [len(tokenizer(text)["input_ids"]) + 1 for text in TEXTS]
    learned = one.manifest.train.target_tokens + one.manifest.validation.target_tokens
    assert learned == sum(tokens - 1 for tokens in whole)


def test_the_texts_are_those_of_one_part(tmp_path: Path, recipe: DataRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    # A row takes each text whole, so that both ways cut none.
    recipe = recipe_for(tmp_path / "rows.jsonl", sequence_length=256)
    parts = prepare(recipe, tmp_path / "parts", report=lambda line: None, processes=1)
    monkeypatch.setattr(pipeline, "PART_BYTES", 1 << 30)
    whole = prepare(recipe, tmp_path / "whole", report=lambda line: None)
    assert contents(parts) == contents(whole) == sorted(f"{text}<|eos|>" for text in TEXTS)


KILLED = """
import os, signal, sys
from pathlib import Path
from strata_platform.spec import DataRecipe
from tasks.runtime.data import prepare
from tasks.runtime.data.preparation import pipeline
from tasks.runtime.data.preparation import prepare_part
pipeline.PART_BYTES = int(sys.argv[3])
prepared, counted = prepare_part.PartPreparer.prepare, []
def prepare_some(*arguments):
    counted.append(1)
    if len(counted) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return prepared(*arguments)
prepare_part.PartPreparer.prepare = prepare_some
prepare(DataRecipe.model_validate_json(sys.argv[1]), Path(sys.argv[2]), report=print, processes=1)
"""


def test_a_killed_preparation_continues_with_the_parts_that_are_left(tmp_path: Path, recipe: DataRecipe) -> None:
    undisturbed = prepare(recipe, tmp_path / "undisturbed", report=lambda line: None, processes=1)
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, recipe.model_dump_json(), str(out), str(PART)]
    killed = subprocess.run(command, timeout=300, stdout=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"has no prepared data: its manifest.json"):
        PreparedData.load(out)
    done = sorted(out.glob("parts/*.json"))
    times = {path: path.stat().st_mtime_ns for path in (*done, *out.glob("*.safetensors"))}
    lines: list[str] = []
    data = prepare(recipe, out, report=lines.append, processes=1)
    assert any(line.startswith("3 of ") and line.endswith("parts are prepared already") for line in lines)
    assert len(done) == 3 and all(path.stat().st_mtime_ns == made for path, made in times.items())
    assert data.manifest == undisturbed.manifest
    assert not list(out.glob(".part-*"))


def test_parts_of_another_recipe_are_not_continued(tmp_path: Path, recipe: DataRecipe) -> None:
    prepare(recipe, tmp_path / "out", report=lambda line: None, processes=1)
    os.unlink(tmp_path / "out" / "manifest.json")
    lines: list[str] = []
    other = recipe.model_copy(update={"seed": 1})
    assert prepare(other, tmp_path / "out", report=lines.append, processes=1).manifest.recipe["seed"] == 1
    assert not any("already" in line for line in lines)


def test_an_error_in_a_process_names_the_row_and_what_is_right_is_kept(tmp_path: Path) -> None:
    texts: list[object] = [*TEXTS]
    texts[100] = 7
    write(tmp_path / "rows.jsonl", texts)
    recipe = recipe_for(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"rows.jsonl line 101: column 'text' holds int 7, not text; correct it"):
        prepare(recipe, tmp_path / "out", report=lambda line: None, processes=1)
    assert not list((tmp_path / "out").glob(".part-*"))
    skipping = recipe_for(tmp_path / "rows.jsonl", invalid="skip")
    manifest = prepare(skipping, tmp_path / "skipping", report=lambda line: None, processes=1).manifest
    assert (manifest.samples_used, manifest.skipped["invalid"]) == (119, 1)


ORPHANED = """
import os, sys, time
from pathlib import Path
from strata_platform.spec import DataRecipe
from tasks.runtime.data import prepare
from tasks.runtime.data.preparation import part_processes
from tasks.runtime.data.preparation import pipeline

if __name__ == "__main__":
    pipeline.PART_BYTES = int(sys.argv[3])
    def told(*arguments):
        import multiprocessing
        # All of them have begun when the first part is done.
        print(*(process.pid for process in multiprocessing.active_children()), flush=True)
        sys.stdin.read()
    part_processes._wait = told
    prepare(DataRecipe.model_validate_json(sys.argv[1]), Path(sys.argv[2]), report=lambda line: None, processes=2)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path: Path, recipe: DataRecipe) -> None:
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    command = [sys.executable, str(script), recipe.model_dump_json(), str(tmp_path / "out"), str(PART)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        workers = [os.pidfd_open(int(pid)) for pid in first.stdout.readline().split()]
        # The processes and the server that they are forked from.
        server = os.pidfd_open(int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[-1]))
        assert len(workers) == 2
        os.kill(first.pid, signal.SIGKILL)
    for descriptor in (*workers, server):
        assert select.select([descriptor], [], [], 60)[0], "still there"
        os.close(descriptor)


def test_no_process_is_left_behind(tmp_path: Path, recipe: DataRecipe) -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    prepare(recipe, tmp_path / "out", report=lambda line: None, processes=2)
    left = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children() - before]
    # Python keeps the process that tracks shared memory.
    assert not [command for command in left if b"resource_tracker" not in command]
