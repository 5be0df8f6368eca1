"""Reads a spec from a file or text, YAML or JSON, with the line of every problem; and writes it back to text.

Values are those of YAML 1.2's core schema, so a file means the same as YAML and as JSON; see `yaml_core`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from strata_platform.errors import Place, Problem, SpecError
from strata_platform.file_io import require_regular_file
from strata_platform.spec.reading.compose import Composed, compose
from strata_platform.spec.reading.environment import escape_variables
from strata_platform.spec.run_spec import RunSpec
from strata_platform.spec.yaml_core import dump_yaml, read_yaml

SPEC_SUFFIXES = (".yaml", ".yml", ".json")
STANDARD_INPUT = "standard input"
# A spec has a few kilobytes. More is another file by mistake, or a stream that never ends.
_MAX_BYTES = 4 << 20


def load_spec(path_or_text: str | Path, overrides: Iterable[str] = ()) -> RunSpec:
    """Read a spec. The same values give the same `RunSpec`, and hash, from YAML, JSON and Python.

    A `Path` is a file. A `str` is a file if one of that name exists, or if it ends in .yaml, .yml or .json; otherwise
    it is the spec itself. `overrides` are those of `--set` on a command line. For `include` and `${NAME}`, see
    `compose` and `environment`.

    Raises SpecError with every problem and, if known, its line.

    >>> load_spec("training: {steps: 100}").training.steps
    100
    >>> load_spec("training: {steps: 100}", ["training.steps=3", "optimizer.lr=1e-5"]).training.steps
    3
    """
    return load_spec_with_places(path_or_text, overrides)[0]


def load_spec_with_places(path_or_text: str | Path, overrides: Iterable[str] = ()) -> tuple[RunSpec, Composed]:
    """As `load_spec`; also the values before defaults are filled in, with the place of each."""
    path = _as_path(path_or_text)
    if path is None:
        return _parse(str(path_or_text), "spec", overrides)
    return _parse(_read_file(path), str(path), overrides, path)


def load_spec_argument(argument: str | Path, overrides: Iterable[str] = ()) -> RunSpec:
    """The spec that a command line names: a file, or `-` for standard input. Raises SpecError."""
    return load_argument_with_places(argument, overrides)[0]


def load_argument_with_places(
    argument: str | Path, overrides: Iterable[str] = ()
) -> tuple[RunSpec, str, dict[str, Place]]:
    """As `load_spec_argument`; also the name of what was read, for errors, and the place of each field in it."""
    if str(argument) == "-":
        spec, composed = _parse(_read_standard_input(), STANDARD_INPUT, overrides)
        return spec, STANDARD_INPUT, composed.places
    spec, composed = load_spec_with_places(Path(argument), overrides)
    return spec, str(argument), composed.places


def read_values(path: str | Path) -> Any:
    """The values in a YAML or JSON file, which need not be a spec.

    Raises SpecError if it cannot be read, is neither YAML nor JSON, or has a key twice.
    """
    return parse_values(_read_file(Path(path)), str(path))


def parse_values(text: str, source: str) -> Any:
    """As `read_values`, of a text; `source` names it in errors."""
    document = read_yaml(text, source)
    if document.duplicates:
        raise SpecError(document.duplicates, source)
    return document.value


def dump_spec(spec: RunSpec, format: Literal["yaml", "json"] = "yaml") -> str:
    """The spec as text, defaults filled in; `load_spec` reads it back to an equal spec, in any environment."""
    values = escape_variables(spec.model_dump(mode="json"))
    return json.dumps(values, indent=2) + "\n" if format == "json" else dump_yaml(values)


def _as_path(path_or_text: str | Path) -> Path | None:
    if isinstance(path_or_text, Path):
        return path_or_text
    if "\n" in path_or_text:
        return None
    # False where a path cannot be asked for, such as a long text.
    exists = os.path.exists(path_or_text) and not os.path.isdir(path_or_text)
    return Path(path_or_text) if exists or path_or_text.endswith(SPEC_SUFFIXES) else None


def _read_standard_input() -> str:
    return _decoded(sys.stdin.buffer.read(_MAX_BYTES + 1), STANDARD_INPUT)


def _read_file(path: Path) -> str:
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(str(path), f"cannot be read: {error.strerror or error}") from None
    # A path with a null byte.
    except ValueError as error:
        raise _unreadable(str(path), f"cannot be read: {error}") from None
    text = _decoded(content, str(path))
    # JSON may be indented with tabs, YAML may not; inside a JSON string a tab is always escaped.
    return text.replace("\t", " ") if path.suffix == ".json" else text


def _decoded(content: bytes, source: str) -> str:
    if len(content) > _MAX_BYTES:
        raise _unreadable(source, f"longer than {_MAX_BYTES >> 20} MiB, so it is not a spec; give another file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it as UTF-8"
        raise _unreadable(source, message) from None


def _parse(text: str, source: str, overrides: Iterable[str], path: Path | None = None) -> tuple[RunSpec, Composed]:
    composed = compose(text, source, path.parent if path else Path(), overrides, _read_file, main=path)
    problems = composed.problems
    try:
        spec = RunSpec.model_validate(composed.values)
    except SpecError as error:
        problems = [*problems, *(problem for problem in error.problems if problem.path not in composed.unknown)]
    if problems:
        raise SpecError(problems).with_places(source, composed.places)
    return spec, composed


def _unreadable(source: str, message: str) -> SpecError:
    return SpecError([Problem("", message)], source)
