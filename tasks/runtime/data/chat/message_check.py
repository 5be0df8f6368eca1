"""Check that a chat template renders all messages: what it leaves out is neither context nor learned.

A content that the text has is rendered. Any other is replaced by a character that no text has: the template must render
that, too, and make something of the content in its place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from tasks.runtime.data.chat.messages import Messages
from tasks.runtime.data.chat.template_renderer import Span
from tasks.runtime.data.chat.tools import Tools
from tasks.runtime.data.media.media_messages import between_stand_ins, has_stand_in
from tasks.runtime.data.reading.rows import RowError

PRIVATE = 0xF0000
"""The first of the characters that stand for contents."""
# Roles that a template may write as they are, without naming them.
_ROLES = frozenset(("system", "user", "assistant", "tool"))
# Characters of a content that may well be a part of another.
_SHORT = 64

Apply = Callable[[list[tuple[Messages, bool]], str, Tools | None], list[tuple[str, list[Span]]]]
"""Renders chats, each with or without the generation prompt. Raises RowError when the template rejects them."""


def names_role(source: str, role: str) -> bool:
    """Whether the source of a template has the name of a role."""
    return role in _ROLES or re.search(rf"""['"]{re.escape(role)}['"]""", source) is not None


class MessageCheck:
    """The check of one template. source: its Jinja source."""

    def __init__(self, source: str, apply: Apply) -> None:
        self._source, self._apply = source, apply
        self._known_roles = set(_ROLES)
        # Kinds of messages whose content the template renders.
        self._rendered: set[tuple[str, bool, bool]] = set()

    def require_all(self, messages: Messages, text: str, where: str, tools: Tools | None) -> None:
        """Raise RowError when the rendered `text` of messages lacks the content of one, or a role is unknown."""
        kinds = [(message["role"], "tool_calls" in message, index == 0) for index, message in enumerate(messages)]
        self._require_roles(messages, where)
        contents = [message.get("content", "").strip() for message in messages]
        missing = _missing(contents, text)
        # A content that the template itself writes may be found in the text, so the first message of each kind is
        # looked at closely.
        doubtful = {
            index: chr(PRIVATE + index)
            for index, content in enumerate(contents)
            if content and (index in missing or kinds[index] not in self._rendered)
        }
        if not doubtful:
            return
        # A template that rejects the marks of several messages may render those of each.
        for marks in (doubtful, *({index: mark} for index, mark in doubtful.items() if len(doubtful) > 1)):
            marked = [
                {**message, "content": marks[index]} if index in marks else message
                for index, message in enumerate(messages)
            ]
            try:
                ((rendered, _),) = self._apply([(marked, False)], where, tools)
            except RowError:
                # It rejects another content of one of them, so it reads that one.
                continue
            for index, mark in marks.items():
                if mark not in rendered:
                    role, has_calls, _ = kinds[index]
                    beside = " beside its tool calls" if has_calls else ""
                    raise RowError(
                        f"{where}: the chat template omits message {index + 1}, of role {role!r}, "
                        f"{contents[index][:40]!r}{beside}; set data.chat_template to a template that renders it, or "
                        "remove it from the messages"
                    )
                self._rendered.add(kinds[index])
            if marks is doubtful:
                break
        # What a template makes of the assistant's turns is seen where they are located; it may leave out reasoning.
        for index in sorted(index for index in missing if messages[index]["role"] != "assistant"):
            self._require_something(messages, index, text, where, tools)

    def _require_roles(self, messages: Messages, where: str) -> None:
        for number, message in enumerate(messages, start=1):
            role = message["role"]
            if role in self._known_roles:
                continue
            if not names_role(self._source, role):
                raise RowError(
                    f"{where}: message {number} has the role {role!r}, which the chat template does not name; map it "
                    "to another by data.roles, or set data.chat_template to a template that names it"
                )
            self._known_roles.add(role)

    def _require_something(self, messages: Messages, index: int, text: str, where: str, tools: Tools | None) -> None:
        """Raise RowError when the template writes another content of this message, and nothing for its own."""
        mark = chr(PRIVATE)
        marked = [{**message, "content": mark} if at == index else message for at, message in enumerate(messages)]
        try:
            ((rendered, _),) = self._apply([(marked, False)], where, tools)
        except RowError:
            # It rejects another content, so it reads this one.
            return
        before, _, after = rendered.partition(mark)
        if mark in after:
            # Where one of them ends is not known.
            return
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            return
        raise RowError(
            f"{where}: the chat template omits message {index + 1}, of role {messages[index]['role']!r}, "
            f"{messages[index]['content'].strip()[:40]!r}, because of its content; set data.chat_template to a "
            "template that renders it, or remove it from the messages"
        )


def _missing(contents: list[str], text: str) -> set[int]:
    """The contents that are not in a text as often as they should be; short ones may be parts of others.

    Of a content with images or audio, all that is between them must be in the text.
    """
    whole, times = "\0".join(contents), Counter(contents)
    expected = {
        content: whole.count(content) if len(content) <= _SHORT else number
        for content, number in times.items()
        if content
    }
    return {
        index
        for index, content in enumerate(contents)
        if content
        and (
            any(piece.strip() not in text for piece in between_stand_ins(content))
            if has_stand_in(content)
            else text.count(content) < expected[content]
        )
    }
