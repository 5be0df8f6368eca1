"""Preference data: how the rows of the formats `preference` and `preference_chat` are read.

Datasets on the Hub have two shapes. Answers are texts that continue the prompt. Or they are messages that differ only
in the last one: complete chats, which repeat the prompt if there is one, or continuations of a prompt: a list of
messages, one message, or its text. The prompt is a question or a list of messages. A continuation begins with the
assistant's message and may be that alone.
"""

from __future__ import annotations

from typing import Any

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.chat.messages import (
    Messages,
    advice_on_role,
    answer_of,
    is_text,
    messages_of,
    question_messages,
)
from tasks.runtime.data.formats.columns import HISTORY, INPUTS
from tasks.runtime.data.reading.rows import Row, RowError


def text_answers(row: Row, columns: tuple[str, ...]) -> tuple[str, str, str]:
    """Prompt, chosen and rejected answer of a row of texts. Raises RowError."""
    prompt, chosen, rejected = (row.text(column) for column in columns)
    return prompt, chosen, rejected


def chat_answers(row: Row, columns: tuple[str, ...], data: Data) -> tuple[Messages, Messages]:
    """The two chats of a row: equal but for the last message, the chosen or the rejected answer. Raises RowError."""
    *prompt, chosen, rejected = columns
    first, second = (_chat(row, column, prompt, data) for column in (chosen, rejected))
    for number, (one, other) in enumerate(zip(first[:-1], second[:-1], strict=False), start=1):
        if one != other:
            raise RowError(_mismatch(row, chosen, rejected, f"differ in message {number}"))
    if len(first) != len(second):
        raise RowError(_mismatch(row, chosen, rejected, f"have {len(first)} and {len(second)} messages"))
    return first, second


def _prompt_messages(row: Row, column: str, data: Data) -> Messages:
    if is_text(row.value(column), data):
        return question_messages(row, column, data)
    if unread := [name for name in (*INPUTS, HISTORY) if name not in (column, *data.ignore_columns)
                  and row.fields().get(name)]:  # fmt: skip
        raise RowError(
            f"{row.where}: column {unread[0]!r} belongs to a prompt that is a text, but column {column!r} holds "
            f"messages; name {unread[0]!r} in data.ignore_columns"
        )
    return messages_of(row, column, data, several=True)


def _chat(row: Row, column: str, prompt: list[str], data: Data) -> Messages:
    """The chat that ends with the answer in `column`. prompt: the name of the prompt's column, if there is one."""
    messages = answer_of(row, column, data)
    if messages[-1]["role"] != "assistant":
        raise RowError(
            f"{row.where}: the last message in column {column!r} has role {messages[-1]['role']!r}; it must be the "
            f"assistant's answer{advice_on_role(messages[-1]['role'])}"
        )
    if messages[-1].get("weight", 1) == 0:
        raise RowError(
            f"{row.where}: the last message in column {column!r} has weight 0, but it is the answer to compare; leave "
            "weight out"
        )
    prompt_messages = _prompt_messages(row, prompt[0], data) if prompt else []
    if not prompt_messages and len(messages) == 1:
        raise RowError(
            f"{row.where}: column {column!r} has an answer without a prompt before it; set data.prompt_column"
        )
    if _keys(messages[: len(prompt_messages)]) == _keys(prompt_messages):
        return messages
    if messages[0]["role"] == "assistant":
        return [*prompt_messages, *messages]
    if end_of_prompt(messages, prompt_messages) is not None:
        return messages
    raise RowError(
        f"{row.where}: the chat in column {column!r} begins neither with the prompt in column {prompt[0]!r} nor with "
        "the assistant's message; repeat the prompt in it, or set data.prompt_column to the right column"
    )


def end_of_prompt(messages: Messages, prompt: Messages) -> int | None:
    """The index behind the messages of a prompt in a chat that repeats them and goes on; None if it does not.

    The chat may have more messages before the prompt: a system message, or earlier turns.
    """
    sought, keys = _keys(prompt), _keys(messages)
    ends = range(len(sought), len(keys))
    return next((end for end in ends if keys[end - len(sought) : end] == sought), None)


def _keys(messages: Messages) -> list[tuple[str, str, Any]]:
    """The parts of messages that are compared; surrounding white space varies between columns."""
    return [(each["role"], each.get("content", "").strip(), each.get("tool_calls")) for each in messages]


def _mismatch(row: Row, chosen: str, rejected: str, how: str) -> str:
    return f"{row.where}: {chosen!r} and {rejected!r} {how}; they may differ only in the last message, the answer"
