"""A mixture has the rows of its sources, each prepared by itself, in the shares that its weights ask for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.data import Data
from tasks.runtime.data import PreparedData, prepare, recipe_of
from tasks.runtime.data.loader import MicroBatchSampler
from tasks.runtime.data.mixture import Draw, source_shares
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.data.row_order import row_order
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import data_folder

WORDS = ["river", "stone", "cloud", "meadow", "harbour", "lantern"]
WEIGHTS = (0.5, 0.3, 0.2)

Write = Callable[[str, list[Any]], str]
Prepare = Callable[..., tuple[RunSpec, PreparedData, list[str]]]


@pytest.mark.parametrize(
    "weights", [WEIGHTS, (1, 1), (7,), (3, 1e-6), (1 / 3, 1 / 7, 1 / 11, 0.1), (640, 13, 1)], ids=str
)
def test_each_source_is_near_its_share_after_any_number_of_rows(weights):
    draw = Draw(weights)
    counts = [0] * len(weights)
    for position in range(3000):
        # Its rows come in order, none twice and none left out.
        number, index = draw.source(position)
        assert index == counts[number]
        counts[number] += 1
        assert counts == draw.counts(position + 1)
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (position + 1) * weight / sum(weights)) < len(weights)


def test_the_share_of_a_long_run_is_exact():
    assert Draw(WEIGHTS).counts(10**12) == [5 * 10**11, 3 * 10**11, 2 * 10**11]
    number, index = Draw(WEIGHTS).source(10**12)
    assert (number, index) == (0, 5 * 10**11)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(WORDS), folder)
    return str(folder)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(name: str, rows: list[Any]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(tmp_path / name)

    return to_file


@pytest.fixture
def files(write: Write) -> list[str]:
    """Texts, pairs and chats; the word in each row says which of them it is."""
    texts = [{"text": f"The {WORDS[0]} number {i} is {'very ' * (i % 9)}long."} for i in range(90)]
    pairs = [{"question": f"How many {WORDS[1]}s, {i}?", "answer": f"There are {i * 37 % 101}."} for i in range(30)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Show {WORDS[2]} {i}"},
                {"role": "assistant", "content": f"No, {i}"},
            ]
        }
        for i in range(20)
    ]
    return [write("texts.jsonl", texts), write("pairs.jsonl", pairs), write("chats.jsonl", chats)]


@pytest.fixture
def prepared(tmp_path: Path, tokenizer_folder: str) -> Prepare:
    def run(data: dict[str, Any], tokenizer: str | None = tokenizer_folder, **fields: Any) -> Any:
        values = {"sequence_length": 96, "validation_fraction": 0.1, **data}
        spec = RunSpec.model_validate(
            {
                "output": str(tmp_path / "out"),
                "objective": {"type": "pretrain"},
                "model": {"tokenizer": tokenizer},
                "data": values,
                **fields,
            }
        )
        recipe, lines = recipe_of(spec), []
        return spec, prepare(recipe, data_folder(spec.output, recipe), report=lines.append), lines

    return run


def mixed(files: list[str], *weights: float | None, **changes: Any) -> dict[str, Any]:
    sources: list[dict[str, Any]] = [{"source": file} for file in files]
    sources[1] |= {"prompt_column": "question", "completion_column": "answer"}
    if weights:
        sources = [source | {"weight": weight} for source, weight in zip(sources, weights, strict=True)]
    return {"sources": sources, **changes}


def rows_of(data: PreparedData, split: str = "train") -> list[bytes]:
    rows = getattr(data, split)
    return [rows[index]["input_ids"].numpy().tobytes() for index in range(len(rows))]


def text_of(data: PreparedData, split: str) -> str:
    ids = torch.cat([getattr(data, split)[index]["input_ids"] for index in range(len(getattr(data, split)))])
    return str(data.tokenizer().decode(ids))


def test_a_mixture_has_the_rows_of_its_sources_prepared_alone(prepared: Prepare, files: list[str]) -> None:
    _, alone, _ = prepared({"source": files[1], "prompt_column": "question", "completion_column": "answer"})
    _, data, lines = prepared(mixed(files, *WEIGHTS))
    assert f"the data of recipe {alone.manifest.recipe_hash} is already prepared in {alone.folder}" in lines
    assert [part.format for part in data.manifest.sources] == ["text", "prompt_completion", "chat"]
    first = data.manifest.sources[0].train.rows
    assert rows_of(data)[first : first + len(alone.train)] == rows_of(alone)
    assert len(data.train) == sum(part.train.rows for part in data.manifest.sources)
    assert data.tokenizer().chat_template == prepared({"source": files[2]})[1].tokenizer().chat_template
    # Held out of every source; the first samples are of each in turn.
    assert all(word in text_of(data, "validation") for word in WORDS[:3])
    assert [next(word for word in WORDS if word in sample.prompt) for sample in data.samples(3)] == WORDS[:3]
    # The files are there once, and the folder needs no other.
    shard = data.manifest.sources[1].train.shards[0].file
    assert (data.folder / shard).samefile(alone.folder / alone.manifest.train.shards[0].file)
    # Other weights, and no weights, prepare nothing.
    for other in (mixed(files, 1, 1, 1), mixed(files)):
        assert prepared(other)[1].folder == data.folder


def test_a_changed_file_is_prepared_again_and_the_others_are_not(prepared: Prepare, files: list[str]) -> None:
    before = prepared(mixed(files))[1]
    path = Path(files[0])
    path.write_text(path.read_text().replace("very", "quite"))
    _, after, lines = prepared(mixed(files))
    hashes = [[part.recipe_hash for part in data.manifest.sources] for data in (before, after)]
    assert hashes[0][0] != hashes[1][0] and hashes[0][1:] == hashes[1][1:]
    assert sum("is already prepared" in line for line in lines) == 2
    assert before.manifest.content_hash != after.manifest.content_hash
    assert "quite" in text_of(after, "train") and "quite" not in text_of(before, "train")


def source_counts(data: PreparedData, indices: list[int]) -> list[int]:
    ends = torch.tensor([part.train.rows for part in data.manifest.trained]).cumsum(0)
    found = Counter(torch.bucketize(torch.tensor(indices), ends, right=True).tolist())
    return [found[number] for number in range(len(ends))]


def read(spec: RunSpec, data: PreparedData, rank: int, start: int, stop: int) -> list[list[int]]:
    order = row_order(data.manifest, data.train, spec.data, spec.seed)
    return list(MicroBatchSampler(spec, Processes(rank, rank, spec.dp_size), order, start=start, stop=stop))


def test_a_run_reads_the_shares_of_its_weights_however_its_rows_are_spread(prepared: Prepare, files: list[str]) -> None:
    steps, found = 50, []
    for size, accumulation, processes in ((8, 1, 1), (2, 2, 2), (1, 2, 4)):
        spec, data, _ = prepared(
            mixed(files, *WEIGHTS),
            training={"micro_batch_size": size, "gradient_accumulation_steps": accumulation, "steps": steps},
            topology={"nproc_per_node": processes},
            parallel={"type": "ddp"},
        )
        # Stopped after step 17 and started again.
        ranks = [read(spec, data, rank, 0, 17) + read(spec, data, rank, 17, steps) for rank in range(processes)]
        found.append([row for batches in zip(*ranks, strict=True) for batch in batches for row in batch])
    assert found[0] == found[1] == found[2]
    assert source_counts(data, found[0]) == [200, 120, 80]
    for source, count in zip(data.manifest.sources, (200, 120, 80), strict=True):
        # A source that repeats gives each row about as often as any other.
        first = sum(part.train.rows for part in data.manifest.sources[: data.manifest.sources.index(source)])
        times = Counter(row for row in found[0] if first <= row < first + source.train.rows)
        assert len(times) == min(count, source.train.rows) and max(times.values()) - min(times.values()) <= 1
    shares = source_shares(data.manifest, spec.data.weights, [(0, 8 * 10), (8 * 20, 8 * 60)])
    assert [share.rows for share in shares] == [200, 120, 80]
    assert [share.row_share for share in shares] == pytest.approx(WEIGHTS, abs=1e-12)
    assert sum(share.token_share for share in shares) == pytest.approx(1)
    assert shares[0].tokens == round(200 * data.manifest.sources[0].train.tokens / data.manifest.sources[0].train.rows)


def test_without_weights_an_epoch_has_each_row_once(prepared: Prepare, files: list[str]) -> None:
    spec, data, _ = prepared(mixed(files))
    rows = len(data.train)
    order = row_order(data.manifest, data.train, spec.data, spec.seed)
    epochs = [[order[epoch * rows + index] for index in range(rows)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    shares = source_shares(data.manifest, spec.data.weights, [(0, rows)])
    assert [(share.rows, share.epochs) for share in shares] == [(part.train.rows, 1) for part in data.manifest.sources]
    assert [share.tokens for share in shares] == [part.train.tokens for part in data.manifest.sources]


def test_rows_for_evaluation_come_from_where_they_are_named(prepared: Prepare, files: list[str], write: Write) -> None:
    own = write("own.jsonl", [{"text": f"A {WORDS[3]} and {i}."} for i in range(5)])
    also = write("also.jsonl", [{"question": f"{WORDS[4]} {i}?", "answer": "Yes."} for i in range(5)])
    every = write("every.jsonl", [{"text": f"A {WORDS[5]} and {i}."} for i in range(5)])
    values = mixed(files, *WEIGHTS, validation_fraction=0)
    del values["sources"][2]
    values["sources"][1]["validation_source"] = also
    _, data, _ = prepared(values | {"validation_source": {"source": every, "max_samples": 3}})
    assert data.manifest.validation.samples == 5 + 3 and data.manifest.train.samples == 90 + 30
    text = text_of(data, "validation")
    assert WORDS[4] in text and WORDS[5] in text and not any(word in text for word in WORDS[:3])
    assert not any(word in text_of(data, "train") for word in WORDS[3:])
    _, single, _ = prepared({"source": files[0], "validation_source": own, "validation_fraction": 0})
    assert single.manifest.train.samples == 90 and single.manifest.validation.samples == 5
    assert WORDS[3] in text_of(single, "validation")
    # A single source that is trained on is read like one without.
    plain = prepared({"source": files[0], "validation_fraction": 0})[1]
    orders = [row_order(data.manifest, data.train, Data(), 0) for data in (single, plain)]
    assert rows_of(single) == rows_of(plain)
    assert [orders[0][index] for index in range(200)] == [orders[1][index] for index in range(200)]


def test_a_tokenizer_of_a_preset_is_trained_on_every_source(prepared: Prepare, files: list[str]) -> None:
    _, data, _ = prepared(mixed(files), tokenizer=None)
    vocabulary = " ".join(data.tokenizer().get_vocab())
    assert all(f"Ġ{word}" in vocabulary for word in WORDS[:3])
    assert all(word in text_of(data, "train") for word in WORDS[:3])
    alone = prepared({"source": files[0]}, tokenizer=None)[1].tokenizer().get_vocab()
    assert f"Ġ{WORDS[2]}" not in alone


def test_pairs_of_answers_are_mixed_too(prepared: Prepare, write: Write) -> None:
    texts = [{"prompt": f"{i}?", "chosen": "yes", "rejected": f"no {i}"} for i in range(12)]
    user = [{"role": "user", "content": "Hi"}]
    chats = [
        {
            "prompt": user,
            "chosen": [{"role": "assistant", "content": f"{i}"}],
            "rejected": [{"role": "assistant", "content": "?"}],
        }
        for i in range(12)
    ]
    sources = [{"source": write("a.jsonl", texts), "weight": 1}, {"source": write("b.jsonl", chats), "weight": 1}]
    _, data, _ = prepared({"sources": sources}, objective={"type": "dpo"})
    assert [part.format for part in data.manifest.sources] == ["preference", "preference_chat"]
    for index in (0, len(data.train) - 1):
        assert set(data.train[index]["sides"].tolist()) >= {1, -1}


def test_the_sources_of_a_mixture_have_a_commit_each(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    from types import SimpleNamespace

    commits = {"org/a": "a" * 40, "org/b": "b" * 40}
    asked: list[str] = []

    def info(hub: object, name: str, revision: str | None, timeout: float) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(sha=commits[name])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    tested = {"source": "org/b", "validation_source": {"split": "test"}}
    data = {"sources": [{"source": "org/a"}, {"source": files[0]}, tested]}
    spec = RunSpec.model_validate({"data": data, "model": {"tokenizer": "org/tokenizer"}})
    recipe = recipe_of(spec)
    assert [part.data.revision for part in recipe.single_sources()] == ["a" * 40, None, "b" * 40, "b" * 40]
    assert asked == ["org/a", "org/b", "org/b"]
    again = recipe_of(spec, ["c" * 40, None, "d" * 40, "e" * 40])
    assert [part.data.revision for part in again.single_sources()] == ["c" * 40, None, "d" * 40, "e" * 40]
    assert len(asked) == 3 and again.single_sources()[1] == recipe.single_sources()[1]
