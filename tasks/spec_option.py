"""How the command lines of both Flyte versions read a spec: as `strata` does, with `--set` to change its fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from pydantic import BaseModel

from strata_platform.spec import RunSpec, load_spec
from strata_platform.spec.reading.load import SPEC_SUFFIXES, read_values
from strata_platform.spec.reading.overrides import OPTION
from strata_platform.spec.stages import Stages, load_stages

_OVERRIDES = f"{__name__}.overrides"
_HELP = "Set a field of --{}, such as optimizer.lr=1e-5; the value is YAML. May be given several times."


def reading_files(convert: Callable[..., Any]) -> Callable[..., Any]:
    """`JsonParamType.convert` of flytekit or flyte, for files as `strata` reads them.

    The original reads YAML 1.1, where `steps: 1:30` is 90, and of a key that appears twice the last one.
    """

    @wraps(convert)
    def read(self: Any, value: Any, param: Any, ctx: Any) -> Any:
        wanted = self._python_type
        if isinstance(value, str) and wanted is RunSpec:
            return load_spec(value, ctx.meta.get(_OVERRIDES, ()) if ctx else ())
        is_file = isinstance(value, str) and value.endswith(SPEC_SUFFIXES)
        if is_file and wanted is Stages:
            return load_stages(value)
        if is_file and isinstance(wanted, type) and issubclass(wanted, BaseModel):
            return wanted.model_validate(read_values(value))
        return convert(self, value, param, ctx)

    return read


def with_override_option(params: list[Any], option: type[click.Option]) -> list[Any]:
    """A command's parameters with `--set`, an `option`, if one of them is a spec."""
    specs = [param for param in params if getattr(param.type, "_python_type", None) is RunSpec]
    # With two specs, nobody could say which one an override is for.
    if len(specs) != 1:
        return params
    # It is read before the others, and is no input of the workflow.
    added = option(
        [OPTION],
        multiple=True,
        is_eager=True,
        expose_value=False,
        metavar="FIELD=VALUE",
        help=_HELP.format(specs[0].name),
        callback=lambda ctx, param, value: ctx.meta.__setitem__(_OVERRIDES, value),
    )
    return [*params, added]
