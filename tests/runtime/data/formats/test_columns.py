"""Columns: those that change what a row means are read, or refused with the way out; none is left out in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, fingerprint, prepare

TALK = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
PAIR = {"prompt": "2 + 2 =", "completion": " 4"}
PREFERENCE = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
CHATS = {"chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "No."}]}
ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "4"}

Prepare = Callable[..., PreparedData]


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def prepared(tmp_path: Path, byte_tokenizer: str, lines: list[str]) -> Prepare:
    def run(rows: list[Any], objective: str = "sft", **data: Any) -> PreparedData:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {
            "source": str(tmp_path / "rows.jsonl"), "sequence_length": 256, "packing": False,
            "validation_fraction": 0.0, **data,
        }  # fmt: skip
        spec = RunSpec.model_validate(
            {"data": values, "objective": {"type": objective}, "model": {"tokenizer": byte_tokenizer}}
        )
        return prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "out", report=lines.append)

    return run


def _turns(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def _documents(data: PreparedData) -> list[tuple[str, str]]:
    """Of each row the text and what of it is learned, in order."""
    rows = [data.train[index] for index in range(len(data.train))]
    decode = data.tokenizer().decode
    return sorted((decode(row["input_ids"]), decode(row["labels"][row["labels"] != -100])) for row in rows)


ALPACAS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "input": (ALPACA, [("user", "Add.\n2 and 2"), ("assistant", "4")]),
    "no input": ({**ALPACA, "input": ""}, [("user", "Add."), ("assistant", "4")]),
    "null": ({**ALPACA, "input": None, "history": None, "system": None}, [("user", "Add."), ("assistant", "4")]),
    "only input": ({**ALPACA, "instruction": ""}, [("user", "2 and 2"), ("assistant", "4")]),
    "system": (
        {**ALPACA, "system": "Be brief."},
        [("system", "Be brief."), ("user", "Add.\n2 and 2"), ("assistant", "4")],
    ),
    "history": (
        {**ALPACA, "history": [["1 + 1?", "2"]]},
        [("user", "1 + 1?"), ("assistant", "2"), ("user", "Add.\n2 and 2"), ("assistant", "4")],
    ),
}


@pytest.mark.parametrize(("row", "turns"), ALPACAS.values(), ids=ALPACAS)
def test_rows_of_alpaca_are_chats(row: dict[str, Any], turns: list[tuple[str, str]], prepared: Prepare) -> None:
    data = prepared([row])
    learned = "".join(f"{content}<|im_end|>" for role, content in turns if role == "assistant")
    assert data.manifest.format == "alpaca"
    assert _documents(data) == [(_turns(*turns), learned)]
    # A token per character of these texts; the special token at the end of each turn is one.
    assert data.manifest.train.target_tokens == sum(len(text) + 1 for role, text in turns if role == "assistant")


def test_an_output_that_is_empty_teaches_nothing(prepared: Prepare) -> None:
    manifest = prepared([ALPACA, {**ALPACA, "output": " "}]).manifest
    assert (manifest.samples_used, manifest.skipped["no_target"]) == (1, 1)


def test_a_system_column_becomes_the_first_message(prepared: Prepare) -> None:
    whole = _turns(("system", "Be brief."), ("user", "Hello?"), ("assistant", "Hi."))
    for values in (
        {"messages": TALK, "system": "Be brief."},
        {"messages": [{"role": "system", "content": "Be brief."}, *TALK], "system": "Be brief. "},
    ):
        assert _documents(prepared([values])) == [(whole, "Hi.<|im_end|>")]
    rows = [{"messages": TALK, "system_prompt": "Be brief."}]
    assert _documents(prepared(rows, system_column="system_prompt")) == [(whole, "Hi.<|im_end|>")]
    assert _documents(prepared(rows, ignore_columns=["system_prompt"]))[0][0] == whole.removeprefix(
        _turns(("system", "Be brief."))
    )
    other = {"messages": [{"role": "system", "content": "Be long."}, *TALK], "system": "Be brief."}
    with pytest.raises(
        ValueError, match=r"rows.jsonl line 1: column 'system' and the first message hold different sys"
    ):
        prepared([other])
    assert "Be long." in _documents(prepared([other], ignore_columns=["system"]))[0][0]
    with pytest.raises(ValueError, match=r"data.system_column 'sytem': the data has 'messages', 'system'; did"):
        prepared([other], system_column="sytem")


def test_both_answers_follow_the_system_message(prepared: Prepare) -> None:
    data = prepared([{**CHATS, "system": "Be brief."}], "dpo")
    head = _turns(("system", "Be brief."), ("user", "Hello?"))
    ((text, learned),) = _documents(data)
    assert text == "".join(f"{head}{_turns(('assistant', answer))}" for answer in ("Hi.", "No."))
    assert learned == "Hi.<|im_end|>No.<|im_end|>"
    # 3 characters and the token at the end, twice.
    assert data.manifest.train.target_tokens == 8


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "input": ({**PAIR, "input": "2"}, "sft", r"column 'input' holds str '2'; it is a part of the prompt, .*'alpaca'"),
    "history": ({**PAIR, "history": [["a", "b"]]}, "sft", "column 'history' holds list .*earlier turns"),
    "system": ({**PAIR, "system": "Be brief."}, "sft", "column 'system' holds str .*a system message.*system_column"),
    "system_prompt": ({**PAIR, "system_prompt": "a"}, "sft", "column 'system_prompt' .*set data.system_column"),
    "label": (
        {**PAIR, "label": False},
        "sft",
        "column 'label' holds bool False; it marks a bad answer.*drop such rows",
    ),
    "label as text": ({**PAIR, "label": "False"}, "sft", "column 'label' holds str 'False'"),
    "kto_tag": ({"messages": TALK, "kto_tag": 0}, "sft", "column 'kto_tag' holds int 0; it marks a bad answer"),
    "train": ({"messages": TALK, "train": False}, "sft", "column 'train' holds bool False; it excludes the row"),
    "loss": ({**ALPACA, "loss": False}, "sft", "column 'loss' holds bool False; it excludes the row"),
    "weight": ({**PAIR, "weight": 0.5}, "sft", r"column 'weight' holds float 0\.5; it weighs the row"),
    "masks": ({"messages": TALK, "masks": [0, 1]}, "sft", "column 'masks' holds list .*which tokens carry loss"),
    "functions": ({"messages": TALK, "functions": "[{}]"}, "sft", "column 'functions' .*rename it to 'tools'"),
    "dpo, system": ({**PREFERENCE, "system": "a"}, "dpo", "column 'system' .*format preference does not read it"),
    "dpo, input": ({**PREFERENCE, "input": "a"}, "dpo", "column 'input' .*a part of the prompt"),
    "dpo, history": ({**CHATS, "history": [["a", "b"]]}, "dpo", "column 'history' .*earlier turns"),
}


@pytest.mark.parametrize(("row", "objective", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_column_that_changes_what_a_row_means_is_refused(
    row: dict[str, Any], objective: str, problem: str, prepared: Prepare
) -> None:
    plain = {
        name: value for name, value in row.items() if name in {**PREFERENCE, **PAIR, **CHATS, **ALPACA, "messages": 0}
    }
    column = next(name for name in reversed(row))
    plain.pop(column, None)
    rows = [plain] * 120 + [row]
    # In a row that is not among the first, too, and whatever data.invalid is.
    with pytest.raises(ValueError, match=rf"rows.jsonl line 121: {problem}.*, or name '{column}' in data"):
        prepared(rows, objective, invalid="skip")
    with pytest.raises(ValueError, match=rf"rows.jsonl line 2: {problem}"):
        prepared([plain, row], objective)
    data = prepared([row], objective, ignore_columns=[column])
    assert data.manifest.samples_used == 1
    # As without the column.
    assert _documents(prepared([plain], objective)) == _documents(data)


def test_token_ids_of_one_sample_are_taken_with_their_positions(prepared: Prepare) -> None:
    one = {"input_ids": [1, 50, 51, 2], "position_ids": [0, 1, 2, 3], "seq_lengths": [4], "attention_mask": [1] * 4}
    assert prepared([one]).manifest.samples_used == 1
    with pytest.raises(ValueError, match=r"line 2: column 'seq_lengths' .*; it says that the row packs"):
        prepared([one, {**one, "seq_lengths": [2, 2]}])


def test_values_that_change_nothing_are_taken(prepared: Prepare) -> None:
    row = {**PAIR, "label": True, "weight": 1, "system": None, "input": "", "history": [], "train": True, "masks": None}
    assert prepared([row]).manifest.samples_used == 1
    # A text that is pretrained on is what it is.
    assert (
        prepared([{"text": "a text", "label": 0, "input": "b"}], "pretrain", sequence_length=64).manifest.format
        == "text"
    )


def test_columns_that_are_not_read_are_named(prepared: Prepare, lines: list[str]) -> None:
    prepared([{"id": 7, **PAIR}, {**PAIR, "label": True, "id": 8}])
    assert "columns not used: 'id', 'label'" in lines
    lines.clear()
    prepared([{"messages": TALK, "tools": None, "system": None}])
    assert not [line for line in lines if line.startswith("columns not used")]


def test_keys_of_messages_that_the_template_does_not_read_are_named(
    prepared: Prepare, lines: list[str], tmp_path: Path
) -> None:
    template = tmp_path / "named.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'tool' %} {{ m.name }}{% endif %}: "
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    chat = [
        {"role": "user", "content": "Hello?", "name": "Ann", "id": 1},
        {"role": "tool", "content": "12:00", "name": "clock"},
        {"role": "assistant", "content": "Hi.", "id": 2},
    ]
    # A row that is not usable says nothing.
    prepared([{"messages": chat}, {"messages": [{"role": "user"}]}], invalid="skip", chat_template=str(template))
    told = "keys of messages that the chat template does not read: "
    assert [line for line in lines if line.startswith(told)] == [
        f"{told}'name' of 'user', 'id' of 'user', 'id' of 'assistant'"
    ]
    lines.clear()
    prepared([{"messages": chat}], chat_template=str(template), ignore_columns=["id", "name"])
    prepared([{"messages": TALK}])
    assert not [line for line in lines if line.startswith(told)]


def _flagged(**flags: Any) -> list[dict[str, Any]]:
    return [*TALK, {"role": "user", "content": "Bye."}, {"role": "assistant", "content": "Bye!", **flags}]


@pytest.mark.parametrize("flags", [{"train": False}, {"loss": False}, {"training": 0}, {"loss": 0.0, "weight": 0}])
def test_a_turn_that_is_not_to_be_learned_is_read_only(flags: dict[str, Any], prepared: Prepare) -> None:
    whole = _turns(("user", "Hello?"), ("assistant", "Hi."), ("user", "Bye."), ("assistant", "Bye!"))
    assert _documents(prepared([{"messages": _flagged(**flags)}])) == [(whole, "Hi.<|im_end|>")]
    both = "Hi.<|im_end|>Bye!<|im_end|>"
    assert _documents(prepared([{"messages": _flagged(**dict.fromkeys(flags, 1))}])) == [(whole, both)]
    assert _documents(prepared([{"messages": _flagged(**dict.fromkeys(flags))}])) == [(whole, both)]
    assert _documents(prepared([{"messages": _flagged(**flags)}], ignore_columns=list(flags))) == [(whole, both)]


FLAGS = {
    "detail": (
        {"train_detail": [{"begin": 0}]},
        r"has 'train_detail': which parts of a message carry loss cannot be chosen",
    ),
    "mask": ({"mask": True}, "has 'mask': which parts"),
    "scale": ({"loss": 0.5}, r"loss is 0\.5; it may be true or false"),
    "both": ({"train": True, "weight": 0}, "train is True, but weight is 0"),
    "more": ({"train": True, "weight": 1.5}, r"train is True, but weight is 1\.5"),
    "less": ({"train": False, "weight": 0.5}, r"train is False, but weight is 0\.5"),
    "text": ({"train": True, "weight": "high"}, "train is True, but weight is 'high'"),
}


@pytest.mark.parametrize(("flags", "problem"), FLAGS.values(), ids=FLAGS)
def test_flags_of_a_turn_that_cannot_be_followed_are_refused(
    flags: dict[str, Any], problem: str, prepared: Prepare
) -> None:
    with pytest.raises(ValueError, match=f"rows.jsonl line 1: message 4:? {problem}"):
        prepared([{"messages": _flagged(**flags)}])
    assert prepared([{"messages": _flagged(**flags)}], ignore_columns=list(flags)).manifest.samples_used == 1


def test_a_user_is_not_learned(prepared: Prepare) -> None:
    rows = [{"messages": [{**TALK[0], "train": True}, TALK[1]]}]
    with pytest.raises(ValueError, match="message 1: train is True and role is 'user', but only the assistant's"):
        prepared(rows)
    rows[0]["messages"][0]["train"] = False
    assert _documents(prepared(rows))[0][1] == "Hi.<|im_end|>"


def test_fields_that_name_a_column_in_vain_are_warned_of(prepared: Prepare) -> None:
    rows = [{"messages": [{**TALK[0], "id": 1}, TALK[1]], "extra": "x"}]
    with pytest.warns(UserWarning, match=r"^data\.prompt_column 'extra' has no effect: the data's format is chat$"):
        prepared(rows, prompt_column="extra")
    with pytest.raises(
        ValueError, match=r"^data\.prompt_column 'extar': the data has 'messages', 'extra'; did you mean"
    ):
        prepared(rows, prompt_column="extar")
    with pytest.warns(UserWarning, match=r"^data\.ignore_columns: none of the first 1 rows has 'nowhere'$"):
        prepared(rows, ignore_columns=["extra", "nowhere", "id"])


def test_the_columns_of_the_data_are_named_though_they_are_ignored(prepared: Prepare) -> None:
    with pytest.raises(ValueError, match=r"data\.ignore_columns: no column is left of 'prompt', 'completion'"):
        prepared([PAIR], ignore_columns=list(PAIR))
