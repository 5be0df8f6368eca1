"""The JSON Schema of a spec, for editors and for charts."""

from __future__ import annotations

from typing import Any

from strata_platform.spec.describe import sections
from strata_platform.spec.run_spec import RunSpec


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a spec file.

    Contradictions between fields are beyond it; and it wants numbers where `load_spec` also reads them from texts.
    """
    schema = RunSpec.model_json_schema()
    for field in RunSpec.model_fields.values():
        if field.discriminator is not None:
            for section in sections(field).values():
                # pydantic calls a field with a default optional, but without its type a section cannot be picked.
                schema["$defs"][section.__name__]["required"] = [field.discriminator]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
