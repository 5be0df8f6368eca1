"""Where the time of a small run goes, from its submission to the second step and to its end.

    KUBECONFIG=... FLYTECTL_CONFIG=... python -m benchmarks.first_step (--version VERSION | --image IMAGE) [--runs 3]

VERSION is a release, whose code is its image's, and IMAGE what the working copy runs in, whose code each pod fetches.
Submits the two-pod run of tests/e2e/spec.yaml once, so that its data are prepared and the workflow is registered, then
again under other names. The last of them is submitted once more after its end. Prints the rows of a table: median,
least, most.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubernetes import client, config

from benchmarks.submission import END, FIRST, JOB, MEANINGS, SPEC, Moments, show, stages
from strata_platform.backends.flyte import FlyteBackend
from strata_platform.client import Client
from strata_platform.runs import Phase
from strata_platform.spec import RunSpec

ROOT = Path(__file__).parents[1]
REST = "rest of training"
_SHOWN = MEANINGS | {
    "start task": "plans, finds the data, asks for the job",
    REST: "the other steps, the weights stored, until the first container ends",
}


def measured(runs: Client, moments: Moments, name: str) -> dict[str, float]:
    """Seconds of every stage of a run that is followed to its end. Raises AssertionError if it fails."""
    spec = RunSpec.model_validate(yaml.safe_load(SPEC.read_text()) | {"name": name})
    moments.note(name, "begin")
    clock = time.time() - time.monotonic()
    runs.submit(spec)
    moments.note(name, "answered")
    run = runs.wait(name)
    end = time.monotonic()
    moments.note(name, "done")
    assert run.phase is Phase.SUCCEEDED, run.message
    at = moments.of(name)
    record = json.loads(Path(runs.outputs(name, to=ROOT / "out" / name).record).read_text())
    row = stages(at, FIRST) | {"start task": at["start ended"] - at["start running"]} | stages(at, JOB)
    first = (
        record["begun"] - clock + sum(seconds for phase, seconds in record["startup"].items() if phase != "second step")
    )
    row |= record["startup"] | {"first step ends": first - at["begin"]}
    row |= {REST: at["train ended"] - first} | stages(at, END)
    return row | {"run ends": end - at["begin"]}


@dataclass(frozen=True)
class Measured:
    """Seconds of every stage of each run, and of a submission of a run that had finished."""

    rows: list[dict[str, float]]
    again: float
    jobs: int
    """Training jobs that the latter started."""


def measure(version: str | None, image: str | None, place: tuple[str, str], count: int) -> Measured:
    """Follow `count` runs to their ends, after one that prepares the data; then submit the last one again."""
    config.load_kube_config()
    runs = Client(FlyteBackend(*place, version=version, image=image, source=ROOT), poll=0.5)
    moments = Moments("-".join(place))
    names = [f"first-step-{time.time_ns() // 10**9}-{number}" for number in range(count + 1)]
    _, *rows = [measured(runs, moments, name) for name in names]
    begin = time.monotonic()
    runs.submit(RunSpec.model_validate(yaml.safe_load(SPEC.read_text()) | {"name": names[-1]}))
    again = runs.wait(names[-1])
    seconds = time.monotonic() - begin
    assert again.phase is Phase.SUCCEEDED, again.message
    mine = {"label_selector": f"execution-id={names[-1]}-x2"}
    jobs = client.CustomObjectsApi().list_namespaced_custom_object(
        "kubeflow.org", "v1", "-".join(place), "pytorchjobs", **mine
    )["items"]
    return Measured(rows, seconds, len(jobs))


def show_stages(found: Measured) -> None:
    """Print a row of each stage: median, least, most."""
    for stage in found.rows[0]:
        show(stage, [row[stage] for row in found.rows], _SHOWN.get(stage, ""))
    show("submitted again", [found.again], f"until the outputs of the finished run are there; jobs: {found.jobs}")


def measure_as_asked(description: str | None) -> Measured:
    """`measure` with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    code = parser.add_mutually_exclusive_group(required=True)
    code.add_argument("--version", help="a registered version")
    code.add_argument("--image", help="the project's image, for the working copy")
    parser.add_argument("--project", default="flytesnacks")
    parser.add_argument("--domain", default="development")
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    return measure(asked.version, asked.image, (asked.project, asked.domain), asked.runs)


def main() -> None:
    """Measure and print."""
    found = measure_as_asked(__doc__)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    show_stages(found)
    assert not found.jobs, "a finished run started a job"


if __name__ == "__main__":
    main()
