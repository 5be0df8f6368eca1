"""Describes in words what a field takes, for error messages and for the reference, from its type annotation."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from strata_platform.redact import redacted


@dataclass(frozen=True)
class Allowed:
    """Metadata that describes the allowed values of a type whose constraint is a pattern."""

    text: str


_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


def describe_field(field: FieldInfo) -> str:
    """Describe what `field` takes."""
    if field.discriminator is not None:
        return f"a section with type {join_or(map(repr, sections(field)))}"
    return describe(field.annotation, field.metadata)


def describe(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Describe the values of type `annotation` under the constraints in `metadata`.

    >>> from pydantic import Field
    >>> describe(int, Field(ge=1, le=64).metadata)
    'a whole number from 1 to 64'
    >>> describe(Literal["linear", "cosine"] | None)
    "'linear' or 'cosine', or null"
    """
    metadata = list(metadata)
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section with {', '.join(annotation.model_fields)}"
    if annotation in _SCALARS:
        return f"{_SCALARS[annotation]}{_bounds(metadata)}"
    return _describe_generic(annotation, metadata)


def _describe_generic(annotation: Any, metadata: list[Any]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        own = [part for item in args[1:] for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return describe(args[0], [*own, *metadata])
    if origin is Literal:
        return join_or(repr(value) for value in args)
    if origin in (Union, UnionType):
        choices = [describe(arg, metadata) for arg in args if arg is not NoneType]
        return f"{join_or(choices)}, or null" if NoneType in args else join_or(choices)
    assert origin is tuple, f"no words for {annotation}"
    if args[-1] is Ellipsis:
        return f"a list of {describe(args[0]).removeprefix('a ').replace('section with', 'sections with')}"
    return f"a list of {len(args)}: {'; '.join(describe(arg) for arg in args)}"


def _bounds(metadata: list[Any]) -> str:
    """` from 1 to 64`, ` above 0 and at most 1`, `, not empty`, or nothing."""
    limits = {name: str(getattr(item, name)) for item in metadata for name in _BOUNDS if hasattr(item, name)}
    limits = {name: limit.removesuffix(".0") for name, limit in limits.items()}
    if limits.keys() == {"ge", "le"}:
        return f" from {limits['ge']} to {limits['le']}"
    words = [f"{phrase} {limits[name]}" for name, phrase in _BOUNDS.items() if name in limits]
    if words:
        return f" {' and '.join(words)}"
    return ", not empty" if any(getattr(item, "min_length", 0) for item in metadata) else ""


def listed_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section of a field that is a list of sections; None for other fields."""
    if get_origin(field.annotation) is not tuple:
        return None
    item = get_args(field.annotation)[0]
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None


def sections(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """The sections that `field` may hold, by the value of their `type`; a single one has the empty key."""
    if listed_section(field):
        return {}
    classes = [
        choice
        for choice in (get_args(field.annotation) or (field.annotation,))
        if isinstance(choice, type) and issubclass(choice, BaseModel)
    ]
    if field.discriminator is None:
        return {"": classes[0]} if classes else {}
    return {choice.model_fields["type"].default: choice for choice in classes}


def item_annotation(annotation: Any, index: int) -> Any:
    """The type of item `index` of a list of type `annotation`."""
    args = get_args(annotation)
    return args[0] if args[-1] is Ellipsis else args[index]


def literals(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal of strings, also as a part of a union; empty for any other type."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(value for part in get_args(annotation) for value in literals(part))
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def join_or(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def format_value(value: Any, width: int = 60) -> str:
    """`value` as a person would have written it, on one line of at most `width` characters.

    Nested values become `...`; credentials in URLs are removed.
    """
    if isinstance(value, str):
        text = repr(redacted(value))
    elif value is None or isinstance(value, bool | int | float):
        text = json.dumps(value)
    elif isinstance(value, list | tuple):
        items = (
            "..." if isinstance(item, list | tuple | dict) else format_value(item, width) for item in value[:width]
        )
        text = f"[{', '.join(items)}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key}: ...' for key in value)}}}"
    else:
        text = str(value).replace("\n", " ")
    return text if len(text) <= width else f"{text[: width - 3]}..."


def closest_match(word: object, options: Iterable[str]) -> str | None:
    """The option that a person who wrote `word` most likely meant, or None."""
    if not isinstance(word, str):
        return None
    by_key = {option.lower().replace("-", "_"): option for option in options}
    key = word[:100].lower().replace("-", "_")
    matches = difflib.get_close_matches(key, by_key, n=1) or [name for name in by_key if name.startswith(f"{key}_")]
    return by_key[matches[0]] if matches else None
