"""Ranks and sizes of the job's processes, read from torch elastic's environment variables; object collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from strata_platform.spec.run_spec import Topology
from tasks.runtime.process.errors import Unreachable

TIMEOUT = timedelta(minutes=30)
"""Timeout of the training collectives and of the rendezvous."""

LONG_TIMEOUT = timedelta(days=7)
"""Timeout of collectives in which all ranks wait for rank 0: to prepare data, or to read or upload a checkpoint.

A lost process is still noticed at once, by its closed connections, and a lost machine by the elastic agents."""

_connections = count()

_long_timeout_group: dist.ProcessGroup | None = None
"""The Gloo group in which the ranks wait for rank 0, once this process is connected."""

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Ranks and sizes of the job; one process of rank 0 unless torchrun or a Flyte elastic task started it.

    Ranks are laid out as (dp, cp, tp), tensor-parallel ranks next to each other: rank = (dp_rank * cp_size + cp_rank) *
    tp_size + tp_rank.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    """Tensor-parallel size: ranks that hold shards of the same matrices and compute the same loss."""
    cp_size: int = 1
    """Context-parallel size: tensor-parallel groups that hold shards of the same rows."""
    group: dist.ProcessGroup | None = None
    """Process group of the collectives below; None is the default group, which training uses."""

    @classmethod
    def from_environment(cls, *, tp_size: int = 1, cp_size: int = 1) -> Processes:
        """Read RANK, LOCAL_RANK and WORLD_SIZE. Raises ValueError when only some of them are set."""
        if "RANK" not in os.environ:
            return cls()
        missing = [name for name in ("LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]
        if missing:
            raise ValueError(
                f"the environment has RANK {os.environ['RANK']} and no {' and no '.join(missing)}, as in pods that "
                "call torchrun; start the run with torchrun, or unset RANK for a single process"
            )
        rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        return cls(rank, local_rank, world_size, tp_size, cp_size)

    @property
    def dp_cp_size(self) -> int:
        """Ranks, tensor parallelism aside, whose losses add up to the loss of a step: `dp_size * cp_size`."""
        return self.world_size // self.tp_size

    @property
    def dp_cp_rank(self) -> int:
        """Index of this process among the `dp_cp_size` ranks: `dp_rank * cp_size + cp_rank`."""
        return self.rank // self.tp_size

    @property
    def dp_size(self) -> int:
        """Data-parallel size: groups of ranks that each read rows of their own."""
        return self.dp_cp_size // self.cp_size

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank."""
        return self.dp_cp_rank // self.cp_size

    @property
    def cp_rank(self) -> int:
        """Context-parallel rank: which shard of its rows this process computes."""
        return self.dp_cp_rank % self.cp_size

    @property
    def tp_rank(self) -> int:
        """Tensor-parallel rank: which shards of matrices this process holds."""
        return self.rank % self.tp_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the main process, which alone writes files that the job has one of."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """This process's GPU, or the CPU without one."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def require_world_size(self, topology: Topology) -> None:
        """Raises ValueError unless the job has as many processes as `topology` states."""
        asked = topology.world_size
        if self.world_size != asked:
            shape = f"topology.nnodes {topology.nnodes} x topology.nproc_per_node {topology.nproc_per_node}"
            raise ValueError(
                f"{shape} = {asked} processes, but {self.world_size} were started; start them with "
                f"'torchrun --nnodes {topology.nnodes} --nproc-per-node {topology.nproc_per_node} "
                f"-m tasks.runtime SPEC', or set topology and parallel to what was started"
            )

    def connect(self) -> None:
        """Join the job's process group; a no-op for a single process."""
        if self.world_size == 1 or dist.is_initialized():
            return
        backend, device = "gloo", None
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
            backend, device = "cpu:gloo,cuda:nccl", self.device
        store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
        # torchrun's static rendezvous keeps its store across restarts and across sessions of a process. Without a new
        # prefix, the first process to come back would read its peers' old addresses.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"restart-{restart}/connection-{next(_connections)}", store
        )
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT, device_id=device
        )
        global _long_timeout_group
        _long_timeout_group = _new_long_timeout_group()

    def barrier(self) -> None:
        """Wait for all ranks of the job."""
        if self.world_size > 1:
            dist.barrier()

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and broadcast its result, or its ValueError or Unreachable, to every rank.

        A collective: all ranks return the same value or raise the same error, so none waits for one that has failed.
        """
        if self.world_size == 1:
            return function()
        outcome: list[Any] = [None, None]
        error_here: ValueError | Unreachable | None = None
        if self.is_main:
            try:
                outcome[0] = function()
            except (ValueError, Unreachable) as error:
                kind = Unreachable if isinstance(error, Unreachable) else ValueError
                error_here, outcome[1] = error, (kind, str(error))
        # Over Gloo: the GPUs may be busy, and Gloo notices a lost peer at once.
        dist.broadcast_object_list(outcome, src=0, group=self.group or _long_timeout_group, device=torch.device("cpu"))
        if outcome[1] is not None:
            kind, message = outcome[1]
            raise error_here or kind(message)
        result: T = outcome[0]
        return result

    def gather(self, value: T) -> list[T] | None:
        """Values of all ranks in order of rank, on rank 0; None elsewhere. A collective. PyTorch: gather_object."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, group=self.group)
        return values

    def scatter(self, values: list[T] | None) -> T:
        """This rank's element of rank 0's list. A collective. PyTorch: scatter_object_list."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, group=self.group)
        value: T = received[0]
        return value

    def tp_share(self, values: Sequence[T]) -> list[T]:
        """Of values that all ranks of a tensor-parallel group have, those that this rank is to work on: consecutive
        ones, of equal number on all ranks if it is divisible.
        """
        size = -(-len(values) // self.tp_size)
        return list(values[self.tp_rank * size : (self.tp_rank + 1) * size])

    def tp_gather(self, value: T) -> list[T]:
        """Values of the ranks of this tensor-parallel group, in order. A collective of all ranks. PyTorch:
        all_gather_object.
        """
        if self.tp_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        first = self.rank - self.tp_rank
        return values[first : first + self.tp_size]

    def in_new_group(self) -> Processes:
        """The same ranks with a Gloo group of their own, for collectives in another thread. A collective."""
        if self.world_size == 1:
            return self
        return replace(self, group=_new_long_timeout_group())

    def all_true(self, value: bool) -> bool:
        """Whether `value` is true on every rank. A collective. PyTorch: all_reduce with ReduceOp.MIN."""
        if self.world_size == 1:
            return value
        result = torch.tensor(int(value))
        dist.all_reduce(result, op=dist.ReduceOp.MIN)
        return bool(result)

    def disconnect(self) -> None:
        """Leave the process group."""
        global _long_timeout_group
        _long_timeout_group = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _new_long_timeout_group() -> dist.ProcessGroup:
    """A new Gloo group of all ranks. A collective."""
    group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member of the group"
    return group
