"""Preference data: the columns of the formats `preference` and `preference_chat`, and how their rows are read.

Datasets on the Hub have two shapes. Answers are texts that continue the prompt. Or they are lists of messages that
differ only in the last one: complete chats, which repeat the prompt if there is one, or continuations of a prompt. The
prompt is a text or a list of messages. A continuation begins with the assistant's message and may be that alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from strata_platform.spec.data import Data
from tasks.runtime.data.messages import Messages, messages_of
from tasks.runtime.data.rows import Row, RowError, suggestion

ROLES = ("chosen", "rejected")


def preference_columns(data: Data, present: list[str]) -> tuple[str, ...]:
    """The columns of a preference dataset among those `present`: the prompt, if any, and both answers.

    Raises ValueError when the column of an answer is missing.
    """
    for role, column in zip(ROLES, (data.chosen_column, data.rejected_column), strict=True):
        if column not in present:
            raise ValueError(
                f"objective.type 'dpo' needs pairs of answers, but the data has no column {column!r}, only "
                f"{', '.join(map(repr, present))}{suggestion(column, present)}; set data.{role}_column"
            )
    prompt = (data.prompt_column,) if data.prompt_column in present else ()
    return (*prompt, data.chosen_column, data.rejected_column)


def are_chats(columns: tuple[str, ...], rows: list[Row]) -> bool:
    """Whether answers are lists of messages, judged by the first answer that is not null.

    Raises ValueError when answers are texts and there is no prompt column.
    """
    *prompt, chosen, _ = columns
    answers = [
        row.values[chosen] for row in rows if isinstance(row.values, dict) and row.values.get(chosen) is not None
    ]
    if answers and isinstance(answers[0], list):
        return True
    if not prompt:
        raise ValueError(
            f"the answers in column {chosen!r} are texts, but there is no column with their prompt; set "
            "data.prompt_column, or give answers as lists of messages"
        )
    return False


def text_answers(row: Row, columns: tuple[str, ...]) -> tuple[str, str, str]:
    """Prompt, chosen and rejected answer of a row of texts. Raises RowError."""
    prompt, chosen, rejected = (row.text(column) for column in columns)
    return prompt, chosen, rejected


def chat_answers(row: Row, columns: tuple[str, ...], ignored: Collection[str] = ()) -> tuple[Messages, Messages]:
    """The two chats of a row: equal but for the last message, the chosen or the rejected answer. Raises RowError.

    ignored: keys of messages that are left out.
    """
    *prompt, chosen, rejected = columns
    first, second = (_chat(row, column, prompt, ignored) for column in (chosen, rejected))
    for number, (one, other) in enumerate(zip(first[:-1], second[:-1], strict=False), start=1):
        if one != other:
            raise RowError(_mismatch(row, chosen, rejected, f"differ in message {number}"))
    if len(first) != len(second):
        raise RowError(_mismatch(row, chosen, rejected, f"have {len(first)} and {len(second)} messages"))
    return first, second


def _prompt_messages(row: Row, column: str, ignored: Collection[str]) -> Messages:
    if isinstance(row.value(column), str):
        return [{"role": "user", "content": row.text(column)}]
    return messages_of(row, column, ignored)


def _chat(row: Row, column: str, prompt: list[str], ignored: Collection[str]) -> Messages:
    """The chat that ends with the answer in `column`. prompt: the name of the prompt's column, if there is one."""
    messages = messages_of(row, column, ignored)
    if messages[-1]["role"] != "assistant":
        raise RowError(
            f"{row.where}: the last message in column {column!r} has role {messages[-1]['role']!r}; it must be the "
            "assistant's answer"
        )
    if messages[-1].get("weight", 1) == 0:
        raise RowError(
            f"{row.where}: the last message in column {column!r} has weight 0, but it is the answer to compare; leave "
            "weight out"
        )
    prompt_messages = _prompt_messages(row, prompt[0], ignored) if prompt else []
    if not prompt_messages and len(messages) == 1:
        raise RowError(f"{row.where}: column {column!r} has an answer without a prompt before it")
    if _starts_with(messages, prompt_messages):
        return messages
    if messages[0]["role"] == "assistant":
        return [*prompt_messages, *messages]
    # A chat may have more messages before the prompt: a system message, or earlier turns.
    if any(
        _starts_with(messages[start:-1], prompt_messages) for start in range(1, len(messages) - len(prompt_messages))
    ):
        return messages
    raise RowError(
        f"{row.where}: the chat in column {column!r} begins neither with the prompt in column {prompt[0]!r} nor with "
        "the assistant's message; repeat the prompt in it, or set data.prompt_column to the right column"
    )


def _starts_with(messages: Messages, prompt_messages: Messages) -> bool:
    return [*map(_message_key, messages[: len(prompt_messages)])] == [*map(_message_key, prompt_messages)]


def _message_key(message: dict[str, Any]) -> tuple[str, str, Any]:
    """The parts of a message that are compared; surrounding white space varies between columns."""
    return message["role"], message.get("content", "").strip(), message.get("tool_calls")


def _mismatch(row: Row, chosen: str, rejected: str, how: str) -> str:
    return f"{row.where}: {chosen!r} and {rejected!r} {how}; they may differ only in the last message, the answer"
