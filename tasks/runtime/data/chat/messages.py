"""The messages of a chat: as OpenAI's, with `role` and `content`; as ShareGPT's, with `from` and `value`; as a
question and its answer; or as a transcript.

`data.message_keys` and `data.roles` name other keys and roles. Flags of an assistant's message that other frameworks
read, `train` and `loss`, become its `weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from strata_platform.spec.sections.data import Data, TrainOn
from tasks.runtime.data.chat.json_chat import AUTHORS, ROLES, TEXTS, is_json_chat, role_name
from tasks.runtime.data.chat.tools import called_functions, drop_nulls, parsed_calls
from tasks.runtime.data.formats.columns import HISTORY, INPUTS, system_columns
from tasks.runtime.data.media.media_messages import join_parts, medium_of_part, require_no_media_keys, require_places
from tasks.runtime.data.reading.rows import Row, RowError, describe_type, require_valid_unicode

# A role of LLaMA-Factory's: the value is a call as JSON, or a list of them. Also a key of OpenAI's before `tool_calls`.
_CALL = "function_call"
_TEXT_PARTS = ("text", "input_text", "output_text")

# Keys that say whether a message is learned, in axolotl, LLaMA-Factory and ms-swift, true by default.
_LEARNED = ("train", "training", "loss")
# Keys that say which parts of a message are learned, or how much.
_UNSUPPORTED = ("train_detail", "training_detail", "loss_scale", "loss_mask", "mask", "masks")
_FLAGS = frozenset((*_LEARNED, *_UNSUPPORTED))
# As in hh-rlhf: `\n\nHuman: Hello\n\nAssistant: Hi.`
_TRANSCRIPT = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
# LLaMA-Factory's reasoning before a call.
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of the assistant's reasoning. A template that renders reasoning reads one of them."""

Messages = list[dict[str, Any]]
_DEFAULTS = Data()


def messages_of(row: Row, column: str, data: Data = _DEFAULTS, *, several: bool = False) -> Messages:
    """The checked messages of a row, without null values and empty lists of tool calls. Raises RowError.

    data: says which keys are left out, and which keys and roles have other names.
    several: the row has messages in other columns, too, so that errors name this one.

    ShareGPT's messages with `from` and `value`, contents that are lists of text parts, transcripts, and JSON are
    converted to messages with `role` and a string as `content`.
    """
    value = row.value(column)
    where = f"{row.where}: column {column!r}, message" if several else f"{row.where}: message"
    if is_transcript(value):
        # Its names of roles are not those of the data's messages.
        turns = _of_transcript(row.text(column))
        return [_checked(turn, f"{where} {number}") for number, turn in enumerate(turns, start=1)]
    if is_json_chat(value, data):
        value = _of_json(row.text(column), f"{row.where}: column {column!r}")
    if not isinstance(value, list):
        way_out = " or JSON of one; write it by json.dumps, or give a list" if isinstance(value, str) else ""
        raise RowError(f"{row.where}: column {column!r} holds {describe_type(value)}, not a list of messages{way_out}")
    if not value:
        raise RowError(f"{row.where}: column {column!r} holds no message")
    return [_message(message, f"{where} {number}", data) for number, message in enumerate(value, start=1)]


def answer_of(row: Row, column: str, data: Data) -> Messages:
    """The messages in `column`, which may also be one message, or the text of the assistant's. Raises RowError."""
    value = row.value(column)
    if is_json_chat(value, data):
        value = _of_json(row.text(column), f"{row.where}: column {column!r}")
    if isinstance(value, dict):
        return [_message(value, f"{row.where}: column {column!r}", data)]
    if is_text(value, data):
        return [{"role": "assistant", "content": row.text(column)}]
    return messages_of(row, column, data, several=True)


def roles_in(row: Row, columns: Sequence[str], data: Data) -> Iterator[tuple[str, str, Any]]:
    """Of each message in some columns of a row: where it is, the key of its role in the data, and the role there.

    Leaves out what `messages_of` cannot read.
    """
    for column in columns if isinstance(row.values, dict) else ():
        value = row.values.get(column)
        if is_json_chat(value, data):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        for number, message in enumerate(value if isinstance(value, list) else [value], start=1):
            if isinstance(message, dict):
                names = {_names(data).get(key, key): key for key in message if key not in data.ignore_columns}
                author = next((names[key] for key in AUTHORS if key in names), None)
                if author is not None:
                    place = f"column {column!r}, message" if len(columns) > 1 else "message"
                    yield f"{row.where}: {place} {number}", author, message[author]


def is_transcript(value: Any) -> bool:
    """Whether a value is a chat as in hh-rlhf: a text of turns that begin with `Human:` and `Assistant:`."""
    return isinstance(value, str) and _TRANSCRIPT.match(value) is not None and "\n\nAssistant:" in value


def is_text(value: Any, data: Data) -> bool:
    """Whether a value is a text and not the JSON of a chat."""
    return isinstance(value, str) and not is_transcript(value) and not is_json_chat(value, data)


def advice_on_role(role: str) -> str:
    """The end of the error message about a message of a role that not every template has."""
    return "" if role in ROLES.values() else f"; if {role!r} is another name of a role, map it by data.roles"


def _of_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where} begins as the JSON of messages, but is not valid: {error}") from error


def _of_transcript(text: str) -> Messages:
    _, *parts = _TRANSCRIPT.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": content.strip()} for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _message(value: Any, where: str, data: Data) -> dict[str, Any]:
    """The checked message. Raises RowError."""
    if not isinstance(value, dict):
        raise RowError(f"{where} is {describe_type(value)}, not an object with role and content")
    given = {key: item for key, item in value.items() if item is not None and key not in data.ignore_columns}
    renamed = _with_keys(given, where, _names(data))
    try:
        if renamed.keys().isdisjoint(AUTHORS):
            held = ", ".join(map(repr, given)) or "nothing"
            raise RowError(
                f"{where} has no role; a message has role and content, this one {held}; data.message_keys maps other "
                "keys to these"
            )
        return _read(renamed, where, data)
    except RowError as error:
        raise RowError(f"{error}{_read_as(str(error).removeprefix(where), value, data)}") from error


def _names(data: Data) -> dict[str, str]:
    """The keys of `data.message_keys` as the data has them, each with the one that it is read as."""
    return {key: name for name, key in data.message_keys.items() if key != name}


def _read_as(problem: str, message: dict[str, Any], data: Data) -> str:
    """The end of an error message: the names that the keys in the problem have in the data, if they are others."""
    keys = {**{key: key for key in (AUTHORS[1], TEXTS[1]) if key in message}, **_names(data)}
    found = ""
    for key, name in keys.items():
        meant = AUTHORS[0] if name in AUTHORS else TEXTS[0] if name in TEXTS else name
        for told in dict.fromkeys((name, meant)):
            if told != key and re.search(rf"\b{re.escape(told)}(?: is| has|;|')", problem):
                found += f"; the key {key!r} is read as {told}"
    return found


def _read(renamed: dict[str, Any], where: str, data: Data) -> dict[str, Any]:
    """The checked message of the keys that are read. Raises RowError."""
    if renamed.get("tool_calls"):
        renamed["tool_calls"] = parsed_calls(renamed["tool_calls"], f"{where}: tool_calls")
    held = {key: item for key, item in renamed.items() if key != "tool_calls" or item not in ("", [], None)}
    if _CALL in held:
        raise RowError(
            f"{where} has {_CALL!r}, a key that chat templates do not read; give the call as tool_calls, a list of "
            f"{{'type': 'function', 'function': ...}}, or name {_CALL!r} in data.ignore_columns"
        )
    require_no_media_keys(held, where)
    return _checked(_with_role(held, where, data), where)


def _checked(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with `role`, `content` and weight as chat templates and the loss read them. Raises RowError."""
    message = _with_weight(_with_text(message), where)
    if "tool_calls" in message:
        message["tool_calls"] = drop_nulls(message["tool_calls"])
        called_functions(message["tool_calls"], where)
    if not isinstance(message.get("content", "" if "tool_calls" in message else None), str):
        raise RowError(f"{where}: content is {describe_type(message.get('content'))}, not text{_other_parts(message)}")
    require_valid_unicode(message.get("content", ""), f"{where}: content")
    require_places(message, where)
    _require_weight(message, where)
    return message


def _with_keys(message: dict[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    """Rename the keys of `data.message_keys`. Raises RowError for a message that has a key under both names."""
    for key, name in names.items():
        if key in message and name in message and name not in names:
            raise RowError(
                f"{where} has {name!r} and {key!r}, and data.message_keys reads {key!r} as {name!r}; correct that, or "
                f"name {name!r} in data.ignore_columns"
            )
    return {names.get(key, key): item for key, item in message.items()}


def _with_role(message: dict[str, Any], where: str, data: Data) -> dict[str, Any]:
    """Convert `{"from": "human", "value": ...}` to `role` and `content`. Raises RowError for an unknown `from`."""
    roles = known_roles(data)
    author, text = (next((key for key in keys if key in message), None) for keys in (AUTHORS, TEXTS))
    assert author is not None
    role, given = role_name(message[author]), message[author]
    if role in roles and roles[role] == _CALL and text is not None:
        others = {key: item for key, item in message.items() if key not in (author, text)}
        return {"role": "assistant", **_calls(message[text], where), **others}
    if role not in roles and (author != "role" or not isinstance(given, str)):
        raise RowError(
            f"{where}: {author} is {given!r}; it may be {', '.join(map(repr, roles))}; map other names of roles by "
            "data.roles"
        )
    names = {author: "role", **({} if text is None else {text: "content"})}
    converted = {names.get(key, key): item for key, item in message.items()}
    return {**converted, "role": roles[role]} if role in roles else converted


def known_roles(data: Data) -> dict[str, str]:
    """The roles by their names in the data."""
    return {**ROLES, _CALL: _CALL, **{name: role for role, names in data.roles.items() for name in names}}


def _calls(value: Any, where: str) -> dict[str, Any]:
    """Tool calls from LLaMA-Factory's JSON of a call, or of a list of them, after reasoning. Raises RowError."""
    thought = _THOUGHT.match(value) if isinstance(value, str) else None
    found = parsed_calls(value[thought.end() :] if thought else value, f"{where}: the function call")
    calls = [{"type": "function", "function": call} for call in (found if isinstance(found, list) else [found])]
    return {**({"content": thought[0].strip()} if thought else {}), "tool_calls": calls}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Join a content that is a list of parts: texts, images and audio; see `media_messages`."""
    parts = message.get("content")
    if not isinstance(parts, list) or not parts or not all(map(_is_read, parts)):
        return message
    return {**message, **join_parts(parts)}


def _is_read(part: Any) -> bool:
    return _is_text(part) or medium_of_part(part) is not None


def _is_text(part: Any) -> bool:
    # Columnar files give every part the keys of all parts, with null values.
    held = {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else {}
    return held.keys() == {"type", "text"} and held["type"] in _TEXT_PARTS and isinstance(held["text"], str)


def _other_parts(message: dict[str, Any]) -> str:
    """The end of the error message for a content of parts that are not all text: the first other one."""
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return ""
    other = next(part for part in parts if not _is_read(part))
    kind = other.get("type") if isinstance(other, dict) else None
    shown = f"type {kind!r}" if isinstance(kind, str) else describe_type(other)
    return f"; only parts of type 'text', images and audio are read, this one has {shown}"


def _with_weight(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert `"train": false` and `"loss": false` to `"weight": 0`. Raises RowError for unsupported flags."""
    if message.keys().isdisjoint(_FLAGS):
        return message
    if unsupported := [key for key in _UNSUPPORTED if key in message]:
        raise RowError(
            f"{where} has {unsupported[0]!r}: which parts of a message carry loss cannot be chosen; set weight to 0 "
            f"for a message without loss, or name {unsupported[0]!r} in data.ignore_columns"
        )
    flags = {key: message.pop(key) for key in _LEARNED if key in message}
    for key, value in flags.items():
        if value not in (0, 1):
            raise RowError(f"{where}: {key} is {value!r}; it may be true or false")
        if value and message.get("role") != "assistant" and "role" in message:
            raise RowError(
                f"{where}: {key} is {value!r} and role is {message['role']!r}, but only the assistant's messages carry "
                f"loss; set it to false, or name {key!r} in data.ignore_columns{advice_on_role(message['role'])}"
            )
        if value != message.setdefault("weight", value):
            raise RowError(f"{where}: {key} is {value!r}, but weight is {message['weight']!r}; leave one of them out")
    return message


def _require_weight(message: dict[str, Any], where: str) -> None:
    """Raise RowError for a `weight` other than 0 or 1, or on a message that is not the assistant's."""
    weight, role = message.get("weight", 0), message["role"]
    if weight not in (0, 1):
        raise RowError(f"{where}: weight is {weight!r}; set it to 1 to train on the message, or to 0 for context only")
    if weight == 1 and role != "assistant":
        raise RowError(
            f"{where}: weight is 1 and role is {role!r}, but only the assistant's messages carry loss; leave weight out"
            f"{advice_on_role(role)}"
        )


def learned_messages(messages: Messages, train_on: TrainOn) -> list[int]:
    """Numbers of the messages that carry loss by `data.train_on`, without those of weight 0."""
    roles = train_on if isinstance(train_on, tuple) else ("assistant",)
    found = [index for index, message in enumerate(messages) if train_on == "all" or message["role"] in roles]
    return [
        index for index in (found[-1:] if train_on == "last_turn" else found) if messages[index].get("weight", 1) != 0
    ]


def is_empty_answer(message: dict[str, Any]) -> bool:
    """Whether the assistant's message has no text, call or reasoning: to learn it is to learn to end at once."""
    contents = (message.get(key) for key in ("content", *REASONING))
    return (
        message["role"] == "assistant"
        and not message.get("tool_calls")
        and not any(text.strip() if isinstance(text, str) else text for text in contents)
    )


def question_messages(row: Row, column: str, data: Data) -> Messages:
    """The messages before an answer: earlier turns in `history`, and the question in `column` with its `input`.

    The assistant's turns in `history`, a list of pairs of texts, are learned like the answer. Raises RowError.
    """
    fields = {name: value for name, value in row.fields().items() if name not in data.ignore_columns}
    texts = [row.text(column)]
    for name in INPUTS:
        if name != column and fields.get(name) is not None:
            texts.append(_optional_text(row, name))
    history = fields.get(HISTORY) or []
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise RowError(f"{row.where}: column {HISTORY!r} holds {describe_type(history)}, not a list of pairs of texts")
    for pair in history:
        for text in pair:
            require_valid_unicode(text, row.where)
    question = "\n".join(text for text in texts if text.strip())
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]
    return [*turns, {"role": "user", "content": question}]


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)


def _optional_text(row: Row, column: str) -> str:
    try:
        return row.text(column)
    except RowError as error:
        raise RowError(f"{error}; to leave it unread, name it in data.ignore_columns") from error


def with_system(messages: Messages, row: Row, data: Data) -> Messages:
    """The messages, after the system message in a column. Raises RowError if they begin with another one."""
    first = f"column {{!r}} and {'the first message' if messages[0]['role'] == 'system' else 'another column'}"
    for column in system_columns(data):
        value = row.fields().get(column)
        if column in data.ignore_columns or value is None or (isinstance(value, str) and not value.strip()):
            continue
        text = row.text(column)
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": text}, *messages]
        elif messages[0].get("content", "").strip() != text.strip():
            raise RowError(
                f"{row.where}: {first.format(column)} hold different system messages; correct one of them, or name "
                f"{column!r} in data.ignore_columns"
            )
    return messages
