"""Parameters of `pyflyte run`: a spec is read as `strata` reads it, and `--set` changes its fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import rich_click as click
from flytekit.clis.sdk_in_container.run import YamlFileReadingCommand
from flytekit.interaction.click_types import JsonParamType
from pydantic import BaseModel

from strata_platform.spec import RunSpec, load_spec
from strata_platform.spec.load import SPEC_SUFFIXES, read_values
from strata_platform.spec.overrides import OPTION
from strata_platform.spec.stages import Stages, load_stages

_OVERRIDES = f"{__name__}.overrides"
_HELP = "Set a field of --{}, such as optimizer.lr=1e-5; the value is YAML. May be given several times."


def read_files_as_strata_does() -> None:
    """Make `pyflyte run --spec my.yaml` read the values that `strata spec my.yaml` reads, with the same errors.

    flytekit reads YAML 1.1, where `steps: 1:30` is 90, and of a key that appears twice the last one. Commands with a
    spec also get the option `--set`. The spec is whole when it is sent: what Flyte stores has no variables, includes
    or overrides left.
    """
    if not hasattr(JsonParamType.convert, "__wrapped__"):
        JsonParamType.convert = _reading_files(JsonParamType.convert)
        YamlFileReadingCommand.__init__ = _with_overrides(YamlFileReadingCommand.__init__)


def _reading_files(convert: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(convert)
    def read(self: JsonParamType, value: Any, param: Any, ctx: Any) -> Any:
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


def _with_overrides(make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def init(self: YamlFileReadingCommand, name: str, params: list[click.Option], *args: Any, **kwargs: Any) -> None:
        specs = [param for param in params if getattr(param.type, "_python_type", None) is RunSpec]
        # With two specs, nobody could say which one an override is for.
        if len(specs) == 1:
            params = [*params, _option(str(specs[0].name))]
        make(self, name, params, *args, **kwargs)

    return init


def _option(spec: str) -> click.Option:
    """The option `--set`. It is read before the others, and is no input of the workflow."""
    return click.Option(
        [OPTION],
        multiple=True,
        is_eager=True,
        expose_value=False,
        metavar="FIELD=VALUE",
        help=_HELP.format(spec),
        callback=lambda ctx, param, value: ctx.meta.__setitem__(_OVERRIDES, value),
    )
