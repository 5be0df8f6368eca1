"""The column `chat_template_kwargs`: what each row passes to the chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, fingerprint, prepare
from tasks.runtime.extensions import ChatFormat
from tests.runtime.helpers.byte_tokenizer import save_byte_tokenizer

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
# As Qwen3's: a mode writes into the prompt of an answer, and a text into the system message.
TEMPLATE = (
    "{% if rules %}<|im_start|>system\n{{ rules }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
USER = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"

Prepare = Callable[..., PreparedData]


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def prepared(tmp_path: Path, lines: list[str]) -> Prepare:
    save_byte_tokenizer(tmp_path / "tokenizer", TEMPLATE)

    def run(rows: list[Any], objective: str = "sft", **data: Any) -> PreparedData:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {"source": str(tmp_path / "rows.jsonl"), "packing": False, "validation_fraction": 0.0, **data}
        more = {"rewards": [{"function": "exact_match"}], "generation": {"max_new_tokens": 16}}
        spec = RunSpec.model_validate(
            {
                "data": values,
                "objective": {"type": objective, **(more if objective == "grpo" else {})},
                "model": {"tokenizer": str(tmp_path / "tokenizer")},
            }
        )
        return prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "out", report=lines.append)

    return run


def _documents(data: PreparedData) -> list[tuple[str, str]]:
    """Of each row the text and what of it carries loss, sorted."""
    rows = [data.train[index] for index in range(len(data.train))]
    decode = data.tokenizer().decode
    return sorted((decode(row["input_ids"]), decode(row["labels"][row["labels"] != -100])) for row in rows)


ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": ({}, f"{USER}<think></think>4<|im_end|>\n", "<think></think>4<|im_end|>"),
    "null": ({"chat_template_kwargs": None}, f"{USER}<think></think>4<|im_end|>\n", "<think></think>4<|im_end|>"),
    "null of a key": (
        {"chat_template_kwargs": {"enable_thinking": None, "tools": None}},
        f"{USER}<think></think>4<|im_end|>\n",
        "<think></think>4<|im_end|>",
    ),
    "mode": (
        {"chat_template_kwargs": {"enable_thinking": False}},
        f"{USER}<think></think>4<|im_end|>\n",
        "4<|im_end|>",
    ),
    "json": (
        {"chat_template_kwargs": '{"enable_thinking": false, "rules": "Add."}'},
        f"<|im_start|>system\nAdd.<|im_end|>\n{USER}<think></think>4<|im_end|>\n",
        "4<|im_end|>",
    ),
}


@pytest.mark.parametrize(("row", "text", "learned"), ROWS.values(), ids=ROWS)
def test_each_row_has_its_own(row: dict[str, Any], text: str, learned: str, prepared: Prepare) -> None:
    other = {"messages": [TALK[0], {"role": "assistant", "content": "5"}]}
    data = prepared([{"messages": TALK, **row}, other])
    assert (text, learned) in _documents(data)
    rest = f"{USER}<think></think>5<|im_end|>\n"
    assert (rest, "<think></think>5<|im_end|>") in _documents(data)


def test_prompts_and_labelled_answers_have_it_too(prepared: Prepare) -> None:
    row = {"chat_template_kwargs": {"enable_thinking": False, "rules": "Add."}}
    head = f"<|im_start|>system\nAdd.<|im_end|>\n{USER}<think></think>"
    data = prepared([{"messages": TALK, "label": True, **row}], "kto")
    assert _documents(data) == [(f"{head}4<|im_end|>\n", "4<|im_end|>")]
    ((text, _),) = _documents(prepared([{"prompt": TALK[:1], **row}], "grpo"))
    assert text.startswith(head)


class Questions(ChatFormat):
    """A format of the user's."""

    columns = ("question",)

    def messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "4"}]


def test_a_format_of_the_users_passes_them_too(prepared: Prepare, lines: list[str]) -> None:
    row = {"question": "2 + 2?", "id": 7, "chat_template_kwargs": {"rules": "Add."}}
    data = prepared([row], format=f"{__name__}:Questions")
    assert data.tokenizer().decode(data.train[0]["input_ids"]).startswith("<|im_start|>system\nAdd.<|im_end|>\n")
    assert [line for line in lines if line.startswith("columns not used")] == ["columns not used: 'id'"]


def test_a_special_token_in_a_text_is_text(prepared: Prepare) -> None:
    data = prepared([{"messages": TALK, "chat_template_kwargs": {"rules": "a<|im_end|>"}}])
    ids = data.train[0]["input_ids"].tolist()
    end = data.tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 3
    assert data.tokenizer().decode(ids).startswith("<|im_start|>system\na<|im_end|><|im_end|>\n")


def test_what_the_template_does_not_read_is_told(prepared: Prepare, lines: list[str]) -> None:
    prepared([{"messages": TALK, "chat_template_kwargs": {"enable_thinking": True, "effort": "low"}}])
    told = "keys of column 'chat_template_kwargs' that the chat template does not read: "
    assert [line for line in lines if line.startswith(told)] == [f"{told}'effort'"]
    assert not [line for line in lines if line.startswith("columns not used")]
    lines.clear()
    # Names of the template that are no variables of it: a key of messages, an attribute, a text, a loop's variable.
    prepared(
        [{"messages": TALK, "chat_template_kwargs": dict.fromkeys(["content", "last", "system", "m", "rules"], "")}]
    )
    assert [line for line in lines if line.startswith(told)] == [f"{told}'content', 'last', 'system', 'm'"]
    lines.clear()
    row = {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False, "effort": "low"}}
    data = prepared([row], ignore_columns=["chat_template_kwargs"])
    assert _documents(data)[0][1] == "<think></think>4<|im_end|>"
    assert not [line for line in lines if line.startswith(told)]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            [1],
            r"holds list \[1\], not an object or a JSON string of one; correct it, or name 'chat_template_kwargs' in",
        ),
        ("{", "is not valid JSON"),
        ({"tools": []}, "has 'tools'; give them in a column 'tools'"),
        ({"chat_template": "{{ 1 }}"}, "has 'chat_template'; set data.chat_template"),
        ({"add_generation_prompt": True}, "has 'add_generation_prompt'; leave it out: a prompt is rendered with it"),
        ({"messages": []}, "has 'messages'; leave it out"),
    ],
    ids=["list", "cut", "tools", "template", "argument", "messages"],
)
def test_what_no_template_can_get_is_refused(value: Any, problem: str, prepared: Prepare) -> None:
    rows = [{"messages": TALK}, {"messages": TALK, "chat_template_kwargs": value}]
    with pytest.raises(ValueError, match=f"rows.jsonl line 2: column 'chat_template_kwargs' {problem}"):
        prepared(rows)
    manifest = prepared(rows, invalid="skip").manifest
    assert (manifest.samples_used, manifest.skipped["invalid"]) == (1, 1)


@pytest.mark.parametrize(
    ("row", "objective", "chat"),
    [
        ({"prompt": "2 + 2?", "completion": "4"}, "sft", "alpaca"),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "dpo", "preference_chat"),
        ({"prompt": "2 + 2?"}, "grpo", "prompt_chat"),
    ],
    ids=["completion", "pair", "prompt"],
)
def test_texts_are_not_rendered_by_it(row: dict[str, Any], objective: str, chat: str, prepared: Prepare) -> None:
    given = {**row, "chat_template_kwargs": {"rules": "Add."}}
    problem = f"line 1: column 'chat_template_kwargs' holds .*; it changes how a chat is rendered, and .*'{chat}'"
    with pytest.raises(ValueError, match=f"{problem}.*, or name 'chat_template_kwargs' in data.ignore_columns"):
        prepared([given], objective)
    ((text, _),) = _documents(prepared([given], objective, format=chat))
    assert text.startswith("<|im_start|>system\nAdd.")
    ignored = prepared([given], objective, ignore_columns=["chat_template_kwargs"])
    assert _documents(ignored) == _documents(prepared([row], objective))
    for empty in (None, {}, {"rules": None}, "{}", " "):
        prepared([{**row, "chat_template_kwargs": empty}], objective)


QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>"
    "{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def test_a_mode_that_contradicts_the_message_is_an_invalid_row(prepared: Prepare, tmp_path: Path) -> None:
    template = tmp_path / "qwen3.jinja"
    template.write_text(QWEN3)
    rows = [
        {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
        {
            "messages": [TALK[0], {**TALK[1], "reasoning_content": "Add."}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ]
    problem = (
        "line 2: column 'chat_template_kwargs' contradicts message 2: .*'</think>' became 'Add.*; correct one of them, "
        "or name 'chat_template_kwargs' in data.ignore_columns"
    )
    with pytest.raises(ValueError, match=problem):
        prepared(rows, chat_template=str(template))
    manifest = prepared(rows, chat_template=str(template), invalid="skip").manifest
    assert (manifest.samples_used, manifest.skipped["invalid"]) == (1, 1)
    # Of the template, not of the row.
    template.write_text(QWEN3.replace("<|im_start|>assistant", "<|im_start|>model"))
    with pytest.raises(ValueError, match="does not begin with its own generation prompt"):
        prepared(rows, chat_template=str(template), invalid="skip")


def test_marks_of_turns_are_no_variables(prepared: Prepare, lines: list[str], tmp_path: Path) -> None:
    template = tmp_path / "marked.jinja"
    template.write_text(
        "{% for m in messages %}{% if mode == 'off' %}{% continue %}{% endif %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    prepared([{"messages": TALK, "chat_template_kwargs": {"mode": "on", "generation": 1}}], chat_template=str(template))
    assert [line for line in lines if line.startswith("keys of column")] == [
        "keys of column 'chat_template_kwargs' that the chat template does not read: 'generation'"
    ]


def test_documents_reach_the_template(prepared: Prepare, tmp_path: Path) -> None:
    template = tmp_path / "documents.jinja"
    template.write_text("{% for d in documents %}[{{ d.title }}]{% endfor %}" + TEMPLATE)
    row = {"messages": TALK, "chat_template_kwargs": {"documents": [{"title": "Sums", "text": "a"}]}}
    ((text, _),) = _documents(prepared([row], chat_template=str(template)))
    assert text.startswith("[Sums]<|im_start|>user")
