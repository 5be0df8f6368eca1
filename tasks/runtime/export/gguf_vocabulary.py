"""The tokenizer of a GGUF file: byte-level BPE with the pre-tokenizers that llama.cpp has, or SentencePiece's BPE."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from tasks.runtime.export.gguf_sentencepiece import IS_BYTE, SPACE, is_sentencepiece, scores_of, space_prefix

if TYPE_CHECKING:
    from gguf import GGUFWriter, TokenType

log = logging.getLogger(__name__)

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
# (pattern that divides a text into words, whether a word that is a token is not merged) → llama.cpp's name for it.
# Without a pattern the words are GPT-2's.
PRE_TOKENIZERS = {
    (None, False): "gpt-2",
    (r"\p{N}", False): "smollm",
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", True): "llama-bpe",
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", False): "smaug-bpe",
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", False): "qwen2",
    (rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", True): "tekken",
}


def require_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if llama.cpp has no tokenizer of this kind, or would make other tokens of a text."""
    parts = _parts(tokenizer)
    if is_sentencepiece(parts):
        scores_of(parts)
        space_prefix(tokenizer, parts)
    else:
        _pre_tokenizer_of(parts)


def _pre_tokenizer_of(parts: Mapping[str, Any]) -> str:
    """llama.cpp's name of the way in which a tokenizer.json divides texts."""
    model = parts["model"]
    odd = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    if model["type"] != "BPE" or odd:
        raise ValueError(
            f"its tokenizer is {model['type']}{' with ' + odd[0] if odd else ''}, not byte-level BPE or SentencePiece's"
        )
    # llama.cpp does not normalize, and text is in this form as a rule.
    if (parts["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        raise ValueError(f"its tokenizer normalizes texts by {parts['normalizer']['type']}, which llama.cpp does not")
    key = (_pattern(parts["pre_tokenizer"] or {}), bool(model.get("ignore_merges")))
    if key not in PRE_TOKENIZERS:
        raise ValueError(
            "llama.cpp has no name for the way in which its tokenizer divides texts into words: "
            f"{json.dumps(parts['pre_tokenizer'])[:300]}"
        )
    return PRE_TOKENIZERS[key]


def _parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The tokenizer.json of a tokenizer."""
    if not tokenizer.is_fast:
        raise ValueError(f"its tokenizer, a {type(tokenizer).__name__}, has no tokenizer.json")
    parts: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return parts


def _pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The pattern in front of a byte-level pre-tokenizer; None for GPT-2's alone; "" for another form."""
    *first, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or len(first) > 1:
        return ""
    if not first:
        return None if last["use_regex"] else ""
    [before] = first
    if before["type"] == "Digits" and before["individual_digits"] and last["use_regex"]:
        return r"\p{N}"
    if before["type"] == "Split" and before["behavior"] == "Isolated" and not last["use_regex"]:
        return str(before["pattern"].get("Regex", ""))
    return ""


def add_vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, stops: list[int], rows: int) -> None:
    """Write vocabulary, merges, special tokens and chat template.

    Args:
        writer: of the GGUF file.
        tokenizer: a tokenizer that `require_vocabulary` accepts.
        stops: ids of the tokens at which generation ends.
        rows: rows of the embedding, some of which may have no token.
    """
    from gguf import TokenType

    parts = _parts(tokenizer)
    tokens = [f"[PAD{index}]" for index in range(rows)]
    kinds = [TokenType.UNUSED] * rows
    for text, index in parts["model"]["vocab"].items():
        tokens[index], kinds[index] = text, TokenType.NORMAL
    for added in parts["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if is_sentencepiece(parts):
        _add_sentencepiece(writer, tokenizer, parts, tokens, kinds)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer_of(parts))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in parts["model"]["merges"]])
    for name in ("bos", "unk", "pad"):
        if (index := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    _add_stops(writer, tokenizer, stops)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(ids[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, dict):
        writer.add_chat_template([{"name": k, "template": v} for k, v in tokenizer.chat_template.items()])
    elif tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _add_sentencepiece(
    writer: GGUFWriter,
    tokenizer: PreTrainedTokenizerBase,
    parts: Mapping[str, Any],
    tokens: list[str],
    kinds: list[TokenType],
) -> None:
    """Write what this kind has alone, and change the kinds of bytes, and of runs of spaces, which are found whole."""
    from gguf import TokenType

    scores = scores_of(parts)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(token, 0.0) for token in tokens])
    writer.add_add_space_prefix(space_prefix(tokenizer, parts))
    for index, token in enumerate(tokens):
        if IS_BYTE.fullmatch(token):
            kinds[index] = TokenType.BYTE
        elif kinds[index] is TokenType.USER_DEFINED and not token.strip(SPACE):
            # The tokenizer finds it as characters of the vocabulary's spelling, which no text has, and joins spaces.
            tokens[index] = " " * len(token)
    if tokenizer.unk_token_id is not None:
        kinds[tokenizer.unk_token_id] = TokenType.UNKNOWN


def _add_stops(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, stops: list[int]) -> None:
    """Write the tokens at which generation ends. The format has fields for three: end of text, of turn, of message."""
    first = [tokenizer.eos_token_id] if tokenizer.eos_token_id in stops else []
    ordered = first + [stop for stop in stops if stop not in first]
    for name, stop in zip(("eos", "eot", "eom"), ordered, strict=False):
        getattr(writer, f"add_{name}_token_id")(stop)
    if left := tokenizer.convert_ids_to_tokens(ordered[3:]):
        log.warning("export.formats gguf: the format names three tokens that end a text, not also %s", ", ".join(left))
