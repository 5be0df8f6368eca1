"""The files of a run, `<output>/<name>`: the one list of their names.

    spec.yaml            the spec of the run, defaults filled in
    metrics.jsonl        a line for each optimizer step
    checkpoints/         a folder for each saved step
    record.json          the completion record, once every step is done
    model/, report.html  the exported model and the report
    stored_outputs.json  where a cluster keeps the model, the report and the record
    weights/             the trained weights on their way to evaluation and export
    attempts.txt         a line for each start of the training processes
    logs/                what the processes of its pods printed, a file for each start of a pod; see `kept_log`
    hangs/               stacks of processes that hung, by start
    tensorboard/         event files
    data_commit.txt      the commits of the Hub data sets that the run reads, a line for each source
    initial_weights.txt  the weights that the run began with, a line for each field that names some: the commit of a
                         Hub model, or digests of a local folder
    .lease/              which machine trains it now
    supervisor/          what the supervisor of a local run writes; see `SupervisorLayout`

The runtime writes these files; the backends read them from a folder, or from a copy in an object store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

METRICS = "metrics.jsonl"
RECORD = "record.json"
MODEL = "model"
REPORT = "report.html"
LOGS = "logs"
LEASE = ".lease"


@dataclass(frozen=True)
class RunLayout:
    """Paths of a run's files below its folder, `root`. Nothing is created."""

    root: Path

    @property
    def spec(self) -> Path:
        """The spec of the run, defaults filled in."""
        return self.root / "spec.yaml"

    @property
    def checkpoints(self) -> Path:
        """A folder for each saved step."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """A line for each optimizer step."""
        return self.root / METRICS

    @property
    def data_commit(self) -> Path:
        """The commit of the Hub data set that the run reads; missing if it reads none."""
        return self.root / "data_commit.txt"

    @property
    def initial_weights(self) -> Path:
        """What tells the weights that the run began with from others; missing if the spec names none."""
        return self.root / "initial_weights.txt"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def attempts(self) -> Path:
        """A line for each start of the training processes."""
        return self.root / "attempts.txt"

    @property
    def hangs(self) -> Path:
        """Stacks of processes that hung, by start."""
        return self.root / "hangs"

    @property
    def logs(self) -> Path:
        """What the processes of the run's pods printed; missing on one machine."""
        return self.root / LOGS

    @property
    def weights(self) -> Path:
        """The trained weights on their way to evaluation and export."""
        return self.root / "weights"

    @property
    def model(self) -> Path:
        """The exported model, a Hugging Face folder."""
        return self.root / MODEL

    @property
    def report(self) -> Path:
        """The report."""
        return self.root / REPORT

    @property
    def record(self) -> Path:
        """The completion record; missing until every step is done."""
        return self.root / RECORD

    @property
    def stored_outputs(self) -> Path:
        """Addresses of a finished run's outputs in Flyte's object store; missing on one machine."""
        return self.root / "stored_outputs.json"

    @property
    def lock_file(self) -> Path:
        """Locked while the run trains, evaluates or exports."""
        return self.root / ".lock"

    @property
    def supervisor(self) -> SupervisorLayout:
        """Files of the supervisor of a local run."""
        return SupervisorLayout(self.root / "supervisor")

    @property
    def outputs(self) -> dict[str, Path]:
        """Paths of a finished run's outputs, by kind."""
        return {"model": self.model, "report": self.report, "record": self.record}


@dataclass(frozen=True)
class SupervisorLayout:
    """Paths of the files that the supervisor of a local run writes below `root`."""

    root: Path

    @property
    def spec(self) -> Path:
        """The spec as it was submitted."""
        return self.root / "spec.yaml"

    @property
    def state(self) -> Path:
        """Phase, stage and times of the run; replaced as a whole."""
        return self.root / "state.json"

    @property
    def events(self) -> Path:
        """A line for each event, over all submissions."""
        return self.root / "events.jsonl"

    @property
    def log(self) -> Path:
        """A line for each line that the processes printed, over all submissions."""
        return self.root / "log.jsonl"

    @property
    def output(self) -> Path:
        """Output of the supervisor itself; empty unless the supervisor failed."""
        return self.root / "supervisor.log"

    @property
    def lock_file(self) -> Path:
        """Locked for as long as the supervisor lives."""
        return self.root / "lock"
