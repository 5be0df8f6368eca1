"""The built-in source `python-docs`: docstrings of Python's standard library.

A pair has the qualified name and signature of a module, class or function, and the first paragraph of its docstring:

    def json.dumps(obj, *, skipkeys=False, ensure_ascii=True, ...)
    Serialize ``obj`` to a JSON formatted ``str``.

The library's source is parsed, never imported: no side effects, the same pairs on every machine with the same Python.
"""

from __future__ import annotations

import ast
import copy
import gc
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# Tests, demos and installed packages, which are not part of the library's documentation.
_EXCLUDED = {
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_MAX_SIGNATURE = 120
_MIN_WORDS = 3
# A paragraph such as `getopt(args, options[, long_options]) -> opts, args` repeats the prompt.
_CALL = re.compile(r"^[\w.]+\(.*\)( *(->|=>|--|:).*)?$", re.DOTALL)

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def pairs() -> tuple[tuple[str, str], ...]:
    """All (prompt, completion) pairs of the standard library, sorted by prompt.

    A completion that several definitions share is kept once, with the first prompt: most such completions are
    boilerplate, and one in the training split would leak into the validation split.
    """
    root = _standard_library()
    with _gc_disabled():
        found = sorted({pair for path in _files(root) for pair in _module_pairs(path, _module_name(path, root))})
    by_completion: dict[str, str] = {}
    by_prompt: set[str] = set()
    for prompt, completion in found:
        if completion not in by_completion and prompt not in by_prompt:
            by_completion[completion] = prompt
            by_prompt.add(prompt)
    return tuple((prompt, completion) for completion, prompt in by_completion.items())


@cache
def digest() -> str:
    """SHA-256 of Python's version and of the source that `pairs` reads."""
    root = _standard_library()
    result = hashlib.sha256(platform.python_version().encode())
    for path in _files(root):
        result.update(f"\0{path.relative_to(root)}\0".encode())
        result.update(path.read_bytes())
    return result.hexdigest()


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        # In place, so that os.walk does not descend into the installed packages, which are ten times as large.
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable garbage collection while parsing: syntax trees have no cycles, and scans of their nodes cost time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module_pairs(path: Path, module: str) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_bytes(), filename=str(path))
    if completion := _first_paragraph(tree):
        yield f"module {module}\n", completion
    for name, node in _definitions(tree, module):
        if completion := _first_paragraph(node):
            yield f"{_signature(name, node)}\n", completion


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, _Definition]]:
    """Classes, their members, and functions, with qualified names; without definitions inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield f"{name}.{child.name}", child
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{name}.{child.name}")
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _definitions(child, name)


def _first_paragraph(node: ast.Module | _Definition) -> str | None:
    """The docstring's first paragraph of prose on one line; None without one of at least three words."""
    docstring = ast.get_docstring(node)
    if docstring is None:
        return None
    paragraphs = re.split(r"\n\s*\n", docstring)
    if _CALL.match(paragraphs[0].strip()):
        del paragraphs[0]
    text = " ".join(paragraphs[0].split()) if paragraphs else ""
    return text if len(text.split()) >= _MIN_WORDS and not text.startswith(">>>") else None


def _signature(name: str, node: _Definition) -> str:
    """`def name(args) -> returns` or `class name(bases)`, on one line.

    Beyond 120 characters it omits annotations, then default values, then the last parameters.
    """
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(base for base in map(ast.unparse, node.bases) if base != "object")
        return f"class {name}({bases})" if bases and len(bases) < _MAX_SIGNATURE else f"class {name}"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    for tail in _parameters(node.args, returns):
        line = f"{keyword} {name}{tail}"
        if len(line) <= _MAX_SIGNATURE:
            return line
    kept, _, _ = line[: _MAX_SIGNATURE - len("...)")].rpartition(", ")
    return f"{kept}, ...)" if kept else f"{keyword} {name}(...)"


def _parameters(arguments: ast.arguments, returns: str) -> Iterator[str]:
    """Ever shorter versions. A generator, because copying a syntax tree is slow and few definitions need it."""
    yield f"({ast.unparse(arguments)}){returns}"
    plain = _without_annotations(arguments)
    yield f"({ast.unparse(plain)})"
    yield f"({ast.unparse(_without_defaults(plain))})"


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    result = copy.deepcopy(arguments)
    for node in ast.walk(result):
        if isinstance(node, ast.arg):
            node.annotation = None
    return result


def _without_defaults(arguments: ast.arguments) -> ast.arguments:
    result = copy.copy(arguments)
    result.defaults = []
    result.kw_defaults = [None] * len(result.kwonlyargs)
    return result
