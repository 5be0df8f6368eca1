"""Training reads parts as they are prepared: the same rows, in the same order, as when all are there."""

from __future__ import annotations

import json
import logging
from itertools import count
from pathlib import Path

import pytest
import torch

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, collate, fingerprint, open_prepared, prepare, shards
from tasks.runtime.data.growing_data import GrowingData
from tasks.runtime.data.loader import training_loader
from tasks.runtime.data.preparation import pipeline
from tasks.runtime.data.preparation.part_processes import PlannedSource, prepare_parts
from tasks.runtime.data.preparation.part_records import prepared_parts
from tasks.runtime.data.preparation.pipeline import begin, finish
from tasks.runtime.data.row_order import row_order
from tasks.runtime.process.ranks import Processes


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.setattr(pipeline, "PART_BYTES", 1500)
    monkeypatch.setattr(shards, "_SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setenv("STRATA_DATA_CACHE", str(tmp_path / "cache"))
    texts = [f"def name_{number}(value): return value * {number}\n" * (1 + number % 5) for number in range(120)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"source": str(tmp_path / "rows.jsonl"), "sequence_length": 64, "shuffle": "window", "shuffle_window": 2}
    return RunSpec.model_validate(
        {"data": {**data, "streaming": True}, "objective": {"type": "pretrain"}, "training": {"steps": 9}}
    )


@pytest.fixture
def recipe(spec: RunSpec) -> DataRecipe:
    return DataRecipe.from_spec(spec, fingerprint(spec))


@pytest.fixture
def complete(recipe: DataRecipe, tmp_path: Path) -> PreparedData:
    return prepare(recipe, tmp_path / "complete", report=lambda line: None, processes=1)


def growing(recipe: DataRecipe, spec: RunSpec, folder: Path, url: str | None = None) -> PreparedData:
    """Data of which each wait for a part prepares one more, and the wait after the last the manifest."""
    [plan] = begin(recipe, folder, report=lambda line: None, url=url).values()
    source, numbers = PlannedSource(plan, folder), count()

    def one_more() -> None:
        number = next(numbers)
        if number < len(plan.parts):
            prepare_parts([(source, number)], report=lambda line: None, processes=1)
        else:
            finish(folder, lambda line: None)

    return open_prepared(folder, spec.data, one_more)


def batches(spec: RunSpec, data: PreparedData, start: int = 0, rank: int = 0, ranks: int = 1) -> list[torch.Tensor]:
    loader = training_loader(spec, data, Processes(rank, rank, ranks), collate=collate, start=start, stop=12)
    return [batch["input_ids"] for batch in loader]


@pytest.mark.parametrize("stored", [False, True], ids=["folder", "store"])
def test_streaming_gives_the_rows_of_complete_data(
    stored: bool, recipe: DataRecipe, spec: RunSpec, complete: PreparedData, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store" if stored else None
    data = growing(recipe, spec, tmp_path / "growing", url)
    rows, order = data.train, row_order(data.manifest, data.train, spec.data, spec.seed)
    theirs = row_order(complete.manifest, complete.train, spec.data, spec.seed)
    total = len(complete.train)
    for position in range(2 * total + 5):
        index = order[position]
        assert index == theirs[position]
        assert torch.equal(rows[index]["input_ids"], complete.train[index]["input_ids"])
        if position == 0:
            # Training has begun, and most parts are not prepared.
            assert len(prepared_parts(data._plan.store(data.folder))) == 2 < len(data._plan.parts) - 3
    found = data.completed()
    assert type(found) is PreparedData
    assert found.manifest.train == complete.manifest.train
    assert (
        found.manifest.plan_hash == data.manifest.plan_hash
        and found.manifest.identities[1:] == data.manifest.identities
    )
    assert len(found.validation) == len(complete.validation) > 0
    assert found.samples(3) == complete.samples(3)
    if stored:
        assert not list((tmp_path / "growing").glob("*.safetensors"))
        assert torch.equal(found.validation[0]["input_ids"], complete.validation[0]["input_ids"])


def test_batches_of_two_ranks_and_of_a_later_start_are_those_of_complete_data(
    recipe: DataRecipe, spec: RunSpec, complete: PreparedData, tmp_path: Path
) -> None:
    two = RunSpec.model_validate({**spec.model_dump(), "topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}})
    whole = [batches(two, complete, rank=rank, ranks=2) for rank in range(2)]
    for rank in range(2):
        data = growing(recipe, two, tmp_path / f"rank-{rank}")
        later = batches(two, data, start=5, rank=rank, ranks=2)
        assert all(map(torch.equal, later, whole[rank][5:])) and len(later) == 7
        # The same once more: nothing depends on when a part came.
        assert all(map(torch.equal, batches(two, data, rank=rank, ranks=2), whole[rank]))


def test_what_is_waited_for_is_logged_and_a_failure_ends_the_wait(
    recipe: DataRecipe, spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(recipe, tmp_path / "out", report=lambda line: None)
    looks = count()

    def fail() -> None:
        if next(looks):
            raise ValueError("the preparation ended")

    data = open_prepared(tmp_path / "out", spec.data, fail)
    assert isinstance(data, GrowingData)
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="the preparation ended"):
        len(data.train)
    assert [record.message for record in caplog.records] == [
        f"waiting for part 1 of {len(data._plan.parts)} to be prepared, 0 s"
    ]
    with pytest.raises(ValueError, match="has no prepared data"):
        open_prepared(tmp_path / "out", spec.data.model_copy(update={"streaming": False}))


def test_another_machine_continues_and_reads_what_is_in_the_store(
    recipe: DataRecipe, spec: RunSpec, complete: PreparedData, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    [plan] = begin(recipe, tmp_path / "first", report=lambda line: None, url=url).values()
    source = PlannedSource(plan, tmp_path / "first")
    prepare_parts([(source, number) for number in range(3)], report=lambda line: None, processes=1)
    lines: list[str] = []
    second = prepare(recipe, tmp_path / "second", report=lines.append, url=url, processes=1)
    assert f"3 of {len(plan.parts)} parts are prepared already" in lines
    assert second.manifest.train == complete.manifest.train and second.manifest.url == f"{url}/{recipe.hash()}"
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    third = prepare(recipe, tmp_path / "third", report=lines.append, url=url, processes=1)
    assert third.manifest == second.manifest and third.samples(2) == second.samples(2)
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert third.tokenizer().get_vocab() == complete.tokenizer().get_vocab()
    assert all(
        torch.equal(third.train[index]["labels"], complete.train[index]["labels"]) for index in range(len(third.train))
    )


def test_a_cache_that_is_too_small_is_refused(
    recipe: DataRecipe, spec: RunSpec, complete: PreparedData, tmp_path: Path
) -> None:
    prepare(recipe, tmp_path / "out", report=lambda line: None, url=f"file://{tmp_path}/store", processes=1)
    largest = max(shard.bytes for shard in complete.manifest.train.shards)
    whole = sum(shard.bytes for shard in complete.manifest.train.shards)

    def opened(limit: float, **data: object) -> PreparedData:
        return open_prepared(tmp_path / "out", spec.data.model_copy(update={"cache_gib": limit / 2**30, **data}))

    assert opened(4 * largest + 1).cache_bytes < whole
    with pytest.raises(ValueError, match=r"reads two windows of 2 shards, .*; raise it, or lower data.shuffle_window"):
        opened(4 * largest - 1)
    assert opened(whole + 1, shuffle="global")
    with pytest.raises(ValueError, match=r"'global' reads all rows, .*; raise it, or set data.shuffle to 'window'"):
        opened(whole - 1, shuffle="global")
    # Within the bound, whatever is read.
    data = opened(4 * largest + 1)
    order = row_order(data.manifest, data.train, spec.data, 0)
    rows = data.train
    for position in range(2 * len(rows)):
        index = order[position]
        assert torch.equal(rows[index]["input_ids"], complete.train[index]["input_ids"])
    held = sum(path.stat().st_size for path in (tmp_path / "cache" / recipe.hash()).glob("*.safetensors"))
    assert 0 < held <= 4 * largest + 1
