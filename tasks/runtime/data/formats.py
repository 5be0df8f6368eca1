"""Rows to documents: which text a row holds, and which of it a model would have to write.

| format              | columns              | written by the model           |
| ------------------- | -------------------- | ------------------------------ |
| `text`              | text                 | all of it                      |
| `prompt_completion` | prompt, completion   | the completion                 |
| `chat`              | messages             | what the assistant says        |
| `preference`        | prompt, chosen,      | the answer, in two documents:  |
|                     | rejected             | chosen, then rejected          |

Texts end with the end-of-sequence token, which is learned too; it and what the tokenizer puts before a text are not
added where the text has them. The turns of a chat end as the template has it. What a column `tools` holds beside a
chat, or a pair of answers in chats, goes to the template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from tasks.runtime.data.chat import ChatTemplate, Messages, Span, messages_of, resolve_template, templates_to_save
from tasks.runtime.data.preferences import are_chats, chat_answers, preference_columns, text_answers
from tasks.runtime.data.rows import Row, RowError, suggestion
from tasks.runtime.data.tools import tools_of


class Segment(NamedTuple):
    """A piece of text, tokenized by itself; `generated`: the model is to write it."""

    text: str
    generated: bool


@dataclass(frozen=True)
class Document:
    """Segments in order. `has_special_tokens`: the text has its own special tokens, none are added around it."""

    segments: tuple[Segment, ...]
    has_special_tokens: bool


ToDocuments = Callable[[Row], list[Document]]
# From a chat, and the row that it is in, to texts with the spans of what the assistant says.
Render = Callable[[Messages, Row], list[tuple[str, list[Span]]]]

# The names under which pairs of answers are kept: texts, or chats.
PREFERENCES = ("preference", "preference_chat")


@dataclass(frozen=True)
class Format:
    """A way to read rows: its name, the function from a row to documents, and for chats the tokenizer's templates.

    The function raises RowError for a row that does not fit.
    """

    name: str
    documents: ToDocuments
    templates: str | dict[str, str] | None = None

    @property
    def paired(self) -> bool:
        """Whether a row makes two documents, which are compared."""
        return self.name in PREFERENCES


def choose_format(recipe: DataRecipe, rows: list[Row]) -> tuple[str, tuple[str, ...]]:
    """Name and columns of the format of a source that starts with `rows`, at least one.

    `auto` takes the first format whose columns are there, in the order that suits the objective.

    Raises:
        ValueError: a column is missing, no row is readable, or the format does not suit the objective.
    """
    data = recipe.data
    present = list(dict.fromkeys(name for row in rows if isinstance(row.values, dict) for name in row.values))
    if not present:
        raise ValueError(f"data.source: none of the first {len(rows)} rows can be read; {_first_problem(rows)}")
    if recipe.objective == "dpo":
        columns = preference_columns(data, present)
        return PREFERENCES[are_chats(columns, rows)], columns
    known = {
        "chat": (data.messages_column,),
        "prompt_completion": (data.prompt_column, data.completion_column),
        "text": (data.text_column,),
    }
    if data.format != "auto":
        for column in known[data.format]:
            if column not in present:
                raise ValueError(_missing(data.format, column, present))
        return data.format, known[data.format]
    order = ("text", "chat", "prompt_completion") if recipe.objective == "pretrain" else known
    name = next((name for name in order if set(known[name]) <= set(present)), None)
    if name is None:
        raise ValueError(
            f"data.format 'auto' knows none of the columns {', '.join(map(repr, present))}; it looks for "
            + " or ".join(" and ".join(map(repr, columns)) for columns in known.values())
            + "; set data.messages_column, data.prompt_column and data.completion_column, or data.text_column"
        )
    if name == "text" and recipe.objective == "sft":
        raise ValueError(
            f"objective.type 'sft' needs prompts and completions, but the data has only texts (column "
            f"{data.text_column!r}); set objective.type to 'pretrain', or name the columns"
        )
    return name, known[name]


def _first_problem(rows: list[Row]) -> str:
    try:
        rows[0].fields()
    except RowError as error:
        return str(error)
    return f"{rows[0].where}: it has no columns"


def _missing(format_name: str, column: str, present: list[str]) -> str:
    return (
        f"data.format {format_name!r} needs the column {column!r}, but the data has "
        f"{', '.join(map(repr, present))}{suggestion(column, present)}"
    )


def make_format(
    name: str, columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, chat_template: str | None
) -> Format:
    """The format with all that it takes to make documents: for chats, the template."""
    if name in ("chat", "preference_chat"):
        render = _renderer(tokenizer, chat_template)
        templates = templates_to_save(chat_template, tokenizer)
        if name == "chat":
            return Format(name, lambda row: _chat(row, columns[0], render), templates)
        return Format(name, lambda row: _chat_preference(row, columns, render), templates)
    if name == "preference":
        return Format(name, lambda row: _preference(row, columns))
    if name == "prompt_completion":
        return Format(name, lambda row: _prompt_completion(row, *columns))
    return Format(name, lambda row: _text(row, columns[0]))


def _renderer(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> Render:
    plain, with_tools = (
        ChatTemplate(resolve_template(chat_template, tokenizer, tools=tools), tokenizer) for tools in (False, True)
    )

    def render(messages: Messages, row: Row) -> list[tuple[str, list[Span]]]:
        tools = tools_of(row)
        return (with_tools if tools else plain).render(messages, row.where, tools)

    return render


def raw_text(name: str, columns: tuple[str, ...], row: Row) -> str:
    """What a row says, without special tokens: for training a tokenizer. Raises RowError."""
    if name == "preference_chat":
        return "\n".join(message.get("content", "") for chat in chat_answers(row, columns) for message in chat)
    if name == "chat":
        return "\n".join(message.get("content", "") for message in messages_of(row, columns[0]))
    return "".join(row.text(column) for column in columns)


def _text(row: Row, column: str) -> list[Document]:
    text = row.text(column)
    return [Document((Segment(text, True),), has_special_tokens=False)] if text.strip() else []


def _prompt_completion(row: Row, prompt_column: str, completion_column: str) -> list[Document]:
    prompt, completion = row.text(prompt_column), row.text(completion_column)
    return [_prompt_completion_document(prompt, completion)] if completion.strip() else []


def _preference(row: Row, columns: tuple[str, ...]) -> list[Document]:
    prompt, chosen, rejected = text_answers(row, columns)
    # Equal answers say nothing of which is better.
    if chosen == rejected or not chosen.strip() or not rejected.strip():
        return []
    return [_prompt_completion_document(prompt, chosen), _prompt_completion_document(prompt, rejected)]


def _chat_preference(row: Row, columns: tuple[str, ...], render: Render) -> list[Document]:
    chats = chat_answers(row, columns)
    if chats[0] == chats[1]:
        return []
    # The last turn's document and, of the turns in it, the last: what the others say is the same in both chats.
    last = [render(chat, row)[-1] for chat in chats]
    if not all(text for text, _ in last):
        raise RowError(
            f"{row.where}: the chat template renders nothing for an answer; set data.chat_template to another"
        )
    return [Document(tuple(_split_at_spans(text, spans[-1:])), has_special_tokens=True) for text, spans in last]


def _prompt_completion_document(prompt: str, completion: str) -> Document:
    segments = (Segment(prompt, False), Segment(completion, True))
    return Document(tuple(segment for segment in segments if segment.text), has_special_tokens=False)


def _chat(row: Row, column: str, render: Render) -> list[Document]:
    rendered = render(messages_of(row, column), row)
    return [Document(tuple(_split_at_spans(text, spans)), has_special_tokens=True) for text, spans in rendered if text]


def _split_at_spans(text: str, spans: list[Span]) -> list[Segment]:
    segments, at = [], 0
    for begin, end in spans:
        segments += [Segment(text[at:begin], False), Segment(text[begin:end], True)]
        at = end
    segments.append(Segment(text[at:], False))
    return [segment for segment in segments if segment.text]
