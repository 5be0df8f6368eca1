"""How bfloat16 weights accumulate updates that are smaller than their rounding step: `optimizer.precision`.

The kernel layer's `adamw_step` and `weight_step` do the arithmetic (`strata_kernels.ops.adamw` has the formulas). This
module tells them which elements of which parameter a local tensor holds, so that random bits do not depend on how a
parameter is sharded.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strata_kernels import Rounding, Shard
from strata_platform.spec.sections.training import Optimizer
from tasks.runtime.optim.state_tensors import REMAINDER, new_state_tensor

ROUNDINGS: dict[str, Rounding] = {
    "fp32_master": "master",
    "stochastic_rounding": "stochastic",
    "nearest": "nearest",
}


@dataclass(frozen=True)
class WeightRounding:
    """How an optimizer rounds the weights that it steps."""

    mode: Rounding
    seed: int
    keys: dict[nn.Parameter, int]
    """A key for the random bits of each parameter, the same in every process and every attempt."""

    @classmethod
    def of(cls, model: nn.Module, settings: Optimizer, seed: int) -> WeightRounding:
        """The rounding of `optimizer.precision`. Keys are hashes of the parameters' names."""
        keys = {parameter: zlib.crc32(name.encode()) for name, parameter in model.named_parameters()}
        return cls(ROUNDINGS[settings.precision], seed, keys)

    def remainder_of(self, parameter: nn.Parameter, state: dict[str, Tensor], *, paged: bool = False) -> Tensor | None:
        """The low bits of the parameter's master weight in `state`, zeros at first; None, and removed from `state`, if
        the parameter has no master weight.

        A run may change `optimizer.precision` between attempts. It then starts from the rounded weights.
        """
        if self.mode != "master" or parameter.dtype != torch.bfloat16:
            state.pop(REMAINDER, None)
            return None
        if REMAINDER not in state:
            state[REMAINDER] = new_state_tensor(parameter, parameter.shape, torch.int16, paged=paged)
        return state[REMAINDER]

    def shard_of(self, parameter: nn.Parameter) -> Shard:
        """The elements of the parameter that this process holds."""
        key = self.keys[parameter]
        if not isinstance(parameter, DTensor):
            return Shard(key)
        # One chunk, or none if other ranks have all rows.
        chunks = parameter.__create_chunk_list__()
        if not chunks or not parameter._local_tensor.numel():
            return Shard(key)
        (chunk,) = chunks
        return Shard.of(key, parameter.shape, chunk.sizes, chunk.offsets)


def has_bfloat16(parameters: list[nn.Parameter]) -> bool:
    """Whether rounding can lose updates of any of these weights."""
    return any(parameter.dtype == torch.bfloat16 for parameter in parameters)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of `tensor`, without autograd. Cheaper than `to_local()`, which matters for thousands of
    calls per step."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
