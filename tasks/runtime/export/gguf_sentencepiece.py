"""SentencePiece's BPE as llama.cpp has it: Llama 2, Mistral 7B, Gemma, Phi-3.

llama.cpp joins the two neighbours whose joined text is the token with the highest score; a tokenizer.json lists pairs
by rank. Both give the same tokens if each pair that makes a token is listed, those of a token together. Where a text
begins, and after special tokens, llama.cpp adds a space, or never; tokenizers do so in more ways. `space_prefix`
compares what both make of a text and of a chat.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How the vocabulary spells a space."""

IS_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token that stands for one byte."""

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# How a tokenizer.json spells spaces, besides a Metaspace pre-tokenizer.
_SPELLING = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_NORMALIZERS: tuple[Any, ...] = (
    None,
    _SPELLING,
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, _SPELLING]},
)
_TEXT = "It's  2 + 2 = 4:\n\n   f(x)\tna\u00efve \u6f22\u5b57 \U0001f600    end.\n"
_CHAT = (
    {"role": "user", "content": "Hello there,\n  what is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Thanks!"},
)
# Characters that an error shows around a difference.
_SHOWN = 12


def is_sentencepiece(parts: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json is of this kind: characters without a token are written as bytes."""
    return parts["model"]["type"] == "BPE" and bool(parts["model"].get("byte_fallback"))


def scores_of(parts: Mapping[str, Any]) -> dict[str, float]:
    """A score for each token that joins others: the earlier its pairs are listed, the higher.

    Raises ValueError if llama.cpp would join other pairs, or in another order.
    """
    model = parts["model"]
    vocabulary, pairs = model["vocab"], [tuple(pair) for pair in model["merges"]]
    added = {token["content"] for token in parts["added_tokens"]}
    if missing := [byte for byte in _BYTES if byte not in vocabulary]:
        raise ValueError(f"its tokenizer has no token for the byte {missing[0]}")
    if parts["normalizer"] not in _NORMALIZERS or not _keeps_words_together(parts["pre_tokenizer"]):
        raise ValueError("its tokenizer changes or divides texts before it joins characters, which llama.cpp does not")
    scores: dict[str, float] = {}
    before = None
    for joined in map("".join, pairs):
        # Added tokens are found whole, before anything is joined.
        if joined != before and joined in scores and joined not in added:
            raise ValueError(
                f"its tokenizer ranks pairs of {joined!r} apart from each other, and llama.cpp has one score"
            )
        scores.setdefault(joined, -float(len(scores)))
        before = joined
    listed, others = set(pairs), added | set(_BYTES)
    for token in vocabulary:
        if len(token) < 2 or token in others:
            continue
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        if unlisted := [pair for pair in halves if pair not in listed and all(half in vocabulary for half in pair)]:
            raise ValueError(
                f"its tokenizer does not join {unlisted[0][0]!r} and {unlisted[0][1]!r} to the token {token!r}, as "
                "llama.cpp would"
            )
    return scores


def _keeps_words_together(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer only spells spaces, if anything."""
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Metaspace":
        return pre_tokenizer["replacement"] == SPACE and not pre_tokenizer["split"]
    # Gemma's, which comes after its normalizer has replaced all spaces.
    return pre_tokenizer["type"] == "Split" and pre_tokenizer["pattern"] == {"String": " "}


def space_prefix(tokenizer: PreTrainedTokenizerBase, parts: Mapping[str, Any]) -> bool:
    """Whether llama.cpp has to add a space where a text begins and after special tokens.

    Chats decide, if the tokenizer has a template; a warning tells if other texts then differ.

    Raises ValueError if llama.cpp makes other tokens of a chat, or of a text, in both ways.
    """
    chat = _rendered_chat(tokenizer)
    apart = {}
    for added in (True, False):
        apart[added] = [_difference(tokenizer, parts, text, added) for text in (chat, _TEXT) if text is not None]
        if not any(apart[added]):
            return added
    best = next((added for added, found in apart.items() if chat is not None and found[0] is None), None)
    if best is None:
        raise ValueError(
            f"its tokenizer adds a space to parts of a {'text' if chat is None else 'chat'} where llama.cpp does not, "
            f"or the reverse: {apart[True][0]}"
        )
    log.warning(
        "export.formats gguf: chats have the same tokens in llama.cpp; texts without the chat template begin with "
        "another token there, because the space that this tokenizer adds to texts alone is %s",
        "added to each part of a chat, too" if best else "left out",
    )
    return best


def _rendered_chat(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A chat as the tokenizer's template renders it; None without one."""
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.apply_chat_template(list(_CHAT), tokenize=False, add_generation_prompt=True))
    # A template may raise anything, for example if it wants tools or a system prompt.
    except Exception as error:
        log.info("export.formats gguf: no chat is compared, because the template renders none (%s)", error)
        return None


def _difference(tokenizer: PreTrainedTokenizerBase, parts: Mapping[str, Any], text: str, added: bool) -> str | None:
    """Where llama.cpp's tokens of a text differ from the tokenizer's; None if they do not."""
    wanted = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    found = list(_tokens(tokenizer, parts, text, added))
    for at, (one, other) in enumerate(zip([*wanted, ""], [*found, ""], strict=False)):
        if one != other:
            context = "".join(wanted[max(0, at - 3) : at]).replace(SPACE, " ")[-_SHOWN:]
            return f"after {context!r} it has {one!r}, and llama.cpp {other!r}"
    return None


def _tokens(tokenizer: PreTrainedTokenizerBase, parts: Mapping[str, Any], text: str, added: bool) -> Iterator[str]:
    """The tokens that llama.cpp makes of a text in which special tokens are control."""
    special = {token["content"]: token["special"] for token in parts["added_tokens"]}
    model, after_special = tokenizer.backend_tokenizer.model, True
    for piece in _split(special, text):
        if piece in special:
            yield piece
            after_special = special[piece]
            continue
        spelled = piece.replace(" ", SPACE)
        yield from (token.value for token in model.tokenize(SPACE + spelled if added and after_special else spelled))
        after_special = False


def _split(tokens: Iterable[str], text: str) -> list[str]:
    """The text in pieces: tokens, the longest first, and what lies between them."""
    longest = sorted(tokens, key=len, reverse=True)
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, longest))})", text) if piece]
