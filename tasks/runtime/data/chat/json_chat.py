"""Chats that a text holds as JSON, as in columns of CSV: `[{"role": "user", "content": "Hello"}]`, or one message."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from strata_platform.spec.sections.data import Data

# Keys that hold the author and the text of a message; the first of each is the one of chat templates.
AUTHORS, TEXTS = ("role", "from"), ("content", "value")
# Roles by the names that data sets give them, ShareGPT's among them.
ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
# Keys that messages of other names have for their author.
_SPEAKERS = frozenset((*AUTHORS, "author", "speaker", "sender"))
_BEGIN = re.compile(r"\s*(?:\[\s*\{|\{\s*\")")


def role_name(value: Any) -> str | None:
    """A role as a name of `data.roles`: numbers and booleans as JSON writes them. None for other values."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, bool | int | float) else None


def is_json_chat(value: Any, data: Data) -> bool:
    """Whether a value is a text that is the JSON of messages, or was cut off within it."""
    return _holds(value, data)[0]


def keys_of_no_chat(value: Any, data: Data) -> list[str]:
    """The keys of a text that is the JSON of a list of objects, none of which is a message, though they look like some;
    empty for other values.
    """
    return list(_holds(value, data)[1])


def forms_of_key(key: str) -> tuple[str, str]:
    """A key as JSON writes it: as it is, and with letters beyond ASCII escaped."""
    return json.dumps(key, ensure_ascii=False), json.dumps(key)


def _holds(value: Any, data: Data) -> tuple[bool, tuple[str, ...]]:
    if not isinstance(value, str) or _BEGIN.match(value) is None:
        return False, ()
    keys = data.message_keys
    authors = (*AUTHORS, *(keys[name] for name in AUTHORS if name in keys))
    texts = (*TEXTS, "tool_calls", *(keys[name] for name in (*TEXTS, "tool_calls") if name in keys))
    roles = frozenset((*ROLES, *(name for names in data.roles.values() for name in names)))
    return _parsed(value, authors, texts, roles)


# For a row it is asked several times.
@lru_cache(maxsize=8)
def _parsed(
    text: str, authors: tuple[str, ...], texts: tuple[str, ...], roles: frozenset[str]
) -> tuple[bool, tuple[str, ...]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _begins_as_chat(text, (*authors, *texts)), ()
    if isinstance(found, dict) and roles.isdisjoint(role_name(found.get(key)) for key in authors):
        # An answer such as {"from": "USD", "value": 3}.
        return False, ()
    objects = found if isinstance(found, list) else [found]
    if not all(isinstance(each, dict) for each in objects):
        return False, ()
    if any(not each.keys().isdisjoint(authors) and not each.keys().isdisjoint(texts) for each in objects):
        return True, ()
    # Other lists of objects, such as calls of functions, are texts.
    like_messages = any(
        not _SPEAKERS.isdisjoint(each) or not roles.isdisjoint(map(role_name, each.values())) for each in objects
    )
    return False, tuple(dict.fromkeys(key for each in objects for key in each)) if like_messages else ()


def _begins_as_chat(text: str, keys: tuple[str, ...]) -> bool:
    """Whether a text that is no JSON begins as a list of messages."""
    named = "|".join(re.escape(form) for key in keys for form in forms_of_key(key))
    return re.match(rf"\s*\[\s*\{{\s*(?:{named})\s*:", text) is not None
