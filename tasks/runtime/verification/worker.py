"""The process that a check starts: `python -m tasks.runtime.verification.worker REQUEST`, or under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData
from tasks.runtime.training.frameworks import load_framework
from tasks.runtime.training.job import Job
from tasks.runtime.training.session import session
from tasks.runtime.training.train import train
from tasks.runtime.verification.observe import Step, first_step, plain_buffers, quiet, with_job
from tasks.runtime.verification.uneven import UnevenData


@dataclass(frozen=True)
class Request:
    """The work of a process, and the place of its results."""

    kind: Literal["first_step", "buffers", "train"]
    spec: str
    """The spec as JSON."""
    data: str
    """The folder of the prepared data."""
    out: str
    """Each process writes its results to a file with this name, followed by its rank."""
    uneven: bool = False
    kill_after: int | None = None
    """End this process by SIGKILL after this number of steps."""

    def write(self, path: Path) -> Path:
        """Write the request to `path`, for `main`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    def found(self, rank: int) -> Step:
        """The results of the process with that rank."""
        step: Step = torch.load(f"{self.out}{rank}", weights_only=False)
        return step


def do(request: Request) -> None:
    """Do the work of a request in one of the processes."""
    spec = RunSpec.model_validate_json(request.spec)
    data = (UnevenData if request.uneven else PreparedData).load(request.data)
    if request.kind == "train":
        with session(spec) as run:
            train(run, data, lambda job: _train(job, request.kill_after))
        return
    found: list[Step] = []
    if request.kind == "first_step":
        found.append(first_step(spec, data))
    else:
        with_job(spec, data, lambda job: found.append(Step(0.0, {}, plain_buffers(job.unwrapped_model))))
    step = found[0]
    on_host = {name: gradient.cpu() for name, gradient in step.gradients.items()}
    torch.save(Step(step.loss, on_host, step.buffers), f"{request.out}{os.environ.get('RANK', '0')}")


def _train(job: Job, kill_after: int | None) -> None:
    """Train to the end, or kill this process after a step."""
    done = job.start
    ended = job.step_ended

    def step_ended() -> None:
        nonlocal done
        done += 1
        ended()
        if done == kill_after:
            # Without this, chance would decide whether there is a complete checkpoint to resume from.
            job.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    job.step_ended = step_ended
    load_framework(job.spec.runtime.framework)(job)


def wait(process: subprocess.Popen[str], *, expected: int = 0) -> None:
    """Wait for a process of `Subject.start`. Raises RuntimeError with its last lines if its exit code is another."""
    output, _ = process.communicate()
    if process.returncode != expected:
        raise RuntimeError(f"a process ended with code {process.returncode}, not {expected}: {output.strip()[-1500:]}")


def main() -> None:
    """Do the work of the request whose file the command line names."""
    request = Request(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    with quiet():
        do(request)


if __name__ == "__main__":
    main()
