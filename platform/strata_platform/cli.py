"""The command line: `strata`.

Results go to stdout, problems to stderr. Exit codes: 0 success; 1 a negative answer, such as a run that does
not fit or did not succeed, or a failed check; 2 wrong input; 130 after Ctrl-C while a run continues.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strata_platform import commands
from strata_platform.client import BackendName, prices_of_cluster, project_and_domain
from strata_platform.doctor.targets import TARGETS, checks_of
from strata_platform.errors import BackendError, SpecError, StrataError
from strata_platform.estimate.gpus import GPUS, gpu_kind

# The spec's models take longer to import than most commands take: functions import what they use.
if TYPE_CHECKING:
    from strata_platform.estimate import Price, Prices
    from strata_platform.spec import RunSpec
    from strata_platform.spec.run_spec import Resources, Topology

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(commands.app)


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
    """Describe and check training runs, submit them and follow them."""


@app.command()
def spec(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="YAML or JSON file of a spec, - for standard input. Without a file, the default spec is printed."
        ),
    ] = None,
    overrides: commands.Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of specs instead.")] = False,
    checks: Annotated[
        bool, typer.Option("--checks", help="Print the checks that run before training instead.")
    ] = False,
    format: Annotated[Literal["yaml", "json"], typer.Option(help="Output format.")] = "yaml",
    backend: Annotated[
        BackendName,
        typer.Option(
            envvar="STRATA_BACKEND",
            help="Where the run will be submitted. For a cluster, files missing on this machine are only warnings.",
        ),
    ] = "local",
) -> None:
    """Check a spec and the files that it names, and print it with all defaults."""
    from strata_platform.spec import dump_spec
    from strata_platform.spec.schema import json_schema

    if checks:
        if file is not None or schema or overrides:
            raise typer.BadParameter("--checks lists the checks of every run; leave FILE, --schema and --set out")
        _print_checks()
    elif schema:
        if file is not None or overrides:
            raise typer.BadParameter("--schema describes every spec and reads no FILE; leave FILE and --set out")
        typer.echo(json.dumps(json_schema(), indent=2))
    else:
        checked = _read("{}", overrides) if file is None else _read_with_files(file, overrides, backend)
        typer.echo(dump_spec(checked, format), nl=False)


def _read_with_files(file: Path, overrides: list[str] | None, backend: BackendName) -> RunSpec:
    """The spec in a file, and a check of the files that it names. Pods of a cluster may have files of their own."""
    from strata_platform.spec.local_files import missing_local_files
    from strata_platform.spec.reading.load import load_argument_with_places

    try:
        checked, source, places = load_argument_with_places(file, overrides or ())
    except SpecError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.exit_code) from None
    if missing := missing_local_files(checked, source, places):
        if backend == "local":
            typer.echo(
                f"{missing}\nfor a run on a cluster whose pods have these files, add --backend flyte or kubernetes",
                err=True,
            )
            raise typer.Exit(missing.exit_code)
        _warn(f"this machine lacks files that the pods of the run must have: {missing}")
    return checked


def _print_checks() -> None:
    """Print the runtime's table. The runtime is another distribution, so its module runs in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "tasks.runtime.preflight"], text=True, capture_output=True)
    if done.returncode != 0:
        typer.echo(
            f"--checks prints a table of the package strata, which {sys.executable} cannot load; install strata there: "
            f"{done.stderr.strip().rpartition(chr(10))[2]}",
            err=True,
        )
        raise typer.Exit(1)
    typer.echo(done.stdout, nl=False)


@app.command("estimate")
def estimate_(
    file: Annotated[Path, typer.Argument(help="YAML or JSON file of a spec, - for standard input.")],
    overrides: commands.Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(help=f"GPU model: {', '.join(GPUS)}; by default resources.gpu_type, or h200."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The model's config.json; needed if model.name is not a known model.")
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            callback=commands.finite, help="Tokens of the whole run; by default computed from training.steps, if set."
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(callback=commands.finite, help="Price of one GPU hour, in any currency.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(envvar="STRATA_PRICES", help="File with a table of prices; see docs/estimate.md.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Maximum number of GPUs of the proposed layout.")] = 64,
    format: Annotated[Literal["text", "json"], typer.Option(help="Output format.")] = "text",
    backend: Annotated[
        BackendName,
        typer.Option(
            envvar="STRATA_BACKEND",
            help="Where the run will be submitted. For a cluster, its prices and queues are used.",
        ),
    ] = "local",
) -> None:
    """Estimate memory, time and cost of a run, and propose the cheapest layout that fits.

    If the run does not fit, the command prints changes that save memory, and the cost of each. A spec with
    resources.gpu 0 is estimated on CPUs, unless you set --gpu. Exit code 1 if the run does not fit, or if no queue of
    the cluster can ever admit it.
    """
    from strata_platform.estimate import Price, cheapest, estimate, render, shape_of
    from strata_platform.estimate.host_estimate import estimate_on_host
    from strata_platform.estimate.remedies import combined, proposals

    if gpu is not None and gpu not in GPUS:
        raise typer.BadParameter(f"{gpu!r} is not one of {', '.join(GPUS)}", param_hint="--gpu")
    asked = _read(file, overrides)
    if backend != "local":
        _require_admission(backend, asked.resources, asked.topology)
    kind = gpu or _kind(asked.resources.gpu_type)
    try:
        shape = shape_of(asked.model.name, config)
        if gpu is None and asked.resources.gpu == 0:
            on_host = estimate_on_host(asked, shape)
            shown = json.dumps(render.host_to_dict(on_host), indent=2) if format == "json" else None
            typer.echo(shown or "\n".join(render.host_lines(on_host)))
            raise typer.Exit(0 if on_host.fits else 1)
        found = estimate(asked, shape, GPUS[kind])
        each = Price(price) if price is not None else _price(kind, prices, backend)
    except SpecError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.exit_code) from None
    advice = render.Advice(cheapest(asked, shape, GPUS[kind], gpus))
    if not found.fits:
        advice = render.Advice(advice.best, proposals(found, gpus), combined(found, gpus))
    if tokens is None and asked.training.steps is not None:
        tokens = asked.training.steps * asked.rows_per_step * asked.data.sequence_length
    if format == "json":
        typer.echo(json.dumps(render.to_dict(found, advice, tokens, each), indent=2))
    else:
        typer.echo("\n".join(render.lines(found, advice, tokens, each)))
    raise typer.Exit(0 if found.fits else 1)


@app.command()
def costs(
    days: Annotated[
        int, typer.Option(min=1, help="Number of days back: runs that were submitted earlier are not counted.")
    ] = 30,
    prices: Annotated[
        Path | None, typer.Option(envvar="STRATA_PRICES", help="File with a table of prices; see docs/estimate.md.")
    ] = None,
    project: Annotated[list[str] | None, typer.Option(help="Project of a cluster; may be given several times.")] = None,
    format: Annotated[Literal["text", "json"], typer.Option(help="Output format.")] = "text",
    backend: Annotated[
        BackendName, typer.Option(envvar="STRATA_BACKEND", help="Where the runs are: this machine, or a cluster.")
    ] = "local",
) -> None:
    """Show the GPU hours and the cost of each person's runs, failed and running attempts included.

    The hours of an attempt are the time in which it held its GPUs. On a cluster, each project has its own lines; the
    default project is STRATA_PROJECT.
    """
    from strata_platform.costs import CPU, used_by_owner

    if project and backend == "local":
        raise typer.BadParameter("runs on this machine have no project", param_hint="--project")
    found = []
    with commands.errors():
        for each in project or (None,):
            submissions = commands.connect(backend, project=each).held(since=time.time() - days * 86400)
            shown = "/".join(project_and_domain(each)) if backend != "local" else "local"
            source, table = _price_table(prices, backend, each)
            used_here = used_by_owner(shown, submissions, table)
            found += used_here
            if table is not None:
                for kind in sorted({kind for used in used_here for kind in used.hours} - {CPU, *table.gpus}):
                    _warn_of_no_price(source, table, kind)
    if format == "json":
        commands.echo_json([asdict(used) for used in found], indent=2)
        return
    rows = [("PROJECT", "OWNER", "RUNS", "UNKNOWN", "GPU HOURS", "CPU HOURS", "COST")]
    for used in found:
        cost = "no price" if used.cost is None else f"{used.cost:.2f} {used.currency}".rstrip()
        hours = (f"{used.gpu_hours:.2f}", f"{used.hours.get(CPU, 0.0):.2f}")
        rows.append((used.project, used.owner or "-", str(used.runs), str(used.unknown), *hours, cost))
    commands.echo_table(rows)


@app.command()
def doctor(
    target: Annotated[
        str, typer.Argument(help="; ".join(f"{name}: {what}" for name, what in TARGETS.items()))
    ] = "laptop",
    backend: Annotated[
        BackendName,
        typer.Option(envvar="STRATA_BACKEND", help="Where you submit runs. With kubernetes, Flyte is not checked."),
    ] = "flyte",
    format: Annotated[Literal["text", "json"], typer.Option(help="Output format.")] = "text",
) -> None:
    """Check whether runs can work here, and print advice for every problem. Changes nothing.

    Exit code 1 if there is a problem; warnings do not count.
    """
    from strata_platform.doctor import examine
    from strata_platform.doctor import render_findings as findings

    if target not in TARGETS:
        raise typer.BadParameter(f"{target!r} is not one of {', '.join(TARGETS)}", param_hint="TARGET")
    found = list(examine(checks_of(target, with_flyte=backend != "kubernetes")))
    typer.echo(findings.to_json(found) if format == "json" else findings.table(found))
    raise typer.Exit(1 if any(finding.status == "problem" for _, finding in found) else 0)


@app.command()
def verify(
    file: Annotated[str, typer.Argument(help="YAML or JSON file of a spec, - for standard input.")],
    overrides: commands.Overrides = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this check; may be given several times.")] = None,
    layers: Annotated[int, typer.Option(min=0, help="Keep only this many layers of the model; 0 keeps all.")] = 4,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON to standard output, and progress to standard error.")
    ] = False,
) -> None:
    """Check on this machine that the spec's model and data train correctly. Takes minutes.

    Exit code 1 if a check fails, 68 if the Hugging Face Hub cannot be reached.
    """
    from strata_platform.spec.reading.overrides import OPTION

    if importlib.util.find_spec("tasks") is None:
        typer.echo("error: the training runtime is not installed beside this command; install strata, whole", err=True)
        raise typer.Exit(2)
    # A process of its own, which has torch; what it prints is this command's.
    command = [sys.executable, "-m", "tasks.runtime.verification", file, "--layers", str(layers)]
    for override in overrides or ():
        # One word: the value may begin with a dash.
        command.append(f"{OPTION}={override}")
    if as_json:
        command.append("--json")
    if only:
        command += ["--only", *only]
    code = subprocess.run(command).returncode
    raise typer.Exit(code if code >= 0 else 128 - code)


def _require_admission(backend: BackendName, resources: Resources, topology: Topology) -> None:
    """End with exit code 1 if the cluster's queues can never admit the run. Warns if that is not known."""
    try:
        commands.connect(backend).backend.require_admission(resources, topology)
    except BackendError as error:
        if error.reason == "Inadmissible":
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        _warn(f"cannot check whether a queue admits the run: {error}")


def _kind(gpu_type: str | None) -> str:
    """The key in GPUS of `resources.gpu_type`; `h200` if it is unset or unknown."""
    found = gpu_type and gpu_kind(gpu_type)
    if gpu_type and not found:
        _warn(f"resources.gpu_type {gpu_type!r} is not a known GPU: the estimate is for an h200; --gpu names another")
    return found or "h200"


def _price(kind: str, file: Path | None, backend: BackendName) -> Price | None:
    """The price in the table of `file` or of the cluster; None without one. Warns if the price cannot be read."""
    source, table = _price_table(file, backend)
    if table is None:
        return None
    if kind not in table.gpus:
        _warn_of_no_price(source, table, kind)
    return table.of(kind)


def _warn_of_no_price(source: str, table: Prices, kind: str) -> None:
    _warn(f"{source} has no price of {kind}; it has: {', '.join(table.gpus) or 'none'}")


def _price_table(file: Path | None, backend: BackendName, project: str | None = None) -> tuple[str, Prices | None]:
    """Where prices come from, and the table; None without one. Warns if it cannot be read."""
    from strata_platform.estimate import read_prices
    from strata_platform.estimate.prices import CONFIG_MAP

    if file is not None:
        return str(file), read_prices(file)
    source = f"the cluster's config map {CONFIG_MAP}"
    if backend != "local":
        try:
            return source, prices_of_cluster(project)
        except StrataError as error:
            _warn(f"prices are not known: {error}")
    return source, None


def _warn(message: str) -> None:
    typer.echo(f"WARNING: {message}", err=True)


def _read(file: Path | str, overrides: list[str] | None) -> RunSpec:
    """The spec in a file, on standard input, or in a text."""
    from strata_platform.spec.reading.load import load_spec, load_spec_argument

    try:
        return (load_spec if isinstance(file, str) else load_spec_argument)(file, overrides or ())
    except SpecError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.exit_code) from None
