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

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec, dump_spec, load_spec
from strata_platform.spec.schema import json_schema

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Entry point of `strata`."""
    app()


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
        typer.echo(dump_spec(_read(file), format), nl=False)


def _read(file: Path | None) -> RunSpec:
    if file is None:
        return RunSpec()
    try:
        return load_spec(sys.stdin.read() + "\n" if str(file) == "-" else file)
    except SpecError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.exit_code) from None
