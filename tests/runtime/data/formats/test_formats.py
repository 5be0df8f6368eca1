"""The forms of data that the page shows: each is read and learned as the page writes it, or refused as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, fingerprint, prepare
from tests.runtime.helpers.byte_tokenizer import save_byte_tokenizer

DOCS = Path(__file__).parents[4] / "docs"
# Calls and reasoning, too; the tokenizer's own template.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A text of a cell, learned if it is bold, and the role before it.
TEXT = re.compile(r"(?:(system|user|assistant|tool) )?(\*\*)?`(.*?)`")

GRPO = {"rewards": [{"function": "exact_match"}], "generation": {"max_new_tokens": 16}}

Prepare = Callable[..., PreparedData]


class Form(NamedTuple):
    """A row of the page's tables."""

    name: str
    row: dict[str, Any]
    shown: str

    @property
    def objective(self) -> str:
        if named := re.search(r"under `(\w+)`", self.name):
            return named[1]
        return "dpo" if "rejected" in self.row else "sft"

    @property
    def data(self) -> dict[str, Any]:
        """Fields of `data` that the form's name has."""
        found = re.search(r"`(\{.*\})`", self.name)
        return json.loads(found[1]) if found else {}


def forms(page: str, heading: str = "") -> dict[str, Form]:
    """Rows of the tables of a page, or of those below a heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading:
        text = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [Form(name, json.loads(row.strip("`")), shown) for name, row, shown in cells if row.startswith("`")]
    return {f"{row.name}, {row.objective}": row for row in rows}


READ = forms("data-formats.md") | forms("data-formats-preferences.md")
REFUSED = forms("data-formats-refused.md")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A token per byte of these texts and per special token."""
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: str) -> Prepare:
    def run(row: dict[str, Any], objective: str, *others: dict[str, Any], **data: Any) -> PreparedData:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (row, *others)))
        values = {
            "source": str(tmp_path / "rows.jsonl"), "packing": False, "validation_fraction": 0.0,
            # Documents far shorter than a row would be warned of.
            "sequence_length": 64 if objective == "pretrain" else 512, **data,
        }  # fmt: skip
        spec = RunSpec.model_validate(
            {
                "data": values,
                "objective": {"type": objective, **(GRPO if objective == "grpo" else {})},
                "model": {"tokenizer": tokenizer},
            }
        )
        return prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "out", report=print)

    return run


def _expected(shown: str) -> tuple[str, str, int]:
    """The text of a cell, what of it is learned, and how many tokens that is."""
    whole, learned, tokens = "", "", 0
    for answer in shown.split(" and user" if shown.startswith("user") else " and "):
        answer = f"user{answer}" if whole and shown.startswith("user") else answer
        texts = [(role, bold, text.replace("\\n", "\n")) for role, bold, text in TEXT.findall(answer)]
        assert texts, shown
        end = "<|im_end|>" if texts[0][0] else "<|eos|>"
        whole += "" if texts[0][0] else "<|bos|>"
        for role, bold, text in texts:
            whole += f"<|im_start|>{role}\n{text}{end}\n" if role else text
            learned += f"{text}{end}" if bold else ""
            tokens += len(text) + 1 if bold else 0
        whole += "" if texts[0][0] else end
    return whole, learned, tokens


@pytest.mark.parametrize("form", READ.values(), ids=READ)
def test_a_form_is_read_and_learned_as_the_page_shows(form: Form, prepared: Prepare) -> None:
    data = prepared(form.row, form.objective, **form.data)
    whole, learned, tokens = _expected(form.shown)
    row = data.train[0]
    if form.objective == "reward":
        assert row["margin"].tolist() == [form.row["margin"], *[0.0] * (row["margin"].numel() - 1)]
        assert data.tokenizer().decode(row["input_ids"][row["scored"] == 1]) == 2 * "<|eos|>"
    if form.objective == "kto":
        assert set(row["sides"].tolist()) == {-1 if form.shown.endswith(", bad") else 1}
    decode = data.tokenizer().decode
    assert decode(row["input_ids"]) == whole
    assert decode(row["labels"][row["labels"] != -100]) == learned
    # A token per character, and the one that ends the text.
    assert data.manifest.train.target_tokens == tokens
    assert len(data.train) == data.manifest.samples_used == 1


@pytest.mark.parametrize("form", REFUSED.values(), ids=REFUSED)
def test_a_form_that_is_refused_names_the_way_out(form: Form, prepared: Prepare) -> None:
    with pytest.raises(ValueError, match=re.escape(form.shown)):
        prepared(form.row, form.objective)


def test_roles_of_rows_without_roles_are_refused(prepared: Prepare) -> None:
    with pytest.raises(
        ValueError, match=r"data.train_on \['tool'\] names roles, but the data's format is prompt_compl"
    ):
        prepared({"prompt": "a", "completion": "b"}, "sft", train_on=["tool"])


def test_there_are_the_forms_that_people_have() -> None:
    assert len(READ) + len(REFUSED) >= 40


TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("row", "objective"),
    [
        ({"messages": json.dumps(TURNS)}, "sft"),
        ({"prompt": json.dumps(TURNS[:1]), "completion": json.dumps(TURNS[1:], indent=1)}, "sft"),
        ({"prompt": "2 + 2?", "completion": json.dumps(TURNS[1:])}, "sft"),
        (
            {"chosen": json.dumps(TURNS), "rejected": json.dumps([TURNS[0], {"role": "assistant", "content": "5"}])},
            "dpo",
        ),
        ({"prompt": json.dumps([{"id": 1, **TURNS[0]}]), "completion": json.dumps([{"id": 2, **TURNS[1]}])}, "sft"),
        (
            {
                "prompt": json.dumps(TURNS[:1]),
                "chosen": json.dumps({"content": "4", "role": "assistant"}),
                "rejected": json.dumps({"role": "assistant", "content": "5"}),
            },
            "dpo",
        ),
        ({"prompt": json.dumps(TURNS[:1]), "completion": "4"}, "sft"),
        ({"prompt": json.dumps(TURNS[:1]), "chosen": "4", "rejected": "5"}, "dpo"),
    ],
    ids=[
        "messages",
        "prompt and completion",
        "a completion",
        "pairs",
        "other keys first",
        "one message",
        "a prompt",
        "a prompt of pairs",
    ],
)
def test_messages_that_a_table_holds_as_json_are_read(row: dict[str, str], objective: str, prepared: Prepare) -> None:
    data = prepared(row, objective)
    text = data.tokenizer().decode(data.train[0]["input_ids"])
    assert text.startswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[{'role': 'user', 'content': 'Hi'}]", "not a list of messages or JSON of one; write it by json.dumps"),
        ('[{"role": "user", "content": "Hi"}', "begins as the JSON of messages, but is not valid"),
    ],
    ids=["Python", "cut"],
)
def test_messages_in_another_notation_are_refused(text: str, problem: str, prepared: Prepare) -> None:
    with pytest.raises(ValueError, match=problem):
        prepared({"messages": text}, "sft")


def test_json_of_messages_with_mapped_keys_may_escape_them(prepared: Prepare) -> None:
    keys = {"role": "роль", "content": "текст"}
    prompt, completion = (json.dumps([{keys[key]: text for key, text in turn.items()}]) for turn in TURNS)
    assert "\\u" in prompt
    data = prepared({"prompt": prompt, "completion": completion}, "sft", message_keys=keys)
    text = data.tokenizer().decode(data.train[0]["input_ids"])
    assert text == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"


OBJECTS = json.dumps([{"speaker": "agent", "text": "4"}])


@pytest.mark.parametrize(
    ("row", "objective", "text_format"),
    [
        ({"prompt": "2 + 2?", "completion": OBJECTS}, "sft", "prompt_completion"),
        ({"prompt": "2 + 2?", "chosen": OBJECTS, "rejected": "5"}, "dpo", "preference"),
        ({"prompt": OBJECTS}, "grpo", "prompt"),
        ({"question": "2 + 2?", "answer": OBJECTS}, "sft", "alpaca"),
    ],
    ids=["completion", "chosen", "prompt", "answer"],
)
def test_json_of_other_objects_is_text_only_if_the_format_says_so(
    row: dict[str, str], objective: str, text_format: str, prepared: Prepare
) -> None:
    problem = (
        r"line 1: column '\w+' holds the JSON of objects with 'speaker', 'text', of which none is a message with role "
        rf"and content; .* data.message_keys; to read them as text, set data.format to '{text_format}'"
    )
    with pytest.raises(ValueError, match=problem):
        prepared(row, objective)
    data = prepared(row, objective, format=text_format)
    assert OBJECTS in data.tokenizer().decode(data.train[0]["input_ids"])


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": json.dumps(TURNS[:1]), "output": "4"},
        {"instruction": "2 + 2?", "output": json.dumps(TURNS[1:])},
        {"instruction": TURNS[:1], "output": TURNS[1:]},
    ],
    ids=["question", "answer", "lists"],
)
def test_messages_as_a_question_or_its_answer_name_the_format_that_reads_them(
    row: dict[str, Any], prepared: Prepare
) -> None:
    problem = r"line 1: column '\w+' holds messages, but format alpaca makes a chat of texts; .*'prompt_completion'"
    with pytest.raises(ValueError, match=problem):
        prepared(row, "sft")
    data = prepared(row, "sft", format="prompt_completion", prompt_column="instruction", completion_column="output")
    text = data.tokenizer().decode(data.train[0]["input_ids"])
    assert text == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"


def test_json_of_messages_is_the_text_of_a_question_if_the_format_says_so(
    prepared: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"instruction": "Sum up.", "input": json.dumps(TURNS), "output": "A sum."}
    with pytest.raises(ValueError, match=r"column 'input' holds messages.* as text, set data.format to 'alpaca'"):
        prepared(row, "sft")
    data = prepared(row, "sft", format="alpaca")
    assert f"Sum up.\n{row['input']}<|im_end|>" in data.tokenizer().decode(data.train[0]["input_ids"])
    assert prepared(row, "sft", ignore_columns=["input"]).manifest.samples_used == 1
    assert "messages as JSON" not in capsys.readouterr().out
    critic = json.dumps([*TURNS, {"role": "critic", "content": "True."}])
    prepared({"instruction": "Talk.", "output": critic}, "sft", format="alpaca")
    assert "messages as JSON are read as text, by data.format 'alpaca'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer", ['{"sum": 4}', '{"from": "USD", "value": 4}', '[{"name": "add", "arguments": {"a": 2, "b": 2}}]']
)
def test_json_that_is_no_message_is_text(answer: str, prepared: Prepare) -> None:
    """Also an object with keys of ShareGPT's, and calls of functions, as data of tools has them."""
    data = prepared({"prompt": "2 + 2 =", "completion": answer}, "sft")
    assert data.tokenizer().decode(data.train[0]["input_ids"]) == f"<|bos|>2 + 2 ={answer}<|eos|>"


TEXTS = {"prompt": "2 + 2 =", "completion": " 4"}
CHAT = {"prompt": json.dumps(TURNS[:1]), "completion": json.dumps(TURNS[1:])}
PAIR = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
CHATS = {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "5"}]}


@pytest.mark.parametrize(
    ("first", "other", "objective", "problem"),
    [
        (TEXTS, CHAT, "sft", "'completion' holds messages, but by the first rows the format is prompt_completion, of"),
        (CHAT, TEXTS, "sft", "'completion' holds a text, but by the first rows the format is chat, of messages"),
        (PAIR, CHATS, "dpo", "'rejected' holds messages, but by the first rows the format is preference, of texts"),
        (CHATS, PAIR, "dpo", "'rejected' holds a text, but by the first rows the format is preference_chat, of"),
        ({"prompt": "2 + 2 ="}, {"prompt": CHAT["prompt"]}, "grpo", "'prompt' holds messages, .* is prompt, of texts"),
        ({"prompt": CHAT["prompt"]}, {"prompt": "2 + 2 ="}, "grpo", "'prompt' holds a text, .* is prompt_chat, of me"),
    ],
    ids=["messages", "texts", "messages in pairs", "texts in pairs", "messages as prompts", "texts as prompts"],
)
def test_a_row_of_another_kind_than_the_first_is_invalid(
    first: dict[str, Any], other: dict[str, Any], objective: str, problem: str, prepared: Prepare
) -> None:
    with pytest.raises(ValueError, match=f"line 2: column {problem}"):
        prepared(first, objective, other)
    manifest = prepared(first, objective, other, invalid="skip").manifest
    assert (manifest.samples_used, manifest.skipped["invalid"]) == (1, 1)


def test_texts_are_questions_where_the_format_says_so(prepared: Prepare) -> None:
    data = prepared(CHATS, "dpo", PAIR, format="preference_chat")
    assert data.manifest.samples_used == 2
