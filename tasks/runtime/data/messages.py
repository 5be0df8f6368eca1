"""The messages of a chat: as OpenAI's, with `role` and `content`; as ShareGPT's, with `from` and `value`; as Alpaca's.

Flags of an assistant's message that other frameworks read, `train` and `loss`, become its `weight`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tasks.runtime.data.rows import Row, RowError, describe_type, require_valid_unicode
from tasks.runtime.data.tools import called_functions, drop_nulls

# Roles by the values of `from` in ShareGPT's messages.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
          "tool": "tool"}  # fmt: skip

# Keys that say whether a message is learned, in axolotl, LLaMA-Factory and ms-swift, true by default.
_LEARNED = ("train", "training", "loss")
# Keys that say which parts of a message are learned, or how much.
_UNSUPPORTED = ("train_detail", "training_detail", "loss_scale", "loss_mask", "mask", "masks")
# Alpaca's columns.
INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"
_FLAGS = frozenset((*_LEARNED, *_UNSUPPORTED))

Messages = list[dict[str, Any]]


def messages_of(row: Row, column: str, ignored: Collection[str] = ()) -> Messages:
    """The checked messages of a row, without null values and empty lists of tool calls. Raises RowError.

    ignored: keys that are left out.

    ShareGPT's messages with `from` and `value`, and contents that are lists of text parts, are converted to `role` and
    a string as `content`.
    """
    value = row.value(column)
    if not isinstance(value, list):
        raise RowError(f"{row.where}: column {column!r} holds {describe_type(value)}, not a list of messages")
    if not value:
        raise RowError(f"{row.where}: column {column!r} holds no message")
    messages = []
    for number, message in enumerate(value, start=1):
        where = f"{row.where}: message {number}"
        if not isinstance(message, dict):
            raise RowError(f"{where} is {describe_type(message)}, not an object with role and content")
        message = {
            key: item
            for key, item in message.items()
            if item is not None and (key, item) != ("tool_calls", []) and key not in ignored
        }
        message = _with_weight(_with_text(_with_role(message, where)), where)
        if "tool_calls" in message:
            message["tool_calls"] = drop_nulls(message["tool_calls"])
            called_functions(message["tool_calls"], where)
        if not isinstance(message.get("role"), str):
            raise RowError(f"{where}: role is {describe_type(message.get('role'))}, not text{_other_keys(message)}")
        if not isinstance(message.get("content", "" if "tool_calls" in message else None), str):
            raise RowError(f"{where}: content is {describe_type(message.get('content'))}, not text")
        require_valid_unicode(message.get("content", ""), f"{where}: content")
        _require_weight(message, where)
        messages.append(message)
    return messages


def _with_role(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert `{"from": "human", "value": ...}` to `role` and `content`. Raises RowError for an unknown `from`."""
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    author = message["from"]
    if not isinstance(author, str) or author not in _ROLES:
        raise RowError(f"{where}: from is {author!r}; it may be {', '.join(map(repr, _ROLES))}")
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    return {"role": _ROLES[author], "content": message["value"], **others}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Join a content that is a list of text parts."""
    parts = message.get("content")
    if not isinstance(parts, list) or not parts or not all(map(_is_text, parts)):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def _is_text(part: Any) -> bool:
    # Columnar files give every part the keys of all parts, with null values.
    held = {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else {}
    return held.keys() == {"type", "text"} and held["type"] == "text" and isinstance(held["text"], str)


def _other_keys(message: dict[str, Any]) -> str:
    """The end of the error message for a message without a role: the keys that it has."""
    if "role" in message:
        return ""
    return f"; a message has role and content, this one {', '.join(map(repr, message)) or 'nothing'}"


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
                f"loss; set it to false, or name {key!r} in data.ignore_columns"
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
        )


def alpaca_messages(row: Row, ignored: Collection[str] = ()) -> Messages:
    """The messages of a row as in Alpaca: earlier turns, the instruction with its input, and the output.

    The assistant's turns in `history`, a list of pairs of texts, are learned like the output. Raises RowError.

    ignored: columns that are not read.
    """
    fields = {name: value for name, value in row.fields().items() if name not in ignored}
    prompt = row.text(INSTRUCTION)
    if fields.get(INPUT) is not None and row.text(INPUT).strip():
        prompt = f"{prompt}\n{row.text(INPUT)}" if prompt.strip() else row.text(INPUT)
    history = fields.get(HISTORY) or []
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise RowError(f"{row.where}: column {HISTORY!r} holds {describe_type(history)}, not a list of pairs of texts")
    turns = [(number, text) for pair in (*history, (prompt, row.text(OUTPUT))) for number, text in enumerate(pair)]
    for _, text in turns:
        require_valid_unicode(text, row.where)
    return [{"role": ("user", "assistant")[number], "content": text} for number, text in turns]


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)


def with_system(messages: Messages, row: Row, column: str) -> Messages:
    """The messages, with the system message in `column` before them. Raises RowError if they begin with another."""
    value = row.fields().get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return messages
    system = {"role": "system", "content": row.text(column)}
    if messages[0]["role"] != "system":
        return [system, *messages]
    if messages[0].get("content", "").strip() != system["content"].strip():
        raise RowError(
            f"{row.where}: column {column!r} and the first message hold different system messages; correct one of "
            f"them, or name {column!r} in data.ignore_columns"
        )
    return messages
