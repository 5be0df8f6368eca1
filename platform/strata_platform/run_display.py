"""How a run, its log and its metrics look on a terminal."""

from __future__ import annotations

import shutil
import sys
import time

import typer

from strata_platform.runs import LogLine, MetricPoint, Run


class LogHeading:
    """Names the attempt, the pod and the time where a log continues in another attempt, or in a pod that is gone."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, str, str]] = set()
        self._is_needed = False

    def before(self, line: LogLine) -> str:
        """The heading to print before a line; empty if it was printed before, or is not needed."""
        its = (line.attempt, line.source, line.kept)
        if its in self._seen:
            return ""
        self._seen.add(its)
        # In the usual case, a first attempt whose pods still exist, the rank in each line is enough.
        self._is_needed = self._is_needed or bool(line.kept or line.attempt)
        if not self._is_needed:
            return ""
        pod = f"pod {line.source}, " if line.source else ""
        gone = "which is gone, " if line.kept else ""
        return f"-- attempt {line.attempt}, {pod}{gone}from {clock(line.time)} --"


class StatusLine:
    """What a run is doing, in the last line of a terminal, below its log."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, run: Run) -> None:
        """Write the line, cut at the edge of the terminal."""
        if run.is_done:
            return
        text = "  ".join(filter(None, (f"{run.name} {run.stage or run.phase}", progress(run))))
        typer.echo(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", nl=False)
        self._shown = True

    def clear(self) -> None:
        """Remove the line: what comes next takes its place."""
        if self._shown:
            typer.echo("\r\x1b[K", nl=False)
        self._shown = False


class WaitLine:
    """Shows a run that is waited for: one line that a terminal rewrites, elsewhere a line for each change."""

    def __init__(self) -> None:
        self._before = ""
        self._live = sys.stdout.isatty()

    def show(self, run: Run) -> None:
        """Print the state of the run if it changed."""
        doing = f"{run.name} {run.phase}" + (f", {run.stage}" if run.stage else "")
        waiting = f", {run.position} before it" if run.position is not None else ""
        text = f"{doing}{waiting}" + (f" ({run.message})" if run.message else "")
        if self._live:
            far = progress(run)
            typer.echo(f"\r\x1b[K{doing}{waiting}{far and '  ' + far}", nl=False)
            if run.message and self._before != text:
                typer.echo(f"\r\x1b[K{text}")
        elif text != self._before:
            typer.echo(text)
        self._before = text


def progress(run: Run) -> str:
    """Step, losses, speed and time left, as far as they are known; empty before the first step."""
    if not run.step:
        return ""
    parts = [f"step {run.step}" + (f"/{run.steps}" if run.steps else "")]
    if run.loss is not None:
        parts.append(f"loss {run.loss:.4f}")
    if run.eval_loss is not None:
        parts.append(f"validation loss {run.eval_loss:.4f}")
    if run.stopped_early is not None:
        parts.append("stopped early")
    if not run.is_done and run.tokens_per_second is not None:
        parts.append(f"{run.tokens_per_second:,.0f} tok/s")
    if run.eta is not None:
        minutes, seconds = divmod(int(run.eta), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
    return "  ".join(parts)


def metrics_line(point: MetricPoint) -> str:
    """A step and its metrics."""
    norm = "" if point.grad_norm is None else f"  norm {point.grad_norm:.3f}"
    more = "".join(f"  {name} {value:.3f}" for name, value in point.metrics.items())
    rate = f"{point.tokens_per_second:,.0f} tok/s"
    return f"step {point.step}  loss {point.loss:.4f}{more}  lr {point.learning_rate:.2e}{norm}  {rate}"


def clock(seconds: float | None) -> str:
    """A time in seconds since the epoch as local date and time; empty if it is not known."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
