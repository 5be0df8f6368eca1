"""Images in the messages of a chat: content parts, a column of images, and the marks `<image>` in texts.

In a message, a character of a private plane stands for each image in its `content`, and `images` lists what they are.
Before a template renders it, the content becomes a list of parts again, which is what templates of vision-language
models read.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from strata_platform.spec.data import Data
from tasks.runtime.data.rows import Row, RowError, describe_type

IMAGE = "\U000ffffd"
"""Stands for an image in the content of a message."""
COLUMNS = ("images", "image")
"""Columns of images, under the names that they are looked for."""
_KINDS = ("image", "image_url", "input_image")
_VALUES = ("image", "image_url", "url", "path", "base64")
# LLaMA-Factory's and ms-swift's.
_MARK = "<image>"

Message = dict[str, Any]


def image_columns(data: Data) -> tuple[str, ...]:
    """Columns that may hold the images of a chat."""
    return COLUMNS if data.images_column is None else (data.images_column,)


def is_image_part(part: Any) -> bool:
    """Whether a part of a content is an image: `{"type": "image_url", "image_url": {"url": ...}}`, for example."""
    held = _held(part)
    return held.get("type") in _KINDS and held.keys() <= {"type", "detail", *_VALUES}


def image_of_part(part: Any) -> Any:
    """The image that a part names: a path, a URL, or `{"bytes": ...}`; None for one that a column has."""
    held = _held(part)
    key = next((key for key in _VALUES if key in held), None)
    value = held[key] if key else None
    if key == "base64" and isinstance(value, str):
        return f"data:;base64,{value}"
    return _held(value).get("url", value) if key == "image_url" and isinstance(value, dict) else value


def _held(value: Any) -> dict[str, Any]:
    # Columnar files give every part the keys of all parts, with null values.
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}


def images_in(messages: list[Message]) -> list[Any]:
    """The images of a chat, in order."""
    return [image for message in messages for image in message.get("images", ())]


def without_images(messages: list[Message]) -> list[Message]:
    """The messages without the list of their images; contents keep the characters that stand for them."""
    return [{key: item for key, item in message.items() if key != "images"} for message in messages]


def with_images(messages: list[Message], row: Row, data: Data) -> list[Message]:
    """The messages with the images of the row's column in their places.

    The places are marks `<image>` in texts, or parts that name no image themselves. Without any, the images come
    first in the first message of the user, as in TRL. Raises RowError when images and places do not match in number.
    """
    column, images = _column_images(row, data)
    if images:
        messages = [_marked(message) for message in messages]
    places = sum(image is None for image in images_in(messages))
    if images and not places:
        messages, places = _first_in_question(messages, len(images), row), len(images)
    if places != len(images):
        has = f"column {column!r} has {len(images)} images" if column else "there is no column of images"
        raise RowError(f"{row.where}: {has}, but the messages have {places} places for them; correct one of them")
    left = iter(images)
    return [
        {**message, "images": [next(left) if image is None else image for image in message["images"]]}
        if "images" in message
        else message
        for message in messages
    ]


def _column_images(row: Row, data: Data) -> tuple[str, list[Any]]:
    for column in image_columns(data):
        value = row.fields().get(column)
        if column in data.ignore_columns or value is None or value == []:
            continue
        images = value if isinstance(value, list) else [value]
        if missing := [number for number, image in enumerate(images, start=1) if image is None]:
            raise RowError(f"{row.where}: image {missing[0]} of column {column!r} is null")
        return column, images
    return "", []


def _marked(message: Message) -> Message:
    """The message, in whose text marks have become places of images."""
    content = message.get("content", "")
    if _MARK not in content or "images" in message:
        return message
    return {**message, "content": content.replace(_MARK, IMAGE), "images": [None] * content.count(_MARK)}


def _first_in_question(messages: list[Message], count: int, row: Row) -> list[Message]:
    index = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        raise RowError(f"{row.where}: no message of the user has a place for the images; give one as <image>")
    question = messages[index]
    others = question.get("images", [])
    changed = {**question, "content": IMAGE * count + question.get("content", ""), "images": [None] * count + others}
    return [*messages[:index], changed, *messages[index + 1 :]]


def require_places(message: Message, where: str) -> None:
    """Raise RowError when a text has the character that stands for an image."""
    found, images = message.get("content", "").count(IMAGE), len(message.get("images", ()))
    if found != images:
        raise RowError(f"{where}: content has the character U+FFFFD, which stands for images; remove it")


def as_parts(message: Message) -> Message:
    """The message with its content as a list of parts, as processors of transformers render it."""
    if not isinstance(message.get("content"), str):
        return message
    pieces = re.split(f"({IMAGE})", message["content"])
    parts = [
        {"type": "image"} if piece == IMAGE else {"type": "text", "text": piece}
        for piece in pieces
        if piece or len(pieces) == 1
    ]
    return {**message, "content": parts}


def describe_image(value: Any) -> str:
    """An image for messages: its path or URL if it is short, or its type."""
    return repr(value) if isinstance(value, str) and len(value) <= 200 else describe_type(value)


def decode_base64(text: str) -> bytes:
    """The bytes of a text in base 64. Raises ValueError if it is not."""
    return base64.b64decode(text, validate=True)
