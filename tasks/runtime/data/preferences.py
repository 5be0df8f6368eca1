"""Pairs of answers: the columns of format `preference`, and what a row of them says.

Two shapes are on the Hub. Answers are texts, each a continuation of the prompt. Or they are lists of messages that
differ in the last one alone: whole chats, which repeat the prompt if there is one, or what follows a prompt, which is a
text or a list of messages. What follows begins with the assistant's message, and may be that alone.
"""

from __future__ import annotations

from typing import Any

from strata_platform.spec.data import Data
from tasks.runtime.data.chat import Messages, messages_of
from tasks.runtime.data.rows import Row, RowError, suggestion

ROLES = ("chosen", "rejected")


def preference_columns(data: Data, present: list[str]) -> tuple[str, ...]:
    """The columns of pairs of answers among those that are `present`: both answers, and before them the prompt if any.

    Raises ValueError when an answer is missing.
    """
    for role, column in zip(ROLES, (data.chosen_column, data.rejected_column), strict=True):
        if column not in present:
            raise ValueError(
                f"objective.type 'dpo' needs pairs of answers, and the data has no column {column!r}, only "
                f"{', '.join(map(repr, present))}{suggestion(column, present)}; set data.{role}_column"
            )
    prompt = (data.prompt_column,) if data.prompt_column in present else ()
    return (*prompt, data.chosen_column, data.rejected_column)


def are_chats(columns: tuple[str, ...], rows: list[Row]) -> bool:
    """Whether the first answer that is there is a list of messages.

    Raises ValueError when answers are texts and there is no prompt that they continue.
    """
    *prompt, chosen, _ = columns
    answers = [
        row.values[chosen] for row in rows if isinstance(row.values, dict) and row.values.get(chosen) is not None
    ]
    if answers and isinstance(answers[0], list):
        return True
    if not prompt:
        raise ValueError(
            f"the answers in column {chosen!r} are texts, and there is no column with the prompt that they continue; "
            "set data.prompt_column, or give answers as lists of messages"
        )
    return False


def text_answers(row: Row, columns: tuple[str, ...]) -> tuple[str, str, str]:
    """Prompt, chosen and rejected answer of a row of texts. Raises RowError."""
    prompt, chosen, rejected = (row.text(column) for column in columns)
    return prompt, chosen, rejected


def chat_answers(row: Row, columns: tuple[str, ...]) -> tuple[Messages, Messages]:
    """The chats of a row that end with the chosen and the rejected answer, alike before that. Raises RowError."""
    *prompt, chosen, rejected = columns
    first, second = (_chat(row, column, prompt) for column in (chosen, rejected))
    for number, (one, other) in enumerate(zip(first[:-1], second[:-1], strict=False), start=1):
        if one != other:
            raise RowError(_mismatch(row, chosen, rejected, f"differ in message {number}"))
    if len(first) != len(second):
        raise RowError(_mismatch(row, chosen, rejected, f"have {len(first)} and {len(second)} messages"))
    return first, second


def _prompt_messages(row: Row, column: str) -> Messages:
    if isinstance(row.value(column), str):
        return [{"role": "user", "content": row.text(column)}]
    return messages_of(row, column)


def _chat(row: Row, column: str, prompt: list[str]) -> Messages:
    """The chat that ends with the answer in `column`; `prompt` names the column of what was asked, if there is one."""
    messages = messages_of(row, column)
    if messages[-1]["role"] != "assistant":
        raise RowError(f"{row.where}: the last message in column {column!r} is the {messages[-1]['role']}'s, no answer")
    if messages[-1].get("weight", 1) == 0:
        raise RowError(
            f"{row.where}: the last message in column {column!r} has weight 0, and is what is compared; leave it out"
        )
    prompt_messages = _prompt_messages(row, prompt[0]) if prompt else []
    if not prompt_messages and len(messages) == 1:
        raise RowError(f"{row.where}: column {column!r} holds an answer alone, and there is no prompt before it")
    if _starts_with(messages, prompt_messages):
        return messages
    if messages[0]["role"] == "assistant":
        return [*prompt_messages, *messages]
    # A chat may say more before its last question: what the system says, or earlier turns.
    if any(
        _starts_with(messages[start:-1], prompt_messages) for start in range(1, len(messages) - len(prompt_messages))
    ):
        return messages
    raise RowError(
        f"{row.where}: the chat in column {column!r} neither begins with the prompt nor with the assistant's message; "
        f"repeat what column {prompt[0]!r} says in it, or, if that is no prompt, set data.prompt_column to another"
    )


def _starts_with(messages: Messages, prompt_messages: Messages) -> bool:
    return [*map(_message_key, messages[: len(prompt_messages)])] == [*map(_message_key, prompt_messages)]


def _message_key(message: dict[str, Any]) -> tuple[str, str, Any]:
    """What a message says; white space around it varies between columns."""
    return message["role"], message.get("content", "").strip(), message.get("tool_calls")


def _mismatch(row: Row, chosen: str, rejected: str, how: str) -> str:
    return f"{row.where}: {chosen!r} and {rejected!r} {how}; they must be alike but for the last message, the answer"
