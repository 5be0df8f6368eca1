"""Composes the values of a spec from its file, the files that it includes, and overrides; each value keeps its place.

    # my.yaml
    include: [base.yaml, ../team/h200.yaml]     # relative to my.yaml
    optimizer: {lr: 1.0e-5}

What comes later wins: the included files in their order, then the file's own fields, then overrides. Sections are
merged field by field; any other value, also a list, is replaced. A section whose `type` decides its fields (`adapter`,
`objective`, `parallel`) is replaced as a whole by one of another type: no field of the old type is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata_platform.errors import Place, Problem, SpecError
from strata_platform.spec.describe import format_value
from strata_platform.spec.reading.environment import replace_variables
from strata_platform.spec.reading.overrides import parse_overrides
from strata_platform.spec.run_spec import RunSpec
from strata_platform.spec.yaml_core import read_yaml

INCLUDE = "include"
# A spec's sections are less deep. An alias of YAML that names its own parent is deeper than anything.
_DEEPEST = 3

ReadFile = Callable[[Path], str]


@dataclass
class Composed:
    """The values of a spec, where each was written, and what is wrong with how they were written."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    """Fields whose value is not known, because a variable in it could not be replaced."""

    def add(self, later: Composed) -> None:
        """Merge `later` into this; it wins."""
        self._merge(self.values, later.values, "", later.places)
        self.problems += later.problems

    def set(self, path: str, value: Any, place: Place) -> None:
        """Set one field."""
        *sections, name = path.split(".")
        values, above = self.values, ""
        for section in sections:
            above = f"{above}.{section}".removeprefix(".")
            inner = values.get(section)
            if inner is not None and not isinstance(inner, dict):
                message = f"{above} has the value {format_value(inner)}, and no fields"
                self.problems.append(Problem(path, message, origin=place.origin))
                return
            # A copy: by an alias of YAML, another section may be the same object.
            values[section] = dict(inner or {})
            values = values[section]
            self.places.setdefault(above, place)
        if name == "type" and above in _DISCRIMINATED and values.get("type", value) != value:
            values.clear()
        values[name] = value
        self._replace_places(path, {path: place})

    def _merge(self, values: dict[str, Any], later: dict[str, Any], path: str, places: dict[str, Place]) -> None:
        for name, value in later.items():
            inner = f"{path}.{name}".removeprefix(".")
            old = values.get(name)
            if not (isinstance(old, dict) and isinstance(value, dict) and inner.count(".") < _DEEPEST) or (
                inner in _DISCRIMINATED and _other_type(old, value)
            ):
                values[name] = value
                self._replace_places(inner, places)
            else:
                values[name] = dict(old)
                # A value of YAML's merge key << has no place of its own.
                self.places |= {inner: places[inner]} if inner in places else {}
                self._merge(values[name], value, inner, places)

    def _replace_places(self, path: str, places: dict[str, Place]) -> None:
        for known in [known for known in self.places if _is_at(known, path)]:
            del self.places[known]
        self.places |= {known: place for known, place in places.items() if _is_at(known, path)}


def compose(
    text: str, source: str, folder: Path, overrides: Iterable[str], read_file: ReadFile, main: Path | None = None
) -> Composed:
    """The values of the spec `text`, with what it includes, overrides, and environment variables replaced.

    Args:
        text: YAML or JSON.
        source: the text's name in errors.
        folder: what its `include` is relative to.
        overrides: as on a command line, `optimizer.lr=1e-5`.
        read_file: reads an included file; raises SpecError.
        main: the file of `text`, if it is one.

    Raises SpecError if a text is no mapping of fields to values, or not valid YAML.
    """
    composed = _read(text, source, folder, read_file, (main.resolve(),) if main else (), origin=None)
    parsed, problems = parse_overrides(overrides)
    composed.problems += problems
    for override in parsed:
        composed.set(*override)
    composed.values, problems = replace_variables(composed.values)
    composed.problems += [_placed(problem, composed.places) for problem in problems]
    composed.unknown = {problem.path for problem in problems}
    return composed


def _read(
    text: str, source: str, folder: Path, read_file: ReadFile, above: tuple[Path, ...], origin: str | None
) -> Composed:
    """The values of a text and of the files that it includes. `above`: the files that lead to it, itself included."""
    document = read_yaml(text, source)
    if document.value is None and origin is None:
        raise _no_spec(source, "empty; {} is the spec with all its defaults")
    values = {} if document.value is None else document.value
    if not isinstance(values, dict):
        hint = "; there is no such file either" if source == "spec" and isinstance(document.value, str) else ""
        raise _no_spec(source, f"not a mapping of fields to values{hint}", given=format_value(text.strip()))
    own = Composed(
        dict(values),
        {path: Place(line, origin) for path, line in document.lines.items()},
        [Problem(twice.path, twice.message, line=twice.line, origin=origin) for twice in document.duplicates],
    )
    composed = Composed()
    for path, name in _included(own):
        place = own.places.get(path, Place())
        try:
            file, included = _open(name, folder, read_file, above)
            composed.add(_read(included, str(file), file.parent, read_file, (*above, file.resolve()), str(file)))
        except SpecError as error:
            composed.problems += [
                problem if problem.origin else _at(problem, path, place, error.source) for problem in error.problems
            ]
    composed.add(own)
    return composed


def _included(own: Composed) -> list[tuple[str, str]]:
    """Take `include` out of the values: the path of each entry, and the name of the file."""
    if INCLUDE not in own.values:
        return []
    value, problems = replace_variables({INCLUDE: own.values.pop(INCLUDE)})
    own.problems += [_placed(problem, own.places) for problem in problems]
    given = value[INCLUDE]
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name for name in names):
        line, origin = own.places[INCLUDE]
        allowed = "the path of a file, or a list of such paths"
        own.problems.append(
            Problem(INCLUDE, "not a valid value", format_value(given), allowed, line=line, origin=origin)
        )
        return []
    # A file with a wrong variable in its name is not looked for.
    if problems:
        return []
    return [(f"{INCLUDE}[{index}]" if isinstance(given, list) else INCLUDE, name) for index, name in enumerate(names)]


def _open(name: str, folder: Path, read_file: ReadFile, above: tuple[Path, ...]) -> tuple[Path, str]:
    if "://" in name:
        raise _no_spec("", "a URL; only files are included: fetch it, and name the file", given=format_value(name))
    if name.startswith("~"):
        raise _no_spec("", "begins with ~, another folder for every user; write the path out", given=format_value(name))
    file = folder / name
    if file.resolve() in above:
        loop = " -> ".join(path.name for path in (*above[above.index(file.resolve()) :], file))
        raise _no_spec("", f"the files include each other: {loop}; remove one of these lines", given=format_value(name))
    return file, read_file(file)


def _at(problem: Problem, path: str, place: Place, source: str) -> Problem:
    """A problem that a file could not be read: at the entry that names it, or in a line of the file itself."""
    if problem.line is not None:
        return Problem(problem.path, problem.message, problem.given, line=problem.line, origin=source)
    about = f"{source}: " if source else ""
    return Problem(path, f"{about}{problem.message}", problem.given, line=place.line, origin=place.origin)


def _placed(problem: Problem, places: dict[str, Place]) -> Problem:
    return SpecError([problem]).with_places("", places).problems[0]


def _is_at(known: str, path: str) -> bool:
    return known == path or known.startswith((f"{path}.", f"{path}["))


def _other_type(old: dict[str, Any], later: dict[str, Any]) -> bool:
    return "type" in old and "type" in later and old["type"] != later["type"]


def _no_spec(source: str, message: str, given: str | None = None) -> SpecError:
    return SpecError([Problem("", message, given=given)], source)


_DISCRIMINATED = {name for name, field in RunSpec.model_fields.items() if field.discriminator is not None}
