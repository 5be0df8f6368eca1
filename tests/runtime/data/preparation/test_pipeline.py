"""Preparing: every sample is accounted for, the folder is whole or absent, and equal recipes give equal bytes."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import Manifest, PreparedData, RowDataset, collate, fingerprint, prepare
from tasks.runtime.data.formats.documents import Document
from tasks.runtime.data.preparation import preparation_plan
from tasks.runtime.data.preparation.document_buffer import DocumentBuffer
from tasks.runtime.data.preparation.encode import Encoded, Encoder
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.data.preparation.validation import sample_mask
from tasks.runtime.data.prepared_manifest import Split
from tasks.runtime.data.reading.rows import Row, RowError
from tasks.runtime.data.shards import Shards

ROWS = [
    {"prompt": f"def name_{i}(value)\n", "completion": f"Return value number {'minus ' * (i % 5)}{i * 37 % 101}."}
    for i in range(60)
]
TALK = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
LONG = "very " * 200

Prepare = Callable[..., PreparedData]


def _write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _recipe(
    path: Path, *, objective: str = "sft", seed: int = 0, tokenizer: str | None = None, **data: Any
) -> DataRecipe:
    values = {"source": str(path), "sequence_length": 64, "validation_fraction": 0.2, **data}
    spec = RunSpec.model_validate(
        {"data": values, "objective": {"type": objective}, "model": {"tokenizer": tokenizer}, "seed": seed}
    )
    return DataRecipe.from_spec(spec, fingerprint(spec))


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def prepared(tmp_path: Path, lines: list[str]) -> Prepare:
    """Prepare rows with fields of `data`; what is reported is in `lines`."""

    def run(rows: list[Any], **options: Any) -> PreparedData:
        _write(tmp_path / "rows.jsonl", rows)
        return prepare(_recipe(tmp_path / "rows.jsonl", **options), tmp_path / "out", report=lines.append)

    return run


def _texts(data: PreparedData, split: str) -> list[str]:
    """The documents of a split as text, without special tokens, sorted."""
    tokenizer = data.tokenizer()
    texts = []
    for row in (getattr(data, split)[i] for i in range(len(getattr(data, split)))):
        starts = [*torch.nonzero(row["position_ids"] == 0).flatten().tolist(), row["input_ids"].numel()]
        pieces = [row["input_ids"][a:b] for a, b in pairwise(starts)]
        texts += [tokenizer.decode(ids, skip_special_tokens=True) for ids in pieces]
    return sorted(text for text in texts if text)


def test_all_rows_come_back_and_no_sample_is_in_both_splits(prepared: Prepare) -> None:
    data = prepared(ROWS)
    train, validation = _texts(data, "train"), _texts(data, "validation")
    assert sorted(train + validation) == sorted(row["prompt"] + row["completion"] for row in ROWS)
    assert len(validation) == data.manifest.validation.samples > 0
    assert len(train) == data.manifest.train.samples
    assert (data.manifest.samples_read, data.manifest.samples_used) == (60, 60)


def test_rows_are_what_a_model_trains_on(prepared: Prepare) -> None:
    data = prepared(ROWS)
    counts = {"tokens": 0, "targets": 0}
    tokenizer = data.tokenizer()
    for index in range(len(data.train)):
        row = data.train[index]
        assert {name: (tuple(t.shape), t.dtype) for name, t in row.items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), ((64,), torch.int64)
        )
        learned = row["labels"] != -100
        assert torch.equal(row["labels"][learned], row["input_ids"][learned])
        assert not learned[row["position_ids"] == 0].any()
        counts["targets"] += int(learned.sum())
        counts["tokens"] += int((row["input_ids"] != tokenizer.pad_token_id).sum())
        for text in tokenizer.decode(row["labels"][learned]).split("<|eos|>")[:-1]:
            assert text.startswith("Return value number ") and text.endswith(".")
    split = data.manifest.train
    assert counts == {"tokens": split.tokens, "targets": split.target_tokens}
    assert len(data.train) == split.rows and split.fill(64) > 0.8
    with pytest.raises(IndexError):
        data.train[len(data.train)]


def test_padding_is_a_document_of_its_own_without_labels(prepared: Prepare) -> None:
    row = prepared(ROWS[:2]).train[0]
    end = int((row["position_ids"] == 0).nonzero()[-1])
    assert end > 0 and (row["input_ids"][end:] == 0).all() and (row["labels"][end:] == -100).all()
    assert row["position_ids"][end:].tolist() == list(range(64 - end))


def test_without_packing_each_sample_is_a_row(prepared: Prepare) -> None:
    data = prepared(ROWS, packing=False)
    assert len(data.train) == data.manifest.train.samples
    lengths = {data.train[i]["input_ids"].numel() for i in range(len(data.train))}
    assert len(lengths) > 1 and max(lengths) < 64
    batch = collate([data.train[i] for i in range(8)])
    assert (
        batch["input_ids"].shape
        == batch["labels"].shape
        == (8, max(int(n) for n in batch["position_ids"].max(1)[0]) + 1)
    )


def test_a_loaders_workers_map_the_files_themselves(prepared: Prepare) -> None:
    data = prepared(ROWS)
    first = data.train[0]
    train = data.train
    assert train[0]["labels"].equal(first["labels"])
    sent = pickle.dumps(train)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert all(torch.equal(first[name], copy[0][name]) for name in first)


def test_samples_are_raw_prompts_and_references(prepared: Prepare) -> None:
    data = prepared(ROWS)
    samples = data.samples(3)
    assert len(samples) == 3 and len(data.samples(64)) == data.manifest.validation.samples
    known = {(row["prompt"], row["completion"]) for row in ROWS}
    for sample in samples:
        assert (sample.prompt, sample.completion) in known
        assert sample.prompt_ids == data.tokenizer()(sample.prompt)["input_ids"]


def test_the_tokenizer_is_not_trained_on_what_is_validation_mask(prepared: Prepare) -> None:
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), (40, 8))
    words = [f" {''.join(word)}" for word in letters]
    data = prepared([{"prompt": "p", "completion": word * 3} for word in words])
    tokenizer = data.tokenizer()
    held_out = {word for word in words if any(word in text for text in _texts(data, "validation"))}
    whole = {word for word in words if len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1}
    assert held_out and whole == set(words) - held_out


def test_rows_are_not_left_sorted_by_the_lengths_of_their_documents(prepared: Prepare) -> None:
    data = prepared([{"prompt": "p", "completion": "word " * (1 + i % 40)} for i in range(120)])
    # The last learned token of a row's longest document has the row's highest position outside of its padding.
    longest = [int(row["position_ids"][row["labels"] != -100].max()) for row in map(data.train.__getitem__, range(9))]
    assert len(set(longest)) > 5 and longest != sorted(longest, reverse=True)


def test_samples_of_texts_are_cut_in_the_middle(prepared: Prepare) -> None:
    data = prepared([{"text": row["prompt"] + row["completion"]} for row in ROWS], objective="pretrain")
    sample = data.samples(1)[0]
    assert sample.prompt and sample.completion
    assert sample.prompt + sample.completion in {row["prompt"] + row["completion"] for row in ROWS}


def test_chats_are_prepared_with_their_template_and_stop_tokens(prepared: Prepare, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    data = prepared([{"messages": TALK}] * 10, chat_template=str(template))
    tokenizer = data.tokenizer()
    assert data.manifest.format == "chat"
    assert tokenizer.chat_template == template.read_text()
    assert tokenizer.convert_ids_to_tokens(list(data.manifest.stop_token_ids)) == ["<|eos|>", "<|im_end|>"]
    sample = data.samples(1)[0]
    assert (sample.prompt, sample.completion) == ("<|im_start|>user:Hello?<|im_end|><|im_start|>assistant:", "Hi.")
    assert sample.prompt_ids == tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True)["input_ids"]


def test_a_chat_template_for_no_chat_warns(prepared: Prepare) -> None:
    with pytest.warns(UserWarning, match="data.chat_template has no effect on .*, whose format is prompt_completion"):
        prepared(ROWS, chat_template="chatml")


def test_a_chat_template_without_an_end_warns(prepared: Prepare, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
                        "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    with pytest.warns(UserWarning, match="no special token ends the assistant's turns"):
        prepared([{"messages": TALK}] * 10, chat_template=str(template))


FAULTY = [
    *ROWS[:10],
    {"prompt": "p", "completion": 5},
    {"prompt": "p"},
    {"prompt": "p", "completion": " "},
    {"prompt": "p", "completion": LONG},
    ["p", "c"],
]


def test_every_sample_is_accounted_for(prepared: Prepare, lines: list[str]) -> None:
    manifest = prepared(FAULTY, invalid="skip").manifest
    assert manifest.skipped == {"invalid": 3, "no_target": 1, "overlong": 1, "image_size": 0, "audio_length": 0}
    assert (manifest.samples_read, manifest.samples_used) == (15, 10)
    account = next(line for line in lines if "read =" in line)
    assert account.endswith(
        "15 samples read = 10 used + 3 skipped (not readable or of the wrong type) + "
        "1 skipped (without a token that carries loss) + 1 skipped (longer than a row)"
    )
    told = [line.partition("first sample skipped, ")[2].replace(manifest.source, "rows") for line in lines]
    assert [line for line in told if line] == [
        "not readable or of the wrong type: rows line 11: column 'completion' holds int 5, not text",
        "without a token that carries loss: rows line 13",
        "longer than a row: rows line 14: 205 tokens",
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "p", "completion": 5}, "column 'completion' holds int 5, not text"),
        ({"prompt": None, "completion": "c"}, "column 'prompt' holds null, not text"),
        ({"prompt": "p"}, "there is no column 'completion', only 'prompt'"),
        ([1], r"an object with columns was expected, not list \[1\]"),
    ],
)
def test_a_row_of_the_wrong_type_is_an_error_by_default(row: Any, problem: str, prepared: Prepare) -> None:
    with pytest.raises(ValueError, match=f"rows.jsonl line 61: {problem}; correct it, or set data.invalid to 'skip'"):
        prepared([*ROWS, row], max_samples=61)


HALF = "café \ud83d"
CALLING = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": HALF}]}


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        (
            ROWS[0],
            {"prompt": HALF, "completion": "a"},
            r"column 'prompt' has an unpaired surrogate, '\\ud83d', after 'café '",
        ),
        (ROWS[0], {"prompt": "a", "completion": HALF}, "column 'completion' has an unpaired surrogate"),
        (
            {"messages": TALK},
            {"messages": [{"role": "user", "content": HALF}]},
            "message 1: content has an unpaired surrogate",
        ),
        ({"messages": TALK}, {"messages": [CALLING]}, "the chat template's output has an unpaired surrogate"),
    ],
    ids=["prompt", "completion", "content", "arguments"],
)
@pytest.mark.parametrize("model", ["trained", "loaded"])
def test_half_a_character_is_told_with_its_row_or_skipped(
    good: Any, bad: Any, problem: str, model: str, tmp_path: Path, prepared: Prepare
) -> None:
    options: dict[str, Any] = {}
    if "messages" in good:
        (tmp_path / "mine.jinja").write_text(
            "{% for m in messages %}{{ m.role }}:{{ m.content or m.tool_calls[0].arguments }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
        options["chat_template"] = str(tmp_path / "mine.jinja")
    if model == "loaded":
        save_tokenizer(train_tokenizer(["Hello? Hi."]), tmp_path / "tokenizer")
        options["tokenizer"] = str(tmp_path / "tokenizer")
    rows = [good, good, good, bad]
    with pytest.raises(ValueError, match=rf"rows.jsonl line 4: {problem}.*; correct it, or set data.invalid to 'skip'"):
        prepared(rows, **options)
    manifest = prepared(rows, invalid="skip", **options).manifest
    assert (manifest.samples_used, manifest.skipped["invalid"]) == (3, 1)


@pytest.mark.parametrize("count", [1, 5, 16])
def test_a_row_that_the_tokenizer_cannot_cut_is_told_or_skipped(
    count: int, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: Encoder, documents: list[Document]) -> list[Encoded]:
        if bad := [part.text for document in documents for part in document.segments if part.text == "bad"]:
            raise RowError(f"the tokens of {bad[0]!r}")
        return whole(self, documents)

    whole = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", encode)
    rows = [*ROWS[:count], {"prompt": "p", "completion": "bad"}, *ROWS[count : 2 * count]]
    with pytest.raises(ValueError, match=rf"rows.jsonl line {count + 1}: the tokens of 'bad'; correct it, or set data"):
        prepared(rows)
    data = prepared(rows, invalid="skip", validation_fraction=0.0)
    assert (data.manifest.samples_used, data.manifest.skipped["invalid"]) == (2 * count, 1)
    assert _texts(data, "train") == sorted(row["prompt"] + row["completion"] for row in ROWS[: 2 * count])


def test_overlong_samples(prepared: Prepare, tmp_path: Path) -> None:
    rows = [*ROWS[:10], {"prompt": "p", "completion": LONG}, {"prompt": LONG, "completion": "c"}]
    with pytest.raises(ValueError, match=r"rows.jsonl line 11: \d+ tokens, but data.sequence_length is 64; raise it"):
        prepared(rows, overlong="error")
    assert not (tmp_path / "out").exists()
    manifest = prepared(rows, overlong="truncate").manifest
    # The second one's prompt alone is longer than a row: nothing of it would be learned.
    assert (manifest.truncated, manifest.skipped["no_target"], manifest.samples_used) == (1, 1, 11)
    assert prepared(rows, overlong="skip").manifest.skipped["overlong"] == 2


@pytest.mark.parametrize("prompt", [True, False])
def test_a_sample_of_megabytes_is_too_long_like_any_other(prepared: Prepare, prompt: bool) -> None:
    """Also one whose completion lies behind what is tokenized."""
    long = (
        {"prompt": "very " * 400_000, "completion": "4"} if prompt else {"prompt": "4", "completion": "very " * 400_000}
    )
    assert prepared([*ROWS, long]).manifest.skipped["overlong"] == 1
    with pytest.raises(
        ValueError, match=rf"rows\.jsonl line {len(ROWS) + 1}: more than \d+ tokens, but data\.sequence_length"
    ):
        prepared([*ROWS, long], overlong="error")
    manifest = prepared([*ROWS, long], overlong="truncate").manifest
    assert (manifest.truncated, manifest.skipped["no_target"]) == ((0, 1) if prompt else (1, 0))


def test_few_long_rows_choose_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("a", {"messages": [{"role": "user", "content": "x" * 60}]}), Row("b", {"text": "y" * 60})] * 100
    monkeypatch.setattr(preparation_plan, "_FORMAT_CHARACTERS", 200)
    assert len(preparation_plan._first(iter(rows))) == 4
    assert len(preparation_plan._first(Row("a", None) for _ in range(1000))) == 100


def test_long_documents_are_split_in_pretraining(prepared: Prepare) -> None:
    data = prepared([{"text": LONG}, {"text": "short text"}], objective="pretrain", validation_fraction=0.0)
    assert data.manifest.split_long == 1 and data.manifest.samples_used == 2
    tokenizer = data.tokenizer()
    whole = len(tokenizer(LONG)["input_ids"]) + len(tokenizer("short text")["input_ids"])
    # Beginning and end of each text: the first is never a target, the second always is.
    assert data.manifest.train.target_tokens == whole - 2 + 2
    assert data.manifest.train.documents > 2


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        ([], {}, "has no rows"),
        (
            [{"prompt": "p", "completion": ""}] * 3,
            {},
            "nothing is left to train on; 3 samples read = 0 used + 3 skipped",
        ),
        ([3, 4], {}, "rows.jsonl line 1: an object with columns was expected, not int 3"),
        (ROWS, {"format": "chat"}, "'chat' needs the column 'messages', but the data has 'prompt', 'completion'"),
        (
            ROWS,
            {"format": "prompt_completion", "completion_column": "completions"},
            "needs the column 'completions', but the data has 'prompt', 'completion'; did you mean 'completion'",
        ),
        (
            [{"question": "q"}],
            {},
            "'auto' recognizes none of the columns 'question'; it looks for 'messages', 'conversations', ",
        ),
        ([{"text": "t"}], {}, "objective.type 'sft' needs prompts and completions, but the data has only texts"),
    ],
    ids=["no-rows", "nothing-left", "no-objects", "missing", "near", "auto", "objective"],
)
def test_data_that_cannot_be_used(
    rows: list[Any], options: dict[str, Any], problem: str, prepared: Prepare, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        prepared(rows, **options)
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.jsonl", ".out.lock"}


def test_auto_suits_the_objective(prepared: Prepare) -> None:
    rows = [{"text": "a text", **row} for row in ROWS]
    assert prepared(rows).manifest.format == "prompt_completion"
    assert prepared(rows, objective="pretrain").manifest.format == "text"
    assert prepared(rows, max_samples=7).manifest.samples_read == 7


@pytest.mark.parametrize(("count", "fraction", "expected"), [(1, 0.5, 0), (2, 0.01, 1), (2, 0.5, 1), (9, 0.0, 0)])
def test_the_smallest_validation_splits(count: int, fraction: float, expected: int, prepared: Prepare) -> None:
    manifest = prepared(ROWS[:count], validation_fraction=fraction).manifest
    assert manifest.validation.samples == expected and manifest.train.samples == count - expected


def test_the_split_follows_the_seed_and_stays_when_rows_are_appended() -> None:
    shorter, longer = (sample_mask(np.arange(n), fraction=0.2, seed=0) for n in (1000, 2000))
    assert np.array_equal(shorter, longer[:1000])
    assert not np.array_equal(shorter, sample_mask(np.arange(1000), fraction=0.2, seed=1))
    assert 0.15 < shorter.mean() < 0.25


def test_equal_recipes_give_equal_bytes(tmp_path: Path) -> None:
    _write(tmp_path / "rows.jsonl", ROWS)
    recipe = _recipe(tmp_path / "rows.jsonl")
    for name in ("a", "b"):
        prepare(recipe, tmp_path / name, report=lambda line: None)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) >= 6
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


def test_the_hash_of_the_contents_is_that_of_the_rows_and_not_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d %b') }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def render(common: dict[str, Any], chats: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
        return [(render_jinja_template(**common, **chat)[0][0], []) for chat in chats]

    # In this process, which has the clock of the test.
    monkeypatch.setattr("tasks.runtime.data.chat.template.render_templates", render)

    def told(out: str, day: int, rows: str = "rows.jsonl") -> tuple[str, str]:
        clock = SimpleNamespace(now=lambda: datetime(2026, 11, day))
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        _write(tmp_path / rows, [{"messages": TALK}] * 4)
        recipe = _recipe(tmp_path / rows, chat_template=str(template), sequence_length=128)
        manifest = prepare(recipe, tmp_path / out, report=lambda line: None).manifest
        return manifest.recipe_hash, manifest.content_hash

    first, later, renamed = told("first", 22), told("later", 23), told("renamed", 22, "other.jsonl")
    assert first[0] == later[0] != renamed[0]
    assert first[1] == renamed[1] != later[1]


def test_each_row_counts_in_the_hash_of_the_contents(tmp_path: Path) -> None:
    def digest(name: str, *documents: list[int], targets: bool = True, length: int = 8) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        with DocumentBuffer(tmp_path / name) as buffer:
            for number, ids in enumerate(documents):
                buffer.add(Encoded(np.array(ids, np.int32), np.full(len(ids), targets), (0, len(ids))), number)
            split = buffer.write_shards(tmp_path / name, "train", np.arange(len(documents)), length=length, seed=0)
        return split.shards[0].sha256

    base = digest("base", [1, 2, 3], [4, 5])
    assert base == digest("again", [1, 2, 3], [4, 5])
    others = [
        digest("ids", [1, 2, 3], [4, 6]),
        digest("documents", [1, 2], [3, 4, 5]),
        digest("targets", [1, 2, 3], [4, 5], targets=False),
        digest("rows", [1, 2, 3], [4, 5], length=4),
    ]
    assert len({base, *others}) == 5


def test_a_prepared_folder_is_used_again_until_the_recipe_or_the_data_changes(tmp_path: Path, lines: list[str]) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    _write(path, ROWS)
    # Without a fingerprint: `prepare` takes it itself.
    recipe = _recipe(path).model_copy(update={"fingerprint": ""})
    prepare(recipe, out, report=lines.append)
    made = (out / "manifest.json").stat().st_mtime_ns
    prepare(recipe, out, report=lines.append)
    assert "already prepared" in lines[-1] and (out / "manifest.json").stat().st_mtime_ns == made
    _write(path, ROWS[:30])
    assert prepare(recipe, out, report=lines.append).manifest.samples_read == 30
    changed = recipe.model_copy(update={"seed": 1})
    assert prepare(changed, out, report=lines.append).manifest.recipe["seed"] == 1
    # A shard that is not whole is no prepared data.
    shard = out / "train-00000.safetensors"
    os.truncate(shard, 100)
    with pytest.raises(ValueError, match=r"train-00000.safetensors is missing or truncated"):
        PreparedData.load(out)
    prepare(changed, out, report=lines.append)
    assert shard.stat().st_size > 100
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.lock", "out", "rows.jsonl"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, lines: list[str]) -> None:
    _write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    (tmp_path / "out" / "manifest.json").write_text('{"version": 1, "files": {}}')
    with pytest.raises(ValueError, match="out has other files in it; give a new or an empty folder"):
        prepare(_recipe(tmp_path / "rows.jsonl"), tmp_path / "out", report=lines.append)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    assert not lines  # refused before any work is done


def test_preparations_at_the_same_time_do_the_work_once(tmp_path: Path) -> None:
    _write(tmp_path / "rows.jsonl", ROWS)
    recipe, lines = _recipe(tmp_path / "rows.jsonl"), []
    work = partial(prepare, recipe, tmp_path / "out", report=lines.append)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("already prepared" in line for line in lines) == 2
    assert len(PreparedData.load(tmp_path / "out").train) > 0


def test_a_killed_preparation_leaves_nothing_in_the_place(tmp_path: Path) -> None:
    _write(tmp_path / "rows.jsonl", ROWS)
    recipe, out = _recipe(tmp_path / "rows.jsonl"), tmp_path / "out"
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from strata_platform.spec import DataRecipe; from tasks.runtime.data import prepare\n"
        "def report(line):\n"
        "    if line.startswith('validation:'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(DataRecipe.model_validate_json(sys.argv[1]), Path(sys.argv[2]), report=report)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, recipe.model_dump_json(), str(out)], timeout=600)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists() and len(list(tmp_path.iterdir())) == 3  # the rows, the lock, what was built
    assert prepare(recipe, out, report=lambda line: None).manifest.samples_read == 60
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out", "rows.jsonl"]


def test_a_folder_that_is_no_prepared_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no prepared data: its manifest.json"):
        PreparedData.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"has no prepared data"):
        PreparedData.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 0, "kind": "prepared data"}')
    with pytest.raises(ValueError, match="has prepared data of version 0, but this version of Strata reads version 8"):
        PreparedData.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version"')
    with pytest.raises(ValueError, match=r"cannot read .*manifest.json"):
        PreparedData.load(tmp_path)


def test_nothing_that_runs_code_is_written(prepared: Prepare) -> None:
    data = prepared(ROWS)
    suffixes = {path.suffix for path in data.folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".jinja", ".safetensors"}
    assert Manifest.read(data.folder) == data.manifest


def test_rows_are_spread_over_shards(tmp_path: Path) -> None:
    with DocumentBuffer(tmp_path) as buffer:
        for number in range(50):
            ids = np.full(1 + number % 7, number, dtype=np.int32)
            buffer.add(Encoded(ids, ids > 0, (0, len(ids))), number)
        split = buffer.write_shards(tmp_path, "train", np.arange(50), length=8, seed=0, shard_tokens=40)
        whole = buffer.write_shards(tmp_path, "whole", np.arange(50), length=8, seed=0)
        empty = buffer.write_shards(tmp_path, "none", np.arange(0), length=8, seed=0)
    assert len(split.shards) > 3 and len(whole.shards) == 1
    assert sum(shard.rows for shard in split.shards) == split.rows == whole.rows
    assert empty == Split(samples=0, documents=0, tokens=0, target_tokens=0, rows=0, shards=())
    sharded, single, none = (RowDataset(Shards(tmp_path, s), length=8, pad_token_id=99) for s in (split, whole, empty))
    assert len(none) == 0
    for index in range(split.rows):
        assert torch.equal(sharded[index]["input_ids"], single[index]["input_ids"])
    seen = torch.cat([sharded[index]["input_ids"] for index in range(split.rows)])
    assert torch.equal(torch.bincount(seen)[:50], torch.tensor([1 + number % 7 for number in range(50)]))
    assert not list(tmp_path.glob("*.spool"))


def test_the_built_in_data_end_to_end(tmp_path: Path, lines: list[str]) -> None:
    spec = RunSpec()
    data = prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "out", report=lines.append)
    manifest = data.manifest
    assert manifest.samples_used > 5_000 and manifest.skipped["overlong"] < 50
    assert manifest.train.fill(256) > 0.95 and manifest.vocabulary_size == 4096
    assert data.samples(3)[0].prompt.startswith(("def ", "async def ", "class ", "module "))
    assert len(lines) < 12
