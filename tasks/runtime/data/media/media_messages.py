"""Images and audio in the messages of a chat: content parts, columns, and the marks `<image>` and `<audio>` in texts.

In a message, a character of a private plane stands for each of them in its `content`, and `_media` lists what they are
by their kind. Before a template renders it, the content becomes a list of parts again, which is what templates of
multimodal models read.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.media.kinds import MEDIA, Item, Medium
from tasks.runtime.data.reading.rows import Row, RowError, describe_type

Message = dict[str, Any]
# A key of messages: the name of a medium, and its values in order; None for one that a column has.
_KEY = "_media"
_STAND_INS = {medium.stand_in: medium for medium in MEDIA}
# Keys of messages that would be lost, and the way out.
_KEYS_BESIDE = {
    column: f"give the {medium.several} as parts of the content, or in a column {medium.columns[0]!r} of the row"
    for medium in MEDIA
    for column in medium.columns
} | {column: "videos are not supported; leave the row out" for column in ("video", "videos")}
_PIECES = re.compile(f"([{''.join(_STAND_INS)}])")


def media_columns(data: Data, medium: Medium) -> tuple[str, ...]:
    """Columns that may hold a chat's images, or its audio."""
    named: str | None = getattr(data, medium.column_field)
    return medium.columns if named is None else (named,)


def medium_of_part(part: Any) -> Medium | None:
    """What a part of a content is: `{"type": "image_url", "image_url": {"url": ...}}` an image, for example."""
    held = _held(part)
    return next(
        (
            medium
            for medium in MEDIA
            if held.get("type") in medium.parts and held.keys() <= {"type", "detail", *medium.values}
        ),
        None,
    )


def _value_of_part(part: Any, medium: Medium) -> Any:
    """What a part names: a path, a URL, or `{"bytes": ...}`; None for one that a column has."""
    held = _held(part)
    key = next((key for key in medium.values if key in held), None)
    value = held[key] if key else None
    if key == "base64" and isinstance(value, str):
        return f"data:;base64,{value}"
    if isinstance(value, dict) and key == "input_audio" and isinstance(value.get("data"), str):
        return f"data:;base64,{value['data']}"
    return _held(value).get("url", value) if key and key.endswith("_url") and isinstance(value, dict) else value


def _held(value: Any) -> dict[str, Any]:
    # Columnar files give every part the keys of all parts, with null values.
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}


def join_parts(parts: list[Any]) -> Message:
    """The content of a message, and what its parts hold beside text, given parts that are texts, images or audio."""
    content, media = "", dict[str, list[Any]]()
    for part in parts:
        medium = medium_of_part(part)
        content += part["text"] if medium is None else medium.stand_in
        if medium is not None:
            media.setdefault(medium.name, []).append(_value_of_part(part, medium))
    return {"content": content, _KEY: media} if media else {"content": content}


def media_in(messages: list[Message]) -> list[Item]:
    """The images and audio of a chat, in order."""
    return [item for message in messages for item in _items(message)]


def _items(message: Message) -> Iterator[Item]:
    values = {name: iter(found) for name, found in message.get(_KEY, {}).items()}
    for character in _PIECES.findall(message.get("content", "")) if values else ():
        medium = _STAND_INS[character]
        yield Item(medium, next(values[medium.name]))


def without_media(messages: list[Message]) -> list[Message]:
    """The messages without the lists of their media; contents keep the characters that stand for them."""
    return [{key: item for key, item in message.items() if key != _KEY} for message in messages]


def has_stand_in(text: str) -> bool:
    """Whether a text has a character that stands for an image or audio."""
    return _PIECES.search(text) is not None


def between_stand_ins(text: str) -> list[str]:
    """The pieces of a text around the characters that stand for images and audio."""
    return _PIECES.split(text)[::2]


def with_media(messages: list[Message], row: Row, data: Data) -> list[Message]:
    """The messages with the images and audio of the row's columns in their places.

    The places are marks such as `<image>` in texts, or parts that name nothing themselves. Without any, they come first
    in the first message of the user, as in TRL. Raises RowError when they and the places do not match in number.
    """
    for medium in MEDIA:
        messages = _filled(messages, medium, row, data)
    return messages


def _filled(messages: list[Message], medium: Medium, row: Row, data: Data) -> list[Message]:
    column, values = _of_column(row, data, medium)
    if values:
        messages = [_marked(message, medium) for message in messages]
    elif column and (marks := sum(_marks(message, medium) for message in messages)):
        raise RowError(
            f"{row.where}: column {column!r} has no {medium.several}, but the messages have {marks} places for them, "
            f"{medium.mark}; correct one of them, or name {column!r} in data.ignore_columns if that is text"
        )
    places = sum(value is None for message in messages for value in _values(message, medium))
    if values and not places:
        messages, places = _first_in_question(messages, len(values), medium, row), len(values)
    if places != len(values):
        has = (
            f"column {column!r} has {len(values)} {medium.several}" if values
            else f"there is no column of {medium.several}"
        )  # fmt: skip
        raise RowError(f"{row.where}: {has}, but the messages have {places} places for them; correct one of them")
    left = iter(values)
    return [
        _with_values(message, medium, [next(left) if value is None else value for value in _values(message, medium)])
        for message in messages
    ]


def _values(message: Message, medium: Medium) -> list[Any]:
    found: list[Any] = message.get(_KEY, {}).get(medium.name, [])
    return found


def _with_values(message: Message, medium: Medium, values: list[Any], **changes: Any) -> Message:
    return {**message, **changes, _KEY: {**message.get(_KEY, {}), medium.name: values}} if values else message


def _of_column(row: Row, data: Data, medium: Medium) -> tuple[str, list[Any]]:
    """(the row's column of a medium, or an empty one, or ''; its values)."""
    empty = ""
    for column in media_columns(data, medium):
        value = row.fields().get(column)
        if column in data.ignore_columns or column not in row.fields():
            continue
        if value is None or value == []:
            empty = empty or column
            continue
        values = value if isinstance(value, list) else [value]
        if missing := [number for number, one in enumerate(values, start=1) if one is None]:
            raise RowError(f"{row.where}: {medium.name} {missing[0]} of column {column!r} is null")
        return column, values
    return empty, []


def _marks(message: Message, medium: Medium) -> int:
    """How many marks of a text are places; none beside parts that are."""
    return 0 if _values(message, medium) else message.get("content", "").count(medium.mark)


def _marked(message: Message, medium: Medium) -> Message:
    """The message, in whose text marks have become places."""
    if not (marks := _marks(message, medium)):
        return message
    marked = message["content"].replace(medium.mark, medium.stand_in)
    return _with_values(message, medium, [None] * marks, content=marked)


def _first_in_question(messages: list[Message], count: int, medium: Medium, row: Row) -> list[Message]:
    index = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        raise RowError(
            f"{row.where}: no message of the user has a place for the {medium.several}; give one as {medium.mark}"
        )
    question = messages[index]
    content = medium.stand_in * count + question.get("content", "")
    changed = _with_values(question, medium, [None] * count + _values(question, medium), content=content)
    return [*messages[:index], changed, *messages[index + 1 :]]


def require_no_media_keys(message: Message, where: str) -> None:
    """Raise RowError when a message has images, audio or videos under a key beside its content, which is not read."""
    for key in message.keys() & _KEYS_BESIDE.keys():
        if message[key] not in ([], ""):
            raise RowError(
                f"{where} has {key!r}, a key that is not read; {_KEYS_BESIDE[key]}, or name {key!r} in "
                "data.ignore_columns"
            )


def require_places(message: Message, where: str) -> None:
    """Raise RowError when a text has a character that stands for an image or audio."""
    for medium in MEDIA:
        if message.get("content", "").count(medium.stand_in) != len(_values(message, medium)):
            code = f"U+{ord(medium.stand_in):X}"
            raise RowError(f"{where}: content has the character {code}, which stands for {medium.several}; remove it")


def as_parts(message: Message) -> Message:
    """The message with its content as a list of parts, as processors of transformers render it."""
    if not isinstance(message.get("content"), str):
        return message
    pieces = _PIECES.split(message["content"])
    parts = [
        {"type": _STAND_INS[piece].name} if piece in _STAND_INS else {"type": "text", "text": piece}
        for piece in pieces
        if piece or len(pieces) == 1
    ]
    return {**message, "content": parts}


def describe_value(value: Any) -> str:
    """An image or audio for messages: its path or URL if it is short, or its type."""
    return repr(value) if isinstance(value, str) and len(value) <= 200 else describe_type(value)


def decode_base64(text: str) -> bytes:
    """The bytes of a text in base 64. Raises ValueError if it is not."""
    return base64.b64decode(text, validate=True)
