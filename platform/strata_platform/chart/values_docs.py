"""Write the chart's values.yaml, schema and README from its models.

Run as `python -m strata_platform.chart.values_docs [FOLDER]`.

FOLDER is the chart, by default charts/strata. The program also writes tasks.json: the limits of Strata's tasks, which
the templates read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from strata_platform.chart.tenants import Tenant, TenantSettings
from strata_platform.chart.values import ChartValues
from strata_platform.kubernetes_answers import TASK_LIMITS

_COMMAND = "python -m strata_platform.chart.values_docs"
_WIDTH = 120
_INTRODUCTION = """\
# strata

<!-- Written by `python -m strata_platform.chart.values_docs`; change the models instead. -->

Prepares a cluster with Flyte, Kueue and the training operator for training runs. Each tenant gets a namespace with a
service account, roles, quota, network policies, a pod template and queues. The cluster gets Kueue's flavors, cluster
queues and priority classes.

```console
$ helm install strata charts/strata --namespace strata-system --create-namespace --values my-values.yaml
$ helm test strata --namespace strata-system
```

[docs/cluster.md](../../docs/cluster.md) describes an installation step by step; [ci](ci) has complete examples of
values. Helm rejects unknown keys and values of the wrong type, and shows their paths.

With the defaults below, the chart creates no tenant and no queue.
"""


def schema() -> dict[str, Any]:
    """The JSON Schema of the values; Helm checks it before it renders anything."""
    described = ChartValues.model_json_schema()
    for part in _parts(described):
        # pydantic describes the keys that a mapping takes, but lets others pass.
        if "patternProperties" in part:
            part["additionalProperties"] = False
        if isinstance(part.get("title"), str):
            del part["title"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in `value`, the outermost first."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _parts(item)


def values_yaml() -> str:
    """The default values, each with its description above it."""
    head = f"# Written by `{_COMMAND}`; change the models in platform/strata_platform/chart instead.\n"
    return head + "\n".join(_yaml(ChartValues, ChartValues(), 0)) + "\n"


def _yaml(section: type[BaseModel], values: BaseModel, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, field in section.model_fields.items():
        value = getattr(values, name)
        yield from (f"{indent}# {line}" for line in _wrapped(f"-- {field.description}", _WIDTH - len(indent) - 2))
        if isinstance(value, BaseModel):
            yield f"{indent}{field.alias}:"
            yield from _yaml(type(value), value, depth + 1)
        else:
            text = yaml.safe_dump({field.alias: _plain(value)}, sort_keys=False, width=_WIDTH, default_flow_style=False)
            yield from (f"{indent}{line}" for line in text.rstrip().splitlines())


def _plain(value: Any) -> Any:
    """`value` as plain YAML data, without fields of list entries that have their defaults."""
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(by_alias=True, exclude_defaults=True))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _wrapped(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".lstrip()
    yield line


def readme() -> str:
    """The chart's README: usage, and a table of every value."""
    blocks = [_INTRODUCTION, "## Values", *_table(_rows(ChartValues, ChartValues(), ""))]
    blocks += ["", "## Entries of lists", ""]
    for section in _entries(ChartValues):
        blocks += [f"### {section.__name__}", "", str(section.__doc__), *_table(_rows(section, None, "")), ""]
    return "\n".join(blocks).rstrip() + "\n"


def _table(rows: Iterator[tuple[str, str, str, str]]) -> Iterator[str]:
    yield from ("", "| Key | Takes | Default | |", "|---|---|---|---|")
    yield from (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _rows(section: type[BaseModel], values: BaseModel | None, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """A row for each key. A tenant's settings are described once, under `tenantDefaults`."""
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias}"
        value = getattr(values, name) if values is not None else field.default
        if name in TenantSettings.model_fields and section is Tenant:
            yield f"`{key}`", _takes(properties[str(field.alias)], field), "`tenantDefaults`", str(field.description)
        elif isinstance(value, BaseModel):
            yield from _rows(type(value), value, f"{key}.")
        else:
            default = "required" if field.is_required() else f"`{json.dumps(_plain(value))}`"
            yield f"`{key}`", _takes(properties[str(field.alias)], field), default, str(field.description)


def _takes(described: dict[str, Any], field: FieldInfo) -> str:
    """Describe the type of a value in a few words."""
    if entry := _section_in(field.annotation):
        return (
            f"list of [{entry.__name__}](#{entry.__name__.lower()})" if described.get("type") == "array" else "section"
        )
    if "enum" in described:
        return ", ".join(f"`{option}`" if option else "empty" for option in described["enum"])
    return {"array": "list", "object": "mapping"}.get(_kind(described), _kind(described))


def _kind(described: dict[str, Any]) -> str:
    kind = described.get("type", "section")
    return "quantity" if isinstance(kind, list) else str(kind)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class of a value, or of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _entries(section: type[BaseModel]) -> list[type[BaseModel]]:
    """Section classes of list entries, in order of appearance."""
    found: dict[type[BaseModel], None] = {}
    for field in section.model_fields.values():
        inner = _section_in(field.annotation)
        if inner is not None:
            found |= {} if inner is field.annotation else {inner: None}
            found |= dict.fromkeys(_entries(inner))
    return list(found)


def files() -> dict[str, str]:
    """The text of each generated file, by name."""
    return {
        "values.yaml": values_yaml(),
        "values.schema.json": json.dumps(schema(), indent=2) + "\n",
        "README.md": readme(),
        "tasks.json": json.dumps(dict(TASK_LIMITS)) + "\n",
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "charts/strata")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")
