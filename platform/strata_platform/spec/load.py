"""Reads a spec from a file or text, YAML or JSON, with the line of every problem; and writes it back to text.

Values are those of `yaml.safe_load` (YAML 1.1), so a file means the same here and to other tools. Two rules are
stricter: a key that appears twice is a problem, where other readers silently take the last one; and keys are always
strings (`on:` is the field "on"). JSON is read as YAML.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from strata_platform.errors import Problem, SpecError
from strata_platform.spec.describe import format_value
from strata_platform.spec.run_spec import RunSpec

_SUFFIXES = (".yaml", ".yml", ".json")


def load_spec(path_or_text: str | Path) -> RunSpec:
    """Read a spec. The same values give the same `RunSpec`, and hash, from YAML, JSON and Python.

    A `Path` is a file. A `str` is a file if one of that name exists, or if it ends in .yaml, .yml or .json; otherwise
    it is the spec itself.

    Raises SpecError with every problem and, if known, its line.

    >>> load_spec("training: {steps: 100}").training.steps
    100
    """
    path = _as_path(path_or_text)
    if path is None:
        return _parse(str(path_or_text), "spec")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _unreadable(str(path), f"not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    # JSON may be indented with tabs, YAML may not; inside a JSON string a tab is always escaped.
    return _parse(text.replace("\t", " ") if path.suffix == ".json" else text, str(path))


def dump_spec(spec: RunSpec, format: Literal["yaml", "json"] = "yaml") -> str:
    """The spec as text, defaults filled in; `load_spec` reads it back to an equal spec."""
    values = spec.model_dump(mode="json")
    if format == "json":
        return json.dumps(values, indent=2) + "\n"
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def _as_path(path_or_text: str | Path) -> Path | None:
    if isinstance(path_or_text, Path):
        return path_or_text
    if "\n" in path_or_text:
        return None
    path = Path(path_or_text)
    # Asking for a file with a name of more than 255 bytes is an error.
    is_file = path_or_text.endswith(_SUFFIXES) or (len(path.name.encode()) < 256 and path.is_file())
    return path if is_file else None


def _parse(text: str, source: str) -> RunSpec:
    document = _read(text, source)
    if document.value is None:
        raise _unreadable(source, "empty; {} is the spec with all its defaults")
    if not isinstance(document.value, dict):
        hint = "; there is no such file either" if source == "spec" and isinstance(document.value, str) else ""
        raise _unreadable(source, f"not a mapping of fields to values{hint}", given=text.strip())
    problems = document.duplicates
    try:
        spec = RunSpec.model_validate(document.value)
    except SpecError as error:
        problems = [*problems, *error.problems]
    if problems:
        raise SpecError(problems).with_lines(source, document.lines)
    return spec


def _unreadable(source: str, message: str, line: int | None = None, given: str | None = None) -> SpecError:
    return SpecError([Problem("", message, given=given and format_value(given), line=line)], source)


@dataclass
class _Document:
    """The values of a file, the line of each field, and the keys that appear twice."""

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    duplicates: list[Problem] = field(default_factory=list)


def _read(text: str, source: str) -> _Document:
    document = _Document()
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is not None:
            _collect_lines(root, "", document, set())
            document.value = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None, error
        message = f"not valid YAML, column {mark.column + 1}: {error.problem or error.context}"
        raise _unreadable(source, message, line=mark.line + 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _unreadable(source, f"not valid YAML: {error.reason}: {error.character!r}", line=line) from None
    except RecursionError:
        raise _unreadable(source, "nested too deeply") from None
    except ValueError as error:
        # A value that looks like a date but is none, `2024-13-01`.
        raise _unreadable(source, f"not valid YAML: {error}; put it in quotes if it is text") from None
    return document


def _collect_lines(node: yaml.Node, path: str, document: _Document, seen: set[int]) -> None:
    """Collect lines and duplicate keys under `node`; visits each node once, as an alias may name its own parent."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        # JSON escapes a character beyond U+FFFF as a surrogate pair, which YAML leaves as two halves.
        node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            document.lines[f"{path}[{index}]"] = item.start_mark.line + 1
            _collect_lines(item, f"{path}[{index}]", document, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, item in node.value:
        if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
            continue
        key.tag = "tag:yaml.org,2002:str"
        line, child = key.start_mark.line + 1, f"{path}.{key.value}" if path else key.value
        if key.value in first:
            message = f"given twice, first in line {first[key.value]}; keep one"
            document.duplicates.append(Problem(child, message, line=line))
        first.setdefault(key.value, line)
        document.lines[child] = line
        _collect_lines(item, child, document, seen)
