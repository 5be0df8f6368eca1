"""Parameters of `flyte run`: a spec is read as `strata` reads it, and `--set` changes its fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import rich_click as click
from flyte.cli._params import JsonParamType
from flyte.cli._run import RunTaskCommand

from tasks.spec_option import reading_files, with_override_option


def read_files_as_strata_does() -> None:
    """Make `flyte run FILE TASK --spec my.yaml` read the values that `strata spec my.yaml` reads, with the same errors.

    Commands with a spec also get the option `--set`. The spec is whole when it is sent.
    """
    if not hasattr(JsonParamType.convert, "__wrapped__"):
        JsonParamType.convert = reading_files(JsonParamType.convert)
        RunTaskCommand.get_params = _with_overrides(RunTaskCommand.get_params)


def _with_overrides(get_params: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @wraps(get_params)
    def params(self: RunTaskCommand, ctx: Any) -> list[Any]:
        found = get_params(self, ctx)
        for param in found:
            # Flyte writes the JSON schema there, hundreds of lines of it.
            if isinstance(param.type, JsonParamType):
                param.help = "A YAML or JSON file."
                param.show_default = False
        return with_override_option(found, click.Option)

    return params
