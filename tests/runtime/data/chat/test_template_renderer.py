"""Chat templates that would never end, or take all memory."""

import os
import threading
import time

import pytest

from tasks.runtime.data.chat import template_renderer
from tasks.runtime.data.chat.template import ChatTemplate
from tasks.runtime.data.chat.template_renderer import TemplateLimit, TemplateRejection, chat_variables, render_templates
from tasks.runtime.data.preparation.tokenizer import train_tokenizer

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def render(template, messages=TALK, **options):
    (found,) = render_templates({"chat_template": template, **options}, [{"conversations": [messages]}])
    return found


@pytest.fixture(scope="module")
def small():
    """A process with small limits, for tests that reach them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_renderer, "MEMORY", 1 << 28)
        patch.setattr(template_renderer, "LONGEST", 1_000_000)
        template_renderer.stop_rendering()
        yield
    template_renderer.stop_rendering()


def test_the_text_and_the_spans():
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}{{ bos_token }}"
    text, spans = render(template, return_assistant_tokens_mask=True, bos_token="<s>")
    assert text == "2 + 2?;4;<s>" and spans == [(0, 6), (7, 8)]


@pytest.mark.parametrize(
    "template",
    [
        LOOPS,
        # One operation, which holds the interpreter's lock.
        "{{ 10 ** (10 ** 9) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops", "power", "recursion"],
)
def test_a_template_without_an_end_is_stopped(monkeypatch, template):
    monkeypatch.setattr(template_renderer, "SECONDS", 0.5)
    with pytest.raises(TemplateLimit, match=r"takes more than 0\.5 s for one chat"):
        render(template)
    # The next one has a process of its own.
    monkeypatch.setattr(template_renderer, "SECONDS", 30.0)
    assert render("{{ messages[1].content }}") == ("4", [])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 10 ** 10 }}", "takes more than 256 MiB of memory"),
        (
            "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "takes more",
        ),
        ("{{ 'x' * 1000001 }}", "renders more than 1,000,000 characters"),
        ("a\n{% if %}", "is not a Jinja template: line 2: Expected an expression"),
        ("{% nonsense %}", "is not a Jinja template: line 1: Encountered unknown tag 'nonsense'"),
    ],
    ids=["product", "doubling", "text", "syntax", "tag"],
)
def test_a_template_of_any_size_or_none(small, template, message):
    with pytest.raises(TemplateLimit, match=message):
        render(template)


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{% for m in messages %}{{ m.role }}{{ loop.index }}{{ m['content'] }}{% endfor %}", {"messages"}),
        ("{% if a %}{% set b = 1 %}{% else %}{% set b = 2 %}{% endif %}{{ b }}", {"a"}),
        ("{% if a %}{% set b = 1 %}{% elif c %}{% set b = 2 %}{% else %}{% set b = 3 %}{% endif %}{{ b }}", {"a", "c"}),
        (
            "{% if a %}{% set b = 1 %}{% elif c %}{% set d = 2 %}{% else %}{% set b = 3 %}{% endif %}{{ b }}{{ d }}",
            None,
        ),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}", {"a"}),
        ("{% if c %}{% set a = 1 %}{% endif %}{{ a }}", {"a", "c"}),
        ("{% set a = a | default(b) %}{% set c, d = e %}{{ c }}{{ d }}", {"a", "b", "e"}),
        ("{% for m in messages %}{% set a = 1 %}{% else %}{{ m }}{% endfor %}{{ a }}", {"messages", "a", "m"}),
        ("{% macro show(a, b=c) %}{{ a }}{{ b }}{{ d }}{% endmacro %}{{ show(e) }}", {"c", "d", "e"}),
        ("{% set n = namespace(a=b) %}{% set n.a = c %}{{ n.a }}", {"namespace", "b", "c"}),
        ("{% generation %}{% set a = 1 %}{{ a }}{% endgeneration %}{% set b %}{{ c }}{% endset %}{{ b }}", {"c"}),
        ("{% with a = b %}{{ a }}{% endwith %}{{ [1] | map('upper') | join(c) }}{{ d if e else f }}", set("bcdef")),
    ],
)
def test_the_variables_of_a_template(template, read):
    assert chat_variables(template) == (set("abcd") if read is None else read)


def test_an_error_of_the_template_is_a_fault_of_the_chat():
    with pytest.raises(TemplateRejection, match=r"^only two$"):
        render("{{ raise_exception('only two') }}")
    with pytest.raises(TemplateRejection):
        render("{{ range(10 ** 9) }}")


def test_a_thread_may_render_and_stops_too(monkeypatch):
    monkeypatch.setattr(template_renderer, "SECONDS", 0.5)
    found = []

    def run():
        try:
            render(LOOPS)
        except TemplateLimit as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found == ["takes more than 0.5 s for one chat"]


def test_a_process_that_dies_is_replaced():
    render("x")
    template_renderer._renderer._process.kill()
    template_renderer._renderer._process.wait()
    with pytest.raises(TemplateLimit, match="ended its process"):
        render("x")
    assert render("x") == ("x", [])


def test_the_process_ends_with_the_preparation():
    render("x")
    process = template_renderer._renderer._process
    template_renderer.stop_rendering()
    assert process.returncode is not None
    template_renderer.stop_rendering()


def test_a_fork_has_a_process_of_its_own(monkeypatch):
    render("x")
    before = template_renderer._renderer._process
    # As in a fork: the process is another's.
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert render("x") == ("x", []) and template_renderer._renderer._process is not before
    template_renderer.stop_rendering()


@pytest.mark.parametrize(
    ("name", "named"), [("mine.jinja", "'mine.jinja'"), (None, "the tokenizer's own template")], ids=["file", "own"]
)
def test_the_error_names_template_and_row(monkeypatch, name, named):
    monkeypatch.setattr(template_renderer, "SECONDS", 0.5)
    template = ChatTemplate(LOOPS, train_tokenizer(["2 + 2 = 4"]), name)
    started = time.monotonic()
    with pytest.raises(ValueError) as caught:
        template.render(TALK, "rows.jsonl line 7")
    assert str(caught.value) == (
        f"data.chat_template: {named} takes more than 0.5 s for one chat (rows.jsonl line 7); correct it, or set "
        "data.chat_template to another"
    )
    assert time.monotonic() - started < 60
