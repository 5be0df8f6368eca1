"""How the work is split over processes: one file for each value of `parallel.type`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from tasks.runtime.parallel.ddp import Ddp
from tasks.runtime.parallel.fsdp import Fsdp
from tasks.runtime.parallel.single import Single
from tasks.runtime.processes import Processes


class Strategy(Protocol):
    """Splits a model over the processes of a job, and averages their gradients."""

    def wrap(self, model: PreTrainedModel, *, weights_follow: bool) -> nn.Module:
        """What a forward pass in training calls: `model`, on this process's device, split. A collective.

        The main process's model has the weights that training starts from, and those of the others are empty; with
        `weights_follow` all are, and are filled later.
        """

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; only after the step's `last` need gradients be averaged."""


def strategy_of(spec: RunSpec, processes: Processes) -> Strategy:
    """The strategy that `parallel.type` names; a single process has nothing to split."""
    if processes.world_size == 1:
        return Single(processes)
    return {"ddp": Ddp, "fsdp": Fsdp}[spec.parallel.type](spec, processes)
