"""The chats of a row, as messages that the chat template takes."""

from __future__ import annotations

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.chat.json_chat import is_json_chat
from tasks.runtime.data.chat.messages import (
    Messages,
    answer_of,
    is_text,
    messages_of,
    question_messages,
    with_system,
)
from tasks.runtime.data.formats.own_format import is_own, own_messages
from tasks.runtime.data.formats.preferences import chat_answers, end_of_prompt
from tasks.runtime.data.media.media_messages import with_media
from tasks.runtime.data.reading.rows import Row


def chats_in(name: str, columns: tuple[str, ...], row: Row, data: Data) -> list[Messages]:
    """The chats of a row in a format of `CHATS`, or in a class of the user's. Raises RowError: they cannot be read."""
    return [own_messages(row, data)] if is_own(name) else chats_of(name, columns, row, data)


def chats_of(name: str, columns: tuple[str, ...], row: Row, data: Data) -> list[Messages]:
    """The chats of a row in a format of `CHATS`: one, or two with the chosen and the rejected answer.

    Raises:
        RowError: they cannot be read.
    """
    if name == "preference_chat":
        chats = list(chat_answers(row, columns, data))
    elif name == "alpaca":
        question, answer = columns
        turn = {"role": "assistant", "content": row.text(answer)}
        # Without an answer there is nothing to learn.
        chats = [[*question_messages(row, question, data), turn]] if row.text(answer).strip() else []
    elif name == "prompt_chat" and is_text(row.value(columns[0]), data):
        chats = [question_messages(row, columns[0], data)] if row.text(columns[0]).strip() else []
    elif len(columns) == 2:
        chats = [_continued(row, columns, data)]
    else:
        chats = [messages_of(row, columns[0], data)]
    return [with_media(with_system(chat, row, data), row, data) for chat in chats]


def _continued(row: Row, columns: tuple[str, ...], data: Data) -> Messages:
    """The chat of a prompt and a completion, of which the completion alone is learned."""
    prompt, completion = columns
    before = (
        [{"role": "user", "content": row.text(prompt)}]
        if isinstance(row.value(prompt), str) and not is_json_chat(row.value(prompt), data)
        else messages_of(row, prompt, data, several=True)
    )
    answer = answer_of(row, completion, data)
    # The completion may be the whole chat, which repeats the prompt, like the answers of UltraFeedback.
    if answer[0]["role"] != "assistant" and (end := end_of_prompt(answer, before)) is not None:
        before, answer = answer[:end], answer[end:]
    context = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in before]
    return [*context, *answer]
