"""Reads and writes YAML whose plain scalars are those of YAML 1.2's core schema.

PyYAML follows YAML 1.1, where `1:30` is 90, `012` is 10, `1_000` is 1000, `on` is true and `1e-5` is text. Here, as in
JSON and YAML 1.2, the first, the third and the fourth are text, `012` is 12 and `1e-5` is a number. Two rules are
stricter: a key that appears twice is a problem, where other readers silently take the last one; and keys are always
strings (`on:` is the field "on").

Source: https://yaml.org/spec/1.2.2/#103-core-schema
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

from strata_platform.errors import Problem, SpecError

_TAG = "tag:yaml.org,2002:"
# Tag, form, and the characters that a scalar of the form may begin with.
_FORMS = (
    ("null", re.compile(r"(?:null|Null|NULL|~|)\Z"), ["n", "N", "~", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    ("int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        list("-+.0123456789"),
    ),
    # Merge keys are no part of YAML 1.2, but every reader knows them.
    ("merge", re.compile(r"<<\Z"), ["<"]),
)
_NUMBERS = {tag: form for tag, form, _ in _FORMS if tag in ("int", "float")}


def parse_number(text: str) -> int | float | None:
    """The number that `text` is in YAML 1.2, or None.

    >>> parse_number("1e3"), parse_number("012"), parse_number("1_000"), parse_number("1:30")
    (1000.0, 12, None, None)
    """
    if _NUMBERS["int"].match(text):
        return _integer(text)
    return _float(text) if _NUMBERS["float"].match(text) else None


def meaning_in_yaml_1_1(text: str) -> Any:
    """What a plain scalar that is text in YAML 1.2 is in YAML 1.1: a number, true or false; None if it is text, too."""
    try:
        value = yaml.safe_load(text) if len(text) < 40 else None
    except (yaml.YAMLError, ValueError):
        return None
    return value if isinstance(value, bool | int | float) else None


def _integer(text: str) -> int:
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


class _Loader(yaml.SafeLoader):
    """Without the resolvers of YAML 1.1; those of 1.2 are added below."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge; keep one value for each key, or repeated merges of merges would double the mapping every time."""
        super().flatten_mapping(node)
        kept: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            kept[key.value if isinstance(key, yaml.ScalarNode) else id(key)] = key, value
        node.value = list(kept.values())


def _text(loader: Any, node: Any) -> str:
    return str(loader.construct_scalar(node))


class _Dumper(yaml.SafeDumper):
    """Quotes a text that either version of YAML would take for something else."""


for _name, _form, _first in _FORMS:
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _form, _first)
    _Dumper.add_implicit_resolver(f"{_TAG}{_name}", _form, _first)
_Loader.add_constructor(f"{_TAG}int", lambda loader, node: _integer(_text(loader, node)))
_Loader.add_constructor(f"{_TAG}float", lambda loader, node: _float(_text(loader, node)))


def dump_yaml(values: Any) -> str:
    """`values` as YAML that means the same in YAML 1.1 and 1.2."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


@dataclass
class Document:
    """The values of a file, the line of each field, and the keys that appear twice."""

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    duplicates: list[Problem] = field(default_factory=list)


def read_yaml(text: str, source: str) -> Document:
    """Read YAML, of which JSON is a part. `source` names the text in errors. Raises SpecError if it is not valid."""
    document = Document()
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            _join_surrogates(root, source, set())
            _collect_lines(root, "", document, set())
            document.value = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None, error
        message = f"not valid YAML, column {mark.column + 1}: {error.problem or error.context}"
        raise _invalid(source, message, line=mark.line + 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _invalid(source, f"not valid YAML: {error.reason}: {error.character!r}", line=line) from None
    except RecursionError:
        raise _invalid(source, "nested too deeply") from None
    except ValueError as error:
        # A number of thousands of digits, or a value that is none of its explicit tag, `!!int x`.
        raise _invalid(source, f"not valid YAML: {error}; put it in quotes if it is text") from None
    return document


def _invalid(source: str, message: str, line: int | None = None) -> SpecError:
    return SpecError([Problem("", message, line=line)], source)


def _join_surrogates(node: yaml.Node, source: str, seen: set[int]) -> None:
    """JSON escapes a character beyond U+FFFF as a surrogate pair, which YAML leaves as two halves.

    Raises SpecError for half a pair, which is not a character: no file or terminal takes it.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        try:
            node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            message = f"{node.value!a} has half a surrogate pair, which is not a character; remove it"
            raise _invalid(source, message, line=node.start_mark.line + 1) from None
        return
    for child in node.value:
        for item in child if isinstance(child, tuple) else (child,):
            _join_surrogates(item, source, seen)


def _collect_lines(node: yaml.Node, path: str, document: Document, seen: set[int]) -> None:
    """Collect lines and duplicate keys under `node`; visits each node once, as an alias may name its own parent."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            document.lines[f"{path}[{index}]"] = item.start_mark.line + 1
            _collect_lines(item, f"{path}[{index}]", document, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, item in node.value:
        if key.tag == f"{_TAG}merge" or not isinstance(key, yaml.ScalarNode):
            continue
        key.tag = f"{_TAG}str"
        line, child = key.start_mark.line + 1, f"{path}.{key.value}" if path else key.value
        if key.value in first:
            message = f"given twice, first in line {first[key.value]}; keep one"
            document.duplicates.append(Problem(child, message, line=line))
        first.setdefault(key.value, line)
        document.lines[child] = line
        _collect_lines(item, child, document, seen)
