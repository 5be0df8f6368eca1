"""Collects all problems of a spec at once and describes them to its author.

pydantic stops at the first failing stage: it checks no contradictions while a field is wrong, and nothing inside a
section of an unknown `type`. `check` therefore notes the problems that pydantic reports, removes the wrong values, and
validates again until the rest is valid. Then it checks contradictions among the fields that were valid as written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from strata_platform.errors import Problem, SpecError
from strata_platform.spec.describe import (
    closest_match,
    describe,
    describe_field,
    format_value,
    item_annotation,
    join_or,
    listed_section,
    literals,
    sections,
)
from strata_platform.spec.other_names import NAMES_IN_SOURCES, NO_FIELDS, OTHER_NAMES, OTHER_VALUES, PER_EPOCH

Spec = TypeVar("Spec", bound=BaseModel)


@dataclass(frozen=True)
class Contradiction:
    """Fields that are valid alone but not together. `fields` are paths; the first is where to look."""

    broken: bool
    fields: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class _Location:
    """Where an error is.

    Attributes:
        keys: lead to the field in the raw mapping; `[0]` is an item of a list.
        path: the field as a person writes it.
        owner: the section that has, or lacks, the field.
        alternatives: the sections that `type` could have picked, by their `type`.
        wanted: describes what the field takes; empty if there is no such field.
        options: the values of the field, if they are a list.
    """

    keys: tuple[str, ...]
    path: str
    owner: type[BaseModel]
    alternatives: Mapping[str, type[BaseModel]]
    field: FieldInfo | None
    wanted: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class _Finding:
    """A problem, and its repair for further checks: the value at `keys` is removed, or replaced by `instead`."""

    problem: Problem
    keys: tuple[str, ...]
    instead: str | None = None


def check(
    model: type[Spec],
    value: Any,
    validate: Callable[[Any], Spec],
    contradictions: Callable[[Spec], Iterable[Contradiction]],
) -> Spec:
    """`validate(value)`; raises SpecError with every problem."""
    problems: list[Problem] = []
    repaired: list[str] = []
    while True:
        try:
            spec = validate(value)
            break
        except ValidationError as error:
            if not isinstance(value, Mapping):
                raise
            findings = _findings(model, error)
            problems += [finding.problem for finding in findings]
            # What is inside of a section before the section itself.
            for keys, instead in sorted({f.keys: f.instead for f in findings}.items(), key=lambda item: -len(item[0])):
                value = _repair(value, keys, instead)
                repaired.append(".".join(keys))
    problems += [
        Problem(found.fields[0], found.message)
        for found in contradictions(spec)
        if found.broken and not any(_overlap(field, path) for field in found.fields for path in repaired)
    ]
    if problems:
        raise SpecError(problems, model.__name__)
    return spec


def spec_error(model: type[BaseModel], error: ValidationError) -> SpecError:
    """The SpecError for pydantic's errors about a value of `model`."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        if isinstance(cause := item.get("ctx", {}).get("error"), SpecError):
            problems += cause.problems
    return SpecError(problems or [finding.problem for finding in _findings(model, error)], model.__name__)


def _repair(value: Any, keys: tuple[str, ...], instead: str | None) -> Any:
    head, *rest = keys
    if isinstance(value, list | tuple):
        return [_repair(item, tuple(rest), instead) if f"[{at}]" == head else item for at, item in enumerate(value)]
    if rest:
        return {**value, head: _repair(value[head], tuple(rest), instead)}
    kept = {key: item for key, item in value.items() if str(key) != head}
    assert len(kept) < len(value), f"{head} is not in {list(value)}: the next pass would find the same error"
    return kept if instead is None else {**kept, head: instead}


def _overlap(a: str, b: str) -> bool:
    a, b = (f"{path.replace('[', '.').replace(']', '')}." for path in (a, b))
    return a.startswith(b) or b.startswith(a)


def _findings(model: type[BaseModel], error: ValidationError) -> list[_Finding]:
    """One finding per path; pydantic reports each branch of a plain union (`text or a list of text`)."""
    found: dict[str, _Finding] = {}
    for item in error.errors(include_url=False):
        location = _locate(model, item)
        finding = _FINDERS.get(item["type"], _wrong_value)(model, item, location)
        if found_in := _without_space(item, location):
            text, kind = found_in
            message = f"{text!r} is one {kind}; YAML needs a space after a colon: {{{text.replace(':', ': ', 1)}}}"
            finding = replace(finding, problem=Problem(location.path, message, allowed=location.wanted or None))
        # An item cannot be taken out of a list: those after it would move up.
        keys = finding.keys[:-1] if finding.keys and finding.keys[-1].startswith("[") else finding.keys
        found.setdefault(finding.problem.path, replace(finding, keys=keys))
    return list(found.values())


def _without_space(item: ErrorDetails, location: _Location) -> tuple[str, str] | None:
    """What YAML reads in `{a:b}`, a key whose value is null, and in a line `a:b`, a value; None without either."""
    given = item["input"]
    if isinstance(given, str) and item["type"] in ("model_type", "model_attributes_type"):
        name, colon, value = given.partition(":")
        owners = sections(location.field).values() if location.field else ()
        has_field = any(name in section.model_fields for section in owners)
        return (given, "value") if colon and value and has_field else None
    if isinstance(given, Mapping) and item["type"] == "union_tag_not_found":
        keys = [key for key, value in given.items() if value is None and str(key).startswith("type:")]
    else:
        keys = [key for key in item["loc"] if isinstance(key, str) and given in (None, key)]
    return next(((key, "key") for key in keys if re.fullmatch(r"[A-Za-z_]\w*:\S+", key)), None)


def _locate(model: type[BaseModel], item: ErrorDetails) -> _Location:
    """Follow an error's location through the sections, without the tags that pydantic inserts for unions."""
    owner, section, alternatives = model, model, dict[str, type[BaseModel]]()
    keys: tuple[str, ...] = ()
    field, wanted, options, path = None, describe(model), tuple[str, ...](), ""
    rest = iter(item["loc"])
    for key in rest:
        owner, keys = section, (*keys, str(key))
        path = f"{path}.{key}" if path else str(key)
        field = owner.model_fields.get(str(key))
        if field is None:
            wanted = ""
            break
        wanted, options = describe_field(field), literals(field.annotation)
        choices, item_section = sections(field), listed_section(field)
        if item_section is not None:
            position = next(rest, None)
            if not isinstance(position, int):
                break
            section, alternatives = item_section, {}
            keys, path, wanted = (*keys, f"[{position}]"), f"{path}[{position}]", describe(section)
            continue
        if not choices:
            position = next(rest, None)
            if isinstance(position, int) and item["type"] != "missing":
                item_type = item_annotation(field.annotation, position)
                path, wanted, options = f"{path}[{position}]", describe(item_type), literals(item_type)
            break
        tag = "" if field.discriminator is None else next(rest, None)
        if tag not in choices:
            break
        section, alternatives = choices[str(tag)], choices
    return _Location(keys, path, owner, alternatives, field, wanted, options)


def _wrong_value(model: type[BaseModel], item: ErrorDetails, location: _Location) -> _Finding:
    given, message = item["input"], "not a valid value"
    if item["type"] == "string_type" and not isinstance(given, list | tuple | dict | None):
        message = "not text, put it in quotes"
    suggestion = _other_value(location.keys, given) or closest_match(given, location.options)
    if location.path in PER_EPOCH and isinstance(given, float) and 0 < given < 1:
        suggestion = f"{PER_EPOCH[location.path]}: {round(1 / given)}"
        message = f"{message}: {given:g} of an epoch is {_times(given)} per epoch, {_share(given)}"
    return _Finding(Problem(location.path, message, format_value(given), location.wanted, suggestion), location.keys)


def _share(given: float) -> str:
    """What to give per epoch for a share of all steps."""
    return f"{given:g} of all steps is {_times(given)} / training.epochs per epoch"


def _times(share: float) -> str:
    """How often a share is in a whole: `per_epoch` is a whole number."""
    times = round(1 / share)
    return f"{times}" if abs(times * share - 1) < 1e-2 else f"about {times}"


def _other_value(keys: tuple[str, ...], given: Any) -> str | None:
    """What others call `given` in the field that `keys` lead to. Sources have the fields of `data`."""
    if not isinstance(given, str | int):
        return None
    path = f"{keys[0]}.{keys[-1]}"
    if given == "epoch" and path in PER_EPOCH:
        return f"{PER_EPOCH[path]}: 1"
    return OTHER_VALUES.get(path, {}).get(str(given).lower().removeprefix("torch."))


def _unknown_field(model: type[BaseModel], item: ErrorDetails, location: _Location) -> _Finding:
    name, fields = location.keys[-1], location.owner.model_fields
    message, allowed = "no such field", None
    having = [repr(tag) for tag, section in location.alternatives.items() if name in section.model_fields]
    suggestion = _within(location)
    if suggestion is None and having:
        message, allowed = f"a field of type {join_or(having)} alone", ", ".join(fields)
    elif suggestion is None and name in model.model_fields and name != "name":
        message = f"no such field here; {name!r} stands at the top of the spec"
    elif suggestion is None and (instead := _no_field(location, item["input"])) is not None:
        message = f"{message}; {instead}"
    elif (suggestion := suggestion or _other_name(location, item["input"])) in PER_EPOCH.values() and (
        OTHER_NAMES.get(name) in PER_EPOCH
    ):
        message = f"{message}; {_share(item['input'])}"
    elif suggestion is None:
        closest, elsewhere = closest_match(name, fields), _elsewhere(model, name)
        # `alpha` in an adapter is `lora_alpha`, but `packing` at the top is not `tracking`.
        is_elsewhere = elsewhere is not None and (closest is None or len(location.keys) == 1)
        suggestion, allowed = (elsewhere, None) if is_elsewhere else (closest, ", ".join(fields))
    return _Finding(Problem(location.path, message, allowed=allowed, suggestion=suggestion), location.keys)


def _no_field(location: _Location, given: Any) -> str | None:
    """What to do instead of a setting that has no field, be it for this value alone."""
    if location.keys[-1] == "quantization_bit" and str(given) == "8":
        return NO_FIELDS["load_in_8bit"]
    return _there_or_anywhere(NO_FIELDS, location)


def _there_or_anywhere(names: Mapping[str, str], location: _Location) -> str | None:
    """The value of the setting in its section, as `section.name`, or of one with that name in any."""
    *above, name = location.keys
    return names.get(f"{'.'.join(above)}.{name}", names.get(name))


def _within(location: _Location) -> str | None:
    """The path of a field of that name in a section of the owner."""
    *above, name = location.keys
    for key, field in location.owner.model_fields.items() if above else ():
        if any(name in section.model_fields for section in sections(field).values()):
            return ".".join((*above, key, name))
    return None


def _other_name(location: _Location, given: Any) -> str | None:
    """The path of the field that others call so with such a value, unless the owner is a variant of its section without
    it.
    """
    *above, name = location.keys
    if above[:1] == ["data"] and name in NAMES_IN_SOURCES:
        return NAMES_IN_SOURCES[name]
    meant = _there_or_anywhere(OTHER_NAMES, location)
    if meant is None:
        return None
    section, *field = meant.split(".")
    if isinstance(given, float) and 0 < given < 1:
        meant = PER_EPOCH.get(meant, meant)
    elif given == "epoch" and meant in PER_EPOCH:
        meant = f"{PER_EPOCH[meant]}: 1"
    return meant if [section] != above or field[0] in location.owner.model_fields else None


def _elsewhere(model: type[BaseModel], name: str) -> str | None:
    """The path of a field called `name` in another section; not of names that many sections have."""
    for key, field in model.model_fields.items() if name not in ("name", "type") else ():
        for section in sections(field).values():
            if name in section.model_fields:
                return f"{key}.{name}"
    return None


def _missing(model: type[BaseModel], item: ErrorDetails, location: _Location) -> _Finding:
    if isinstance(item["loc"][-1], int):
        return _wrong_value(model, item, location)
    return _Finding(Problem(location.path, "required", allowed=location.wanted), location.keys[:-1])


_TYPED = ("optimizer", "schedule")


def _not_a_section(model: type[BaseModel], item: ErrorDetails, location: _Location) -> _Finding:
    given = item["input"]
    message = "empty; leave it out for its defaults" if given is None else "not a section"
    # As in `adapter: lora` or `model: Qwen/Qwen3-8B`.
    inner = {"model": "name", "data": "source", "runtime": "framework"}.get(location.path)
    if (location.field is not None and location.field.discriminator is not None) or location.path in _TYPED:
        inner = "type"
    suggestion = f"{location.path}.{inner}" if inner and isinstance(given, str) else None
    return _Finding(Problem(location.path, message, format_value(given), location.wanted, suggestion), location.keys)


def _wrong_type(model: type[BaseModel], item: ErrorDetails, location: _Location) -> _Finding:
    """The `type` that selects the section is unknown or missing."""
    assert location.field is not None
    allowed, path = join_or(map(repr, sections(location.field))), f"{location.path}.type"
    if item["type"] == "union_tag_not_found":
        having = _types_with(item["input"], sections(location.field))
        message = f"required; {having}" if having else "required"
        return _Finding(Problem(path, message, allowed=allowed), location.keys)
    if not isinstance(item["input"], Mapping):
        return _not_a_section(model, item, location)
    given = item["input"]["type"]
    suggestion = _other_value((*location.keys, "type"), given) or closest_match(given, sections(location.field))
    problem = Problem(path, "not a valid value", format_value(given), allowed, suggestion)
    # With the suggested type, the section's other fields are checked, too.
    instead = suggestion.split()[0] if suggestion else None
    return _Finding(problem, (*location.keys, "type") if suggestion else location.keys, instead)


def _types_with(given: Mapping[str, Any], choices: Mapping[str, type[BaseModel]]) -> str | None:
    """`beta is a field of 'dpo' or 'kto'`: the types that have the given fields, as far as not all types have them."""
    fields = {name: {tag for tag, section in choices.items() if name in section.model_fields} for name in given}
    told = [name for name, tags in fields.items() if 0 < len(tags) < len(choices)]
    having = [repr(tag) for tag in choices if all(tag in fields[name] for name in told)]
    if not told or not having:
        return None
    *most, last = told
    names = f"{', '.join(most)} and {last} are fields" if most else f"{last} is a field"
    return f"{names} of {join_or(having)}"


def _validator_message(model: type[BaseModel], item: ErrorDetails, location: _Location) -> _Finding:
    """One of our validators raised ValueError."""
    given, suggestion = item["input"], _other_value(location.keys, item["input"])
    message = "not a valid value" if suggestion else str(item["ctx"]["error"])
    return _Finding(Problem(location.path, message, format_value(given), location.wanted, suggestion), location.keys)


def _not_json(model: type[BaseModel], item: ErrorDetails, location: _Location) -> _Finding:
    return _Finding(Problem("", f"not JSON: {item['ctx']['error']}"), ())


_FINDERS = {
    "extra_forbidden": _unknown_field,
    "invalid_key": _unknown_field,
    "missing": _missing,
    "union_tag_invalid": _wrong_type,
    "union_tag_not_found": _wrong_type,
    "model_type": _not_a_section,
    "model_attributes_type": _not_a_section,
    "value_error": _validator_message,
    "json_invalid": _not_json,
}
