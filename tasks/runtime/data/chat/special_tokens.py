"""Special tokens that texts and messages contain: control tokens, or text like any other; see `data.special_tokens`.

A chat template writes control tokens around the messages. Before it runs, special tokens within the messages are
replaced by characters of a private plane, one each, so that both kinds can be told apart in its output.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST = 0x100000
_PLACEHOLDERS = "[\U00100000-\U0010fffd]"


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens of a tokenizer, the longest first."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted({*added, *tokenizer.all_special_tokens}, key=lambda token: (-len(token), token)))


class SpecialTokens:
    """Finds special tokens of a tokenizer in texts.

    control: whether they are control tokens there.
    found: number of samples that have some. example: the first token, and where it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, control: bool) -> None:
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        names = special_tokens_of(tokenizer)
        self._pattern = re.compile("|".join(map(re.escape, names)))
        self._to_hide = re.compile(f"{self._pattern.pattern}|{_PLACEHOLDERS}")
        # With the white space that a token takes from the text beside it.
        self._controls = re.compile("|".join(_with_space(name, added.get(name)) for name in names))
        self.control = control
        self.found = 0
        self.example: tuple[str, str] | None = None

    def in_text(self, text: str) -> bool:
        """Whether a text has a special token."""
        return self._pattern.search(text) is not None

    def is_control(self, where: str, *texts: str) -> bool:
        """Whether special tokens in the texts of a sample, if there are any, are control tokens."""
        for text in texts:
            if match := self._pattern.search(text):
                self.found += 1
                self.example = self.example or (match[0], where)
                return self.control
        return True

    def hide(self, value: Any, where: str) -> tuple[Any, list[str]]:
        """The value with special tokens in its texts and keys, at any depth, replaced, and the tokens in order.

        Nothing is replaced in a value without special tokens, or if they are control tokens.
        """
        if self.is_control(where, *texts_in(value, keys=True)):
            return value, []
        hidden: list[str] = []

        def replace(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return chr(_FIRST + len(hidden) - 1)

        return _mapped(value, lambda text: self._to_hide.sub(replace, text)), hidden

    def hide_in_chat(
        self, messages: list[dict[str, Any]], others: Any, where: str
    ) -> tuple[list[dict[str, Any]], Any, list[str]]:
        """`hide` in messages, and in what else the template gets, but not in roles: a template may name one that is a
        special token.
        """
        rest = [{key: value for key, value in message.items() if key != "role"} for message in messages]
        (rest, others), hidden = self.hide([rest, others], where)
        return [{"role": message["role"], **item} for message, item in zip(messages, rest, strict=True)], others, hidden

    def plain_spans(self, text: str) -> list[tuple[int, int]]:
        """The stretches between control tokens of a rendered text that have a token that was replaced."""
        ends = [(match.start(), match.end()) for match in self._controls.finditer(text)]
        begins = [0, *(end for _, end in ends)]
        stops = [*(begin for begin, _ in ends), len(text)]
        return [
            (begin, end) for begin, end in zip(begins, stops, strict=True) if re.search(_PLACEHOLDERS, text[begin:end])
        ]


def restore(text: str, hidden: list[str]) -> str:
    """The text with the tokens that `SpecialTokens.hide` replaced."""
    return re.sub(_PLACEHOLDERS, lambda match: hidden[ord(match[0]) - _FIRST], text) if hidden else text


def _with_space(name: str, token: Any) -> str:
    before, after = (r"\s*" if getattr(token, side, False) else "" for side in ("lstrip", "rstrip"))
    return f"{before}{re.escape(name)}{after}"


def texts_in(value: Any, *, keys: bool = False) -> list[str]:
    """All texts in a value, at any depth and in order. keys: those of its mappings, too."""
    found, left = [], [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            left += reversed(item.values())
            left += reversed(item) if keys else ()
        elif isinstance(item, list):
            left += reversed(item)
    return found


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value
