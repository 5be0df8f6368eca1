"""Which process of the job this is, as torch elastic says in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from strata_platform.spec import RunSpec
from tasks.runtime.process.errors import Unreachable

TIMEOUT = timedelta(minutes=30)
"""How long collectives of training wait for a process, and processes for each other at the start."""

PATIENCE = timedelta(days=7)
"""How long the others wait for what the main process alone does: prepare data, read or copy a checkpoint. One that is
lost is noticed by its connections, and a machine that is lost by the agents."""

_CONNECTIONS = count()

_patient: dist.ProcessGroup | None = None
"""The group that a connected process waits for the main one in."""

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Rank and size of the job. One process, rank 0, when not started by torchrun or a Flyte elastic task."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    copies: int = 1
    """Processes, next to each other by rank, that compute the same loss together."""
    slices: int = 1
    """How many of those groups, likewise, have parts of the same rows."""
    group: dist.ProcessGroup | None = None
    """Whom the collectives below are with; None is the group that training uses."""

    @classmethod
    def from_environment(cls, *, copies: int = 1, slices: int = 1) -> Processes:
        """This process as torch elastic started it. Raises ValueError where something else told it a part of that."""
        if "RANK" not in os.environ:
            return cls()
        missing = [name for name in ("LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]
        if missing:
            raise ValueError(
                f"the environment has RANK {os.environ['RANK']} and no {' and no '.join(missing)}, as of pods that "
                "call torchrun; start the run with torchrun, or unset RANK for one process alone"
            )
        rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        return cls(rank, local_rank, world_size, copies, slices)

    @property
    def shares(self) -> int:
        """How many add to a step's loss: processes, or groups of those that compute the same."""
        return self.world_size // self.copies

    @property
    def share(self) -> int:
        """Which of them this process is, or is in."""
        return self.rank // self.copies

    @property
    def readers(self) -> int:
        """How many of them, or of groups that cut rows, read rows of their own."""
        return self.shares // self.slices

    @property
    def reader(self) -> int:
        """Which of those this process is, or is in."""
        return self.share // self.slices

    @property
    def slice(self) -> int:
        """Which part of its rows this process has."""
        return self.share % self.slices

    @property
    def is_main(self) -> bool:
        """Whether this process writes what the job writes once."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """This process's GPU, or the CPU where there is none."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def require(self, spec: RunSpec) -> None:
        """Raises ValueError when the job does not have the shape that the spec states."""
        asked = spec.topology.world_size
        if self.world_size != asked:
            shape = f"topology.nnodes {spec.topology.nnodes} x topology.nproc_per_node {spec.topology.nproc_per_node}"
            raise ValueError(
                f"{shape} = {asked} processes, but {self.world_size} were started; start them with "
                f"'torchrun --nnodes {spec.topology.nnodes} --nproc-per-node {spec.topology.nproc_per_node} "
                f"-m tasks.runtime SPEC', or set topology and parallel to what was started"
            )

    def connect(self) -> None:
        """Join the job's process group; nothing to do for a single process."""
        if self.world_size == 1 or dist.is_initialized():
            return
        backend, device = "gloo", None
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
            backend, device = "cpu:gloo,cuda:nccl", self.device
        store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
        # torchrun's static rendezvous keeps its store over restarts, and over the sessions of a process: without a
        # prefix of its own, one that comes back first would meet the addresses that its peers had before.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"restart-{restart}/connection-{next(_CONNECTIONS)}", store
        )
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT, device_id=device
        )
        global _patient
        _patient = _patient_group()

    def barrier(self) -> None:
        """Wait for all processes of the job."""
        if self.world_size > 1:
            dist.barrier()

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` on the main process; every process gets its result, or raises its ValueError or Unreachable.

        A collective: what one process reads or refuses, all do, and none waits for one that has given up.
        """
        if self.world_size == 1:
            return function()
        outcome: list[Any] = [None, None]
        refusal: ValueError | Unreachable | None = None
        if self.is_main:
            try:
                outcome[0] = function()
            except (ValueError, Unreachable) as error:
                kind = Unreachable if isinstance(error, Unreachable) else ValueError
                refusal, outcome[1] = error, (kind, str(error))
        # On the CPU: the GPUs may be busy, and a lost peer is noticed there at once.
        dist.broadcast_object_list(outcome, src=0, group=self.group or _patient, device=torch.device("cpu"))
        if outcome[1] is not None:
            kind, said = outcome[1]
            raise refusal or kind(said)
        result: T = outcome[0]
        return result

    def gather(self, value: T) -> list[T] | None:
        """The values of all processes by rank, on the main process; None on the others. A collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, group=self.group)
        return values

    def scatter(self, values: list[T] | None) -> T:
        """This process's of the values that the main process has. A collective."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, group=self.group)
        value: T = received[0]
        return value

    def in_new_group(self) -> Processes:
        """The same processes, whose collectives, on the CPU, do not mix with those of any other group. A collective."""
        if self.world_size == 1:
            return self
        return replace(self, group=_patient_group())

    def all_true(self, value: bool) -> bool:
        """Whether `value` is true in every process. A collective."""
        if self.world_size == 1:
            return value
        verdict = torch.tensor(int(value))
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict)

    def disconnect(self) -> None:
        """Leave the process group."""
        global _patient
        _patient = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _patient_group() -> dist.ProcessGroup:
    """All processes, on the CPU. A collective."""
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(group, dist.ProcessGroup), "new_group is called by its members alone"
    return group
