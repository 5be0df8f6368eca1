"""Tokenizers like SentencePiece's are written so that llama.cpp makes the same tokens, or are refused."""

import json
import random
from itertools import pairwise

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GemmaTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, LlamaTokenizer
from transformers.tokenization_utils_base import generate_merges

from tasks.runtime.export.check_folder import read_gguf, vocabulary_apart
from tasks.runtime.export.gguf_file import write_gguf
from tasks.runtime.export.gguf_sentencepiece import scores_of, space_prefix
from tests.runtime.helpers.llama_cpp import LlamaCpp

WORDS = (
    "the he in on re at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne ea"
)
PIECES = [
    *"▁abcdefghijklmnopqrstuvwxyz.,:'0123456789+=(){}[]/|<>\n", "▁▁", "▁▁▁▁", *WORDS.split(), "▁the", "▁in", "ing",
    "tion", "▁ti", "▁t", "▁h", "▁s", "▁a", "ent", "▁of", "▁to", "and", "▁and",
]  # fmt: skip
VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token + bos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"


def merges():
    """As transformers derives them from a SentencePiece model, whose scores fall with the number of a piece."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    return vocabulary, generate_merges(vocabulary, {token: -index for token, index in vocabulary.items()})


def made(kind):
    """Tokenizers that put a space before: every part of a text, as Llama's do; the first part; none, as Gemma's."""
    vocabulary, pairs = merges()
    if kind == "none":
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": "<unk>"}
        return GemmaTokenizer(vocab=vocabulary, merges=pairs, **tokens)
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=pairs)
    if kind == "each":
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        spelling = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        parts["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spelling]}
        parts["pre_tokenizer"] = None
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(parts))
    return tokenizer


def parts_of(tokenizer):
    return json.loads(tokenizer.backend_tokenizer.to_str())


def joined_by_scores(text, scores):
    """SentencePiece's algorithm, slowly: join the pair with the highest score, the first of several."""
    symbols = list(text)
    while True:
        found = [scores.get(one + other) for one, other in pairwise(symbols)]
        known = [score for score in found if score is not None]
        if not known:
            return symbols
        at = found.index(max(known))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def texts():
    generator = random.Random(0)
    alphabet = "the in tion ▁▁ ing and of ent  0123(){}\n".replace("▁", " ")
    return ["".join(generator.choice(alphabet) for _ in range(60)) for _ in range(40)]


def test_scores_give_the_tokens_of_the_tokenizer():
    tokenizer = made("none")
    scores = scores_of(parts_of(tokenizer))
    for text in texts():
        assert tokenizer.tokenize(text) == joined_by_scores(text.replace(" ", "▁"), scores), text


@pytest.fixture(scope="module", params=["each", "first", "none"])
def written(request, tmp_path_factory):
    """A folder with a tokenizer of each kind, and its GGUF file."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(VOCABULARY) + 3
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=2)
    model.save_pretrained(folder)
    made(request.param).save_pretrained(folder)
    if request.param == "each":
        # Read as it is, not as a LlamaTokenizer, which has no normalizer.
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_gguf(folder, folder / "m.gguf", "m", "f16")
    return folder, made(request.param), request.param


def test_transformers_reads_the_same_vocabulary(written):
    folder, tokenizer, _ = written
    assert vocabulary_apart(tokenizer, read_gguf(folder, "m.gguf", torch.float32)[1]) is None


def test_the_file_says_what_each_token_is(written):
    folder, _, kind = written
    fields = gguf.GGUFReader(folder / "m.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() == (kind != "none")
    kinds = fields["tokenizer.ggml.token_type"].contents()
    expected = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    assert kinds[: len(expected)] == expected
    assert set(kinds[len(expected) :]) == {gguf.TokenType.NORMAL, gguf.TokenType.UNUSED}
    assert fields["tokenizer.ggml.tokens"].contents()[: len(VOCABULARY)] == VOCABULARY


def test_llama_cpp_makes_the_same_tokens(written):
    folder, tokenizer, _ = written
    model = LlamaCpp(folder / "m.gguf")
    for text in [text.strip() for text in texts()] + ["x\u00e9\u6f22 y", "a  b   c\n\n d"]:
        assert model.tokens(text) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "template", "added"), [("each", None, True), ("first", None, True), ("none", ZEPHYR, False)]
)
def test_a_space_is_added_where_the_tokenizer_adds_one(kind, template, added, caplog):
    tokenizer = made(kind)
    tokenizer.chat_template = template
    assert space_prefix(tokenizer, parts_of(tokenizer)) is added
    assert not caplog.records


def test_chats_decide_and_a_warning_tells_of_other_texts(caplog):
    """Llama 2's begin with a special token, after which this tokenizer adds no space."""
    tokenizer = made("first")
    tokenizer.chat_template = LLAMA_2
    assert space_prefix(tokenizer, parts_of(tokenizer)) is False
    assert "texts without the chat template begin with another token there" in caplog.text


def test_a_chat_that_llama_cpp_cannot_have_is_refused():
    """It begins with a text, which gets a space; after a special token there is none."""
    tokenizer = made("first")
    tokenizer.chat_template = ZEPHYR
    with pytest.raises(ValueError, match=r"adds a space to parts of a chat .* it has '\\n', and llama\.cpp '▁'"):
        space_prefix(tokenizer, parts_of(tokenizer))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda parts: parts["model"]["vocab"].pop("<0x0A>"), "has no token for the byte <0x0A>"),
        (lambda parts: parts["model"]["merges"].pop(5), r"does not join .* as llama\.cpp would"),
        (
            lambda parts: parts["model"]["merges"].append(parts["model"]["merges"].pop(
                next(i for i, pair in enumerate(parts["model"]["merges"]) if "".join(pair) == "▁the"))),
            "ranks pairs of '▁the' apart",
        ),
        (lambda parts: parts.update(normalizer={"type": "NFKC"}), "changes or divides texts before"),
        (lambda parts: parts.update(pre_tokenizer={"type": "Whitespace"}), "changes or divides texts before"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_llama_cpp_joins_otherwise_is_refused(change, said):
    parts = parts_of(made("none"))
    change(parts)
    with pytest.raises(ValueError, match=said):
        scores_of(parts)


def test_the_tokenizer_is_read_from_its_folder(written):
    """As an export does it."""
    folder, tokenizer, _ = written
    text = "the end of it\n and 2 + 2"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]
