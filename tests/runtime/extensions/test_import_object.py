import sys

import pytest

from tasks.runtime.extensions import TextFormat, TokenObjective
from tasks.runtime.extensions.import_object import _sources, code_digest, load_class, make_object

CODE = """
from tasks.runtime.extensions import TextFormat

from {package}helper import NAME


class Mine(TextFormat):
    def __init__(self, size: int = 1, *, mode: str = "a") -> None:
        self.size = size
        if size < 0:
            raise ValueError("size is negative")

    def segments(self, row):
        return []


class Unfinished(TextFormat):
    pass


def function():
    pass
"""


_MODULES = ("loose_format", "loose_helper", "packed", "unrelated")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder with a module and a package, which is on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loose_format.py").write_text(CODE.format(package="loose_"))
    (tmp_path / "loose_helper.py").write_text("NAME = 1")
    (tmp_path / "unrelated.py").write_text("")
    package = tmp_path / "packed" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "packed" / "__init__.py").write_text("from packed import other")
    (tmp_path / "packed" / "other.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "formats.py").write_text(CODE.format(package="."))
    (package / "helper.py").write_text("NAME = 1\nimport json, torch, unrelated")
    (tmp_path / "broken.py").write_text("import not_installed_at_all")
    (tmp_path / "wrong.py").write_text("x = 1\n1 / 0")
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in _MODULES]:
        del sys.modules[name]
    _sources.cache_clear()


def make(name, arguments=None):
    return make_object(name, arguments or {}, (TextFormat,), field="data.format", group="strata.formats")


def test_objects_are_made_with_their_arguments(elsewhere):
    assert make("loose_format:Mine", {"size": 3, "mode": "b"}).size == 3
    assert make("packed.inner.formats:Mine").size == 1


def test_an_installed_package_registers_entry_points(elsewhere):
    metadata = elsewhere / "my_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[strata.formats]\nmine = loose_format:Mine\n")
    assert make("entry-point:mine", {"size": 2}).size == 2
    with pytest.raises(ValueError, match=r"registers 'mini' .*; registered: mine; did you mean 'mine'\?"):
        make("entry-point:mini")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("lose_format:Mine", {}, "Python finds no module 'lose_format' here; install it, or add its folder"),
        ("packed.outer:Mine", {}, "Python finds no module 'packed.outer' here"),
        ("loose_format:Mien", {}, r"loose_format has no 'Mien'; did you mean 'Mine'\?"),
        ("loose_format:function", {}, "is not a class based on tasks.runtime.extensions.TextFormat"),
        ("loose_format:Unfinished", {}, "lacks methods that .*TextFormat asks for: segments"),
        ("loose_format:Mine", {"sice": 3}, "unexpected keyword argument 'sice'; it takes: size, mode"),
        ("loose_format:Mine", {"size": -1}, r"Mine\(size=-1\) raised ValueError: size is negative, in line 11 of"),
        ("broken:Mine", {}, "importing broken raised ModuleNotFoundError: No module named 'not_installed_at_all'"),
        ("wrong:Mine", {}, "importing wrong raised ZeroDivisionError: .*, in line 2 of"),
    ],
)
def test_what_cannot_be_made_is_told_with_the_field(elsewhere, name, arguments, message):
    with pytest.raises(ValueError, match=f"^data.format '{name}'.*{message}"):
        make(name, arguments)


def test_a_class_of_another_kind_is_refused(elsewhere):
    with pytest.raises(ValueError, match=r"not a class based on tasks\.runtime\.extensions\.TokenObjective"):
        load_class("loose_format:Mine", (TokenObjective,), field="objective.object", group="strata.objectives")


@pytest.mark.parametrize(
    ("name", "file", "changes"),
    [
        ("loose_format:Mine", "loose_format.py", True),
        ("loose_format:Mine", "loose_helper.py", True),
        ("loose_format:Mine", "unrelated.py", False),
        ("packed.inner.formats:Mine", "packed/inner/helper.py", True),
        ("packed.inner.formats:Mine", "packed/__init__.py", True),
        ("packed.inner.formats:Mine", "packed/other.py", True),
        ("packed.inner.formats:Mine", "loose_helper.py", False),
        # Of the user's folder, what the package imports counts, too.
        ("packed.inner.formats:Mine", "unrelated.py", True),
    ],
)
def test_the_digest_is_that_of_the_code_that_is_used(elsewhere, name, file, changes):
    cls = type(make(name))
    before = code_digest(cls)
    with (elsewhere / file).open("a") as opened:
        opened.write("\n# changed\n")
    _sources.cache_clear()
    assert (code_digest(cls) != before) == changes
