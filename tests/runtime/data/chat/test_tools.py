"""Tools in chats: the template gets what a row offers, calls are learned as they are, and none is lost unnoticed."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.data import Data
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.data.chat.messages import messages_of
from tasks.runtime.data.chat.template_source import templates_to_save
from tasks.runtime.data.formats.known_formats import make_format
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.data.reading.rows import Row, RowError

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>{{ call | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Both know the tools and none of the calls.
FORGETFUL = TEMPLATE.replace("m.tool_calls or []", "[]")
MARKED = FORGETFUL.replace("{{ m.content or '' }}", "{% generation %}{{ m.content or '' }}{% endgeneration %}")

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TALK = [
    {"role": "user", "content": "Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "Sunny."},
]


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(["Paris? sun Sunny. weather city"] * 3)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def file(tmp_path):
    def write(source):
        (tmp_path / "template.jinja").write_text(source)
        return str(tmp_path / "template.jinja")

    return write


def read(tokenizer, values, template=None):
    """Of each document the text before the first turn, and the turns."""
    documents = make_format("chat", ("messages",), tokenizer, Data(chat_template=template)).documents(
        Row("row 1", values)
    )
    return [(d.segments[0].text, [segment.text for segment in d.segments if segment.generated]) for d in documents]


def prepared(folder, source, **values):
    data = {"source": str(source), "validation_fraction": 0.0, "sequence_length": 1024, **values.pop("data", {})}
    spec = RunSpec.model_validate({"data": data, **values})
    return prepare(DataRecipe.from_spec(spec, fingerprint(spec)), folder / "out", report=print)


BARE = [tool["function"] for tool in TOOLS]


@pytest.mark.parametrize(
    "tools",
    [TOOLS, json.dumps(TOOLS), BARE, json.dumps(BARE)],
    ids=["list", "json", "functions alone", "json of functions alone"],
)
def test_tools_are_told_and_calls_are_learned(tokenizer, tools):
    ((before, turns),) = read(tokenizer, {"messages": TALK, "tools": tools})
    assert before == f"tools: {json.dumps(TOOLS)}\n<|im_start|>user\nParis?<|im_end|>\n<|im_start|>assistant\n"
    assert turns == [f"<call>{json.dumps(CALL)}</call><|im_end|>", "Sunny.<|im_end|>"]


@pytest.mark.parametrize("tool", [{"type": "search"}, {"type": "custom", "name": "a"}, {"description": "b"}])
def test_a_tool_that_is_no_bare_function_is_passed_as_it_is(tokenizer, tool):
    ((before, _),) = read(tokenizer, {"messages": TALK, "tools": [tool]})
    assert before.startswith(f"tools: {json.dumps([tool])}\n")


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"], ids=["null", "none", "empty", "json-none", "json-null"])
def test_a_chat_may_offer_no_tools(tokenizer, tools):
    row = {"messages": [TALK[0], TALK[3]]}
    assert read(tokenizer, {**row, "tools": tools}) == read(tokenizer, row)


def test_pairs_of_answers_offer_tools_too(tokenizer):
    row = {"tools": TOOLS, "chosen": TALK[:2], "rejected": [TALK[0], TALK[3]]}
    form = make_format("preference_chat", ("chosen", "rejected"), tokenizer, Data())
    assert all(d.segments[0].text.startswith("tools: [{") for d in form.documents(Row("row 1", row)))


def test_nulls_of_columnar_files_are_no_arguments(tokenizer, tmp_path):
    """Objects of other keys in the same column: each row gets the keys of both, with nulls."""
    other = {"function": {"name": "time", "arguments": {"zone": "CET"}}, "type": "function"}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}], "tools": [tool]}
        for call, tool in (
            (CALL, {"name": "weather", "parameters": {"city": {"type": "string"}}}),
            (other, {"name": "time", "parameters": {"zone": {"type": "string"}}}),
        )
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    data = prepared(tmp_path, tmp_path / "rows.parquet", model={"tokenizer": str(tmp_path / "tokenizer")})
    text = data.tokenizer().decode(data.train[0]["input_ids"])
    assert '"arguments": {"zone": "CET"}' in text and '"parameters": {"zone": {"type": "string"}}' in text
    assert '"arguments": {"city": "Paris"}' in text and "null" not in text


def test_arguments_in_json_stay_as_they_are():
    call = {"name": "weather", "arguments": '{"city": null}'}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert messages_of(Row("row 1", {"messages": messages}), "messages") == messages


def test_no_calls_are_as_good_as_none():
    plain = {"role": "assistant", "content": "Sunny."}
    assert messages_of(Row("row 1", {"messages": [{**plain, "tool_calls": []}]}), "messages") == [plain]


@pytest.mark.parametrize("source", [FORGETFUL, MARKED], ids=["plain", "marked"])
def test_a_call_that_the_template_leaves_out_is_told(tokenizer, file, source):
    with pytest.raises(RowError, match=r"row 1: the chat template omits the call of 'weather' in message 2; set "
                       r"data\.chat_template to a template that supports tool calls"):  # fmt: skip
        read(tokenizer, {"messages": TALK, "tools": TOOLS}, file(source))


@pytest.mark.parametrize("arguments", ['{"city": "Zürich"}', "{}"])
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_arguments_in_json_that_the_template_quotes_are_told(tokenizer, file, marked, arguments):
    source = TEMPLATE
    if marked:
        source = source.replace("{{ m.content or '' }}", "{{ m.content or '' }}{% generation %}").replace(
            "<|im_end|>", "{% endgeneration %}"
        )
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    talk = {"messages": [TALK[0], {"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(RowError, match=r"row 1: the chat template renders the arguments of 'weather' in message 2 "
                       r"as a quoted string; give them as an object"):  # fmt: skip
        read(tokenizer, talk, file(source))
    plain = source.replace("call | tojson", "call.function.name }} {{ call.function.arguments")
    assert arguments in "".join(read(tokenizer, talk, file(plain))[0][1])


@pytest.mark.parametrize("question", ["Paris?", "What is the weather?"], ids=["without its name", "with its name"])
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
def test_a_tool_that_the_template_leaves_out_is_told(tokenizer, file, marked, question):
    row = {"messages": [{**TALK[0], "content": question}, TALK[3]], "tools": TOOLS}
    source = file((MARKED if marked else TEMPLATE).replace("tools", "documents"))
    with pytest.raises(RowError, match=r"row 1: the chat template omits the tool 'weather' of column 'tools'; "
                       r"set data\.chat_template to a template that supports tools, or rename the column"):  # fmt: skip
        read(tokenizer, row, source)


def test_a_template_for_texts_alone_says_so_at_a_call_without_one(tokenizer, file):
    texts = FORGETFUL.replace("{{ m.content or '' }}", "{{ m.content + '' }}")
    plain = file(texts.partition("{% for call")[0] + "<|im_end|>\n" + texts.partition("<|im_end|>\n")[2])
    calls = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, *TALK[2:]]
    with pytest.raises(
        RowError, match=r"rejects these messages: .* it does not read tool_calls: set data.chat_template"
    ):
        read(tokenizer, {"messages": calls}, plain)


def test_tools_that_a_template_reads_and_leaves_out_are_told(tokenizer, file):
    with pytest.raises(RowError, match="row 1: the chat template omits the tool 'weather'"):
        read(tokenizer, {"messages": TALK[3:], "tools": TOOLS}, file(TEMPLATE.replace("if tools", "if not tools")))
    nameless = [{"type": "code_interpreter"}]
    assert read(tokenizer, {"messages": TALK[3:], "tools": nameless})


def test_rows_whose_calls_are_left_out_can_be_skipped(tmp_path):
    rows = [{"messages": TALK}, {"messages": [TALK[0], TALK[3]]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = prepared(tmp_path, tmp_path / "rows.jsonl", data={"invalid": "skip"}).manifest
    assert (manifest.samples_used, manifest.skipped["invalid"]) == (1, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tools": "hammer, saw"}, "column 'tools' is not valid JSON: Expecting value"),
        ({"tools": '{"name": "f"}'}, "column 'tools' holds str .*, not a list of objects .* rename the column"),
        ({"tools": ["hammer"]}, r"column 'tools' holds list \['hammer'\], not a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": "f()"}]}, "message 1: tool_calls is not valid JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": '"f"'}]}, "message 1: tool_calls is str 'f', not a list"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "message 1: tool_calls has str 'f', which names"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "message 1: tool_calls has dict"),
    ],
    ids=["text", "object", "names", "call-text", "call-json", "call-names", "nameless"],
)
def test_tools_and_calls_of_the_wrong_type(tokenizer, change, problem):
    with pytest.raises(RowError, match="row 1: " + problem.replace("f()", r"f\(\)")):
        read(tokenizer, {"messages": TALK, **change})


def with_templates(folder):
    made = train_tokenizer(["Paris? sun Sunny. weather city"] * 3)
    made.chat_template = {"default": made.chat_template, "tool_use": TEMPLATE, "search": "{{ documents }}"}
    save_tokenizer(made, folder)
    return made


def test_a_template_for_tools_is_used_and_kept(tmp_path):
    own = with_templates(tmp_path / "tokenizer").chat_template
    rows = [{"messages": TALK, "tools": TOOLS}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepared(tmp_path, tmp_path / "rows.jsonl", model={"tokenizer": str(tmp_path / "tokenizer")})
    tokenizer = data.tokenizer()
    assert tokenizer.chat_template == own
    text = tokenizer.apply_chat_template(TALK, tools=TOOLS, tokenize=False)
    assert text.startswith("tools: ") and tokenizer.decode(data.train[0]["input_ids"]).startswith(text)


def test_a_named_template_stands_for_both_of_the_tokenizers_own(tmp_path, file):
    made = with_templates(tmp_path)
    assert templates_to_save(file(FORGETFUL), made) == {"default": FORGETFUL, "search": "{{ documents }}"}
    made.chat_template = {"default": "", "tool_use": TEMPLATE}
    assert templates_to_save(file(FORGETFUL), made) == FORGETFUL


def test_templates_in_a_folder_of_their_own_change_the_fingerprint(tmp_path):
    with_templates(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    spec = RunSpec.model_validate(
        {"data": {"source": str(tmp_path / "rows.jsonl")}, "model": {"tokenizer": str(tmp_path / "tokenizer")}}
    )
    before = fingerprint(spec)
    (tmp_path / "tokenizer" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert fingerprint(spec) != before
