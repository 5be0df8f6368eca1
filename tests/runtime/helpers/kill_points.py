"""Moments of a training at which it can be killed, and who is killed then.

`python -m tests.runtime.helpers.kill_points SPEC` trains with the plan that is in the environment.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from strata_platform.spec import RunSpec
from tasks.runtime.checkpoint import manifest, storage, writer
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import Preempted
from tasks.runtime.training.job import Job
from tests.runtime.helpers.train_only import train_spec

# Plan of an attempt, and the file that says that it came about.
PLAN, STRUCK = "STRATA_TEST_KILL", "STRATA_TEST_STRUCK"
# How an attempt ended.
DONE, AGAIN, BROKEN = 0, 75, 1

# Signal, and who gets it.
VICTIMS = {
    "SIGKILL to a worker": (signal.SIGKILL, ("worker",)),
    "SIGKILL to the agent": (signal.SIGKILL, ("agent",)),
    "SIGTERM to the agent": (signal.SIGTERM, ("agent",)),
    "SIGKILL to all": (signal.SIGKILL, ("siblings", "agent", "worker")),
}
# No signal: a worker stands still, until the watchdogs of all of them end them.
HANG = "a worker hangs"
POINTS = {
    "end of a step": "a step is computed, and not yet on record",
    "half a file": "the first half of some tensor of a checkpoint is in its file",
    "all files": "all processes have written theirs, and there is no index",
    "rename of a manifest": "it is written under another name",
    "rename of a record": "it is written under another name, and the last checkpoint is whole",
    "half a removal": "the old checkpoint has lost its manifest and one of its files",
}


@dataclass(frozen=True)
class Kill:
    """What is to happen to an attempt: when the process of `rank` reaches `point` for the `nth` time, or, for a number,
    at this share of the time that an undisturbed run takes; in so many starts of the workers by one agent."""

    victim: str
    point: str | float
    nth: int = 1
    rank: int = 0
    starts: int = 1
    harm: str | None = None


def children(pid):
    """Processes that `pid` has started and that are not reaped; [] when it is gone."""
    try:
        return [
            int(child)
            for thread in Path(f"/proc/{pid}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except OSError:
        return []


def strike(victim, agent, worker):
    """Send what `victim` says; `worker` is one of the agent's, or the same where there is no agent."""
    if victim == HANG:
        threading.Event().wait()
    number, to = VICTIMS[victim]
    pids = {"worker": [worker], "agent": [agent], "siblings": [pid for pid in children(agent) if pid != worker]}
    for pid in (pid for role in to for pid in pids[role]):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            assert number == signal.SIGKILL, "nobody but us ends the process"


def arm():
    """In a worker: strike where the plan says so."""
    if not os.environ.get(PLAN):
        return
    kill, struck = Kill(**json.loads(os.environ[PLAN])), Path(os.environ[STRUCK])
    if isinstance(kill.point, float) or int(os.environ.get("RANK", "0")) != kill.rank:
        return
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) >= kill.starts:
        return
    passed = Counter()

    def reach(point):
        passed[point] += 1
        if point == kill.point and passed[point] == kill.nth:
            struck.touch()
            strike(kill.victim, os.getppid() if "RANK" in os.environ else os.getpid(), os.getpid())

    def end_step(*arguments):
        reach("end of a step")
        return plain_end_step(*arguments)

    def write(file, part):
        begun = plain_write(file, part[: len(part) // 2])
        reach("half a file")
        return begun + plain_write(file, part[begun:])

    def commit(*arguments):
        reach("all files")
        return plain_commit(*arguments)

    def rename(source, target):
        name = {manifest.MANIFEST: "manifest", "record.json": "record"}.get(Path(target).name)
        if name:
            reach(f"rename of a {name}")
        return plain_rename(source, target)

    def remove(folder, **options):
        # One that was killed early has none.
        for file in list(folder.iterdir())[:1]:
            file.unlink()
        reach("half a removal")
        shutil.rmtree(folder, **options)

    plain_end_step, plain_write, plain_rename = Job.end_step, storage._write, Path.replace
    plain_commit = writer.CheckpointWriter._commit
    Job.end_step, storage._write, Path.replace = end_step, write, rename
    writer.CheckpointWriter._commit = commit
    manifest.shutil = SimpleNamespace(rmtree=remove)


def train_armed(spec):
    """Train as `python -m tasks.runtime` does; how the attempt ended."""
    arm()
    try:
        return DONE if train_spec(spec).status == "complete" else BROKEN
    except Preempted:
        return AGAIN


if __name__ == "__main__":
    configure_logging()
    sys.exit(train_armed(RunSpec.model_validate_json(sys.argv[1])))
