"""Messages under other keys and roles: the tokens and labels of the tokenizer's own template on renamed messages."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import PreparedData, fingerprint, prepare
from tasks.runtime.data.preparation import preparation_plan
from tests.runtime.helpers.byte_tokenizer import save_byte_tokenizer

# With tools, calls and reasoning. The marks show the assistant's turns to transformers; Strata renders without them.
MARKED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")

Prepare = Callable[..., PreparedData]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: str) -> Prepare:
    def run(
        rows: Any, settings: str = "", objective: str = "sft", name: str = "rows.jsonl", *, trains: bool = False
    ) -> PreparedData:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_text(text)
        data = {"source": str(tmp_path / name), "sequence_length": 512, "packing": False, "validation_fraction": 0.0}
        spec = RunSpec.model_validate(
            {
                "data": data | (yaml.safe_load(settings) or {}),
                "objective": {"type": objective},
                "model": {} if trains else {"tokenizer": tokenizer},
            }
        )
        return prepare(DataRecipe.from_spec(spec, fingerprint(spec)), tmp_path / "out", report=print)

    return run


def _rows(data: PreparedData) -> list[tuple[list[int], list[int]]]:
    """Of each row the tokens, and the labels of those that carry loss, sorted."""
    rows = [data.train[index] for index in range(len(data.train))]
    return sorted((row["input_ids"].tolist(), row["labels"].tolist()) for row in rows)


def _rendered(data: PreparedData, chat: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
    """The tokens by the tokenizer's template, and their labels by its marks."""
    found = data.tokenizer().apply_chat_template(
        chat, tools=tools, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    masks = found["assistant_masks"]
    return found["input_ids"], [token if mask else -100 for token, mask in zip(found["input_ids"], masks, strict=True)]


def _chat(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


TALK = _chat(("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "3 + 3?"), ("assistant", "6"))
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
CALLING = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "reasoning_content": "Add them.", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


def _as(keys: dict[str, str], roles: dict[str, str], chat: list[dict[str, Any]] = TALK) -> list[dict[str, Any]]:
    """A chat under other keys and roles."""
    return [
        {keys.get(key, key): roles.get(item, item) if key == "role" else item for key, item in message.items()}
        for message in chat
    ]


# The shape of a file, the fields of `data` for it, and its chat with keys and roles renamed by hand.
FILES: dict[str, tuple[Any, str, list[dict[str, Any]], Any]] = {
    "axolotl, from sharegpt": (
        [{"conversations": _as({"role": "from", "content": "value"}, {"user": "human", "assistant": "gpt"})}],
        "{messages_column: conversations, message_keys: {role: from, content: value}}",
        TALK, None,
    ),
    "axolotl, with roles": (
        [{"dialogue": _as({"role": "speaker", "content": "text"}, {"user": "client", "assistant": "agent"})}],
        "{messages_column: dialogue, message_keys: {role: speaker, content: text},"
        " roles: {assistant: [agent, model], user: [client, human]}}",
        TALK, None,
    ),
    "llama-factory, with odd tags": (
        json.dumps([
            {
                "conversations": [
                    {"author": "instructions", "text": "Be brief."}, {"author": "person", "text": "2 + 2?"},
                    {"author": "action", "text": json.dumps({"name": "add", "arguments": {"a": 2, "b": 2}})},
                    {"author": "result", "text": "4"}, {"author": "machine", "text": "It is 4."},
                ],
                "tools": json.dumps([TOOLS[0]["function"]]),
            }
        ]),
        "{message_keys: {role: author, content: text}, roles: {system: instructions, user: person, tool: result,"
        " assistant: machine, function_call: action}}",
        [
            *_chat(("system", "Be brief."), ("user", "2 + 2?")),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            *_chat(("tool", "4"), ("assistant", "It is 4.")),
        ],
        TOOLS,
    ),
    "system, user and bot": ([{"messages": _as({}, {"assistant": "bot"})}], "", TALK, None),
    "buyer and seller": (
        [{"messages": _as({}, {"assistant": "seller", "user": "buyer"})}],
        "{roles: {assistant: seller, user: buyer}}",
        TALK, None,
    ),
    "roles that change places": (
        [{"messages": _as({}, {"assistant": "user", "user": "assistant"})}],
        "{roles: {assistant: user, user: assistant}}",
        TALK, None,
    ),
    "tool calls": (
        [
            {
                "messages": _as(
                    {"role": "who", "content": "what", "tool_calls": "calls", "reasoning_content": "thoughts"},
                    {"tool": "api"}, CALLING,
                ),
                "tools": TOOLS,
            }
        ],
        "{message_keys: {role: who, content: what, tool_calls: calls, reasoning_content: thoughts},"
        " roles: {tool: [api]}}",
        CALLING, TOOLS,
    ),
    "json in a column": (
        [{"messages": json.dumps(_as({"role": "speaker", "content": "text"}, {}))}],
        "{message_keys: {role: speaker, content: text}}",
        TALK, None,
    ),
    "a key that both have": (
        [{"messages": [{"role": "clerk", **message} for message in _as({"role": "speaker"}, {})]}],
        "{message_keys: {role: speaker}, ignore_columns: [role]}",
        TALK, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "settings", "chat", "tools"), FILES.values(), ids=FILES)
def test_mapped_messages_have_the_tokens_and_labels_of_renamed_ones(
    rows: Any, settings: str, chat: list[dict[str, Any]], tools: Any, prepared: Prepare
) -> None:
    data = prepared(rows, settings, name="rows.json" if isinstance(rows, str) else "rows.jsonl")
    assert _rows(data) == [_rendered(data, chat, tools)]


MAPPED = "{message_keys: {role: speaker, content: text}, roles: {assistant: [bot], user: [customer]}}"
ASKED = {"speaker": "customer", "text": "2 + 2?"}
ANSWERS = [{"speaker": "bot", "text": text} for text in ("4", "5")]


def test_pairs_and_labelled_answers_are_mapped_too(prepared: Prepare) -> None:
    chats = [_chat(("user", "2 + 2?"), ("assistant", text)) for text in "45"]
    pair = {"chosen": [ANSWERS[0]], "rejected": [ANSWERS[1]]}
    whole = {name: [ASKED, *answer] for name, answer in pair.items()}
    single = {name: answer[0] for name, answer in pair.items()}
    for row in ({"prompt": [ASKED], **pair}, whole, {"conversations": [ASKED], **single}):
        data = prepared([row], MAPPED, "dpo")
        ((tokens, labels),) = _rows(data)
        rendered = [_rendered(data, chat) for chat in chats]
        assert (tokens, labels) == tuple([*one, *other] for one, other in zip(*rendered, strict=True))
    for row in ({"prompt": [ASKED], "completion": [ANSWERS[1]]}, {"messages": [ASKED, ANSWERS[1]]}):
        data = prepared([{**row, "label": False}], MAPPED, "kto")
        assert _rows(data) == [_rendered(data, chats[1])]


PROBLEMS: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "role": (
        [{"role": "buyer", "content": "Hi"}, TALK[2]], "",
        "line 2: message 1 has the role 'buyer', which the chat template does not name; map it to another by "
        "data.roles",
    ),
    "mapped role": (
        [ASKED, {"speaker": "seller", "text": "4"}], MAPPED,
        "line 2: message 2 has the role 'seller', .* map it to another by data.roles",
    ),
    "role of ShareGPT": (
        [{"from": "buyer", "value": "Hi"}], "{roles: {assistant: bot2}}",
        "line 2: message 1: from is 'buyer'; it may be 'system', .*, 'bot2'; map other names of roles by data.roles",
    ),
    "keys": (
        [ASKED], "",
        "line 2: message 1 has no role; a message has role and content, this one 'speaker', 'text'; data.message_keys "
        "maps other keys to these",
    ),
    "text of ShareGPT": (
        [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": None}], "",
        "line 2: message 2: content is null, not text; the key 'value' is read as content",
    ),
    "another mapped key": (
        [{"who": "customer", "text": "2 + 2?"}], MAPPED,
        "line 2: message 1 has no role; .*, this one 'who', 'text'; .*; the key 'speaker' is read as role",
    ),
    "mapped text": (
        [{**ASKED, "text": 4}], MAPPED,
        "line 2: message 1: content is int 4, not text; the key 'text' is read as content",
    ),
    "mapped keys of ShareGPT": (
        [{"speaker": "buyer", "text": "Hi"}], "{message_keys: {from: speaker, value: text}}",
        "line 2: message 1: from is 'buyer'; .*; the key 'speaker' is read as from",
    ),
    "mapped weight": (
        [TALK[1], {**TALK[2], "grade": 2}], "{message_keys: {weight: grade}}",
        "line 2: message 2: weight is 2; .*; the key 'grade' is read as weight",
    ),
    "mapped calls": (
        [TALK[1], {**TALK[2], "calls": "add()"}], "{message_keys: {tool_calls: calls}}",
        "line 2: message 2: tool_calls is not valid JSON: .*; it begins 'add.*'; the key 'calls' is read as tool_calls",
    ),
    "number": (
        [{"role": 0, "content": "Hi"}], "{roles: {user: ['1']}}",
        "line 2: message 1: role is 0; it may be 'system', .*, '1'; map other names of roles by data.roles",
    ),
    "both": (
        [{**ASKED, "role": "clerk"}], MAPPED,
        "line 2: message 1 has 'role' and 'speaker', and data.message_keys reads 'speaker' as 'role'; .*ignore_columns",
    ),
    "weight": (
        [TALK[1], {"role": "seller", "content": "4", "weight": 1}], "",
        "line 2: message 2: weight is 1 and role is 'seller', .*; if 'seller' is another name of a role, map it by da",
    ),
    "train": (
        [TALK[1], {"role": "seller", "content": "4", "train": True}], "",
        "line 2: message 2: train is True and role is 'seller', .*; if 'seller' is another name of a role, map it by",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "settings", "problem"), PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.filterwarnings("ignore:data.message_keys. no message of the first")
def test_unknown_keys_and_roles_name_the_row_and_the_field(
    messages: list[dict[str, Any]], settings: str, problem: str, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation_plan, "_FORMAT_ROWS", 1)
    keys = yaml.safe_load(settings or "{}").get("message_keys", {})
    with pytest.raises(ValueError, match=problem):
        prepared([{"messages": _as(keys, {}, TALK[1:])}, {"messages": messages}], settings)


ROLES: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "several": (
        [{"messages": _as({}, {"user": "buyer", "assistant": "seller"})}, {"messages": [{**TALK[1], "role": "judge"}]}],
        "",
        "line 1: message 2: role is 'buyer', which neither data.roles nor the chat template knows; the first 2 rows "
        "also have 'seller', 'judge'; map them by data.roles, such as {user: ['buyer', 'judge'], assistant: ['seller'",
    ),
    "one more": (
        [{"messages": _as({}, {"user": "buyer", "assistant": "seller"})}], "{roles: {user: buyer}}",
        "line 1: message 3: role is 'seller', .* knows; map it by data.roles, such as {user: ['buyer'], assistant: "
        "['seller']}, or set data.chat_template to a template that names it",
    ),
    "mapped keys, as JSON": (
        [{"messages": json.dumps([{"speaker": "buyer", "text": "Hi"}, ANSWERS[0]])}], MAPPED,
        "line 1: message 1: speaker is 'buyer', .*, such as {assistant: ['bot'], user: ['customer', 'buyer']}",
    ),
    "numbers": (
        [{"conversations": [{"from": 0, "value": "2 + 2?"}, {"from": 1, "value": "4"}]}], "",
        "line 1: message 1: from is 0, .* also have '1'; .*, such as {user: ['0'], assistant: ['1']}",
    ),
    "booleans": (
        [{"prompt": "2 + 2?", "completion": {"bot": True, "content": "4"}}], "{message_keys: {role: bot}}",
        "line 1: column 'completion', message 1: bot is True, .*, such as {user: ['true']}",
    ),
    "other letters": (
        [{"messages": _as({}, {"system": "developer", "assistant": "Assistant", "user": "User"})}], "",
        "line 1: message 1: role is 'developer', .*, such as {system: ['developer'], user: ['User'], assistant: "
        "['Assistant']}",
    ),
    "many": (
        [{"messages": [{"role": f"speaker {number}", "content": "Hi"} for number in range(9)]}], "",
        "line 1: message 1: role is 'speaker 0', .*, 'speaker 7', ...; map them .*, 'speaker 7']}, or",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trains", [False, True], ids=["", "trains a tokenizer"])
@pytest.mark.parametrize(("rows", "settings", "problem"), ROLES.values(), ids=ROLES)
def test_all_unknown_roles_of_the_first_rows_are_told_at_once(
    rows: list[dict[str, Any]], settings: str, problem: str, trains: bool, prepared: Prepare
) -> None:
    pattern = problem.replace("{", r"\{").replace("[", r"\[")
    with pytest.raises(ValueError, match=pattern):
        prepared(rows, settings, trains=trains)


@pytest.mark.parametrize("trains", [False, True], ids=["", "trains a tokenizer"])
def test_unknown_roles_of_rows_that_are_skipped_are_warned_of(trains: bool, prepared: Prepare) -> None:
    rows = [{"messages": [{**TALK[1], "role": "buyer"}, TALK[2]]}, {"messages": [TALK[1], TALK[2]]}]
    with pytest.warns(UserWarning, match=r"line 1: message 1: role is 'buyer', .*, such as \{user: \['buyer'") as told:
        data = prepared(rows, "{invalid: skip}", trains=trains)
    assert len(told) == 1
    assert (data.manifest.samples_used, data.manifest.skipped["invalid"]) == (1, 1)


JSON = json.dumps(TALK[1:3])
READ_AS_TEXT = {
    "pretrain": ({"text": JSON}, "", "column 'text' .* set data.format to 'chat' and data.messages_column to 'text'"),
    "system": ({"system": JSON, "messages": TALK[1:3]}, "", "column 'system' .* is the text of a system message; give"),
    "template": (
        {"question": "2 + 2?", "past": JSON, "answer": "4"}, "{template: '{{ past }}{{ question }}'}",
        "column 'past' .* is text for data.template; to read messages, leave data.template out",
    ),
    "alpaca": (
        {"instruction": "2 + 2?", "input": JSON, "output": "4"}, "{template: alpaca}",
        "column 'input' .* is text for data.template",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "settings", "told"), READ_AS_TEXT.values(), ids=READ_AS_TEXT)
@pytest.mark.filterwarnings("ignore:half of the documents")
def test_messages_as_json_that_are_read_as_text_are_warned_of(
    row: dict[str, Any], settings: str, told: str, prepared: Prepare
) -> None:
    objective = "pretrain" if "text" in row else "sft"
    plain = {name: "2 + 2 = 4" if value == JSON else value for name, value in row.items()}
    prepared([plain], settings, objective)
    with pytest.warns(UserWarning, match=f"line 2: {told}"):
        prepared([plain, row], settings, objective)


def test_messages_as_json_in_a_text_are_read_as_told(prepared: Prepare) -> None:
    chat = prepared([{"messages": TALK[1:3]}])
    assert _rows(prepared([{"text": JSON}], "{format: chat, messages_column: text}", "pretrain")) == _rows(chat)
    assert prepared([{"text": JSON}], "{format: text}", "pretrain").manifest.samples_used == 1


def test_a_chat_without_a_message_that_carries_loss_is_told_with_its_roles(prepared: Prepare) -> None:
    chat = [TALK[1], {**TALK[2], "role": "gpt", "weight": 0}, TALK[3], TALK[4]]
    problem = "line 1: none of its messages carries loss; their roles are user, assistant of weight 0, tool$"
    with pytest.raises(ValueError, match=problem):
        prepared([{"messages": chat}], "{roles: {tool: [assistant]}}")


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected", "completion"])
def test_an_error_names_the_column_if_there_are_several(column: str, prepared: Prepare) -> None:
    columns = ["prompt", "completion"] if column == "completion" else ["prompt", "chosen", "rejected"]
    row = {name: [TALK[1 if name == "prompt" else 2]] for name in columns}
    row[column] = [{**row[column][0], "content": None}]
    with pytest.raises(ValueError, match=f"line 1: column '{column}', message 1: content is null, not text"):
        prepared([row], objective="dpo" if "chosen" in row else "sft")


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_an_answer_of_an_unknown_role_names_the_field(
    objective: str, prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation_plan, "_FORMAT_ROWS", 1)
    chats = [TALK[1], TALK[2]], [TALK[1], {"role": "seller", "content": "4"}]
    rows = [{"chosen": c, "rejected": c} if objective == "dpo" else {"messages": c, "label": True} for c in chats]
    with pytest.raises(ValueError, match=r"line 2: .* 'seller'.*; if 'seller' is another name of a role, map it by da"):
        prepared(rows, objective=objective)


def test_numbers_and_booleans_are_names_of_roles_as_json_writes_them(prepared: Prepare) -> None:
    for names in ({"system": 2, "user": 0, "assistant": 1.5}, {"system": None, "user": False, "assistant": True}):
        rows = [{"messages": [{"n": names[m["role"]], "content": m["content"]} for m in TALK[1:]]}]
        settings = {role: json.dumps(name) for role, name in names.items()}
        data = prepared(rows, f"{{message_keys: {{role: n}}, roles: {json.dumps(settings)}}}")
        assert _rows(data) == [_rendered(data, TALK[1:])]


THOUGHT = "<think>\nAdd them.\n</think>"


@pytest.mark.parametrize("ends", ["", "\n\n"])
def test_a_call_of_llama_factory_may_follow_reasoning(ends: str, prepared: Prepare) -> None:
    """As its own converter reads it: the reasoning, then the call."""
    call = json.dumps([CALL["function"]])
    turns = [
        ("human", "2 + 2?"),
        ("function_call", f"{THOUGHT}{ends}{call}"),
        ("observation", "4"),
        ("gpt", "It is 4."),
    ]
    data = prepared([{"conversations": [{"from": name, "value": text} for name, text in turns]}])
    calling = {"role": "assistant", "content": THOUGHT, "tool_calls": [CALL]}
    assert _rows(data) == [_rendered(data, [CALLING[0], calling, *CALLING[2:]])]


def test_tool_calls_may_be_json(prepared: Prepare) -> None:
    chat = [dict(message) for message in CALLING]
    for none in ([], None):
        data = prepared([{"messages": [{**m, "tool_calls": json.dumps(m.get("tool_calls", none))} for m in chat]}])
        assert _rows(data) == [_rendered(data, CALLING)]


def test_an_earlier_turn_of_a_mapped_role_can_be_excluded(prepared: Prepare) -> None:
    mapped = "{message_keys: {role: speaker, content: text, weight: graded}, roles: {assistant: bot, user: customer}}"
    row = {"messages": [ASKED, {**ANSWERS[1], "graded": 0}, ASKED, {**ANSWERS[0], "graded": 1}]}
    data = prepared([row], mapped)
    ((_, labels),) = _rows(data)
    assert data.tokenizer().decode([label for label in labels if label != -100]) == "4<|im_end|>"


def test_prepared_data_of_other_keys_or_roles_is_not_reused(prepared: Prepare) -> None:
    rows = [{"messages": _as({}, {"user": "assistant", "assistant": "bot"})}]
    first = prepared(rows, "{roles: {user: assistant}}")
    again = prepared(rows, "{roles: {user: [assistant]}}")
    other = prepared(rows, "{roles: {user: assistant}, message_keys: {content: content}}")
    assert first.manifest.recipe_hash == again.manifest.recipe_hash != other.manifest.recipe_hash
    assert _rows(first) == [_rendered(first, TALK)]


@pytest.mark.parametrize(
    ("row", "objective"),
    [
        ({"prompt": "2 + 2 =", "completion": " 4"}, "sft"),
        ({"instruction": "2 + 2?", "output": "4"}, "sft"),
        ({"question": "2 + 2?", "chosen": "4", "rejected": "5"}, "dpo"),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: Ho", "rejected": "\n\nHuman: Hi\n\nAssistant: Hu"}, "dpo"),
    ],
    ids=["texts", "alpaca", "pair of texts", "transcripts"],
)
def test_keys_and_roles_of_rows_without_messages_are_warned_of(
    row: dict[str, str], objective: str, prepared: Prepare
) -> None:
    with pytest.warns(UserWarning) as found:
        prepared([row], MAPPED, objective)
    told = [str(warning.message) for warning in found]
    assert [text.split(" has no effect")[0] for text in told] == ["data.message_keys", "data.roles"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared([{"messages": [ASKED, ANSWERS[0]]}], MAPPED)


def test_a_mapped_key_that_no_message_has_is_warned_of(prepared: Prepare) -> None:
    """Otherwise a turn of weight 0 would be learned for a letter."""
    settings = "{message_keys: {weight: graed, content: text}, roles: {assistant: bot}}"
    turns = [{"role": "user", "text": "2 + 2 ="}, {"role": "bot", "text": "4", "graded": 0}]
    with pytest.warns(UserWarning, match=r"^data\.message_keys: no message of the first 1 rows has 'graed'$"):
        prepared([{"messages": turns}], settings)


def test_keys_within_json_texts_are_found(prepared: Prepare) -> None:
    text = json.dumps([ASKED, ANSWERS[0]], ensure_ascii=False)
    prepared([{"messages": text}], MAPPED)


def test_roles_of_transcripts_are_not_mapped(prepared: Prepare) -> None:
    rows = [{"chosen": "\n\nHuman: 2 + 2 =\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2 =\n\nAssistant: 5"}]
    with pytest.warns(UserWarning, match=r"^data\.roles has no effect on "):
        mapped = prepared(rows, "{roles: {user: assistant, assistant: user}}", "dpo")
    assert _rows(mapped) == _rows(prepared(rows, objective="dpo"))


def test_an_error_in_a_transcript_names_the_message(prepared: Prepare) -> None:
    row = {"chosen": "\n\nHuman: Hi\n\nAssistant: \U000ffffc", "rejected": "\n\nHuman: Hi\n\nAssistant: Hi."}
    with pytest.raises(ValueError, match=r"line 1: column 'chosen', message 2: .*U\+FFFFC"):
        prepared([row], objective="dpo")
