"""The commands of `strata` that submit and follow runs, as the methods of `Client` do."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic_core import to_json

from strata_platform import client as clients
from strata_platform.client import BackendName, Client
from strata_platform.errors import RunNotFound, SpecError, StrataError
from strata_platform.run_display import LogHeading, StatusLine, WaitLine, clock, metrics_line, progress
from strata_platform.runs import Phase, Run

app = typer.Typer()


def finite(value: float | None) -> float | None:
    """Check an option's value: a command line accepts nan and inf as numbers, these options do not."""
    if value is not None and not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is not a finite number of at least 0")
    return value


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field of the spec, such as optimizer.lr=1e-5; the value is YAML. May be given several times.",
    ),
]
_Name = Annotated[str, typer.Argument(help="Name of a run, or the path of a local run's folder.")]
_Backend = Annotated[
    BackendName,
    typer.Option(
        envvar="STRATA_BACKEND", help="Where runs are: this machine, or a cluster with Flyte, or with Kubernetes alone."
    ),
]
_Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue with new output until the run ends.")]
_Poll = Annotated[float, typer.Option(min=0.01, callback=finite, help="Seconds between two queries.")]
_Format = Annotated[Literal["text", "json"], typer.Option(help="Output format.")]

_INTERRUPTED = 130
# What `Run.where` is, by backend.
_WHERE = {"local": "folder", "flyte": "execution", "kubernetes": "jobset"}


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="YAML or JSON file of a spec, - for standard input.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the log until the run ends, as logs -f does.")
    ] = False,
    overrides: Overrides = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Submit even if the run does not fit, no queue admits it, or it has succeeded before.",
        ),
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(
            help="On a cluster: image of the run. With Flyte, it runs this folder's workflow, registered if it changed."
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            help="With Flyte: registered version to run; by default the active release, unless you set --image."
        ),
    ] = None,
    backend: _Backend = "local",
    poll: _Poll = 1.0,
) -> None:
    """Start a run, or continue one that was stopped. The run continues after this command ends."""
    if image is not None and version is not None:
        raise typer.BadParameter("--image registers a version of its own; leave --version out")
    from strata_platform.spec.local_files import missing_local_files
    from strata_platform.spec.reading.load import load_argument_with_places

    with errors():
        client = connect(backend, image=image, version=version, poll=poll)
        spec, source, places = load_argument_with_places(file, overrides or ())
        if backend == "local" and (missing := missing_local_files(spec, source, places)):
            raise missing
        run = client.submit(spec, force=force)
        if run.phase is Phase.SUCCEEDED:
            typer.echo(
                f"{run.name} has succeeded with this spec before, as {run.where}; nothing is started. If its folder is "
                "gone, submit it with --force"
            )
            return
        typer.echo(f"{run.name} is submitted: {run.where}")
        if follow:
            _follow(client, run.name, times=False, rank=None)
        else:
            typer.echo(f"strata logs -f {run.name}, strata wait {run.name}, strata cancel {run.name}")


@app.command()
def get(name: _Name, format: _Format = "text", backend: _Backend = "local") -> None:
    """Show the current state of a run."""
    with errors():
        run = connect(backend).get(name)
    if format == "json":
        echo_json(run, indent=2)
        return
    times = {"submitted": run.submitted, "started": run.started, "ended": run.ended}
    shown = {
        "phase": run.phase,
        "stage": run.stage,
        "progress": progress(run),
        "message": run.message,
        **{kind: value and clock(value) for kind, value in times.items()},
        "restarts": run.restarts,
        "queue": run.queue,
        "owner": run.owner,
        _WHERE[run.backend]: run.where,
    }
    typer.echo(run.name)
    for field, value in shown.items():
        if value:
            typer.echo(f"  {field:<10}{str(value).replace(chr(10), chr(10) + ' ' * 12)}")


@app.command("list")
def list_(
    mine: Annotated[bool, typer.Option("--mine", help="Only runs that you submitted.")] = False,
    owner: Annotated[str | None, typer.Option(help="Only runs that this person submitted.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Show at most this many; 0 shows all.")] = 100,
    format: _Format = "text",
    backend: _Backend = "local",
) -> None:
    """List the newest runs."""
    if mine and owner is not None:
        raise typer.BadParameter("--mine and --owner both choose runs; leave one out")
    with errors():
        client = connect(backend)
        # One more, to know whether there are more.
        runs = client.list(limit=limit + 1 if limit else None, owner=client.backend.me() if mine else owner)
    more, runs = bool(limit) and len(runs) > limit, runs[: limit or None]
    if format == "json":
        echo_json(runs, indent=2)
    else:
        _print_table(runs)
    if more:
        typer.echo(f"these are the newest {limit}; --limit shows more, --limit 0 all", err=True)


def _print_table(runs: list[Run]) -> None:
    rows = [
        (run.name, str(run.phase), progress(run) or str(run.stage or ""), run.owner, clock(run.submitted))
        for run in runs
    ]
    echo_table([("NAME", "PHASE", "PROGRESS", "OWNER", "SUBMITTED"), *rows])


@app.command()
def wait(
    name: _Name,
    timeout: Annotated[
        float | None, typer.Option(callback=finite, help="Stop waiting after this many seconds; the run continues.")
    ] = None,
    backend: _Backend = "local",
    poll: _Poll = 1.0,
) -> None:
    """Show what a run is doing until it ends. Exit code 1 if it does not succeed."""
    with errors(), _interruptible(name):
        _end(connect(backend, poll=poll).wait(name, timeout=timeout, show=WaitLine().show))


@app.command()
def logs(
    name: _Name,
    follow: _Follow = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the log of this rank.")] = None,
    times: Annotated[bool, typer.Option("--times", help="Start each line with its time.")] = False,
    backend: _Backend = "local",
    poll: _Poll = 0.5,
) -> None:
    """Print the log of a run, including pods that no longer exist.

    With --follow, exit code 1 if the run does not succeed. Instead of a name, give the path or URL of a run's folder on
    a cluster to read the logs that are stored there.
    """
    with errors():
        client = connect(backend, poll=poll)
        if follow:
            _follow(client, name, times=times, rank=rank)
        else:
            _print_log(client, name, follow=False, times=times, rank=rank)


@app.command()
def metrics(
    name: _Name,
    follow: _Follow = False,
    format: _Format = "text",
    backend: _Backend = "local",
    poll: _Poll = 0.5,
) -> None:
    """Print the metrics of each step of a run; as JSON, one object per line."""
    with errors(), _interruptible(name):
        for point in connect(backend, poll=poll).metrics(name, follow=follow):
            if format == "json":
                echo_json(point)
            else:
                typer.echo(metrics_line(point))


@app.command()
def events(name: _Name, format: _Format = "text", backend: _Backend = "local") -> None:
    """Print the events of a run."""
    with errors():
        for event in connect(backend).events(name):
            if format == "json":
                echo_json(event)
            else:
                about = event.about and f" ({event.about})"
                typer.echo(f"{clock(event.time)}  {event.reason:<12} {event.message}{about}")


@app.command()
def cancel(name: _Name, backend: _Backend = "local") -> None:
    """Stop a run and wait until it has ended. Its checkpoints stay: submit it again to continue."""
    with errors():
        client = connect(backend, poll=0.2)
        before = client.get(name)
        after = client.cancel(name)
        typer.echo(f"{name} had already ended: {after.phase}" if before.is_done else f"{name} is {after.phase}")


@app.command()
def outputs(
    name: _Name,
    to: Annotated[Path | None, typer.Option(help="Copy the outputs into this folder.")] = None,
    format: _Format = "text",
    backend: _Backend = "local",
) -> None:
    """Print the paths of the model, the report and the record of a run."""
    with errors():
        found = connect(backend).outputs(name, to=to)
    if format == "json":
        echo_json(found, indent=2)
    else:
        for kind, path in found.items():
            typer.echo(f"{kind:<8}{path}")


def connect(
    backend: BackendName,
    *,
    image: str | None = None,
    version: str | None = None,
    project: str | None = None,
    poll: float = 1.0,
) -> Client:
    """A client for a terminal."""
    client = clients.connect(backend, image=image, version=version, project=project, poll=poll)
    # Errors arrive as exceptions; flytekit, if it logs in, would add a traceback for each open connection at exit.
    logging.getLogger("flytekit").setLevel(logging.CRITICAL)
    return client


def echo_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of texts with their columns one below the other."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for row in rows:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip())


def echo_json(value: Any, indent: int | None = None) -> None:
    """Print JSON, which has no NaN or infinity: such a loss becomes null."""
    typer.echo(to_json(value, indent=indent, inf_nan_mode="null").decode())


@contextmanager
def errors() -> Iterator[None]:
    """Print warnings and errors on standard error, without tracebacks."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        yield
    except SpecError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.exit_code) from None
    except StrataError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, RunNotFound) else 1) from None


@contextmanager
def _interruptible(name: str) -> Iterator[None]:
    """Let Ctrl-C end this command and not the run."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\n{name} continues: strata logs -f {name}, strata wait {name}, strata cancel {name}", err=True)
        raise typer.Exit(_INTERRUPTED) from None


def _follow(client: Client, name: str, *, times: bool, rank: int | None) -> None:
    with _interruptible(name):
        _print_log(client, name, follow=True, times=times, rank=rank)
        _end(client.wait(name))


def _print_log(client: Client, name: str, *, follow: bool, times: bool, rank: int | None) -> None:
    status, heading = StatusLine(), LogHeading()
    try:
        for line in client.logs(name, follow=follow, show=status.show if sys.stdout.isatty() else None):
            if rank is None or line.rank == rank:
                status.clear()
                if text := heading.before(line):
                    typer.echo(text)
                typer.echo(f"{clock(line.time) + ' ' if times else ''}{line.prefix} {line.text}")
    finally:
        status.clear()


def _end(run: Run) -> None:
    """Print how the run ended, and exit with 0 or 1."""
    good = run.phase is Phase.SUCCEEDED
    message = f": {run.message}" if run.message else f", outputs: strata outputs {run.name}" * good
    typer.echo(f"{run.name} {run.phase}{message}", err=not good)
    raise typer.Exit(0 if good else 1)
