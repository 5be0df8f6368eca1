"""Parameters of `pyflyte run` that are files: read as `strata` reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from flytekit.interaction.click_types import JsonParamType
from pydantic import BaseModel

from strata_platform.spec import RunSpec
from strata_platform.spec.load import SPEC_SUFFIXES, load_spec_with_lines, read_values


def read_files_as_strata_does() -> None:
    """Make `pyflyte run --spec my.yaml` read the values that `strata spec my.yaml` reads, with the same errors.

    flytekit reads YAML 1.1, where `steps: 1:30` is 90, and of a key that appears twice the last one.
    """
    if not hasattr(JsonParamType._parse, "__wrapped__"):
        JsonParamType._parse = _reading_files(JsonParamType._parse)


def _reading_files(parse: Callable[[JsonParamType, Any, Any], Any]) -> Callable[[JsonParamType, Any, Any], Any]:
    @wraps(parse)
    def read(self: JsonParamType, value: Any, param: Any) -> Any:
        wanted = self._python_type
        is_file = isinstance(value, str) and value.endswith(SPEC_SUFFIXES)
        if not (is_file and isinstance(wanted, type) and issubclass(wanted, BaseModel)):
            return parse(self, value, param)
        if wanted is RunSpec:
            # flytekit validates the values again, but no longer knows their lines.
            return load_spec_with_lines(Path(value))[1].value
        return read_values(value)

    return read
