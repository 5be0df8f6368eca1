"""`python -m tasks.runtime.launch`: the first process of each pod of a run that Kubernetes starts without Flyte.

It starts the pod's training processes, as torchrun does, and ends with the exit code of what ended them, so that
Kubernetes decides by `strata_platform.outcomes` whether another attempt may succeed. It imports no torch, and needs no
rendezvous: the number of pods is fixed, and the first one's address is known. If a process or a pod is lost, all
pods start again.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from strata_platform.errors import SpecError
from strata_platform.outcomes import BAD_INPUT, COMPLETE, PREEMPTED, Outcome, outcome_of_exit, outcome_of_job
from strata_platform.pod_settings import SPEC, STOP_SECONDS
from strata_platform.spec import RunSpec, dump_spec, load_spec
from strata_platform.spec.run_spec import Topology
from tasks.runtime.metrics import startup
from tasks.runtime.process.error_explanations import MemoryKills
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import Preempted, die_with_parent, raise_on_sigterm
from tasks.runtime.run_folder.kept_logs import kept_logs

log = logging.getLogger("tasks.runtime.launch")

POD = "JOB_COMPLETION_INDEX"
"""Environment variable with the number of this pod, which Kubernetes sets in pods of an indexed Job."""

_LOOK_SECONDS = 0.1


def environments(name: str, topology: Topology, pod: int) -> list[dict[str, str]]:
    """What torchrun tells each process of the `pod`-th pod; MASTER_ADDR and MASTER_PORT are those of the pod."""
    here, everywhere = topology.nproc_per_node, topology.world_size
    if everywhere == 1:
        return [{}]
    common = {
        "WORLD_SIZE": str(everywhere),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(pod),
        "TORCHELASTIC_RUN_ID": name,
        # As torchrun, which keeps several processes from using every core each.
        **({} if here == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}),
    }
    return [{**common, "LOCAL_RANK": str(local), "RANK": str(pod * here + local)} for local in range(here)]


def run_processes(command: Sequence[str], environments: Sequence[dict[str, str]]) -> tuple[list[int], bool]:
    """Run a process for each environment. If one fails, or this one gets SIGTERM, all are told to stop.

    Returns:
        Their exit codes, as `subprocess` counts, and whether this process got SIGTERM.
    """
    children: list[subprocess.Popen[bytes]] = []
    try:
        with raise_on_sigterm():
            for more in environments:
                child = subprocess.Popen(command, env=os.environ | more, preexec_fn=die_with_parent)
                children.append(child)
            # The list, and no lazy look: each process has to be asked.
            while None in (codes := [child.poll() for child in children]) and not any(codes):
                time.sleep(_LOOK_SECONDS)
    except Preempted:
        return _stopped(children), True
    return _stopped(children), False


def _stopped(children: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Tell the processes that are left to stop, kill them after STOP_SECONDS, and return all exit codes."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    end = time.monotonic() + STOP_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return [child.returncode for child in children]


def main() -> int:
    """Start this pod's processes and return the exit code that says how they ended."""
    startup.mark_pod()
    configure_logging()
    try:
        spec = load_spec(os.environ[SPEC])
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT.exit_code
    pod = int(os.environ.get(POD, "0"))
    first = pod * spec.topology.nproc_per_node
    with kept_logs(spec, first):
        outcome = _run(spec, pod, first)
    # A shell's way to count signals, and a container's.
    return outcome.exit_code if outcome.exit_code >= 0 else 128 - outcome.exit_code


def _run(spec: RunSpec, pod: int, first: int) -> Outcome:
    """Run the processes of the `pod`-th pod, of which `first` is the rank of the first one."""
    kills = MemoryKills()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec.yaml"
        file.write_text(dump_spec(spec), encoding="utf-8")
        command = [sys.executable, "-u", "-m", "tasks.runtime", str(file)]
        codes, stopped = run_processes(command, environments(spec.name, spec.topology, pod))
    outcome = outcome_of_job(codes)
    if stopped and outcome is not COMPLETE:
        outcome = PREEMPTED
    if message := _message(outcome, codes, first, kills, spec.resources.memory):
        print(f"error: {message}", file=sys.stderr)
    return outcome


def _message(outcome: Outcome, codes: Sequence[int], first: int, kills: MemoryKills, memory: str) -> str | None:
    """What the processes have not said themselves of their end; `first` is the rank of the pod's first one."""
    if outcome.kind == "killed":
        rank = first + next(local for local, code in enumerate(codes) if outcome_of_exit(code).kind == "killed")
        return f"rank {rank}: {kills.sentence(memory) or outcome.sentence}"
    return outcome.sentence if outcome.kind in ("hung", "preempted") else None


if __name__ == "__main__":
    sys.exit(main())
