"""Chats: exactly what the assistant says is learned, under any template, or the template is refused."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from strata_platform.spec.sections.data import CHAT_TEMPLATES, Data
from tasks.runtime.data.chat.messages import is_empty_answer, messages_of
from tasks.runtime.data.chat.template import ChatTemplate
from tasks.runtime.data.chat.template_source import NAMED_TEMPLATES, resolve_template
from tasks.runtime.data.formats.known_formats import make_format
from tasks.runtime.data.preparation.encode import Encoder
from tasks.runtime.data.preparation.tokenizer import train_tokenizer
from tasks.runtime.data.reading.rows import Row, RowError, Skipped

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "assistant\nHow are you?"},
    {"role": "assistant", "content": "\nFine <b>\n\nthanks\n"},
    {"role": "user", "content": "Bye."},
]

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# Reasoning is kept in the last turn alone: earlier turns change when the chat goes on.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNSTABLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
# As SmolLM2's and Qwen 2.5's.
DEFAULTED = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As GLM's: no token ends a turn, and the one that begins the next message does.
UNENDED = (
    "{% for m in messages %}<|im_end|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["Hello? Hi. How are you? Fine, thanks. Be brief. Bye. assistant system user"] * 3)


def _learned(
    tokenizer: PreTrainedTokenizerFast, template: str | None, messages: list[dict[str, Any]], *, train_on: Any = None
) -> list[tuple[str, list[str]]]:
    """Of each document the text, and the runs of it that carry loss."""
    form = make_format("chat", ("messages",), tokenizer, Data(chat_template=template, train_on=train_on))
    documents = form.documents(Row("row 1", {"messages": messages}))
    result = []
    for encoded in Encoder(tokenizer, learn_all=train_on == "all").encode(documents):
        runs: list[list[int]] = []
        for index, (token, target) in enumerate(zip(encoded.ids.tolist(), encoded.targets.tolist(), strict=True)):
            if target:
                if index == 0 or not encoded.targets[index - 1]:
                    runs.append([])
                runs[-1].append(token)
        result.append((tokenizer.decode(encoded.ids), [tokenizer.decode(run) for run in runs]))
    return result


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(source: str) -> str:
        path = tmp_path / "template.jinja"
        path.write_text(source, encoding="utf-8")
        return str(path)

    return write


WHOLE = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
TURNS = ["Hi.<|im_end|>", "\nFine <b>\n\nthanks\n<|im_end|>"]


def test_the_assistants_turns_with_their_ends_are_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    assert _learned(tokenizer, None, TALK) == [(WHOLE, TURNS)]
    assert _learned(tokenizer, "chatml", TALK) == [(WHOLE, TURNS)]


@pytest.mark.parametrize("source", [MARKED, MARKED_WITHOUT_END], ids=["end-marked", "end-not-marked"])
def test_generation_marks_are_followed(source: str, tokenizer: PreTrainedTokenizerFast, file: Any) -> None:
    assert _learned(tokenizer, file(source), TALK) == [(WHOLE, TURNS)]


@pytest.mark.parametrize("source", [None, MARKED, MARKED_WITHOUT_END], ids=["not-marked", "end-marked", "no-end"])
def test_a_turn_of_no_weight_is_read_and_not_learned(
    source: str | None, tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    template = source and file(source)
    for index, turn in ((2, TURNS[1]), (4, TURNS[0])):
        talk = [{**message, "weight": 0} if at == index else message for at, message in enumerate(TALK)]
        assert _learned(tokenizer, template, talk) == [(WHOLE, [turn])]
    talk = [{**message, "weight": int(message["role"] == "assistant")} for message in TALK]
    assert _learned(tokenizer, template, talk) == [(WHOLE, TURNS)]
    with pytest.raises(
        Skipped, match=r"row 1: none of its messages carries loss; .* user of weight 0, assistant of weig"
    ):
        _learned(tokenizer, template, [{**message, "weight": 0} for message in TALK])


def test_marks_that_do_not_tell_turns_apart_know_no_weights(tokenizer: PreTrainedTokenizerFast, file: Any) -> None:
    twice = MARKED.replace("{{ m.content }}", "{% endgeneration %}{% generation %}{{ m.content }}", 1)
    assert [runs for _, runs in _learned(tokenizer, file(twice), TALK)] == [TURNS]
    talk = [{**message, "weight": 0} if at == 2 else message for at, message in enumerate(TALK)]
    with pytest.raises(RowError, match=r"row 1: a message has weight 0 or .* 4 for 2 of the assistant's turns"):
        _learned(tokenizer, file(twice), talk)


TOOL_TALK = [*TALK[:3], {"role": "tool", "content": "4 <b>"}, TALK[4]]
HEAD = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TOOL_TALK)
TRAINED: dict[str, tuple[Any, list[str]]] = {
    "completions": ("completions", ["Hi.<|im_end|>", "\nFine <b>\n\nthanks\n<|im_end|>"]),
    "last turn": ("last_turn", ["\nFine <b>\n\nthanks\n<|im_end|>"]),
    "tools": (("assistant", "tool"), ["Hi.<|im_end|>", "4 <b><|im_end|>", "\nFine <b>\n\nthanks\n<|im_end|>"]),
    "tools alone": (("tool",), ["4 <b><|im_end|>"]),
    "user and system": (("user", "system"), ["Be brief.<|im_end|>", "Hello?<|im_end|>"]),
    "all": ("all", [HEAD.removeprefix("<|im_start|>")]),
}


@pytest.mark.parametrize("source", [None, MARKED], ids=["not-marked", "marked"])
@pytest.mark.parametrize(("train_on", "expected"), TRAINED.values(), ids=TRAINED)
def test_what_is_trained_on(
    train_on: Any, expected: list[str], source: str | None, tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    template = source and file(source)
    assert _learned(tokenizer, template, TOOL_TALK, train_on=train_on) == [(HEAD, expected)]


@pytest.mark.parametrize("source", [None, MARKED], ids=["not-marked", "marked"])
def test_a_turn_of_no_weight_is_never_learned(
    source: str | None, tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    template = source and file(source)
    talk = [{**message, "weight": 0} if at == 2 else message for at, message in enumerate(TOOL_TALK)]
    before, after = HEAD.removeprefix("<|im_start|>").split("Hi.<|im_end|>")
    assert _learned(tokenizer, template, talk, train_on="all") == [(HEAD, [before, after])]
    last = TRAINED["last turn"][1]
    assert _learned(tokenizer, template, talk, train_on="completions") == [(HEAD, last)]
    talk[4] = {**talk[4], "weight": 0}
    with pytest.raises(Skipped, match=r"row 1: none of its messages carries loss"):
        _learned(tokenizer, template, talk, train_on="last_turn")


def test_of_a_template_that_rewrites_turns_all_tokens_are_learned_once(
    tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    talk = [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "<think>x</think>Hi."},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "<think>y</think>Fine."},
    ]
    whole = (
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n<think>y</think>Fine.<|im_end|>\n"
    )
    template = file(FORGETFUL)
    assert _learned(tokenizer, template, talk, train_on="all") == [(whole, [whole.removeprefix("<|im_start|>")])]
    last = "<think>y</think>Fine.<|im_end|>"
    assert _learned(tokenizer, template, talk, train_on="last_turn") == [(whole, [last])]
    first = "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n<think>x</think>Hi.<|im_end|>\n"
    assert _learned(tokenizer, template, talk, train_on=("assistant", "tool")) == [
        (first, ["<think>x</think>Hi.<|im_end|>"]), (whole, [last]), (whole, ["4<|im_end|>"])
    ]  # fmt: skip
    with pytest.raises(RowError, match="row 1: a message has weight 0, but the chat template rewrites it"):
        _learned(tokenizer, template, [talk[0], {**talk[1], "weight": 0}, *talk[2:]], train_on="all")


def test_a_content_that_the_template_writes_twice_is_not_learned(tokenizer: PreTrainedTokenizerFast, file: Any) -> None:
    template = file("{{ messages[0].content }}" + MARKED)
    with pytest.raises(RowError, match=r"row 1: message 1, of role 'system' in data.train_on, cannot be located"):
        _learned(tokenizer, template, TALK, train_on=("system",))


def test_pretraining_learns_every_token_but_the_first(tokenizer: PreTrainedTokenizerFast) -> None:
    assert _learned(tokenizer, None, TALK, train_on="all") == [(WHOLE, [WHOLE.removeprefix("<|im_start|>")])]


def test_what_the_model_reads_has_the_tokens_it_will_be_given(tokenizer: PreTrainedTokenizerFast) -> None:
    """The prompt's tokens are those of the prompt alone, though the turn begins as the header ends."""
    (document,) = make_format("chat", ("messages",), tokenizer, Data()).documents(Row("row 1", {"messages": TALK[:5]}))
    (encoded,) = Encoder(tokenizer, learn_all=False).encode([document])
    prompt = tokenizer.apply_chat_template(TALK[:4], add_generation_prompt=True, return_dict=False)
    begin, end = encoded.completion_span
    assert encoded.ids[:begin].tolist() == prompt
    assert encoded.targets[begin:end].all() and not encoded.targets[end:].any()


def test_a_template_that_rewrites_earlier_turns_gives_a_document_per_turn(
    tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    talk = [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "<think>x</think>Hi."},
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": "<think>y</think>Fine."},
    ]
    header = "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    first = "<think>x</think>Hi.<|im_end|>"
    second = "<think>y</think>Fine.<|im_end|>"
    later = f"{header}Hi.<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n{second}\n"
    assert _learned(tokenizer, file(FORGETFUL), talk) == [(f"{header}{first}\n", [first]), (later, [second])]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("source", [None, MARKED], ids=["not-marked", "marked"])
def test_reasoning_that_the_template_leaves_out_is_told(
    source: str | None, key: str, tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    template = source and file(source)
    talk = [*TALK[:4], {**TALK[4], key: "\nI was asked.\n"}]
    with pytest.raises(RowError, match=rf"row 1: the chat template omits {key} of message 5; set data.chat_temp"):
        _learned(tokenizer, template, talk)
    unlearned = [*TALK[:4], {**TALK[4], key: "I was asked.", "weight": 0}]
    for messages in (unlearned, [*TALK[:4], {**TALK[4], key: " "}]):
        assert _learned(tokenizer, template, messages)[0][1][0] == TURNS[0]


@pytest.mark.parametrize("marked", [False, True])
def test_reasoning_that_a_template_keeps_in_the_last_turn_alone_is_learned(
    marked: bool, tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    thought = "{% if loop.last %}<think>{{ m.thinking }}</think>{% endif %}"
    source = MARKED.replace("{% generation %}", "{% generation %}" + thought)
    if not marked:
        source = re.sub(r"{% (end)?generation %}", "", source)
        source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    talk = [{**m, "thinking": f"Hm {n}."} if m["role"] == "assistant" else m for n, m in enumerate(TALK[:5])]
    found = _learned(tokenizer, file(source), talk)
    last = "<think>Hm 4.</think>" + TURNS[1]
    if marked:
        assert [runs for _, runs in found] == [[TURNS[0], last]]
    else:
        assert [runs for _, runs in found] == [["<think>Hm 2.</think>" + TURNS[0]], [last]]


def test_a_turn_that_does_not_begin_with_its_prompt_is_refused(tokenizer: PreTrainedTokenizerFast, file: Any) -> None:
    with pytest.raises(ValueError, match=r"row 1: .* message 3 does not begin with its own generation prompt "
                       r"\('<think>' became 'Hi.<\|eos\|>'\).*data.chat_template"):  # fmt: skip
        _learned(tokenizer, file(UNSTABLE), TALK)


def test_a_chat_that_begins_with_the_assistant_is_a_row_to_skip(tokenizer: PreTrainedTokenizerFast, file: Any) -> None:
    """ShareGPT has such rows."""
    opened = [{"role": "assistant", "content": "Hello?"}, *TALK[1:3]]
    with pytest.raises(
        RowError, match=r"row 1: the chat begins with the assistant's message, .* give the assistant's we"
    ):
        _learned(tokenizer, file(DEFAULTED), opened)
    ((text, learned),) = _learned(tokenizer, file(DEFAULTED), [{**opened[0], "weight": 0}, *opened[1:]])
    assert text.count("Hello?") == 2 and learned == ["Hi.<|im_end|>"]


def test_marks_that_cover_nothing_are_refused(tokenizer: PreTrainedTokenizerFast, file: Any) -> None:
    source = MARKED.replace("m.role == 'assistant'", "m.role == 'model'")
    with pytest.raises(ValueError, match=r"row 1: the chat template's {% generation %} marks cover none"):
        _learned(tokenizer, file(source), TALK)


def test_a_template_without_special_tokens_keeps_the_white_space_it_ends_turns_with(
    tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    assert _learned(tokenizer, file(PLAIN), TALK[1:3]) == [("user: Hello?\nassistant: Hi.\n", ["Hi.\n"])]


def test_a_turn_without_an_end_token_ends_with_the_one_that_begins_the_next_message(
    tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    whole = "".join(f"<|im_end|>{m['role']}\n{m['content']}" for m in TALK)
    turns = ["Hi.<|im_end|>", "\nFine <b>\n\nthanks\n<|im_end|>"]
    assert _learned(tokenizer, file(UNENDED), TALK) == [(whole, turns)]
    ended = whole.removesuffix("user\nBye.")
    assert _learned(tokenizer, file(UNENDED), TALK[:-1]) == [(ended, turns)]
    assert _learned(tokenizer, file(UNENDED), TALK[:-1], train_on=("system", "assistant"))[0][0] == ended
    ((text, _),) = _learned(tokenizer, file(UNENDED), TALK[:-1], train_on="all")
    assert text == ended
    talk = [*TALK[:4], {**TALK[4], "weight": 0}]
    assert _learned(tokenizer, file(UNENDED), talk) == [(ended.removesuffix("<|im_end|>"), turns[:1])]
    # Nothing ends a turn that the assistant goes on after.
    row = [*TALK[1:3], {"role": "assistant", "content": "Fine."}]
    ((text, runs),) = _learned(tokenizer, file(UNENDED), row)
    assert text.endswith("<|im_end|>assistant\nHi.<|im_end|>assistant\nFine.<|im_end|>")
    assert runs == ["Hi.", "Fine.<|im_end|>"]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("family", ["glm4moe", "llama3", "qwen2_5", "lfm2_v2", "muse_glimmer"])
def test_turns_of_templates_as_published_are_those_of_trl(
    tokenizer: PreTrainedTokenizerFast, family: str, file: Any
) -> None:
    """TRL masks by copies of its own of the templates, with marks. Beside what is learned here some of them mark the
    role before a turn or white space behind it.
    """
    folder = Path(str(importlib.util.find_spec("trl").submodule_search_locations[0])) / "chat_templates"
    published, marked = ((folder / f"{name}.jinja").read_text() for name in (family, f"{family}_training"))
    tokenizer = copy.deepcopy(tokenizer)
    names = sorted({*re.findall(r"<\|[a-z_]+\|>", published + marked), *tokenizer.all_special_tokens})
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    ]
    called = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    called += [{"role": "tool", "name": "add", "content": "4"}, TALK[2]]
    for messages, offered in ((TALK[:3], None), (TALK[:5], None), (called, tools)):
        if offered and family == "llama3":
            continue
        template = ChatTemplate(published, tokenizer)
        ((text, learned, _),) = template.render([dict(message) for message in messages], "row 1", offered)
        found = tokenizer.apply_chat_template(
            messages, tools=offered, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        runs = [""]
        for token, target in zip(found["input_ids"], found["assistant_masks"], strict=True):
            runs[-1] += tokenizer.decode([token]) if target else ""
            runs += [""] if runs[-1] and not target else []
        theirs = [run.strip().removeprefix("<|start|>assistant").strip() for run in runs if run]
        assert [text[begin:end].strip() for begin, end in learned] == theirs


def test_an_opening_by_the_assistant_and_turns_in_a_row(tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [{"role": "assistant", "content": text} for text in ("Hi.", "Fine.")]
    (text, runs), *rest = _learned(tokenizer, None, talk)
    assert not rest and runs == ["Hi.<|im_end|>", "Fine.<|im_end|>"]
    assert text.count("<|im_start|>assistant\n") == 2


def test_a_chat_without_the_assistant_has_nothing_to_learn(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Skipped, match=r"row 1: none of its messages carries loss; their roles are system, user$"):
        _learned(tokenizer, None, TALK[:2])


def test_llama3_by_name() -> None:
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = train_tokenizer(["Hello? Hi."])
    with pytest.raises(
        ValueError, match=r"'llama3' needs the special tokens <\|begin_of_text\|>, .* which the tokenizer"
    ):
        resolve_template("llama3", tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    (text, runs), *_ = _learned(tokenizer, "llama3", TALK[:4])
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>")
    assert runs == ["Hi.<|eot_id|>"]


def test_a_template_is_read_as_text_in_utf_8(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_bytes("\ufeff[é]\r\n".encode())
    assert resolve_template(str(path), tokenizer) == "[é]\n"
    path.write_bytes("[é]".encode("latin-1"))
    with pytest.raises(ValueError, match=r"data.chat_template '.*t.jinja' cannot be read: .*utf-8.*; save it as UTF-8"):
        resolve_template(str(path), tokenizer)


def test_a_template_that_does_not_exist(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"data.chat_template 'chatlm': neither 'chatml' or 'llama3' nor a .jinja "
                       "file; did you mean 'chatml'"):  # fmt: skip
        resolve_template("chatlm", tokenizer)
    with pytest.raises(ValueError, match=r"'none.jinja': there is no file .*/none.jinja"):
        resolve_template("none.jinja", tokenizer)
    bare = train_tokenizer(["a"])
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template; set data.chat_template to 'chatml'"):
        resolve_template(None, bare)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hello", "column 'messages' holds str 'hello', not a list of messages"),
        ([], "column 'messages' holds no message"),
        (["hello"], "message 1 is str 'hello', not an object with role and content"),
        ([{"content": "hello"}], "message 1 has no role; a message has role and content, this one 'content'"),
        ([{"from": "narrator", "value": "4"}], "message 1: from is 'narrator'; it may be 'system', 'user', 'human'"),
        ([{"from": ["gpt"], "value": "4"}], "message 1: from is ['gpt']; it may be 'system'"),
        ([{"from": "function_call", "value": "{"}], "message 1: the function call is not valid JSON"),
        (
            [{"from": "function_call", "value": "[4]"}],
            "message 1: tool_calls has dict {'type': 'function', 'function': 4}",
        ),
        ([{"from": "human", "value": 4}], "message 1: content is int 4, not text"),
        ([{"role": None, "content": "hello"}], "message 1 has no role"),
        ([TALK[0], {"role": "user", "content": None}], "message 2: content is null, not text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1: content is list"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "video", "video": "b"}],
                }
            ],
            "message 1: content is list, not text; only parts of type 'text', images and audio are read, this one has",
        ),
        ([{"role": "assistant", "content": "", "weight": 0.5}], "message 1: weight is 0.5; set it to 1"),
        (
            [{"role": "user", "content": "", "weight": 1}],
            "message 1: weight is 1 and role is 'user', but only the assistant's",
        ),
    ],
)
def test_messages_of_the_wrong_type(messages: Any, problem: str) -> None:
    with pytest.raises(RowError) as caught:
        messages_of(Row("row 1", {"messages": messages}), "messages")
    assert problem in str(caught.value) and "row 1" in str(caught.value)


@pytest.mark.parametrize(
    "messages",
    [
        [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello, you", "weight": 0}],
        [{"role": "human", "value": "hello"}, {"from": "chatgpt", "content": "hello, you", "weight": 0}],
        [
            # As a columnar file gives them.
            {"role": "user", "content": [{"type": "text", "text": "hello", "image_url": None}], "weight": None},
            {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("hello", ", you")], "weight": 0},
        ],
    ],
    ids=["from and value", "keys of both", "parts"],
)
def test_messages_of_other_makers(messages: Any) -> None:
    assert messages_of(Row("row 1", {"messages": messages}), "messages") == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello, you", "weight": 0},
    ]


def test_a_message_that_calls_tools_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    assert messages_of(Row("row 1", {"messages": [call]}), "messages") == [
        {"role": "assistant", "tool_calls": [{"name": "f"}]}
    ]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ [][0].x }}", ""),
    ],
)
def test_a_template_can_refuse_messages(tokenizer: PreTrainedTokenizerFast, source: str, said: str) -> None:
    template = ChatTemplate(source, tokenizer)
    with pytest.raises(RowError, match=f"row 1: the chat template rejects these messages: .*{said}"):
        template.render(TALK, "row 1")


def test_templates_run_in_a_sandbox(tokenizer: PreTrainedTokenizerFast) -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", tokenizer)
    with pytest.raises(RowError, match="unsafe"):
        template.render(TALK, "row 1")


ALL = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "tool", "content": "Hi"},
    {"role": "assistant", "content": "Fine."},
]
WRITE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _without(condition: str) -> str:
    return f"{{% for m in messages %}}{{% if not ({condition}) %}}{WRITE}{{% endif %}}{{% endfor %}}{PROMPT}"


@pytest.mark.parametrize(
    ("condition", "number", "role"),
    [
        ("m.role == 'system'", 1, "system"),
        # "Hi" is in the text all the same.
        ("m.role == 'tool'", 4, "tool"),
        ("m.role == 'user' and loop.first", 0, ""),
    ],
    ids=["system", "tool", "other"],
)
def test_a_message_that_the_template_omits_is_refused(
    condition: str, number: int, role: str, tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    template = file(_without(condition))
    if not number:
        assert _learned(tokenizer, template, ALL) == _learned(tokenizer, None, ALL)
        return
    with pytest.raises(
        RowError, match=rf"row 1: the chat template omits message {number}, of role '{role}', .*; set data"
    ):
        _learned(tokenizer, template, ALL)
    others = [message for message in ALL if message["role"] != role]
    assert _learned(tokenizer, template, others) == _learned(tokenizer, None, others)


def test_a_template_that_rejects_odd_contents_of_one_role_is_looked_at_for_the_others(
    tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    picky = "{% if m.role == 'tool' and m.content != 'Hi' %}{{ raise_exception('unknown result') }}{% endif %}"
    loop = "{% for m in messages %}" + picky
    template = file(_without("m.role == 'system'").replace("{% for m in messages %}", loop))
    with pytest.raises(RowError, match="row 1: the chat template omits message 1, of role 'system'"):
        _learned(tokenizer, template, ALL)
    assert _learned(tokenizer, template, ALL[1:]) == _learned(tokenizer, None, ALL[1:])


def test_a_message_that_is_omitted_in_a_later_row_is_refused(tokenizer: PreTrainedTokenizerFast, file: Any) -> None:
    """Though the template renders other messages of the role."""
    form = make_format(
        "chat", ("messages",), tokenizer, Data(chat_template=file(_without("m.role == 'user' and 'x' in m.content")))
    )
    assert form.documents(Row("row 1", {"messages": ALL}))
    talk = [ALL[1], ALL[2], {"role": "user", "content": "An x?"}, ALL[4]]
    with pytest.raises(RowError, match=r"row 2: .*omits message 3, of role 'user', 'An x\?', because of its content"):
        form.documents(Row("row 2", {"messages": talk}))
    # A short one, which others have in them.
    talk = [{"role": "user", "content": "Is it x?"}, ALL[2], {"role": "user", "content": "x"}, ALL[4]]
    form = make_format(
        "chat", ("messages",), tokenizer, Data(chat_template=file(_without("m.role == 'user' and m.content == 'x'")))
    )
    with pytest.raises(RowError, match=r"row 3: .*omits message 3, of role 'user', 'x', because of its content"):
        form.documents(Row("row 3", {"messages": talk}))
    form = make_format("chat", ("messages",), tokenizer, Data(chat_template=file(_without("loop.index == 3"))))
    assert form.documents(Row("row 1", {"messages": talk[:2]}))
    with pytest.raises(RowError, match="row 2: the chat template omits message 3, of role 'user', 'x'; set"):
        form.documents(Row("row 2", {"messages": talk}))


@pytest.mark.parametrize(
    ("written", "content", "made"),
    [
        ("m.content | upper", "Loud", "LOUD"),
        ("m.content | tojson", 'a "b"\n', '"a \\"b\\"\\n"'),
        ("m.content.split('##')[-1]", "aside ## Hi", " Hi"),
        ("m.content ~ ' and ' ~ m.content | upper", "Twice", "Twice and TWICE"),
    ],
    ids=["upper case", "json", "a part", "twice"],
)
def test_what_a_template_makes_of_a_message_is_the_message(
    written: str, content: str, made: str, tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    mine = "{% if m.role == 'user' %}{% set text = " + written + " %}{% else %}{% set text = m.content %}{% endif %}"
    write = mine + "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n"
    template = file("{% for m in messages %}" + write + "{% endfor %}" + PROMPT)
    ((text, learned),) = _learned(tokenizer, template, [{"role": "user", "content": content}, ALL[2]])
    assert f"user\n{made}<|im_end|>" in text and len(learned) == 1


def test_a_text_beside_tool_calls_that_the_template_omits_is_refused(
    tokenizer: PreTrainedTokenizerFast, file: Any
) -> None:
    write = "{% if m.tool_calls %}<|im_start|>assistant\n{{ m.tool_calls[0].function.name }}<|im_end|>\n{% else %}"
    template = file(f"{{% for m in messages %}}{write}{WRITE}{{% endif %}}{{% endfor %}}{PROMPT}")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    assert _learned(tokenizer, template, [ALL[1], call])[0][1] == ["look<|im_end|>"]
    with pytest.raises(
        RowError, match="omits message 2, of role 'assistant', 'Let me look' beside its tool calls; set"
    ):
        _learned(tokenizer, template, [ALL[1], {**call, "content": "Let me look"}])


def test_a_role_that_the_template_does_not_name_is_refused(tokenizer: PreTrainedTokenizerFast, file: Any) -> None:
    talk = [{"role": "developer", "content": "Be brief."}, *ALL[1:3]]
    with pytest.raises(
        RowError, match="row 1: message 1 has the role 'developer', which the chat template does not name"
    ):
        _learned(tokenizer, "chatml", talk)
    template = file("{# 'developer' #}" + _without("false"))
    assert _learned(tokenizer, template, talk)[0][0].startswith("<|im_start|>developer\nBe brief.")


EMPTY = {"role": "assistant", "content": " "}


@pytest.mark.parametrize(
    "messages, learned",
    [
        ([TALK[1], EMPTY], None),
        ([TALK[1], EMPTY, TALK[1], EMPTY], None),
        ([TALK[1], {**EMPTY, "weight": 0}, TALK[1], TALK[2]], "Hi.<|im_end|>"),
        ([TALK[1], EMPTY, TALK[1], TALK[2]], RowError),
    ],
    ids=["alone", "all", "without loss", "among others"],
)
def test_an_empty_answer_is_not_learned_as_an_end(
    messages: list[dict[str, Any]], learned: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A row of nothing else is skipped and counted, as a question without an answer is."""
    build = make_format("chat", ("messages",), tokenizer, Data(chat_template="chatml")).documents
    row = Row("row 1", {"messages": messages})
    if learned is RowError:
        with pytest.raises(RowError, match=r"row 1: message 2, of the assistant, is empty, .*; remove it, or gi"):
            build(row)
    else:
        found = ["".join(part.text for part in one.segments if part.generated) for one in build(row)]
        assert found == ([] if learned is None else [learned])


def test_a_turn_of_reasoning_or_calls_alone_is_an_answer() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    assert [is_empty_answer(one) for one in (EMPTY, call, {**EMPTY, "thinking": "Hm."}, TALK[1] | {"content": ""})] == [
        True, False, False, False,
    ]  # fmt: skip


def test_a_spec_takes_the_templates_that_are_built_in() -> None:
    assert tuple(NAMED_TEMPLATES) == CHAT_TEMPLATES
