"""Parameters of `pyflyte run`: a spec is read as `strata` reads it, and `--set` changes its fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import rich_click as click
from flytekit.clis.sdk_in_container.run import YamlFileReadingCommand
from flytekit.interaction.click_types import JsonParamType

from tasks.spec_option import reading_files, with_override_option


def read_files_as_strata_does() -> None:
    """Make `pyflyte run --spec my.yaml` read the values that `strata spec my.yaml` reads, with the same errors.

    Commands with a spec also get the option `--set`. The spec is whole when it is sent: what Flyte stores has no
    variables, includes or overrides left.
    """
    if not hasattr(JsonParamType.convert, "__wrapped__"):
        JsonParamType.convert = reading_files(JsonParamType.convert)
        YamlFileReadingCommand.__init__ = _with_overrides(YamlFileReadingCommand.__init__)


def _with_overrides(make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def init(self: YamlFileReadingCommand, name: str, params: list[click.Option], *args: Any, **kwargs: Any) -> None:
        make(self, name, with_override_option(params, click.Option), *args, **kwargs)

    return init
