"""A run that is killed and started again ends with the same bits as an undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import read_model_tensors
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.verification.finding import Measured
from tasks.runtime.verification.subject import Subject
from tasks.runtime.verification.worker import Request, wait

# Step of the checkpoint, step after which the process is killed, and last step.
_EVERY, _KILLED_AFTER, _STEPS = 2, 3, 4


def resume(subject: Subject) -> Measured:
    """Compare losses, gradient norms and weights of both runs, in real processes with a real SIGKILL."""
    undisturbed, killed = _spec(subject), _spec(subject)
    processes = [
        subject.start(_request(subject, undisturbed, None), 1),
        subject.start(_request(subject, killed, _KILLED_AFTER), 1),
    ]
    try:
        wait(processes[1], expected=-signal.SIGKILL)
        again = subject.start(_request(subject, killed, None), 1)
        processes.append(again)
        # The undisturbed run started first and ends first.
        wait(processes[0])
        wait(again)
    finally:
        for process in processes:
            process.kill()
    folders = RunFolder.of(undisturbed), RunFolder.of(killed)
    differing = _different(*folders)
    continued = _attempts(folders[1])
    problem = None
    if continued != [0, 1]:
        problem = f"the recorded steps come from the attempts {continued}, not from a killed attempt and its successor"
    elif differing:
        problem = f"different: {', '.join(differing[:3])}"
    detail = (
        f"losses, norms and last weights of {_STEPS} steps that differ from an undisturbed run, after SIGKILL in step "
        f"{_KILLED_AFTER} with a checkpoint of step {_EVERY}"
    )
    return Measured(float(len(differing)), 0.0, detail, problem)


def _spec(subject: Subject) -> RunSpec:
    return subject.variant(
        training={"steps": _STEPS, "deterministic": torch.cuda.is_available()},
        checkpoint={"every": _EVERY, "keep_last": 3},
        optimizer={"in_backward": subject.asked.optimizer.in_backward},
    )


def _request(subject: Subject, spec: RunSpec, kill_after: int | None) -> Path:
    out = str(subject.new_file(".step."))
    request = Request("train", spec.model_dump_json(), str(subject.data.folder), out, kill_after=kill_after)
    return request.write(subject.new_file(".json"))


def _different(undisturbed: RunFolder, killed: RunFolder) -> list[str]:
    """The steps and the weights in which the two runs differ."""
    points = [read_points(folder.metrics) for folder in (undisturbed, killed)]
    found = [
        f"step {first.step}" for first, second in zip(*points, strict=False) if _computed(first) != _computed(second)
    ]
    if len(points[0]) != _STEPS or len(points[1]) != _STEPS:
        found.append(f"{len(points[0])} and {len(points[1])} steps on record")
    saved = [read_model_tensors(Index(checkpoint.folders(folder.checkpoints)[-1])) for folder in (undisturbed, killed)]
    return found + [name for name, tensor in saved[0].items() if not torch.equal(tensor, saved[1][name])]


def _computed(point: MetricPoint) -> tuple[float | None, ...]:
    """The results of a step, without its times."""
    return point.loss, point.grad_norm, point.learning_rate, point.tokens, point.target_tokens


def _attempts(folder: RunFolder) -> list[int]:
    """The attempts of the recorded steps."""
    return sorted({point.attempt for point in read_points(folder.metrics)})
