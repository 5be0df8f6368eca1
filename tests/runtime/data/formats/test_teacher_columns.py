"""A teacher's log-probabilities in rows: the forms that people have, what is refused, and what becomes of them."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import collate, fingerprint, open_prepared, prepare
from tasks.runtime.data.dataset import IGNORE_INDEX
from tasks.runtime.data.formats.documents import Document
from tasks.runtime.data.formats.teacher_columns import TopTokens, top_tokens_of, with_top_tokens
from tasks.runtime.data.preparation import pipeline
from tasks.runtime.data.preparation.part_processes import PlannedSource, prepare_parts
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.data.reading.rows import Row, RowError
from tasks.runtime.run_folder.folder import data_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["the quick brown fox jumps over the lazy dog", "2 + 2 = 4"] * 40), folder)
    return folder


def spec_of(folder, tokenizer, **data):
    return RunSpec.model_validate(
        {
            "output": str(folder / "out"),
            "model": {"tokenizer": str(tokenizer)},
            "data": {"source": str(folder / "rows.jsonl"), "sequence_length": 16, "validation_fraction": 0, **data},
            "objective": {"type": "distill"},
            "training": {"steps": 3},
        }
    )


def prepared(folder, tokenizer, rows, **data):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of(folder, tokenizer, **data)
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, data_folder(spec.output, recipe), report=print, processes=1)


def documents(data):
    """Of each document the tokens, labels, and the teacher's tokens and log-probabilities, in order of their tokens."""
    found = []
    for number in range(len(data.train)):
        row = data.train[number]
        starts = [*torch.nonzero(row["position_ids"] == 0).flatten().tolist(), row["input_ids"].numel()]
        for begin, end in pairwise(starts):
            if (row["labels"][begin:end] != IGNORE_INDEX).any():
                names = ("input_ids", "labels", "top_token_ids", "top_log_probs")
                found.append([row[name][begin:end].tolist() for name in names])
    return sorted(found)


def random_rows(count=9, width=3):
    """Rows of tokens, of which some carry loss, with a teacher's tokens for these."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(count):
        length = int(draw.integers(3, 12))
        ids = draw.integers(5, 60, length).tolist()
        labels = [token if at > 0 and draw.random() < 0.7 else -100 for at, token in enumerate(ids[:-1])] + ids[-1:]
        learned = sum(label != -100 for label in labels)
        # Some rows know one token less.
        known = width - number % 2
        tokens = [draw.permutation(60)[:known].tolist() for _ in range(learned)]
        log_probs = np.log(draw.dirichlet(np.ones(known + 2), learned)[:, :known]).astype(np.float32).tolist()
        rows.append({"input_ids": ids, "labels": labels, "target_token_ids": tokens, "logprobs": log_probs})
    return rows


def expected(rows, width):
    """As `documents`."""
    found = []
    for row in rows:
        known = iter(zip(row["target_token_ids"], row["logprobs"], strict=True))
        spread = [next(known) if label != -100 else ([0] * width, [0.0] * width) for label in row["labels"]]
        found.append([row["input_ids"], row["labels"], *map(list, zip(*spread, strict=True))])
    return sorted(found)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
def test_rows_keep_what_the_teacher_says_of_each_token(tmp_path, tokenizer, packing):
    rows = random_rows()
    data = prepared(tmp_path, tokenizer, rows, packing=packing)
    assert data.manifest.format == "tokens" and data.manifest.samples_used == len(rows)
    for ours, theirs in zip(documents(data), expected(rows, 3), strict=True):
        assert ours[:2] == theirs[:2]
        for tokens, values, true_tokens, true_values in zip(*ours[2:], *theirs[2:], strict=True):
            given = len(true_tokens)
            assert tokens[:given] == true_tokens and values[:given] == pytest.approx(true_values, abs=1e-7)
            # What is left is empty, and none of the tokens.
            assert len(set(tokens)) == 3 or not any(values)
            assert values[given:] == [-math.inf] * (3 - given)
    batch = collate([data.train[number] for number in range(len(data.train))])
    assert batch["top_token_ids"].shape == (*batch["input_ids"].shape, 3)


def test_shards_with_fewer_tokens_make_one_batch(tmp_path, tokenizer):
    (tmp_path / "a").mkdir()
    narrow = prepared(tmp_path / "a", tokenizer, random_rows(4, 2)).train[0]
    wide = prepared(tmp_path, tokenizer, random_rows(4, 5)).train[0]
    batch = collate([narrow, wide])
    assert batch["top_token_ids"].shape == (2, 16, 5)
    learned = batch["labels"][0] != IGNORE_INDEX
    assert torch.equal(batch["top_token_ids"][0][:, :2], narrow["top_token_ids"])
    assert bool(batch["top_log_probs"][0][learned][:, 2:].isneginf().all())
    assert all(len(set(ids)) == 5 for ids in batch["top_token_ids"][0][learned].tolist())


def test_parts_that_are_read_while_they_are_prepared_are_the_same(tmp_path, tokenizer, monkeypatch):
    rows = random_rows(40)
    monkeypatch.setattr(pipeline, "PART_BYTES", 2000)
    whole = documents(prepared(tmp_path, tokenizer, rows))
    spec = spec_of(tmp_path, tokenizer, streaming=True, shuffle="window")
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    folder = tmp_path / "streamed"
    [plan] = pipeline.begin(recipe, folder, report=print).values()
    prepare_parts([(PlannedSource(plan, folder), part) for part in range(len(plan.parts))], report=print, processes=1)
    data = open_prepared(folder, spec.data)
    found = []
    with pytest.raises(IndexError):
        for number in range(10**6):
            found.append(data.train[number]["top_log_probs"].abs().sum())
    assert len(found) > 2
    pipeline.finish(folder, print)
    assert documents(open_prepared(folder, spec.data)) == whole


def test_truncation_and_pieces_keep_their_tokens(tmp_path, tokenizer):
    """Tokens of a teacher name the token itself and one other."""
    rows = [
        {
            "input_ids": list(range(5, 5 + length)),
            "target_token_ids": [[token, 100 + token] for token in range(6, 5 + length)],
            "logprobs": [[-0.1, -3.0]] * (length - 1),
        }
        for length in (40, 16, 17)
    ]
    found = documents(prepared(tmp_path, tokenizer, rows, overlong="truncate"))
    assert [len(ids) for ids, *_ in found] == [16, 16, 16]
    for ids, labels, tokens, _ in found:
        assert labels == [-100, *ids[1:]]
        assert tokens == [[0, 0], *([token, 100 + token] for token in ids[1:])]


def test_pieces_of_a_long_document_keep_their_tokens():
    from tasks.runtime.data.preparation.encode import Encoded, split_long

    ids = np.arange(5, 45, dtype=np.int32)
    targets = ids % 3 > 0
    targets[0] = False
    known = TopTokens(ids[targets][:, None], -ids[targets][:, None].astype(np.float32))
    pieces = split_long(Encoded(ids, targets, (0, 40), top_tokens=known), 7)
    assert len(pieces) > 5
    assert sum(piece.targets.sum() for piece in pieces) == targets.sum()
    for piece in pieces:
        assert piece.top_tokens.token_ids[:, 0].tolist() == piece.ids[piece.targets].tolist()


# Forms of the same two positions.
FORMS = {
    "two columns": {"logprobs": [[-0.5, -1.5], [-0.25]], "target_token_ids": [[7, 9], [3]]},
    "objects": {
        "logprobs": [
            [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -1.5}],
            [{"token_id": 3, "logprob": -0.25}],
        ]
    },
    "keys": {"logprobs": [{"7": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -1.5}, "3": None}, {"3": -0.25}]},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_servers_are_read(form):
    found = top_tokens_of(Row("here", FORMS[form]))
    assert found.token_ids.tolist() == [[7, 9], [3, 0]]
    assert found.log_probs.tolist() == [[-0.5, -1.5], [-0.25, -math.inf]]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"logprobs": [[-1.0]]}, "logprobs\\[0\\] is list .*without a column 'target_token_ids'"),
        ({"logprobs": [[-1.0]], "target_token_ids": [[1], [2]]}, "'target_token_ids' has 2 entries, but .* has 1"),
        ({"logprobs": [[-1.0, -2.0]], "target_token_ids": [[1]]}, "logprobs\\[0\\]: .* of one length, but are 2 and 1"),
        ({"logprobs": [[-1.0, -2.0]], "target_token_ids": [[1, 1]]}, "logprobs\\[0\\]: token 1 is there twice"),
        ({"logprobs": [[-1.0], [0.5]], "target_token_ids": [[1], [1]]}, "logprobs\\[1\\]: float 0.5 is not a log-prob"),
        ({"logprobs": [[math.nan]], "target_token_ids": [[1]]}, "float nan is not a log-probability"),
        ({"logprobs": [[-math.inf]], "target_token_ids": [[1]]}, "all tokens have probability 0"),
        ({"logprobs": [[-1.0]], "target_token_ids": [[-4]]}, "int -4 is not a token id"),
        ({"logprobs": [[{"token": " fox", "logprob": -1.0}]]}, "' fox' is a text.*return_tokens_as_token_ids"),
        ({"logprobs": [None, []], "target_token_ids": [None, []]}, "has no log-probability"),
        ({"logprobs": "none"}, "column 'logprobs' holds str 'none'; it must be a list"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_by_place(columns, said):
    with pytest.raises(RowError, match=f"rows line 3: .*{said}|rows line 3: {said}"):
        top_tokens_of(Row("rows line 3", columns))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row["logprobs"].pop() and row["target_token_ids"].pop(),
         r"rows\.jsonl line 3: column 'logprobs' has \d+ entries, but the row has (\d+) tokens, of which \d+ carry"),
        (lambda row: row.update(labels=row["labels"][1:]), r"line 3: column 'labels' has \d+ entries, but 'input_ids'"),
        (lambda row: row["labels"].__setitem__(-1, 1), r"line 3: labels\[\d+\] is 1, but input_ids\[\d+\] is \d+"),
        (lambda row: row.update(attention_mask=[0] + [1] * (len(row["input_ids"]) - 1)), "line 3: .*hides tokens"),
        (lambda row: row["input_ids"].__setitem__(0, 2.5), "line 3: column 'input_ids' holds float 2.5"),
        (lambda row: row.update(logprobs=[None] * len(row["input_ids"]), target_token_ids=None),
         "line 3: column 'logprobs' has no log-probability"),
    ],
    ids=["entries", "labels", "label", "mask", "token", "none"],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_told_by_its_line(tmp_path, tokenizer, change, said):
    rows = random_rows(4)
    change(rows[2])
    with pytest.raises(ValueError, match=said):
        prepared(tmp_path, tokenizer, rows)
    assert prepared(tmp_path, tokenizer, rows, invalid="skip").manifest.skipped["invalid"] == 1


def test_data_without_them_is_refused(tmp_path, tokenizer):
    with pytest.raises(
        ValueError, match=r"without objective\.teacher needs a column 'logprobs'.*tasks\.runtime\.teacher"
    ):
        prepared(tmp_path, tokenizer, [{"input_ids": [5, 6, 7]}])


def test_texts_have_an_entry_for_each_token_of_the_answer(tmp_path, tokenizer):
    """As a server returns them with what it has written: the end of the text is a token, too."""
    answers = [" fox", " dog jumps over"]
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    rows = []
    for answer in answers:
        ids = [*encode(answer, add_special_tokens=False)["input_ids"], encode.eos_token_id]
        entries = [[{"token": f"token_id:{token}", "logprob": -0.25}] for token in ids]
        rows.append({"prompt": "the quick", "completion": answer, "logprobs": entries})
    for ids, labels, tokens, values in documents(prepared(tmp_path, tokenizer, rows)):
        learned = [at for at, label in enumerate(labels) if label != IGNORE_INDEX]
        assert [tokens[at] for at in learned] == [[ids[at]] for at in learned]
        assert {values[at][0] for at in learned} == {-0.25}


def test_log_probabilities_of_rows_with_images_are_refused():
    """The row's tokens are those of its text; each image becomes many."""
    build = with_top_tokens(lambda row: [Document((), False, media=(b"picture",))])
    row = Row("rows line 3", {"logprobs": [[-1.0]], "target_token_ids": [[1]]})
    with pytest.raises(RowError, match=r"rows line 3: has images.*name the teacher in objective\.teacher"):
        build(row)
