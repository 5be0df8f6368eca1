"""Pairs of answers: texts and chats as they are on the Hub, and what is said of those that do not fit."""

import json
import warnings

import pytest
import torch

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.data import Data
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.data.formats.format_choice import choose_format
from tasks.runtime.data.formats.known_formats import make_format
from tasks.runtime.data.preparation.tokenizer import train_tokenizer
from tasks.runtime.data.reading.rows import Row, RowError

USER = {"role": "user", "content": "2 + 2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}, USER]
ASKED = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
TALKED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n" + ASKED
TEXTS = {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}


def recipe_of(**data):
    spec = RunSpec.model_validate({"data": {"source": "pairs.jsonl", **data}, "objective": {"type": "dpo"}})
    return DataRecipe.from_spec(spec, "-")


def read(values, **data):
    """What a row says: for each answer, what is read before it and the answer."""
    row = Row("row 1", values)
    name, columns = choose_format(recipe_of(**data), [row])
    form = make_format(name, columns, train_tokenizer(["2 + 2 = 4"]), Data())
    return [
        (document.segments[0].text, "".join(segment.text for segment in document.segments if segment.generated))
        for document in form.documents(row)
    ]


def test_answers_that_are_alike_as_far_as_a_row_goes_are_passed_over_and_counted(tmp_path):
    rows = [TEXTS, {**TEXTS, "chosen": "4 " * 99 + "yes", "rejected": "4 " * 99 + "no"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipe_of(source=str(tmp_path / "pairs.jsonl"), sequence_length=32, overlong="truncate")
    manifest = prepare(recipe, tmp_path / "out", report=print).manifest
    assert (manifest.samples_used, manifest.truncated) == (1, 0)
    assert manifest.skipped == {"invalid": 0, "no_target": 1, "overlong": 0, "image_size": 0, "audio_length": 0}


@pytest.mark.parametrize(
    ("row", "before", "ends"),
    [
        (TEXTS, "2 + 2 = ", ""),
        ({"prompt": "2 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ASKED, "<|im_end|>"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ASKED, "<|im_end|>"),
        ({"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]}, ASKED, "<|im_end|>"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, ASKED, "<|im_end|>"),
        ({"prompt": "2 + 2?", "chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]}, TALKED, "<|im_end|>"),
        ({"prompt": " Hello\n", "chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]}, TALKED, "<|im_end|>"),
        ({"prompt": "Hello", "chosen": [*TALK[1:], GOOD], "rejected": [*TALK[1:], BAD]}, TALKED, "<|im_end|>"),
        ({"prompt": TALK[:1], "chosen": [*TALK[1:], GOOD], "rejected": [*TALK[1:], BAD]}, TALKED, "<|im_end|>"),
        ({"prompt": TALK[:2], "chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]}, TALKED, "<|im_end|>"),
    ],
    ids=[
        *("texts", "chats-and-prompt", "chats", "answers-after-text", "answers-after-messages", "several-turns"),
        *("first-turn", "turns-after-text", "turns-after-messages", "several-turns-and-messages"),
    ],
)
def test_the_last_answer_alone_is_compared(row, before, ends):
    assert read(row) == [(before, "4" + ends), (before, "5" + ends)]


def test_columns_may_have_other_names():
    row = {"question": "2 + 2 = ", "good": "4", "bad": "5"}
    read_as = read(row, prompt_column="question", chosen_column="good", rejected_column="bad")
    assert read_as == [("2 + 2 = ", "4"), ("2 + 2 = ", "5")]


@pytest.mark.parametrize(
    "row",
    [{**TEXTS, "rejected": "4"}, {**TEXTS, "chosen": " "}, {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}],
    ids=["equal", "empty", "equal-chats"],
)
def test_answers_that_tell_nothing_are_passed_over(row):
    assert read(row) == []


@pytest.mark.parametrize(
    ("row", "error", "said"),
    [
        (
            {"prompt": "", "chosen": ""},
            ValueError,
            "no column 'rejected', only 'prompt', 'chosen'.*data.rejected_column",
        ),
        ({"chosen": "a", "reject": "b"}, ValueError, "no column 'rejected'.*did you mean 'reject'"),
        ({"chosen": "a", "rejected": "b"}, ValueError, "column 'chosen' are texts.*set data.prompt_column"),
        ({**TEXTS, "chosen": 4}, RowError, "row 1: column 'chosen' holds int 4, not text"),
        (
            {"chosen": [USER, GOOD], "rejected": "5"},
            RowError,
            "row 1: column 'rejected' has an answer without a prompt",
        ),
        ({"chosen": [USER, GOOD], "rejected": 5}, RowError, "row 1: column 'rejected' holds int 5, not a list"),
        (
            {"chosen": [USER, {**GOOD, "weight": 0}], "rejected": [USER, BAD]},
            RowError,
            "row 1: the last message in column 'chosen' has weight 0, but it is the answer to compare",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, RowError, "row 1: column 'chosen' has an answer without a prompt"),
        (
            {"chosen": [USER, GOOD, USER], "rejected": [USER, BAD]},
            RowError,
            "last message in column 'chosen' has role 'user'",
        ),
        (
            {"chosen": [*TALK, GOOD], "rejected": [USER, USER, USER, BAD]},
            RowError,
            "differ in message 1; they may differ",
        ),
        ({"chosen": [*TALK, GOOD], "rejected": [*TALK[:1], BAD]}, RowError, "have 4 and 2 messages"),
        (
            {"prompt": "2 + 2?", "chosen": [*TALK[:1], GOOD], "rejected": [*TALK[:1], BAD]},
            RowError,
            "row 1: the chat in column 'chosen' begins neither with the prompt .*'prompt' nor .*data.prompt_column",
        ),
        (
            {"prompt": [*TALK[:2]], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            RowError,
            "row 1: the chat in column 'chosen' begins neither with the prompt",
        ),
    ],
    ids=[
        "none",
        "near",
        "no-prompt",
        "number",
        "mixed",
        "neither",
        "weightless",
        "alone",
        "no-answer",
        "apart",
        "longer",
        "other",
        "dropped",
    ],
)
def test_what_does_not_fit_is_told(row, error, said):
    with pytest.raises(error, match=said):
        read(row)


def prepared(folder, **data):
    pairs = [
        {"prompt": f"{n} and {n} is ", "chosen": f"{n + n}", "rejected": "hard to say " * (n + 1)} for n in range(8)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    values = {"source": str(folder / "pairs.jsonl"), "validation_fraction": 0.0, "sequence_length": 64, **data}
    spec = RunSpec.model_validate({"data": values, "objective": {"type": "dpo"}})
    return prepare(DataRecipe.from_spec(spec, fingerprint(spec)), folder / "out", report=print)


def test_a_pair_is_used_whole_or_counted(tmp_path):
    skipped = prepared(tmp_path, sequence_length=32).manifest
    cut = prepared(tmp_path, sequence_length=32, overlong="truncate").manifest
    assert skipped.skipped["overlong"] == cut.truncated > 0
    assert skipped.samples_used + skipped.skipped["overlong"] == cut.samples_used == 8
    assert cut.train.documents == 16 and skipped.train.documents == 2 * skipped.samples_used
    with pytest.raises(ValueError, match=r"line \d: \d+ tokens, but data.sequence_length is 32; raise it"):
        prepared(tmp_path, sequence_length=32, overlong="error")


def test_without_packing_a_row_is_a_pair(tmp_path):
    rows = prepared(tmp_path, packing=False).train
    assert len(rows) == 8
    for row in (rows[index] for index in range(8)):
        assert row["sides"].unique_consecutive().tolist() == [1, -1]
        assert torch.equal(row["position_ids"].eq(0).nonzero().flatten()[1:], (row["sides"] == -1).nonzero()[0])


def test_a_template_for_texts_is_told_to_have_no_effect(tmp_path):
    with warnings.catch_warnings(), pytest.raises(UserWarning, match=r"no effect on .*, whose format is preference"):
        warnings.simplefilter("error")
        prepared(tmp_path, chat_template="chatml")


def test_a_template_that_renders_nothing_is_told():
    row = Row("row 1", {"chosen": [USER, GOOD], "rejected": [USER, BAD]})
    name, columns = choose_format(recipe_of(), [row])
    tokenizer = train_tokenizer(["2 + 2 = 4"])
    tokenizer.chat_template = "{# nothing #}"
    with pytest.raises(RowError, match=r"row 1: the chat template omits message 1, of role 'user', '2 .*"):
        make_format(name, columns, tokenizer, Data()).documents(row)


def test_a_pair_with_an_empty_answer_is_skipped_as_one_of_texts_is():
    row = Row("row 1", {"chosen": [USER, GOOD], "rejected": [USER, {**BAD, "content": " "}]})
    name, columns = choose_format(recipe_of(), [row])
    tokenizer = train_tokenizer(["2 + 2 = 4"])
    assert make_format(name, columns, tokenizer, Data(chat_template="chatml")).documents(row) == []
