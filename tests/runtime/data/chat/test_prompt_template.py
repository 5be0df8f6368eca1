"""Prompts that a template renders: what the model reads and learns, against texts that are written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.local_files import require_local_files
from tasks.runtime.data import PreparedData, fingerprint, prepare
from tasks.runtime.data.chat import template_renderer

Prepare = Callable[..., PreparedData]
QUESTION = "{{ question }} ="


@pytest.fixture
def spec_of(tmp_path: Path, byte_tokenizer: str) -> Callable[..., RunSpec]:
    def build(row: dict[str, Any], template: str, objective: str = "sft", **data: Any) -> RunSpec:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        values = {
            "source": str(tmp_path / "rows.jsonl"), "packing": False, "validation_fraction": 0.0,
            "sequence_length": 512, "template": template, **data,
        }  # fmt: skip
        return RunSpec.model_validate(
            {"data": values, "objective": {"type": objective}, "model": {"tokenizer": byte_tokenizer}}
        )

    return build


@pytest.fixture
def prepared(tmp_path: Path, spec_of: Callable[..., RunSpec]) -> Prepare:
    def run(*arguments: Any, **data: Any) -> PreparedData:
        spec = spec_of(*arguments, **data)
        return prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "out", report=print)

    return run


def texts(data: PreparedData) -> tuple[str, str]:
    """What the model reads, and what of it is learned."""
    row, decode = data.train[0], data.tokenizer().decode
    return decode(row["input_ids"]), decode(row["labels"][row["labels"] != -100])


WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Input:\n2 and 3\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Response:\n"
)


@pytest.mark.parametrize(
    ("row", "template", "prompt"),
    [
        ({"instruction": "Add.", "input": "2 and 3", "output": "5"}, "alpaca", WITH_INPUT),
        ({"instruction": "Add.", "input": "", "output": "5"}, "alpaca", WITHOUT_INPUT),
        ({"instruction": "Add.", "input": None, "output": "5"}, "alpaca", WITHOUT_INPUT),
        ({"instruction": "Add.", "response": "5"}, "alpaca", WITHOUT_INPUT),
        ({"question": "Add.", "context": "2 and 3", "answer": "5"}, "alpaca", WITH_INPUT),
        ({"prompt": "Add.", "completion": "5"}, "alpaca", WITHOUT_INPUT),
        ({"question": "2+3", "answer": "5"}, QUESTION, "2+3 ="),
        ({"question": "2+3", "answer": "5"}, "Q: {{ question }}\nA:\n", "Q: 2+3\nA:\n"),
        ({"question": "<2>", "context": None, "answer": "5"},
         "{% if context %}\n{{ context }}\n{% endif %}\n{{ question | tojson }}", '"<2>"'),
    ],
    ids=["input", "empty", "null", "no-input", "question", "prompt", "own", "line-end", "own-null"],
)  # fmt: skip
def test_the_prompt_is_read_and_the_answer_learned(
    prepared: Prepare, capsys: pytest.CaptureFixture[str], row: dict[str, Any], template: str, prompt: str
) -> None:
    whole, learned = texts(prepared(row, template))
    assert (whole, learned) == (f"<|bos|>{prompt}5<|eos|>", "5<|eos|>")
    assert f"prompts by data.template {template[:60]!r}" in capsys.readouterr().out


def test_columns_of_any_name_and_a_file(prepared: Prepare, spec_of: Callable[..., RunSpec], tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ premise }}? {{ hypothesis }}:")
    row = {"premise": "a", "hypothesis": "b", "verdict": "no"}
    arguments = (row, str(tmp_path / "mine.jinja"))
    assert texts(prepared(*arguments, completion_column="verdict")) == ("<|bos|>a? b:no<|eos|>", "no<|eos|>")
    spec = spec_of(*arguments)
    before = fingerprint(spec)
    (tmp_path / "mine.jinja").write_text("{{ premise }}")
    assert fingerprint(spec) != before
    (tmp_path / "mine.jinja").unlink()
    with pytest.raises(SpecError, match=r"data\.template: there is no such file"):
        require_local_files(spec)


def test_special_tokens_of_a_row_are_text_and_those_of_the_template_are_not(prepared: Prepare) -> None:
    row = {"question": "a<|eos|>b", "answer": "c<|eos|>d"}
    data = prepared(row, "{{ question }}<|eos|>")
    ids = data.train[0]["input_ids"].tolist()
    end = data.tokenizer().eos_token_id
    # BOS, then a token per character of what is text.
    assert [at for at, number in enumerate(ids) if number == end] == [1 + len(row["question"]), len(ids) - 1]
    assert texts(data) == ("<|bos|>a<|eos|>b<|eos|>c<|eos|>d<|eos|>", "c<|eos|>d<|eos|>")


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"question": "a", "answer": "b"}, "{{ qestion }}",
         r"line 1: data.template: '{{ qestion }}': there is no column 'qestion'; the row has the columns "
         r"'question', 'answer'"),
        ({"question": None, "answer": "b"}, QUESTION, r"line 1: .*column 'question' is null"),
        ({"question": None, "answer": "b"}, "{{ question ~ '!' }}", r"line 1: .*column 'question' is null"),
        ({"question": {"a": None}, "answer": "b"}, "{{ question.a }}", r"line 1: .*a value is null"),
        ({"question": "a", "answer": "b"}, "{{ question }}{{ answer }}", "reads the column 'answer', which is the com"),
        ({"question": "a", "answer": "b"}, "{% if %}", "is not a Jinja template: line 1"),
        ({"question": "a", "answer": "b"}, "{{ question.__class__.__mro__ }}", "unsafe"),
        ({"question": "a", "answer": "b", "system": "s"}, QUESTION, "'system' holds .* read it in a template of your"),
        ({"question": "a", "other": "b"}, QUESTION, "set data.completion_column"),
        ({"text": "a"}, QUESTION, "but the data's format is text"),
        ({"messages": []}, "alpaca", "but the data's format is chat"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "{{ prompt }}", "holds messages"),
    ],
    ids=["missing", "null", "null-joined", "null-inside", "answer", "syntax", "unsafe", "system", "unknown", "text",
         "chat", "messages"],
)  # fmt: skip
def test_a_row_or_a_template_that_does_not_fit(
    prepared: Prepare, row: dict[str, Any], template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(row, template)


def test_a_template_without_an_end_is_stopped(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = "{% for i in range(99999) %}" * 3 + "{{ question }}" + "{% endfor %}" * 3
    prepared({"question": "a", "answer": "b"}, QUESTION)
    monkeypatch.setattr(template_renderer, "SECONDS", 0.5)
    with pytest.raises(ValueError, match=r"takes more than 0\.5 s for one row \(.*line 1\)"):
        prepared({"question": "c", "answer": "b"}, loops)


@pytest.mark.parametrize(
    ("objective", "data", "message"),
    [
        ("sft", {"template": "alpacca"}, "neither 'alpaca', nor a .jinja file"),
        ("sft", {"chat_template": "chatml"}, "leave one of them out"),
        ("sft", {"format": "chat"}, "data.format is 'chat'"),
        ("dpo", {}, "compares two"),
    ],
)
def test_what_contradicts_a_template(objective: str, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunSpec.model_validate(
            {"objective": {"type": objective}, "data": {"template": "alpaca", "source": "a.jsonl", **data}}
        )
