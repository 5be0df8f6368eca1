"""Chat templates: render messages to text and find the spans of the assistant's turns, which carry loss.

A template with `{% generation %}` marks states the spans itself. For any other template, a turn is the text that
rendering the messages up to and including the turn adds to rendering the messages before it with the generation prompt;
the result is checked against the rendering of the whole chat. Some templates rewrite earlier turns when later ones
follow, for example to drop their reasoning. Such a chat becomes one document per assistant turn, each in the context
that the model has at inference, with loss on that turn only.

If a template writes no end token after a turn, as GLM's, the special token that begins the next message carries loss,
or the model would never stop.

A template whose turn does not begin with its own generation prompt is rejected. So is a row whose messages, tools, tool
calls or reasoning the template omits, or with a role that it does not know. An assistant message with `weight: 0` is
part of the context and carries no loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from strata_platform.spec.sections.data import TrainOn
from tasks.runtime.data.chat.message_check import PRIVATE, MessageCheck
from tasks.runtime.data.chat.messages import REASONING, Messages, learned_messages
from tasks.runtime.data.chat.special_tokens import special_tokens_of
from tasks.runtime.data.chat.template_kwargs import COLUMN as TEMPLATE_KWARGS
from tasks.runtime.data.chat.template_renderer import Span, TemplateLimit, TemplateRejection, render_templates
from tasks.runtime.data.chat.tools import COLUMN, Tools, called_functions, is_double_encoded, offered_functions
from tasks.runtime.data.media.media_messages import as_parts, has_stand_in
from tasks.runtime.data.reading.rows import RowError, require_valid_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A rendered chat, and spans of it in characters: of the turns that are learned, and of those that never are."""

    text: str
    learned: Sequence[Span]
    context: Sequence[Span] = ()


class ChatTemplate:
    """A chat template with a tokenizer's special tokens, applied to checked messages."""

    def __init__(
        self, source: str, tokenizer: PreTrainedTokenizerBase, name: str | None = None, *, multimodal: bool = False
    ) -> None:
        """name: what `data.chat_template` says; None for the tokenizer's own template.

        multimodal: of a multimodal model, so that it may read contents as lists of parts alone.
        """
        self.source = source
        self._reads_texts: bool | None = None if multimodal else True
        self._in_parts = False
        self._kwargs: Mapping[str, Any] = {}
        self._named = "the tokenizer's own template" if name is None else repr(name)
        self._tokenizer = tokenizer
        self._marked = _GENERATION.search(source) is not None
        self._reads_tools = re.search(r"\btools\b", source) is not None
        self._special = special_tokens_of(tokenizer)
        self._next_token: str | None = None
        self._check = MessageCheck(source, self._apply)

    def render(
        self,
        messages: Messages,
        where: str,
        tools: Tools | None = None,
        train_on: TrainOn = "completions",
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Rendered]:
        """Render to texts with the learned spans, in characters: one text for the chat, or one per turn.

        kwargs: further variables of the template.

        Raises:
            RowError: the template rejects these messages, or omits a message, a tool, a tool call or reasoning.
            ValueError: the assistant's spans cannot be located in the template's output.
        """
        self._begin(messages, kwargs)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = learned_messages(messages, train_on)
        learned = [index for index in turns if index in chosen]
        others = [] if train_on == "all" else [index for index in chosen if index not in turns]
        context = [index for index in turns if train_on == "all" and index not in chosen]
        messages = [{key: item for key, item in message.items() if key != "weight"} for message in messages]
        if self._marked:
            whole, spans = self._marked_turns(messages, turns, learned, where, tools)
            documents = [Rendered(whole, *self._of_turns(spans, turns, (learned, context), where))]
        else:
            whole, documents = self._located_turns(messages, learned, context, where, tools, one=train_on == "all")
        self._check.require_all(messages, whole, where, tools)
        # The template rewrites turns, so each turn becomes a separate document.
        split = documents[0].text != whole
        if not self._marked:
            documents = [self._with_ends(document, where) for document in documents]
        if others:
            extra = self._content_spans(messages, others, whole, where, tools)
            if split:
                return [*documents, Rendered(whole, extra)]
            documents = [Rendered(documents[0].text, sorted([*documents[0].learned, *extra]))]
        return documents

    def render_prompt(
        self, messages: Messages, where: str, tools: Tools | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> Rendered:
        """Render to the text that the assistant's next turn follows.

        Raises:
            RowError: the last message is the assistant's, or as in `render`.
        """
        if messages[-1]["role"] == "assistant":
            raise RowError(f"{where}: the prompt ends with the assistant's message, which the model has to generate")
        self._begin(messages, kwargs)
        messages = [{key: item for key, item in message.items() if key != "weight"} for message in messages]
        ((text, _),) = self._apply([(messages, True)], where, tools)
        self._require_tools(tools, text, where)
        self._check.require_all(messages, text, where, tools)
        return Rendered(text, [])

    def reads(
        self,
        messages: Messages,
        keys: Sequence[tuple[str, str]],
        where: str,
        tools: Tools | None,
        kwargs: Mapping[str, Any],
    ) -> list[bool]:
        """Whether the template writes anything else without a key of the messages of a role, for each (key, role).

        Raises RowError: the template rejects these messages.
        """
        self._begin(messages, kwargs)
        chats = [messages]
        for key, role in keys:
            without = [{name: item for name, item in message.items() if name != key} for message in messages]
            pairs = zip(messages, without, strict=True)
            chats.append([other if message["role"] == role else message for message, other in pairs])
        (whole, _), *others = self._apply([(chat, False) for chat in chats], where, tools)
        return [text != whole for text, _ in others]

    def _begin(self, messages: Messages, kwargs: Mapping[str, Any] | None) -> None:
        """Set what each rendering of these messages has."""
        self._kwargs = kwargs or {}
        self._in_parts = self._needs_parts(messages)

    def _needs_parts(self, messages: Messages) -> bool:
        """Whether contents are rendered as lists of parts: those of a chat with images or audio, or of a template for
        these.
        """
        if self._reads_texts is None:
            self._in_parts, text = False, chr(PRIVATE)
            try:
                ((rendered, _),) = self._apply([([{"role": "user", "content": text}], False)], "", None)
            except RowError:
                rendered = text
            self._reads_texts = text in rendered
        return not self._reads_texts or any(has_stand_in(message.get("content", "")) for message in messages)

    def _marked_turns(
        self, messages: Messages, turns: list[int], learned: list[int], where: str, tools: Tools | None
    ) -> tuple[str, list[Span]]:
        """The chat, and the spans that the template marks."""
        text, spans = self._render_marked(messages, where, tools)
        self._require_tools(tools, text, where)
        if turns and not spans:
            raise ValueError(
                f"{where}: the chat template's {{% generation %}} marks cover none of the assistant's turns"
            )
        written = "\n".join(text[begin:end] for begin, end in spans)
        for index in turns:
            _require_calls(messages, index, written, where)
        # Only in the last turn: a template may drop the reasoning of earlier turns on purpose.
        for index in learned[-1:]:
            _require_reasoning(messages, index, written, where)
        return text, spans

    def _of_turns(
        self, spans: list[Span], turns: list[int], chosen: tuple[list[int], list[int]], where: str
    ) -> list[list[Span]]:
        """The spans of the learned turns, and of those of context, given those of all."""
        learned, context = chosen
        if len(spans) == len(turns):
            return [[span for index, span in zip(turns, spans, strict=True) if index in some] for some in chosen]
        if context or learned not in ([], turns):
            raise RowError(
                f"{where}: a message has weight 0 or is left out by data.train_on, and the {{% generation %}} marks of "
                f"the chat template, {len(spans)} for {len(turns)} of the assistant's turns, do not show which turn it "
                "is; train on all turns, or set data.chat_template to a template that marks each turn once"
            )
        return [spans if learned else [], []]

    def _located_turns(
        self, messages: Messages, learned: list[int], context: list[int], where: str, tools: Tools | None, *, one: bool
    ) -> tuple[str, list[Rendered]]:
        """The chat, and its documents: with all turns, or one per turn if the template rewrites earlier ones.

        one: all tokens are learned, so that one document has them.
        """
        turns = sorted([*learned, *context])
        # All at once: each request to the process that renders takes longer than the template.
        chats = [(messages, False), *((messages[:index], True) for index in turns)]
        texts = self._apply([*chats, *((messages[: index + 1], False) for index in turns)], where, tools)
        whole, *others = (text for text, _ in texts)
        self._require_tools(tools, whole, where)
        rendered = {
            index: self._turn(messages, index, where, prompt, text, tools)
            for index, prompt, text in zip(turns, others[: len(turns)], others[len(turns) :], strict=True)
        }
        kept = [index for index in turns if whole.startswith(rendered[index][0])]
        if one and not set(context) <= set(kept):
            raise RowError(
                f"{where}: a message has weight 0, but the chat template rewrites it in the chat, so that it cannot be "
                "left out of all tokens; leave weight out, or set data.train_on to 'completions'"
            )
        if one or kept == turns:
            spans = [[rendered[index][1] for index in kept if index in some] for some in (learned, context)]
            return whole, [Rendered(whole, *spans)]
        return whole, [Rendered(text, [span]) for text, span in rendered.values()]

    def _content_spans(
        self, messages: Messages, indices: list[int], whole: str, where: str, tools: Tools | None
    ) -> list[Span]:
        """The spans of the contents of messages in the chat `whole`, with the tokens that end their turns."""
        mark = chr(PRIVATE)
        marked = [
            [{**message, "content": mark} if at == index else message for at, message in enumerate(messages)]
            for index in indices
        ]
        spans = []
        for index, (text, _) in zip(indices, self._apply([(one, False) for one in marked], where, tools), strict=True):
            before, found, after = text.partition(mark)
            end = len(whole) - len(after)
            if not found or mark in after or not whole.startswith(before) or not whole.endswith(after):
                raise RowError(
                    f"{where}: message {index + 1}, of role {messages[index]['role']!r} in data.train_on, cannot be "
                    "located in the chat template's output; leave its role out of data.train_on"
                )
            token = next((token for token in self._special if whole.startswith(token, end)), "")
            spans.append((len(before), end + len(token)))
        return spans

    def _require_tools(self, tools: Tools | None, text: str, where: str) -> None:
        """Raise RowError when the rendered `text` lacks a tool that the row offers."""
        for name in offered_functions(tools or []):
            # Messages may have that word, too.
            if not self._reads_tools or name not in text:
                raise RowError(
                    f"{where}: the chat template omits the tool {name!r} of column {COLUMN!r}; set "
                    "data.chat_template to a template that supports tools, or rename the column"
                )

    def _turn(
        self, messages: Messages, index: int, where: str, prompt: str, text: str, tools: Tools | None
    ) -> tuple[str, Span]:
        """The chat up to and including a turn, which is `text`, and the turn's span. prompt: the text before it."""
        if index == 0 and not text.startswith(prompt):
            # Of this chat, not of the template: others begin with another role.
            raise RowError(
                f"{where}: the chat begins with the assistant's message, and the chat template writes something else "
                f"before it than before an answer ({_difference(prompt, text)}); begin with the user's message, or "
                "give the assistant's weight 0"
            )
        if not text.startswith(prompt):
            self._require_agreement(messages, index, where, prompt, text, tools)
            raise ValueError(
                f"{where}: the chat template's output for message {index + 1} does not begin with its own generation "
                f"prompt ({_difference(prompt, text)}), so the assistant's turn cannot be located; set "
                "data.chat_template to a template with {% generation %} marks"
            )
        _require_calls(messages, index, text[len(prompt) :], where)
        _require_reasoning(messages, index, text[len(prompt) :], where)
        return text, (len(prompt), self._end_of_turn(text, len(prompt), len(text)))

    def _require_agreement(
        self, messages: Messages, index: int, where: str, prompt: str, text: str, tools: Tools | None
    ) -> None:
        """Raise RowError when the turn does begin with its prompt without the row's `chat_template_kwargs`."""
        if not self._kwargs:
            return
        given, self._kwargs = self._kwargs, {}
        try:
            (before, _), (after, _) = self._apply(
                [(messages[:index], True), (messages[: index + 1], False)], where, tools
            )
        except RowError:  # It needs them.
            return
        finally:
            self._kwargs = given
        if after.startswith(before):
            raise RowError(
                f"{where}: column {TEMPLATE_KWARGS!r} contradicts message {index + 1}: with it the chat template "
                f"writes another beginning of its turn than before an answer ({_difference(prompt, text)}); correct "
                f"one of them, or name {TEMPLATE_KWARGS!r} in data.ignore_columns"
            )

    def _end_of_turn(self, text: str, begin: int, end: int) -> int:
        """`end` without white space that the template adds after the token that ends the turn."""
        turn = text[begin:end].rstrip()
        return begin + len(turn) if turn.endswith(self._special) else end

    def _with_ends(self, document: Rendered, where: str) -> Rendered:
        """The document, in which the special token that begins the next message ends a learned turn that has no end
        token of its own, as in GLM's templates: generation ends there, too.
        """
        text, learned = document.text, []
        for begin, end in document.learned:
            token = ""
            if not text[begin:end].endswith(self._special):
                if end == len(text):
                    text += self._token_after_turn(where)
                header = text[max(text.rfind(token, 0, begin) for token in self._special) : begin]
                if not text.startswith(header, end):  # Not if the next message is also the assistant's.
                    token = next((token for token in self._special if text.startswith(token, end)), "")
            learned.append((begin, end + len(token)))
        return Rendered(text, learned, document.context)

    def _token_after_turn(self, where: str) -> str:
        """The special token with which the template begins the user's message after an answer; empty if none does."""
        if self._next_token is None:
            talk = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
            try:
                (answered, _), (asked, _) = self._apply([(talk[:2], False), (talk, False)], where, None)
            except RowError:
                answered = asked = ""
            rest = asked.removeprefix(answered) if asked.startswith(answered) else ""
            self._next_token = next((token for token in self._special if rest.startswith(token)), "")
        return self._next_token

    def _render_marked(self, messages: Messages, where: str, tools: Tools | None) -> tuple[str, list[Span]]:
        ((text, spans),) = self._apply([(messages, False)], where, tools, return_assistant_tokens_mask=True)
        # The token that ends the turn carries loss even if the marks omit it, or the model would never stop.
        end_tokens = [token for token in self._special if text.rstrip().endswith(token)]
        end_token = max(end_tokens, key=len, default="")
        return text, [
            (begin, end + len(end_token) if text.startswith(end_token, end) else self._end_of_turn(text, begin, end))
            for begin, end in spans
        ]

    def _apply(
        self, chats: list[tuple[Messages, bool]], where: str, tools: Tools | None, **options: bool
    ) -> list[tuple[str, list[Span]]]:
        """The rendered texts, and the spans that the template marks. transformers runs templates in a sandbox.

        chats: messages, and whether the generation prompt follows them.
        """
        variables = {**self._tokenizer.special_tokens_map, **self._kwargs}
        common = {"tools": tools, "chat_template": self.source, **options, **variables}
        if self._in_parts:
            chats = [([*map(as_parts, messages)], prompted) for messages, prompted in chats]
        try:
            found = render_templates(
                common, [{"conversations": [chat], "add_generation_prompt": prompted} for chat, prompted in chats]
            )
        except TemplateRejection as error:
            calls = any("tool_calls" in message for messages, _ in chats for message in messages)
            advice = "; it does not read tool_calls: set data.chat_template to a template that supports tool calls"
            unread = calls and "tool_calls" not in self.source
            raise RowError(
                f"{where}: the chat template rejects these messages: {error}{advice if unread else ''}"
            ) from error
        except TemplateLimit as error:
            raise ValueError(
                f"data.chat_template: {self._named} {error} ({where}); correct it, or set data.chat_template to another"
            ) from error
        # Texts of tools and calls were not checked before.
        for text, _ in found:
            require_valid_unicode(text, f"{where}: the chat template's output")
        return found


def _require_calls(messages: Messages, index: int, written: str, where: str) -> None:
    """Raise RowError when the assistant's rendered text lacks a tool call of the message or quotes its arguments."""
    calls = messages[index].get("tool_calls", [])
    for call, name in zip(calls, called_functions(calls, where), strict=True):
        if is_double_encoded(call, written):
            raise RowError(
                f"{where}: the chat template renders the arguments of {name!r} in message {index + 1} as a quoted "
                "string; give them as an object instead of a JSON string"
            )
        if name not in written:
            raise RowError(
                f"{where}: the chat template omits the call of {name!r} in message {index + 1}; set "
                "data.chat_template to a template that supports tool calls"
            )


def _require_reasoning(messages: Messages, index: int, written: str, where: str) -> None:
    """Raise RowError when the assistant's rendered text lacks the reasoning of the message."""
    for key in REASONING:
        reasoning = messages[index].get(key)
        if isinstance(reasoning, str) and reasoning.strip() not in written:
            raise RowError(
                f"{where}: the chat template omits {key} of message {index + 1}; set data.chat_template to a template "
                "that supports it, or remove it from the messages"
            )


def _difference(prompt: str, text: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
    return f"{prompt[at : at + 20]!r} became {text[at : at + 20]!r}"
