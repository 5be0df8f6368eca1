"""The command line: `strata`.

Results go to stdout, problems to stderr. Exit codes: 0 done, 2 the input is wrong.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec, load_spec
from strata_platform.spec.schema import json_schema

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Entry point of `strata`."""
    try:
        app()
    except SpecError as error:
        typer.echo(error, err=True)
        sys.exit(error.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"strata {version('strata-platform')}")
        raise typer.Exit


@app.callback()
def _strata(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Describe and check training runs."""


@app.command()
def spec(
    file: Annotated[
        Path | None, typer.Argument(help="YAML or JSON file, - for standard input; by default the spec with no fields.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a spec instead.")] = False,
    format: Annotated[Literal["yaml", "json"], typer.Option(help="How the spec is printed.")] = "yaml",
) -> None:
    """Check a spec and print it whole, with its defaults filled in."""
    if schema:
        if file is not None:
            raise typer.BadParameter("--schema describes every spec and reads no FILE; leave one of them out")
        typer.echo(json.dumps(json_schema(), indent=2))
    else:
        typer.echo(dump(_read(file), format), nl=False)


def _read(file: Path | None) -> RunSpec:
    if file is None:
        return RunSpec()
    return load_spec(sys.stdin.read() + "\n" if str(file) == "-" else file)


def dump(spec: RunSpec, format: Literal["yaml", "json"]) -> str:
    """`spec` as text that `load_spec` reads back to the same spec."""
    values = spec.model_dump(mode="json")
    if format == "json":
        return json.dumps(values, indent=2) + "\n"
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
