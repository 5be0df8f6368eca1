"""Kill training at random until it is done: `python -m tests.runtime.helpers.random_kills --runs 200 --seed 0`.

Each run is a short training that is killed one to three times and started again until it ends. It must then have the
losses of an undisturbed run, bit for bit. No attempt may pass for finished before that, and none may leave a process or
shared memory behind.

`task` and `plain` runs are forks of this process, which has torch imported: the Flyte task with its elastic agent and
workers as in a pod, or one process without an agent. `torchrun` runs start from nothing, as a person starts them.
"""

import argparse
import ctypes
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.run_spec import Runtime
from strata_platform.spec.sections.model import Model
from tasks import topology
from tasks.elastic import Training
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.manifest import MANIFEST
from tasks.runtime.checkpoint.storage import INDEX
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.models.build import set_special_tokens
from tasks.runtime.models.config import PRESETS
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps.train_step import MAX_RESTARTS
from tests.runtime.helpers.all_imports import import_everything
from tests.runtime.helpers.kill_points import (
    AGAIN,
    BROKEN,
    DONE,
    HANG,
    PLAN,
    POINTS,
    STRUCK,
    VICTIMS,
    Kill,
    arm,
    children,
    strike,
    train_armed,
)

ROOT = Path(__file__).parents[3]
STEPS = 8
FRAMEWORKS = get_args(Runtime.model_fields["framework"].annotation)
# What happens to the newest checkpoint after a kill, and to which of its files.
HARMS = {
    "a file is truncated": "*.safetensors",
    "a bit is flipped": "*.safetensors",
    "the index is gone": INDEX,
    "the manifest is torn": MANIFEST,
    "the metrics are torn": "",
}
# Seconds: for an attempt, and for its processes to end after it.
LIMIT, GRACE = 300, 15
HANG_TIMEOUT = 15
PR_SET_CHILD_SUBREAPER, CLONE_NEWNS, MS_REC, MS_PRIVATE = 36, 0x20000, 1 << 14, 1 << 18


@dataclass(frozen=True)
class Cell:
    """How a run is started and split."""

    launcher: str
    processes: int
    strategy: str
    framework: str

    @property
    def name(self) -> str:
        return f"{self.launcher}-{self.processes}-{self.strategy}-{self.framework}"


FORKED = [
    Cell(launcher, processes, strategy, framework)
    for launcher, processes, strategy in (
        ("plain", 1, "single"),
        ("task", 1, "single"),
        ("task", 2, "ddp"),
        ("task", 2, "fsdp"),
    )
    for framework in FRAMEWORKS
]


def make_spec(output, name, cell):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "model": {"name": str(output / "pretrained")},
            "optimizer": {"lr": 5e-3},
            "data": {"sequence_length": 32, "max_samples": 60},
            "training": {"steps": STEPS, "micro_batch_size": 1, "gradient_accumulation_steps": 2 // cell.processes},
            "checkpoint": {"every": 2, "keep_last": 2},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": cell.framework},
            "parallel": {"type": cell.strategy},
            "faults": {"hang_timeout": HANG_TIMEOUT},
            "topology": {"nproc_per_node": cell.processes},
        }
    )


def draw(source, cell):
    """Some way to end an attempt."""
    if source.random() < 0.05:
        return Kill(HANG, "end of a step", nth=source.randint(1, STEPS), rank=source.randrange(cell.processes))
    victim = source.choice(list(VICTIMS) if cell.launcher != "plain" else list(VICTIMS)[:3])
    point = source.uniform(0.0, 1.1) if source.random() < 0.3 else source.choice(list(POINTS))
    return Kill(
        victim,
        point,
        nth=source.randint(1, STEPS) if point in ("end of a step", "half a file") else source.randint(1, 2),
        # The others do not come by the other points.
        rank=source.randrange(cell.processes) if point in ("end of a step", "half a file") else 0,
        # As often as the agent starts its workers, the attempt is given up.
        starts=source.choice((1, 1, MAX_RESTARTS + 1)),
        harm=source.choice(list(HARMS)) if source.random() < 0.3 else None,
    )


def harm_newest(source, spec, harm):
    """What a lost machine may do to what it has just written; whether there was something to harm."""
    folder = RunFolder.of(spec)
    if harm == "the metrics are torn":
        if folder.metrics.exists():
            with folder.metrics.open("a") as file:
                file.write('{"step": 1, "lo')
        return folder.metrics.exists()
    saved = checkpoint.folders(folder.checkpoints)
    files = sorted(saved[-1].glob(HARMS[harm])) if saved else []
    content = bytearray(files[0].read_bytes()) if files else bytearray()
    if not content:
        return False
    if harm == "the index is gone":
        files[0].unlink()
    elif harm == "a bit is flipped":
        content[source.randrange(len(content))] ^= 1 << source.randrange(8)
        files[0].write_bytes(content)
    else:
        files[0].write_bytes(content[: source.randrange(len(content))])
    return True


# As those of tasks.topology, but for forks of a process that has imported everything, and an agent that looks often.
ELASTIC = {"max_restarts": MAX_RESTARTS, "start_method": "fork", "monitor_interval": 0.1}


@task(task_config=Training(nnodes=1, nproc_per_node=1, **ELASTIC))
def train_in_one(spec: RunSpec, data: FlyteDirectory) -> topology.Trained:
    arm()
    return topology._train(spec, data)


@task(task_config=Training(nnodes=1, nproc_per_node=2, **ELASTIC))
def train_in_two(spec: RunSpec, data: FlyteDirectory) -> topology.Trained:
    arm()
    return topology._train(spec, data)


def as_task(spec):
    """Start as Flyte does; the agent is this process."""
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    data = FlyteDirectory(str(data_folder(spec.output, recipe)))
    training = train_in_one if spec.topology.world_size == 1 else train_in_two
    try:
        trained = training(spec=spec, data=data)
    except FlyteRecoverableException as error:
        print("RECOVERABLE", error)
        return AGAIN
    return DONE if trained.record.status == "complete" else BROKEN


def as_torchrun(spec):
    """Start as a person does on a machine of their own: from nothing, as many workers as the spec has processes."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(spec.topology.world_size)]
    launcher += ["--max-restarts", str(MAX_RESTARTS), "-m", "tests.runtime.helpers.kill_points"]
    os.execv(sys.executable, [sys.executable, *launcher, spec.model_dump_json()])


LAUNCHERS = {"plain": train_armed, "task": as_task, "torchrun": as_torchrun}


def start(launcher, spec, log):
    """A fork of this process that ends with what the launcher returns; its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        code = LAUNCHERS[launcher](spec)
    except BaseException:
        traceback.print_exc()
        code = BROKEN
    sys.stdout.flush()
    os._exit(code)


def wait(pid, seconds):
    """How a process ended, as in `subprocess`; None when it has not by then."""
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(descriptor)


def survivors():
    """Processes that an attempt left behind, ended now. This process inherits those whose parents are gone."""
    left, deadline = [], time.monotonic() + GRACE
    while pids := children(os.getpid()):
        command = Path(f"/proc/{pids[0]}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if wait(pids[0], max(0.0, deadline - time.monotonic())) is None:
            left.append(f"{pids[0]} {command}")
            os.kill(pids[0], signal.SIGKILL)
            wait(pids[0], GRACE)
    return left


class Failure(Exception):
    """What must not happen."""


@dataclass
class Run:
    """A run on its way through its kills."""

    spec: RunSpec
    cell: Cell
    log: Path
    usual: float
    struck: list[Kill]
    attempts: int = 0

    @classmethod
    def of(cls, output, name, cell, usual):
        return cls(make_spec(output, name, cell), cell, output / f"{name}.log", usual, [])

    def attempt(self, kill):
        """Start, strike as planned, and wait until all of it is over; whether it said that the run is done."""
        self.attempts += 1
        mark = self.log.with_suffix(f".struck-{self.attempts}")
        os.environ |= {PLAN: json.dumps(asdict(kill)) if kill else "", STRUCK: str(mark)}
        agent = start(self.cell.launcher, self.spec, self.log)
        ended = wait(agent, kill.point * self.usual) if kill and isinstance(kill.point, float) else None
        if ended is None and kill and isinstance(kill.point, float):
            workers = children(agent) if self.cell.launcher != "plain" else [agent]
            strike(kill.victim, agent, workers[kill.rank % len(workers)] if workers else agent)
            mark.touch()
        if ended is None:
            ended = wait(agent, LIMIT)
        if kill and mark.exists():
            self.struck.append(kill)
        if ended is None:
            os.kill(agent, signal.SIGKILL)
            raise Failure(f"an attempt did not end within {LIMIT} s")
        self.judge(ended)
        if left := survivors():
            raise Failure(f"an attempt left processes: {left}")
        if PRIVATE and (leaked := os.listdir("/dev/shm")):
            raise Failure(f"an attempt left shared memory: {leaked}")
        return ended == DONE

    def judge(self, ended):
        """Whether the end of an attempt is what the state of the run says."""
        record = RunFolder.of(self.spec).record
        complete = record.exists() and CompletionRecord.load(record).status == "complete"
        if ended == DONE and not complete:
            raise Failure("an attempt passed for finished, and the run has no complete record")
        # torchrun has one code for all that its workers end with.
        if ended not in (DONE, AGAIN) and ended > 0 and self.cell.launcher != "torchrun":
            raise Failure("an attempt ended as if the user had erred, and would not be tried again")

    def until_done(self, source, kills):
        """Attempts, so many of them killed, until one says that the run is done."""
        while True:
            kill = draw(source, self.cell) if self.attempts < kills else None
            if self.attempt(kill):
                return
            if kill is None:
                raise Failure("an attempt that nobody disturbed did not finish")
            if kill in self.struck and kill.harm and not harm_newest(source, self.spec, kill.harm):
                self.struck[-1] = replace(kill, harm=None)

    def curve(self):
        """All that is computed of each step."""
        points = read_points(RunFolder.of(self.spec).metrics)
        return [(p.step, p.loss, p.grad_norm, p.learning_rate, p.tokens, p.target_tokens) for p in points]


def isolate():
    """Inherit processes whose parents are gone, and have shared memory of our own; whether that is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    return (
        libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0
    )


def prepare_model_and_data(output):
    """A model whose steps and checkpoints take no time, and the data of all runs."""
    spec = make_spec(output, "data", FORKED[0])
    spec = spec.model_copy(update={"model": Model()})
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    tokenizer = prepare(recipe, data_folder(spec.output, recipe), report=print).tokenizer()
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**{**PRESETS["tiny-llama"], **small}))
    set_special_tokens(model, tokenizer)
    model.save_pretrained(output / "pretrained")
    tokenizer.save_pretrained(output / "pretrained")
    spec = make_spec(output, "data", FORKED[0])
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    prepare(recipe, data_folder(spec.output, recipe), report=print)


def main(first, runs, seed, torchruns, output):
    """Runs one after the other, the last ones by torchrun; the number of those that failed."""
    if not PRIVATE:
        print("shared memory is not looked at, because that of others cannot be told apart without privileges")
    import_everything()
    prepare_model_and_data(output)
    undisturbed, failed, kinds, attempts = {}, 0, Counter(), Counter()
    for number in range(first, runs):
        source = random.Random(f"{seed} {number}")
        cell = source.choice(FORKED)
        if number >= runs - torchruns:
            cell = Cell("torchrun", 2, source.choice(("ddp", "fsdp")), source.choice(FRAMEWORKS))
        if cell not in undisturbed:
            begun, reference = time.monotonic(), Run.of(output, f"undisturbed-{cell.name}", cell, 0.0)
            assert reference.attempt(None), reference.log.read_text()
            undisturbed[cell] = time.monotonic() - begun, reference.curve()
        usual, expected = undisturbed[cell]
        run, verdict, begun = Run.of(output, f"run-{number}", cell, usual), "ok", time.monotonic()
        try:
            run.until_done(source, kills=source.randint(1, 3))
            if run.curve() != expected:
                raise Failure(f"other losses than undisturbed: {run.curve()}, not {expected}")
            shutil.rmtree(RunFolder.of(run.spec).root)
        except Failure as failure:
            verdict, failed = f"FAILED: {failure}; see {run.log}", failed + 1
        attempts[cell.launcher] += run.attempts
        kinds.update(map(kind_of, run.struck))
        print(f"{number:3} {cell.name:20} {run.attempts} attempts {time.monotonic() - begun:5.1f} s  {verdict}")
        print(*(f"      {kill}" for kill in run.struck), sep="\n", flush=True)
    print(f"{runs - first} runs, {failed} failed; attempts: {dict(attempts)}; {kinds.total()} kills:")
    print(*(f"{count:5} {kind}" for kind, count in sorted(kinds.items())), sep="\n")
    return failed


def kind_of(kill):
    """What the summary counts."""
    at = kill.point if isinstance(kill.point, str) else "any moment"
    return f"{kill.victim}, {at}" + (f", then {kill.harm}" if kill.harm else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="leave out the runs before this one")
    parser.add_argument("--torchruns", type=int, default=0, help="so many of the runs are started by torchrun")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    configure_logging()
    PRIVATE = isolate()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    ended = main(arguments.first, arguments.runs, arguments.seed, arguments.torchruns, folder)
    if not ended:
        shutil.rmtree(folder)
    sys.exit(ended > 0)
