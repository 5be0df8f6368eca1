"""Environment variables in the values of a spec: `${NAME}`, or `${NAME:-text}` with a text for an unset variable.

They stand for a part of a text, so that one file serves several machines: `output: ${SCRATCH}/runs`. They are replaced
when the spec is read, which is where a run is submitted: the stored spec has the values, and a pod or a second attempt
with another environment reads the same. `$${` is `${` itself.

Every copy of a spec would contain the value of a secret. Variables whose names look like one are therefore refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from strata_platform.errors import Problem

_VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}")
_CONTENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
# A part of a name between underscores, as in HF_TOKEN, or the end of one, as in PGPASSWORD. TOKENIZER is none.
_SECRET = re.compile(
    r"(^|_)(AUTH|CREDENTIALS?|KEYS?|PASS|PAT|PWD)(_|$)|(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE)(_|$)"
)


def escape_variables(value: Any) -> Any:
    """`value`, of any depth, with its texts so that `replace_variables` gives them back."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, dict):
        return {key: escape_variables(item) for key, item in value.items()}
    return [escape_variables(item) for item in value] if isinstance(value, list | tuple) else value


def replace_variables(value: Any, environment: Mapping[str, str] | None = None) -> tuple[Any, list[Problem]]:
    """`value`, of any depth, with the variables in its texts replaced; and a problem for each that cannot be.

    >>> replace_variables({"output": "${HOME}/out"}, environment={"HOME": "/home/me"})
    ({'output': '/home/me/out'}, [])
    """
    environment = os.environ if environment is None else environment
    problems: list[Problem] = []
    # By identity: an alias of YAML may name its own parent, or one list a thousand times.
    done: dict[int, Any] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, str):
            return _replace_in_text(value, path, environment, problems) if "${" in value else value
        if id(value) in done or not isinstance(value, dict | list):
            return done.get(id(value), value)
        if isinstance(value, list):
            items: list[Any] = []
            done[id(value)] = items
            items.extend(visit(item, f"{path}[{index}]") for index, item in enumerate(value))
            return items
        fields: dict[str, Any] = {}
        done[id(value)] = fields
        fields.update((key, visit(item, f"{path}.{key}" if path else str(key))) for key, item in value.items())
        return fields

    return visit(value, ""), problems


def _replace_in_text(text: str, path: str, environment: Mapping[str, str], problems: list[Problem]) -> str:
    def replaced(found: re.Match[str]) -> str:
        if found.group() == "$${":
            return "${"
        value, message = _value(found[1], environment)
        if message:
            problems.append(Problem(path, message))
        return value

    return _VARIABLE.sub(replaced, text)


def _value(content: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """The value of what is between the braces, and the problem with it; one of them is empty."""
    parts = _CONTENT.fullmatch(content)
    if parts is None:
        return "", f"${{{content}}} names no environment variable; write ${{NAME}}, or $${{ for the text ${{"
    name, default = parts.groups()
    if _SECRET.search(name.upper()):
        return "", (
            f"${{{name}}} is a secret by its name, and every copy of the spec would contain its value; leave it in the "
            "environment, where the run reads it"
        )
    value = environment.get(name) or default
    if value is None:
        state = "empty" if name in environment else "not set"
        return "", (
            f"the environment variable {name} is {state}; set it, or write ${{{name}:-text}} for a default, or $${{ "
            "for the text ${"
        )
    return value, ""
