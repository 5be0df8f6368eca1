"""Tokens and targets: clean boundaries, ends that are learned, tokenizers of other makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tasks.runtime.data.formats.documents import Document, Segment
from tasks.runtime.data.preparation.encode import Encoded, Encoder, Ids, split_long, truncate
from tasks.runtime.data.preparation.tokenizer import BOS, EOS, train_tokenizer
from tasks.runtime.data.reading.rows import RowError


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["Return the name of the thing.\n\nReturn the things that are there."] * 3)


def _pair(prompt: str, completion: str) -> Document:
    return Document((Segment(prompt, False), Segment(completion, True)), has_special_tokens=False)


def test_completion_and_end_are_learned_and_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    (encoded,) = Encoder(tokenizer, learn_all=False).encode([_pair("Return\n", "the thing.")])
    assert tokenizer.decode(encoded.ids) == f"{BOS}Return\nthe thing.{EOS}"
    assert tokenizer.decode(encoded.ids[encoded.targets]) == f"the thing.{EOS}"
    assert encoded.ids.dtype == np.int32 and encoded.targets.dtype == np.bool_


def test_in_pretraining_all_but_the_first_token_is_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    text = Document((Segment("Return the thing.", True),), has_special_tokens=False)
    for encoded in Encoder(tokenizer, learn_all=True).encode([text, _pair("Return\n", "the thing.")]):
        assert encoded.targets.tolist() == [False] + [True] * (len(encoded) - 1)


@pytest.mark.parametrize(
    ("prompt", "completion"), [("Return the na", "me."), ("Return", " the"), ("a\n", "\nb"), ("", "b")]
)
def test_no_token_crosses_from_prompt_to_completion(
    prompt: str, completion: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    (encoded,) = Encoder(tokenizer, learn_all=False).encode([_pair(prompt, completion)])
    begin, end = encoded.completion_span
    assert encoded.ids[:begin].tolist() == tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(encoded.ids[begin:end]) == completion
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == prompt + completion


def _sentencepiece_like(prepend: str, *merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text it is given, in one of the two ways there are."""
    merges = (("h", "e"), ("he", "l"), ("▁", "w"), *merges)
    words = ["<unk>", "<s>", "</s>", *"▁abdehlorwxy:\n", *map("".join, merges)]
    pieces = {piece: n for n, piece in enumerate(words)}
    backend = Tokenizer(models.BPE(pieces, list(merges), unk_token="<unk>", fuse_unk=True))
    if prepend == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("prepend", ["normalizer", "pre-tokenizer"])
def test_a_tokenizer_that_prepends_a_space_does_so_once(prepend: str) -> None:
    tokenizer = _sentencepiece_like(prepend)
    (encoded,) = Encoder(tokenizer, learn_all=False).encode([_pair("hello:\n", "hello world")])
    assert tokenizer.decode(encoded.ids) == "<s> hello:\nhello world</s>"
    assert encoded.ids.tolist() == tokenizer("hello:\nhello world</s>")["input_ids"]
    assert tokenizer.decode(encoded.ids[encoded.targets]) == "hello world</s>"


@pytest.mark.parametrize("completion", ["\nhello", "\n\nhello", "\n", " hello", "hello"])
@pytest.mark.parametrize("prepend", ["normalizer", "pre-tokenizer"])
def test_line_breaks_that_merge_are_not_lost(prepend: str, completion: str) -> None:
    tokenizer = _sentencepiece_like(prepend, ("\n", "\n"), ("\n\n", "\n"))
    (encoded,) = Encoder(tokenizer, learn_all=False).encode([_pair("hello:", completion)])
    assert tokenizer.decode(encoded.ids) == f"<s> hello:{completion}</s>"
    begin, end = encoded.completion_span
    assert encoded.ids[begin:end].tolist() == tokenizer(f"hello:{completion}")["input_ids"][begin:]


_BYTES = pre_tokenizers.ByteLevel
# How byte-level tokenizers put a space before a text: RoBERTa's and GPT-2's with `add_prefix_space`, beside a division
# into digits, and a normalizer. Their decoder keeps it.
BYTE_LEVEL = {
    "alone": (_BYTES(add_prefix_space=True), None),
    "digits": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _BYTES(add_prefix_space=True)]), None),
    "normalizer": (_BYTES(add_prefix_space=False), normalizers.Prepend(" ")),
}


@pytest.mark.parametrize(("prompt", "completion"), [("Return\n", "the thing."), ("Return", " the"), ("a\n", "\n b")])
@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_a_byte_level_tokenizer_may_put_a_space_before_a_text(
    kind: str, prompt: str, completion: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer, normalizer = BYTE_LEVEL[kind]
    if normalizer is not None:
        backend.normalizer = normalizer
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    (encoded,) = Encoder(spaced, learn_all=False).encode([_pair(prompt, completion)])
    begin, end = encoded.completion_span
    assert spaced.decode(encoded.ids, skip_special_tokens=True) == f" {prompt}{completion}"
    assert encoded.ids[:begin].tolist() == spaced(prompt)["input_ids"]
    assert spaced.decode(encoded.ids[begin:end]) == completion


def test_a_text_that_merges_with_all_that_may_stand_before_it_is_refused() -> None:
    tokenizer = _sentencepiece_like("normalizer", ("\n", "\n"), ("x", "\n"))
    encoder = Encoder(tokenizer, learn_all=False)
    with pytest.raises(RowError, match=r"the tokenizer's tokens of '\\nhello' depend on the text before them"):
        encoder.encode([_pair("hello:", "hello"), _pair("hello:", "\nhello")])


def test_a_tokenizer_whose_tokens_depend_on_their_neighbors_is_refused() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]")
    with pytest.raises(ValueError, match="prompts cannot be separated from completions"):
        Encoder(tokenizer, learn_all=False)


def test_what_the_tokenizer_puts_behind_a_text_is_not_doubled() -> None:
    tokenizer = train_tokenizer(["Return"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 1), (EOS, 2)]
    )
    (encoded,) = Encoder(tokenizer, learn_all=False).encode([_pair("Re", "turn")])
    assert tokenizer.decode(encoded.ids) == f"{BOS}Return{EOS}"


@pytest.mark.parametrize(("prompt", "completion"), [("", "the thing."), ("Return\n", "the thing.")])
@pytest.mark.parametrize("begin", ["", BOS])
@pytest.mark.parametrize("end", ["", EOS])
def test_special_tokens_that_a_text_has_are_not_doubled(
    prompt: str, completion: str, begin: str, end: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    """As of chats that were rendered before they were stored."""
    segments = (Segment(begin + prompt, False), Segment(completion + end, True))
    document = Document(tuple(segment for segment in segments if segment.text), has_special_tokens=False)
    plain = _pair(prompt, completion) if prompt else Document((Segment(completion, True),), has_special_tokens=False)
    for learn_all in (False, True):
        encoder = Encoder(tokenizer, learn_all=learn_all)
        found, expected = encoder.encode([document, plain])
        assert tokenizer.decode(found.ids) == f"{BOS}{prompt}{completion}{EOS}"
        assert found.ids.tolist() == expected.ids.tolist() and found.targets.tolist() == expected.targets.tolist()


@pytest.mark.parametrize("prepend", ["normalizer", "pre-tokenizer"])
def test_special_tokens_before_which_a_tokenizer_puts_a_space_are_not_doubled(prepend: str) -> None:
    tokenizer = _sentencepiece_like(prepend)
    (encoded,) = Encoder(tokenizer, learn_all=False).encode([_pair("<s>hello:", "world</s>")])
    assert tokenizer.decode(encoded.ids).replace(" ", "") == "<s>hello:world</s>"


@pytest.mark.parametrize("length", [2, 3, 5, 10, 11])
def test_long_documents_lose_no_target_when_split(length: int) -> None:
    targets = np.array([False] + [True] * 9)
    pieces = split_long(Encoded(np.arange(10, dtype=np.int32), targets, (0, 10)), length)
    assert all(2 <= len(piece) <= length and not piece.targets[0] for piece in pieces)
    assert [token for piece in pieces for token in piece.ids[piece.targets].tolist()] == list(range(1, 10))
    context = [piece.ids[0] for piece in pieces[1:]]
    assert context == [piece.ids[-1] for piece in pieces[:-1]]


def test_head_keeps_the_bounds_of_what_is_written() -> None:
    encoded = Encoded(np.arange(6, dtype=np.int32), np.array([0, 0, 0, 1, 1, 1], dtype=np.bool_), (3, 5))
    cut = truncate(encoded, 4)
    assert (cut.ids.tolist(), cut.targets.tolist(), cut.completion_span) == (
        [0, 1, 2, 3],
        [False, False, False, True],
        (3, 4),
    )


def test_of_what_no_row_takes_only_the_beginning_is_tokenized(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Return the name of the thing.\n" * 20_000
    short, long = _pair("Return", " the"), _pair(text, "the thing.")
    encoder = Encoder(tokenizer, learn_all=False, longest=64)
    characters = 0
    tokenize = encoder._tokenize

    def counted(texts: list[str], **options: bool) -> list[Ids]:
        nonlocal characters
        characters += sum(map(len, texts))
        return tokenize(texts, **options)

    monkeypatch.setattr(encoder, "_tokenize", counted)
    found = encoder.encode([short, long, short])
    assert [one.complete for one in found] == [True, False, True] and len(found[1]) > 64
    assert characters < 3 * (1 << 16) < len(text)
    # Up to there the tokens are those of the whole, and the others' are their own.
    expected = Encoder(tokenizer, learn_all=False).encode([short, long])
    assert found[1].ids[:64].tolist() == expected[1].ids[:64].tolist()
    assert found[0].ids.tolist() == found[2].ids.tolist() == expected[0].ids.tolist()


def test_a_long_document_that_a_row_takes_is_tokenized_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    long = _pair("Return the name of the thing.\n" * 4000, "the thing.")
    (expected,) = Encoder(tokenizer, learn_all=False).encode([long])
    for longest in (1000, len(expected)):
        (found,) = Encoder(tokenizer, learn_all=False, longest=longest).encode([long])
        assert found.complete == (longest == len(expected))
    assert found.ids.tolist() == expected.ids.tolist() and found.targets.tolist() == expected.targets.tolist()


def test_a_tokenizer_of_the_library_is_called_directly_and_gives_what_transformers_gives(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    class Own(PreTrainedTokenizerFast):
        """One that adds something of its own, here nothing."""

        def _encode_plus(self, *arguments: Any, **options: Any) -> Any:
            return super()._encode_plus(*arguments, **options)

    own = Own(tokenizer_object=tokenizer.backend_tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # What a tokenizer's file may ask for.
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    cut = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    texts = [f"Return {EOS} the things, é 🙂.\n" * count for count in (1, 40)]
    for control in (True, False):
        document = [Document((Segment(text, True, control),), has_special_tokens=True) for text in texts]
        for one in (tokenizer, own, cut):
            encoder = Encoder(one, learn_all=True)
            assert (encoder._backend is None) == (one is own)
            theirs = own(texts, add_special_tokens=False, split_special_tokens=not control)["input_ids"]
            assert [found.ids.tolist() for found in encoder.encode(document)] == theirs
