"""Training reads a mixture while its sources are prepared: the same rows, in the same order, as when all are there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, fingerprint, open_prepared, prepare, shards
from tasks.runtime.data.loader import training_loader
from tasks.runtime.data.preparation import pipeline
from tasks.runtime.data.preparation.atomic_folder import folder_lock
from tasks.runtime.data.preparation.mixture_folder import source_folders
from tasks.runtime.data.preparation.part_processes import PlannedSource, in_turns, prepare_parts
from tasks.runtime.data.preparation.part_records import prepared_parts
from tasks.runtime.data.preparation.pipeline import begin, finish
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.data.row_order import row_order
from tasks.runtime.process.ranks import Processes

WEIGHTS = (0.5, 0.3, 0.2)
NAMES = ("def", "row", "text")


def silent(line: str) -> None:
    """No log."""


@pytest.fixture(autouse=True)
def small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PART_BYTES", 1500)
    monkeypatch.setattr(shards, "_SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setenv("STRATA_DATA_CACHE", str(tmp_path / "cache"))


def write(folder: Path, name: str, count: int) -> str:
    texts = [f"{name} number_{number}(value) * {number}\n" * (1 + number % 5) for number in range(count)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    """Three sources of several parts each, and rows for evaluation that are one part."""
    sources = [
        {"source": write(tmp_path, name, count), "weight": weight}
        for name, count, weight in zip(NAMES, (90, 70, 60), WEIGHTS, strict=True)
    ]
    return RunSpec.model_validate(
        {
            "data": {
                "sources": sources,
                "validation_source": write(tmp_path, "held", 12),
                "sequence_length": 64,
                "shuffle": "window",
                "shuffle_window": 2,
                "streaming": True,
            },
            "objective": {"type": "pretrain"},
            "training": {"steps": 30},
            "evaluation": {"every": 10},
            "topology": {"nproc_per_node": 2},
            "parallel": {"type": "ddp"},
        }
    )


@pytest.fixture
def recipe(spec: RunSpec) -> DataRecipe:
    return DataRecipe.from_spec(spec, fingerprint(spec))


@pytest.fixture
def complete(recipe: DataRecipe, tmp_path: Path) -> PreparedData:
    return prepare(recipe, tmp_path / "whole" / "mixture", report=silent, processes=1)


def growing(recipe: DataRecipe, spec: RunSpec, out: Path, url: str | None = None) -> PreparedData:
    """Data of which each wait prepares one more part, and the wait after the last one finishes it."""
    plans = begin(recipe, out, report=silent, url=url)
    folders = source_folders(out)
    sources = [PlannedSource(plan, folders[number]) for number, plan in plans.items()]
    left = iter(in_turns(sources, [spec.data.weights[number] for number in plans]))

    def one_more() -> None:
        if (part := next(left, None)) is None:
            finish(out, silent)
        else:
            prepare_parts([part], report=silent, processes=1)

    return open_prepared(out, spec.data, one_more)


def batches(spec: RunSpec, data: PreparedData, rank: int, start: int = 0) -> list[torch.Tensor]:
    collate: Callable[[Any], Any] = lambda rows: torch.stack([row["input_ids"] for row in rows])  # noqa: E731
    loader = training_loader(spec, data, Processes(rank, rank, 2), collate=collate, start=start, stop=30)
    return list(loader)


def digests(data: PreparedData) -> list[tuple[int, str]]:
    shards = (*data.manifest.train.shards, *data.manifest.validation.shards)
    return [(shard.rows, shard.sha256) for shard in shards]


@pytest.mark.parametrize("stored", [False, True], ids=["folder", "store"])
def test_streaming_gives_the_rows_of_complete_data_on_each_rank_and_from_any_step(
    stored: bool, recipe: DataRecipe, spec: RunSpec, complete: PreparedData, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store" if stored else None
    for rank in range(2):
        whole = batches(spec, complete, rank)
        data = growing(recipe, spec, tmp_path / f"rank-{rank}" / "mixture", url if rank == 0 else None)
        assert data.rows is None
        later = batches(spec, data, rank, start=11)
        assert len(later) == 19 and all(map(torch.equal, later, whole[11:]))
        # Once more from the start, when most of it is there.
        assert all(map(torch.equal, batches(spec, data, rank), whole))
        found = data.completed()
        assert type(found) is PreparedData
        assert digests(found) == digests(complete)
        # A checkpoint of either run is one of the other.
        assert data.manifest.identities[0] in found.manifest.identities[1:]
        assert len(found.validation) == len(complete.validation) > 0
        assert torch.equal(found.validation[0]["input_ids"], complete.validation[0]["input_ids"])
        assert all(map(torch.equal, batches(spec, found, rank), whole))


def test_training_begins_with_the_first_parts_of_each_source_and_the_rows_for_evaluation(
    recipe: DataRecipe, spec: RunSpec, tmp_path: Path
) -> None:
    data = growing(recipe, spec, tmp_path / "mixture")
    assert [source.validation.rows > 0 for source in data.manifest.sources] == [False, False, False, True]
    assert data.manifest.validation.target_tokens > 0
    # They are read during training, and nothing is waited for.
    losses_of = data.validation_by_source()
    assert [len(rows) > 0 for rows in losses_of] == [False, False, False, True]
    held = data.tokenizer().decode(losses_of[3][0]["input_ids"])
    assert "held number" in held and [("held" in sample.prompt) for sample in data.samples(2)] == [True, True]
    order = row_order(data.manifest, data.train, spec.data, spec.seed)
    rows = data.train
    first = [rows[order[position]] for position in range(10)]
    names = Counter(data.tokenizer().decode(row["input_ids"][1:]).split()[0] for row in first)
    assert sum(names.values()) == 10
    done = [len(prepared_parts(PlannedSource(one._plan, one.folder).store)) for one in data._sources[:3]]
    parts = [len(one._plan.parts) for one in data._sources[:3]]
    assert all(2 <= some < whole for some, whole in zip(done, parts, strict=True)), (done, parts)


def test_parts_take_turns_by_weight_and_without_one_by_their_number(
    recipe: DataRecipe, spec: RunSpec, tmp_path: Path
) -> None:
    plans = begin(recipe, tmp_path / "mixture", report=silent)
    sources = [PlannedSource(plan, tmp_path) for plan in plans.values()]
    counts = [len(source.plan.parts) for source in sources]
    turns = in_turns(sources, (2, 1, 1))
    assert [sources.index(source) for source, _ in turns[:8]] == [0, 1, 2, 0, 0, 1, 2, 0]
    assert len(turns) == len(set(turns)) == sum(counts)
    for source in sources:
        assert [number for one, number in turns if one is source] == list(range(len(source.plan.parts)))
    half = in_turns(sources, (None, None, None))[: sum(counts) // 2]
    taken = Counter(sources.index(source) for source, _ in half)
    assert all(abs(taken[number] - count / 2) <= 1 for number, count in enumerate(counts))


def test_a_store_has_the_shards_of_each_source_once_and_the_folder_none(
    recipe: DataRecipe, spec: RunSpec, complete: PreparedData, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    data = prepare(recipe, tmp_path / "mixture", report=silent, url=url, processes=1)
    assert not list((tmp_path / "mixture").rglob("*.safetensors"))
    folders = {path.name for path in (tmp_path / "store").iterdir()}
    assert folders == {single.hash() for single in recipe.single_sources()}
    assert digests(data) == digests(complete)
    rows = [data.train[index]["labels"] for index in range(len(data.train))]
    assert all(torch.equal(row, complete.train[index]["labels"]) for index, row in enumerate(rows))
    # Another run with one of the sources alone, and another machine, find what is there.
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    lines: list[str] = []
    prepare(recipe, tmp_path / "elsewhere" / "mixture", report=lines.append, url=url, processes=1)
    prepare(recipe.single_sources()[0], tmp_path / "one", report=lines.append, url=url, processes=1)
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    # All sources share the bound of the cache.
    sizes = [[shard.bytes for shard in source.train.shards] for source in data.manifest.trained]
    limit = sum(min(4 * max(one), sum(one)) for one in sizes)
    small = spec.data.model_copy(update={"cache_gib": (limit + 1) / 2**30})
    assert open_prepared(tmp_path / "mixture", small).cache_bytes < sum(
        shard.bytes for shard in data.manifest.train.shards
    )
    less = spec.data.model_copy(update={"cache_gib": (limit - 1) / 2**30})
    with pytest.raises(ValueError, match=r"reads two windows of 2 shards of each source, .*lower data.shuffle_window"):
        open_prepared(tmp_path / "mixture", less)
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        path.unlink()
    bounded = open_prepared(tmp_path / "mixture", small)
    assert all(map(torch.equal, batches(spec, bounded, 0), batches(spec, complete, 0)))
    held = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.safetensors"))
    assert 0 < held <= limit + 1


def test_two_mixtures_of_the_same_sources_in_another_order_do_not_wait_for_each_other(
    recipe: DataRecipe, spec: RunSpec, tmp_path: Path
) -> None:
    taken: list[Path] = []

    def noting(folder: Path) -> Any:
        taken.append(folder)
        return folder_lock(folder)

    other = spec.data.model_copy(update={"sources": spec.data.sources[::-1]})
    turned = DataRecipe.from_spec(spec.model_copy(update={"data": other}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "folder_lock", noting)
        begin(recipe, tmp_path / "one", report=silent)
        first, taken = taken[1:], []
        begin(turned.model_copy(update={"fingerprint": fingerprint(spec)}), tmp_path / "two", report=silent)
    assert taken[1:] == sorted(taken[1:]) and first == sorted(first) and len(first) == 4


def test_a_killed_preparation_of_a_mixture_continues_with_what_is_left(
    recipe: DataRecipe, spec: RunSpec, complete: PreparedData, tmp_path: Path
) -> None:
    out = tmp_path / "mixture"
    plans, lines = begin(recipe, out, report=silent), list[str]()
    sources = [PlannedSource(plan, source_folders(out)[number]) for number, plan in plans.items()]
    prepare_parts(in_turns(sources, spec.data.weights)[:4], report=silent, processes=1)
    # What a kill during the last step leaves.
    (out / "0").mkdir()
    (out / "0" / "train-00000.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="has no prepared data"):
        PreparedData.load(out)
    data = prepare(recipe, out, report=lines.append, processes=1, weights=spec.data.weights)
    total = sum(len(plan.parts) for plan in plans.values())
    assert f"4 of {total} parts are prepared already" in lines
    assert data.manifest == complete.manifest


def test_pairs_are_streamed_for_an_adapter_whose_base_is_the_reference(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["a question and an answer yes no"] * 3), tmp_path / "tokenizer")
    sources = []
    for name, count in (("first", 60), ("second", 40)):
        rows = [{"prompt": f"{name} {n}?", "chosen": "yes " * (1 + n % 4), "rejected": f"no {n}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append({"source": str(tmp_path / f"{name}.jsonl"), "weight": 1, "validation_fraction": 0.0})
    spec = RunSpec.model_validate(
        {
            "data": {
                "sources": sources,
                "sequence_length": 64,
                "shuffle": "window",
                "shuffle_window": 1,
                "streaming": True,
            },
            "model": {"name": "org/model", "tokenizer": str(tmp_path / "tokenizer")},
            "adapter": {"type": "lora"},
            "objective": {"type": "dpo"},
            "training": {"steps": 30, "micro_batch_size": 1},
            "topology": {"nproc_per_node": 2},
            "parallel": {"type": "ddp"},
        }
    )
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    complete = prepare(recipe, tmp_path / "whole" / "mixture", report=silent, processes=1)
    data = growing(recipe, spec, tmp_path / "mixture")
    assert data.rows is None
    order, theirs = (row_order(one.manifest, one.train, spec.data, spec.seed) for one in (data, complete))
    rows, whole = data.train, complete.train
    for position in range(2 * len(whole)):
        one, other = rows[order[position]], whole[theirs[position]]
        assert set(one["sides"].tolist()) >= {1, -1}
        assert all(torch.equal(one[name], other[name]) for name in ("input_ids", "labels", "sides"))
