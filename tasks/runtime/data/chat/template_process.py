"""The process that renders templates for `template_renderer`: a script that loads neither torch nor this package.

Its arguments are the number of a socket, over which it gets requests and answers each with `(outcome, result or
message)`; the bytes of memory that a template may take; and the characters that it may render.
"""

import json
import resource
import sys
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class TooLong(Exception):
    """A template renders more characters than it may."""


def prompt_environment() -> tuple[Any, Callable[[str], Any]]:
    """The sandbox of prompts, with the white space and filters of chat templates, and what null is in it."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import missing

    class Missing(StrictUndefined):
        def __init__(
            self, hint: str | None = None, obj: Any = missing, name: str | None = None, **options: Any
        ) -> None:
            super().__init__(
                f"there is no column {name!r}" if hint is None and obj is missing else hint, obj, name, **options
            )

    class Null(StrictUndefined):
        """An error where its text is needed, while `{% if column %}` is false, and `is none` true."""

        def __bool__(self) -> bool:  # type: ignore[override]
            return False

    def not_null(value: Any) -> Any:
        if value is None:
            raise ValueError("a value is null")
        return value

    environment = ImmutableSandboxedEnvironment(
        undefined=Missing, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True, finalize=not_null
    )
    environment.tests["none"] = lambda value: value is None or isinstance(value, Null)
    # Jinja's own is for HTML.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment, lambda name: Null(f"column {name!r} is null")


def variables_of(parsed: Any) -> set[str]:
    """Names that a parsed template reads where it has not set them.

    Jinja's `meta` also names those that both branches of a condition set.
    """
    from jinja2 import nodes

    found: set[str] = set()

    def names_in(target: Any) -> set[str]:
        targets = [target, *target.find_all(nodes.Name)]
        return {each.name for each in targets if isinstance(each, nodes.Name) and each.ctx in ("store", "param")}

    def block(body: list[Any], known: set[str]) -> set[str]:
        inner = set(known)
        for node in body:
            visit(node, inner)
        return inner

    def visit(node: Any, known: set[str]) -> None:
        """Add what a node reads to `found`, and what it sets in its scope to `known`."""
        if isinstance(node, nodes.Name):
            if node.ctx == "load" and node.name not in known:
                found.add(node.name)
        elif isinstance(node, nodes.If):
            visit(node.test, known)
            branches = [block(node.body, known), block(node.else_, known)]
            for each in node.elif_:
                visit(each.test, known)
                branches.append(block(each.body, known))
            known |= set.intersection(*branches)
        elif isinstance(node, nodes.For):
            visit(node.iter, known)
            block([*([node.test] if node.test else []), *node.body], known | names_in(node.target) | {"loop"})
            block(node.else_, known)
        elif isinstance(node, nodes.Macro | nodes.CallBlock):
            block([*node.defaults, *([node.call] if isinstance(node, nodes.CallBlock) else [])], known)
            known |= {node.name} if isinstance(node, nodes.Macro) else set()
            arguments = {each.name for each in node.args}
            block(node.body, known | arguments | {"caller", "kwargs", "varargs"})
        elif isinstance(node, nodes.Assign):
            block([node.node, node.target], known)
            known |= names_in(node.target)
        elif isinstance(node, nodes.AssignBlock):
            block([*([node.filter] if node.filter else []), *node.body], known)
            known |= names_in(node.target)
        elif isinstance(node, nodes.With):
            block(node.values, known)
            block(node.body, known.union(*map(names_in, node.targets)))
        elif isinstance(node, nodes.Template | nodes.Output | nodes.Expr | nodes.Helper):
            for child in node.iter_child_nodes():
                visit(child, known)
        else:
            block(list(node.iter_child_nodes()), known)

    visit(parsed, set())
    return found


def main() -> None:
    """Answer requests until the other end is closed."""
    descriptor, memory, longest = map(int, sys.argv[1:])
    connection = Connection(descriptor)
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    environment, null = prompt_environment()
    compiled = lru_cache(maxsize=16)(environment.from_string)

    def chats(common: dict[str, Any], each: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        found = []
        for chat in each:
            texts, spans = render_jinja_template(**common, **chat)
            found.append((within(texts[0]), spans[0] if spans else []))
        return found

    def prompt(source: str, columns: dict[str, Any]) -> str:
        values = {name: null(name) if value is None else value for name, value in columns.items()}
        return within(compiled(source).render(values))

    def columns(source: str) -> list[str]:
        return sorted(meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys())

    def variables(source: str) -> list[str]:
        # Its environment has the tags of chat templates.
        parsed = _compile_jinja_template(source).environment.parse(source)
        return sorted(variables_of(parsed))

    def within(text: str) -> str:
        if len(text) > longest:
            raise TooLong
        return text

    kinds: dict[str, Callable[..., Any]] = {
        "chats": chats,
        "prompt": prompt,
        "columns": columns,
        "variables": variables,
    }

    def answer(kind: str, *arguments: Any) -> tuple[str, Any]:
        try:
            return "rendered", kinds[kind](*arguments)
        except TooLong:
            return "limit", f"renders more than {longest:,} characters"
        except MemoryError:
            return "limit", f"takes more than {memory >> 20} MiB of memory"
        except TemplateSyntaxError as error:
            return "syntax", f"line {error.lineno}: {error.message}"
        # A template can raise any error.
        except Exception as error:
            return "rejected", str(error)

    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send(answer(*request))


if __name__ == "__main__":
    main()
