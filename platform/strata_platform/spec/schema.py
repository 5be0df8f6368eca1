"""The JSON Schema of a spec, for editors and for charts."""

from __future__ import annotations

from typing import Any

from strata_platform.spec.describe import sections
from strata_platform.spec.reading.compose import INCLUDE
from strata_platform.spec.run_spec import RunSpec


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a spec file.

    It cannot express contradictions between fields, and requires numbers where `load_spec` also parses strings.
    """
    schema = RunSpec.model_json_schema()
    for field in RunSpec.model_fields.values():
        if field.discriminator is not None:
            for section in sections(field).values():
                # pydantic makes a field with a default optional, but a section cannot be selected without its type.
                schema["$defs"][section.__name__]["required"] = [field.discriminator]
    path = {"type": "string", "minLength": 1}
    schema["properties"][INCLUDE] = {
        "title": "Include",
        "description": "Files whose values this one builds on; later ones win, and this file's own fields over all.",
        "anyOf": [path, {"type": "array", "items": path, "minItems": 1}],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
