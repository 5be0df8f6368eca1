"""From the texts or the chats of a row to documents: what is read, and what the model has to generate."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

from transformers import PreTrainedTokenizerBase

from strata_platform.spec.sections.data import Data, TrainOn
from tasks.runtime.data.chat.messages import Messages, advice_on_role, is_empty_answer, learned_messages
from tasks.runtime.data.chat.prompt_template import PromptTemplate
from tasks.runtime.data.chat.special_tokens import SpecialTokens, restore
from tasks.runtime.data.chat.template import ChatTemplate, Rendered
from tasks.runtime.data.chat.template_kwargs import template_kwargs_of
from tasks.runtime.data.chat.template_renderer import Span
from tasks.runtime.data.chat.template_source import resolve_template
from tasks.runtime.data.chat.tools import COLUMN, tools_of
from tasks.runtime.data.formats.documents import Document, Segment
from tasks.runtime.data.formats.preferences import text_answers
from tasks.runtime.data.media.media_messages import media_in, without_media
from tasks.runtime.data.media.row_media import Drawn, RowMedia
from tasks.runtime.data.reading.rows import Row, RowError, Skipped
from tasks.runtime.extensions import TextSegment

# From a chat and its row to what is drawn of it.
Render = Callable[[Messages, Row], list[Drawn]]


def text_documents(row: Row, column: str, special: SpecialTokens) -> list[Document]:
    """A text, all of which is learned; none if the whole text is empty."""
    text = row.text(column)
    if row.begins and row.ends and not text.strip():
        return []
    segments = (Segment(text, True, special.is_control(row.where, text)),)
    return [Document(segments, has_special_tokens=False, begins=row.begins, ends=row.ends)]


def completion_documents(row: Row, columns: tuple[str, ...], special: SpecialTokens) -> list[Document]:
    """A prompt and its completion, which is learned; none if it is empty."""
    prompt, completion = (row.text(column) for column in columns)
    control = special.is_control(row.where, prompt, completion)
    return [_prompt_completion_document(prompt, completion, control)] if completion.strip() else []


def prompt_documents(row: Row, column: str, special: SpecialTokens) -> list[Document]:
    """A prompt whose answer is generated later; none if it is empty."""
    text = row.text(column)
    if not text.strip():
        return []
    segments = (Segment(text, False, special.is_control(row.where, text)),)
    # The answer follows, not the end.
    return [Document(segments, has_special_tokens=False, ends=False, columns=_as_json(row, text))]


def preference_documents(row: Row, columns: tuple[str, ...], special: SpecialTokens) -> list[Document]:
    """A prompt with the chosen and with the rejected answer; none if the answers are equal or one is empty."""
    prompt, *answers = text_answers(row, columns)
    # Equal answers express no preference.
    if answers[0] == answers[1] or not all(answer.strip() for answer in answers):
        return []
    control = special.is_control(row.where, prompt, *answers)
    return [_prompt_completion_document(prompt, answer, control) for answer in answers]


def own_documents(pieces: list[TextSegment], row: Row, special: SpecialTokens) -> list[Document]:
    """The pieces of text of a format of the user's."""
    control = special.is_control(row.where, *(piece.text for piece in pieces))
    segments = tuple(Segment(piece.text, piece.learned, control) for piece in pieces)
    return [Document(segments, has_special_tokens=False)] if segments else []


def templated_documents(row: Row, template: PromptTemplate, special: SpecialTokens) -> list[Document]:
    """A prompt by `data.template` and its completion, which is learned; none if it is empty."""
    prompt, completion, hidden = template.render(row, special)
    text = prompt + completion
    segments = _segments(Rendered(text, [(len(prompt), len(text))]), hidden, special)
    return [Document(tuple(segments), has_special_tokens=False)] if completion.strip() else []


def _prompt_completion_document(prompt: str, completion: str, control: bool) -> Document:
    segments = (Segment(prompt, False, control), Segment(completion, True, control))
    return Document(tuple(segment for segment in segments if segment.text), has_special_tokens=False)


def chat_templates(tokenizer: PreTrainedTokenizerBase, data: Data, *, multimodal: bool) -> list[ChatTemplate]:
    """The template of chats without tools, and of those with tools."""
    return [
        ChatTemplate(
            resolve_template(data.chat_template, tokenizer, tools=tools),
            tokenizer,
            data.chat_template,
            multimodal=multimodal,
        )
        for tools in (False, True)
    ]


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase, data: Data, special: SpecialTokens, media: RowMedia, *, prompts: bool = False
) -> Render:
    """What renders chats; with `prompts`, to the text that an answer follows."""
    templates = chat_templates(tokenizer, data, multimodal=media.multimodal)

    def render(messages: Messages, row: Row) -> list[Drawn]:
        tools = None if COLUMN in data.ignore_columns else tools_of(row)
        if found := media_in(messages):
            # Before a template for texts alone would be blamed.
            media.processor(found, row)
        given = [tools, template_kwargs_of(row, data)]
        texts, (tools, kwargs), hidden = special.hide_in_chat(without_media(messages), given, row.where)
        template = templates[bool(tools)]
        if prompts:
            rendered = [template.render_prompt(texts, row.where, tools, kwargs)]
        else:
            rendered = template.render(texts, row.where, tools, data.train_on or "completions", kwargs)
        return media.draw([_segments(document, hidden, special) for document in rendered], found, row)

    return render


def chat_documents(chats: list[Messages], row: Row, render: Render, train_on: TrainOn) -> list[Document]:
    """Chats, of which the turns that `train_on` names are learned. Raises Skipped for a chat without any."""
    rendered = [drawn for chat in chats if _has_answer(chat, row, train_on) for drawn in render(chat, row)]
    for chat in chats:
        if not learned_messages(chat, train_on):
            roles = dict.fromkeys(m["role"] + (" of weight 0" if m.get("weight") == 0 else "") for m in chat)
            told = f"{row.where}: none of its messages carries loss; their roles are {', '.join(roles)}"
            raise Skipped(told, "no_target")
    return [
        Document(tuple(drawn.segments), has_special_tokens=True, media=drawn.media)
        for drawn in rendered
        if drawn.segments
    ]


def _has_answer(chat: Messages, row: Row, train_on: TrainOn) -> bool:
    """Whether there is something to learn: not if all learned turns are empty. Raises RowError if some are."""
    learned = learned_messages(chat, train_on)
    empty = [index for index in learned if is_empty_answer(chat[index])]
    if empty and len(empty) < len(learned):
        raise RowError(
            f"{row.where}: message {empty[0] + 1}, of the assistant, is empty, and the model would learn to end its "
            "turn at once; remove it, or give it weight 0"
        )
    return not empty


def labelled_chat_documents(chats: list[Messages], row: Row, render: Render) -> list[Document]:
    """The chat whose last turn alone carries loss: the label is its."""
    for chat in chats:
        if chat[-1]["role"] != "assistant" or chat[-1].get("weight", 1) == 0:
            raise RowError(
                f"{row.where}: the label belongs to the last message, which must be the assistant's answer and have no "
                f"weight 0, but its role is {chat[-1]['role']!r}{advice_on_role(chat[-1]['role'])}"
            )
    last = [drawn for chat in chats if not is_empty_answer(chat[-1]) for drawn in render(chat, row)][-1:]
    return [
        Document(tuple(_only_last_turn(drawn.segments)), has_special_tokens=True, media=drawn.media)
        for drawn in last
        if drawn.segments
    ]


def chat_preference_documents(chats: list[Messages], row: Row, render: Render) -> list[Document]:
    """A chat with the chosen and with the rejected answer; none if they are equal or one is empty."""
    if chats[0] == chats[1] or any(is_empty_answer(chat[-1]) for chat in chats):
        return []
    # Only the last turn, in the last document, carries loss: all earlier turns are equal in both chats.
    last = [render(chat, row)[-1] for chat in chats]
    return [
        Document(tuple(_only_last_turn(drawn.segments)), has_special_tokens=True, media=drawn.media) for drawn in last
    ]


def _only_last_turn(segments: list[Segment]) -> list[Segment]:
    """The segments of a chat whose last turn alone is generated."""
    last = max((index for index, segment in enumerate(segments) if segment.generated), default=0)
    first = last
    while first > 0 and segments[first - 1].generated:
        first -= 1
    context = [segment._replace(generated=False) for segment in segments[:first]]
    merged = [
        Segment("".join(segment.text for segment in run), *how)
        for how, run in groupby(context, key=lambda segment: segment[1:])
    ]
    return [*merged, *segments[first:]]


def prompt_chat_documents(chats: list[Messages], row: Row, render: Render) -> list[Document]:
    """A chat whose answer is generated later. Raises ValueError: it has images or audio."""
    if not chats:
        return []
    [chat] = chats
    [drawn] = render(chat, row)
    if drawn.media:
        raise ValueError(f"{row.where}: the prompt has images or audio, which objective.type 'grpo' does not read")
    return [Document(tuple(drawn.segments), has_special_tokens=True, columns=_as_json(row, chat))]


def _as_json(row: Row, prompt: str | Messages) -> bytes:
    """What rewards get of a row: where it is, its prompt, and its columns. Raises RowError."""
    known = {"where": row.where, "prompt": prompt, "columns": row.fields()}
    try:
        # Dates and the like of columnar files as texts.
        return json.dumps(known, ensure_ascii=False, default=str).encode()
    except ValueError as error:
        raise RowError(f"{row.where}: its columns cannot be kept for rewards: {error}") from error


def _segments(rendered: Rendered, hidden: list[str], special: SpecialTokens) -> list[Segment]:
    """A rendered text, cut at the learned turns, and at the control tokens around others that are hidden in it."""
    text, learned, context = rendered
    plain = special.plain_spans(text) if hidden else []
    bounds = sorted({0, len(text), *(bound for span in (*learned, *context, *plain) for bound in span)})
    return [
        Segment(
            restore(text[begin:end], hidden),
            _within(begin, learned),
            not _within(begin, plain),
            _within(begin, context),
        )
        for begin, end in pairwise(bounds)
    ]


def _within(at: int, spans: Sequence[Span]) -> bool:
    return any(begin <= at < end for begin, end in spans)
