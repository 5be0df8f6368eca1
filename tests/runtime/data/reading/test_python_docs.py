"""The built-in pairs: real, clean, and the same every time."""

from __future__ import annotations

import ast
import sys

import pytest

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data.reading import python_docs
from tasks.runtime.data.reading.sources import PythonDocs, open_source


def test_the_library_has_thousands_of_clean_pairs() -> None:
    pairs = dict(python_docs.pairs())
    assert len(pairs) > 5_000
    assert pairs["def shutil.which(cmd, mode=os.F_OK | os.X_OK, path=None)\n"].startswith(
        "Given a command, mode, and a"
    )
    assert pairs["class json.decoder.JSONDecoder\n"] == "Simple JSON <https://json.org> decoder"
    assert pairs["module textwrap\n"] == "Text wrapping and filling."
    assert list(pairs) == sorted(pairs, key=lambda prompt: (prompt, pairs[prompt]))
    assert len(set(pairs.values())) == len(pairs)
    for prompt, completion in pairs.items():
        assert prompt.endswith("\n") and prompt.count("\n") == 1 and len(prompt) < 200
        assert completion == " ".join(completion.split()) and len(completion.split()) >= 3


def test_parsing_imports_nothing() -> None:
    before = set(sys.modules)
    path = python_docs._standard_library() / "mailbox.py"
    assert len(list(python_docs._module_pairs(path, "mailbox"))) > 100
    assert set(sys.modules) == before


_NINE = f"def m.f({', '.join('abcdefghij' + str(i) for i in range(8))}, ...)"


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("def f(a: int, /, *b, c: str = 'x', **d) -> bool: ...", "def m.f(a: int, /, *b, c: str='x', **d) -> bool"),
        ("async def f(self): ...", "async def m.f(self)"),
        ("class C(Base, metaclass=M): ...", "class m.C(Base)"),
        ("class C(object): ...", "class m.C"),
        (f"def f(a: {'X' * 110}, b=1): ...", "def m.f(a, b=1)"),
        (f"def f(a: int = {'X' * 110}, *, b=1, c): ...", "def m.f(a, *, b, c)"),
        (f"def f({', '.join('abcdefghij' + str(i) for i in range(20))}): ...", _NINE),
    ],
    ids=["whole", "async", "class", "no-bases", "long-annotation", "long-default", "many-parameters"],
)
def test_signatures(source: str, signature: str) -> None:
    node = ast.parse(source).body[0]
    assert python_docs._signature(f"m.{node.name}", node) == signature  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize(
    ("docstring", "paragraph"),
    [
        ("One  two\n    three.\n\n    More.", "One two three."),
        ("f(x) -> y\n\n    Does it to x.", "Does it to x."),
        ("f(x) -> y", None),
        ("Too short.", None),
        (">>> f(1) is a test", None),
        ("", None),
    ],
)
def test_first_paragraph(docstring: str, paragraph: str | None) -> None:
    module = ast.parse(f'def f(x):\n    """{docstring}"""')
    assert python_docs._first_paragraph(module.body[0]) == paragraph  # type: ignore[arg-type]


def test_the_seed_decides_the_order() -> None:
    orders = [[row.values["prompt"] for row in PythonDocs(seed=seed).rows()] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_digest_is_stable() -> None:
    source = open_source(DataRecipe.from_spec(RunSpec()))
    assert source.digest() == source.digest() and len(source.digest()) == 64
