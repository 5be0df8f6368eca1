"""Text files: what a document is, however long, and how many tokens of it are trained on."""

from __future__ import annotations

import gzip
import json
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, fingerprint, prepare
from tasks.runtime.data.formats.documents import Document, Segment
from tasks.runtime.data.preparation.encode import Encoder
from tasks.runtime.data.reading.text_files import TextDocuments, cut, pieces

TEXT = "\ufeffone\r\n  two\n\n\n\nthree\n \t\n    four é\n---\nfive\n---\n\n"


def _rows(text: str, *, part: int = 1 << 20, **how: Any) -> list[tuple[str, str]]:
    """Places and texts of the documents, those of several rows joined."""
    found: list[tuple[str, str]] = []
    for row in TextDocuments(**how).rows(BytesIO(text.encode()), "a", part=part):
        if row.begins:
            found.append((row.where, ""))
        found[-1] = (found[-1][0], found[-1][1] + row.values["text"])
    assert row.ends
    return found


@pytest.mark.parametrize("part", [1 << 20, 8])
def test_a_document_is_a_file_a_paragraph_a_line_or_what_a_separator_divides(part: int) -> None:
    assert _rows(TEXT, part=part) == [("a", "one\n  two\n\n\n\nthree\n \t\n    four é\n---\nfive\n---")]
    assert _rows(TEXT, part=part, unit="paragraph") == [
        ("a line 1", "one\n  two"), ("a line 6", "three"), ("a line 8", "    four é\n---\nfive\n---")
    ]  # fmt: skip
    assert _rows(TEXT, part=part, separator="---") == [
        ("a line 1", "one\n  two\n\n\n\nthree\n \t\n    four é"), ("a line 10", "five")
    ]  # fmt: skip
    assert _rows("a\r\n\nb", part=part, unit="line") == [("a line 1", "a"), ("a line 2", ""), ("a line 3", "b")]
    assert _rows("", part=part) == [("a", "")]
    long = "x" * (1 << 20)
    assert _rows(f"{long}y\n{long}\n", unit="line") == [("a line 1", f"{long}y"), ("a line 2", long)]


@pytest.mark.parametrize(
    "how", [{}, {"unit": "paragraph"}, {"separator": "ab"}], ids=["file", "paragraph", "separator"]
)
def test_parts_of_any_size_give_the_same_documents(how: dict[str, str]) -> None:
    generator = random.Random(1)
    text = "".join(generator.choice("ab \n") for _ in range(3000))
    whole = _rows(text, **how)
    assert len(whole) > 1 or not how
    for part in (1, 2, 5, 64, 1000):
        assert _rows(text, part=part, **how) == whole


def test_a_file_that_is_not_utf_8_is_refused_with_the_line_and_the_byte() -> None:
    with pytest.raises(OSError, match=r"line 3 is not UTF-8 \(invalid continuation byte at byte 8 of the file\); save"):
        list(TextDocuments().rows(BytesIO("é\r\nabc\n".encode() + b"\xe9\n"), "a"))


def test_a_text_is_cut_before_white_space_after_a_word() -> None:
    text = "one two.\nthree\n  four. \n"
    assert [text[: cut(text, limit)] for limit in (24, 15, 7, 5)] == ["one two.\nthree"] * 2 + ["one"] * 2
    # There is none: at the limit.
    assert [text[: cut(text, limit)] for limit in (12, 9)] == ["one two.\nthr", "one two.\n"]
    assert list(pieces("a" * 10, 4)) == ["aaaa", "aaaa", "aa"]
    assert list(pieces("", 4)) == [""]


# As of Llama 3 and Qwen: a mark takes the line breaks after it.
SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "llama-3": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        decoders.ByteLevel(),
    ),
    "sentencepiece": (pre_tokenizers.Metaspace(), decoders.Metaspace()),
}


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_a_long_text_has_the_tokens_that_the_tokenizer_gives_it_at_once(kind: str) -> None:
    generator = random.Random(0)
    words = ["the", "of", "Ends.", "a1234", "x", "émigré", "(so)", "\n", "\n\n", "\n    ", "  ", "...\n"]
    text = " ".join(generator.choice(words) for _ in range(60_000))
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = PRE_TOKENIZERS[kind]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text[:50_000]], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert len(text) > 3 << 16
    (encoded,) = Encoder(tokenizer, learn_all=True).encode([Document((Segment(text, True),), has_special_tokens=False)])
    assert encoded.ids.tolist() == [*tokenizer(text)["input_ids"], 2]
    assert encoded.targets.tolist() == [False] + [True] * (len(encoded) - 1)


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> str:
    """A token per byte, so that tokens can be counted by hand: a text of n bytes has n + 2, with its begin and end."""
    vocabulary = {token: n for n, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(str(folder))
    return str(folder)


def _prepare(tmp_path: Path, tokenizer: str, source: Path, lines: list[str] | None = None, **data: Any) -> PreparedData:
    values = {"source": str(source), "sequence_length": 16, "validation_fraction": 0.0, **data}
    spec = RunSpec.model_validate(
        {"data": values, "objective": {"type": "pretrain"}, "model": {"tokenizer": tokenizer}}
    )
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, tmp_path / f"out-{recipe.hash()}", report=(lines if lines is not None else []).append)


POEM = "Tyger Tyger,\nburning bright,\n\nIn the forests\nof the night;\n"


@pytest.mark.parametrize(
    ("how", "documents", "tokens"),
    [
        # 58 characters without the last line break, and two special tokens.
        ({}, 1, 60),
        # 28 and 28 characters.
        ({"documents": "paragraph"}, 2, 60),
        # 12, 15, 14 and 13 characters; the blank line is counted as skipped.
        ({"documents": "line"}, 4, 62),
        # Without the five letters of "night" and its line breaks: 52 and 1.
        ({"document_separator": "night"}, 2, 57),
    ],
    ids=["file", "paragraph", "line", "separator"],
)
def test_every_byte_of_every_document_is_learned(
    how: dict[str, str], documents: int, tokens: int, tmp_path: Path, byte_tokenizer: str
) -> None:
    (tmp_path / "poem.txt").write_text(POEM)
    lines: list[str] = []
    manifest = _prepare(tmp_path, byte_tokenizer, tmp_path / "poem.txt", lines, **how).manifest
    assert (manifest.samples_used, manifest.skipped["no_target"]) == (documents, how.get("documents") == "line")
    # All but the first of each document.
    assert manifest.train.target_tokens == tokens - documents
    median = {1: "60", 2: "30" if "documents" in how else "28", 4: "15"}[documents]
    assert f"{documents} documents, median {median} tokens" in lines


def test_a_document_in_parts_gives_the_rows_of_the_whole(
    tmp_path: Path, byte_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.md", "c.txt"):
        (tmp_path / "texts" / name).write_text(POEM * (1 + ord(name[0]) % 3))
    options = {"max_samples": 2, "validation_fraction": 0.1}
    whole = _prepare(tmp_path / "whole", byte_tokenizer, tmp_path / "texts", **options).manifest
    rows = TextDocuments.rows
    monkeypatch.setattr(TextDocuments, "rows", lambda self, file, name: rows(self, file, name, part=20))
    parts = _prepare(tmp_path / "parts", byte_tokenizer, tmp_path / "texts", **options).manifest
    assert parts.content_hash == whole.content_hash
    for manifest in (whole, parts):
        assert (manifest.samples_read, manifest.samples_used, manifest.split_long) == (2, 2, 2)


def test_what_a_document_is_belongs_to_the_recipe(tmp_path: Path, byte_tokenizer: str) -> None:
    (tmp_path / "poem.txt").write_bytes(gzip.compress(POEM.encode()))
    (tmp_path / "poem.txt").rename(tmp_path / "poem.txt.gz")
    hashes = {
        _prepare(tmp_path, byte_tokenizer, tmp_path / "poem.txt.gz", **how).manifest.recipe_hash
        for how in ({}, {"documents": "line"}, {"documents": "paragraph"}, {"document_separator": "night"})
    }
    assert len(hashes) == 4


def test_of_one_long_text_the_end_is_held_out(tmp_path: Path, byte_tokenizer: str) -> None:
    (tmp_path / "poem.txt").write_text(POEM * 10)
    lines: list[str] = []
    data = _prepare(tmp_path, byte_tokenizer, tmp_path / "poem.txt", lines, validation_fraction=0.1)
    # 589 characters and two special tokens are 40 pieces of 15 new tokens; 4 of them are held out: the last has 5.
    assert (data.manifest.train.documents, data.manifest.validation.documents) == (36, 4)
    assert (data.manifest.train.target_tokens, data.manifest.validation.target_tokens) == (540, 50)
    assert "validation: the last 10 % of each long text, because whole texts would be too much or none" in lines
    kept = [data.validation[index]["input_ids"] for index in range(len(data.validation))]
    assert any("ight;</s>" in data.tokenizer().decode(row) for row in kept)
    shown = data.samples(9)
    assert len(shown) == 4 and all(sample.prompt and sample.completion for sample in shown)


def test_texts_far_shorter_than_a_row_are_warned_of(tmp_path: Path, byte_tokenizer: str) -> None:
    (tmp_path / "poem.txt").write_text(POEM)
    with pytest.warns(UserWarning, match=r"at most 15 tokens, far fewer than data.sequence_length 256, .* 'file'\.$"):
        _prepare(tmp_path, byte_tokenizer, tmp_path / "poem.txt", documents="line", sequence_length=256)
    (tmp_path / "poem.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in POEM.split("\n")))
    with pytest.warns(UserWarning, match=r"at most 15 tokens, .*, join texts that belong together\.$"):
        _prepare(tmp_path, byte_tokenizer, tmp_path / "poem.jsonl", sequence_length=256)
    _prepare(tmp_path, byte_tokenizer, tmp_path / "poem.txt", documents="line", sequence_length=240)
    with pytest.warns(UserWarning, match=r"at most 28 tokens, .*, leave out data\.document_separator\.$"):
        _prepare(tmp_path, byte_tokenizer, tmp_path / "poem.txt", document_separator="night", sequence_length=512)


def test_a_separator_that_divides_no_file_is_warned_of(tmp_path: Path, byte_tokenizer: str) -> None:
    (tmp_path / "poem.txt").write_text(POEM)
    with pytest.warns(UserWarning, match=r"data.document_separator '<\|end\|>' divides none of the text files: each of "
                      "the 1 is one document; correct it"):  # fmt: skip
        _prepare(tmp_path, byte_tokenizer, tmp_path / "poem.txt", document_separator="<|end|>")
