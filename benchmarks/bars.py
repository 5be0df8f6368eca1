"""The bars that start-up and commands are held to, and what was measured, as one table.

    KUBECONFIG=... FLYTECTL_CONFIG=... python -m benchmarks.bars (--version VERSION | --image IMAGE) [--runs 3]

Runs `benchmarks.first_step` and `benchmarks.commands`, and prints their tables below. The cluster's servers and pods
get the share of the machine that they have anyway.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks import commands, first_step

FIRST_STEP, WHOLE_RUN, COMMAND = 35.0, 75.0, 1.0
"""Seconds; of a command, of CPU time."""
_FIRST, _END = "first step ends", "run ends"


class Bar(NamedTuple):
    """A row of the table."""

    what: str
    bar: str
    measured: str
    met: bool
    limits: str


def bars(found: first_step.Measured, cpu: Mapping[str, float]) -> Iterator[Bar]:
    """Each bar with what was measured, and what takes longest where it is missed. `cpu`: of each command, seconds."""
    median = {stage: statistics.median(row[stage] for row in found.rows) for stage in found.rows[0]}
    # The stages of a run come in their order.
    first = list(median).index(_FIRST)
    for what, stage, bar, stages in (
        ("submit to the end of the first step, data prepared", _FIRST, FIRST_STEP, list(median)[:first]),
        ("submit to the end of the run", _END, WHOLE_RUN, list(median)[first:-1]),
    ):
        longest = sorted((each for each in stages if each != "second step"), key=lambda each: -median[each])[:3]
        limits = ", ".join(f"{each} {median[each]:.1f} s" for each in longest)
        of = [row[stage] for row in found.rows]
        shown = f"{median[stage]:.1f} s, {min(of):.1f} to {max(of):.1f}"
        yield Bar(what, f"{bar:.0f} s at most", shown, median[stage] <= bar, limits)
    jobs = f"{found.jobs} jobs, {found.again:.1f} s"
    yield Bar("a finished run, submitted again", "starts no job", jobs, found.jobs == 0, "")
    slow = sorted(cpu, key=lambda command: -cpu[command])
    over = ", ".join(f"{command} {cpu[command]:.2f} s" for command in slow if cpu[command] >= COMMAND)
    worst = f"{cpu[slow[0]]:.2f} s, {slow[0]}"
    yield Bar("CPU of the slowest command", f"less than {COMMAND:.1f} s", worst, not over, over)


def main() -> None:
    """Measure and print. Exit code 1 if a bar is missed."""
    loads = [os.getloadavg()[0]]
    found = first_step.measure_as_asked(__doc__)
    loads.append(os.getloadavg()[0])
    cpu = {command: max(seconds.values()) for command, seconds in commands.measure(commands.STRATA, 5)}
    rows = list(bars(found, cpu))
    print(f"load {loads[0]:.1f} before the runs, {loads[1]:.1f} after, on {os.cpu_count()} cores\n")
    print("| what | bar | measured | | what takes longest |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        met = "met" if row.met else "missed"
        print(f"| {row.what} | {row.bar} | {row.measured} | {met} | {'' if row.met else row.limits} |")
    print()
    first_step.show_stages(found)
    print()
    for command, seconds in cpu.items():
        print(f"| `strata {command}` | {seconds:.2f} s |")
    sys.exit(0 if all(row.met for row in rows) else 1)


if __name__ == "__main__":
    main()
