"""Pairs of answers: the columns of format `preference`, and what a row of them says.

Two shapes are on the Hub. Answers are texts, each a continuation of the prompt. Or they are lists of messages: whole
chats that differ in the last message alone, or that message by itself after a prompt, a text or a list of messages.
"""

from __future__ import annotations

from strata_platform.spec.data import Data
from tasks.runtime.data.chat import Messages, messages_of
from tasks.runtime.data.rows import Row, RowError, closest

ROLES = ("chosen", "rejected")


def preference_columns(data: Data, present: list[str]) -> tuple[str, ...]:
    """The columns of pairs of answers among those that are `present`: both answers, and before them the prompt if any.

    Raises ValueError when an answer is missing.
    """
    for role, column in zip(ROLES, (data.chosen_column, data.rejected_column), strict=True):
        if column not in present:
            raise ValueError(
                f"objective.type 'dpo' needs pairs of answers, and the data has no column {column!r}, only "
                f"{', '.join(map(repr, present))}{closest(column, present)}; set data.{role}_column"
            )
    prompt = (data.prompt_column,) if data.prompt_column in present else ()
    return (*prompt, data.chosen_column, data.rejected_column)


def holds_chats(columns: tuple[str, ...], rows: list[Row]) -> bool:
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


def texts_of(row: Row, columns: tuple[str, ...]) -> tuple[str, str, str]:
    """Prompt, chosen and rejected answer of a row of texts. Raises RowError."""
    prompt, chosen, rejected = (row.text(column) for column in columns)
    return prompt, chosen, rejected


def chats_of(row: Row, columns: tuple[str, ...]) -> tuple[Messages, Messages]:
    """The chats of a row that end with the chosen and the rejected answer, alike before that. Raises RowError."""
    *prompt, chosen, rejected = columns
    asked = _asked(row, prompt[0]) if prompt else []
    first, second = (_chat(row, column, asked) for column in (chosen, rejected))
    for number, (one, other) in enumerate(zip(first[:-1], second[:-1], strict=False), start=1):
        if one != other:
            raise RowError(_apart(row, chosen, rejected, f"differ in message {number}"))
    if len(first) != len(second):
        raise RowError(_apart(row, chosen, rejected, f"have {len(first)} and {len(second)} messages"))
    return first, second


def _asked(row: Row, column: str) -> Messages:
    if isinstance(row.value(column), str):
        return [{"role": "user", "content": row.text(column)}]
    return messages_of(row, column)


def _chat(row: Row, column: str, asked: Messages) -> Messages:
    messages = messages_of(row, column)
    if messages[-1]["role"] != "assistant":
        raise RowError(f"{row.where}: the last message in column {column!r} is the {messages[-1]['role']}'s, no answer")
    # A chat that is whole repeats what the prompt says.
    if len(messages) > 1:
        return messages
    if not asked:
        raise RowError(f"{row.where}: column {column!r} holds an answer alone, and there is no prompt before it")
    return [*asked, *messages]


def _apart(row: Row, chosen: str, rejected: str, how: str) -> str:
    return f"{row.where}: {chosen!r} and {rejected!r} {how}; they must be alike but for the last message, the answer"
