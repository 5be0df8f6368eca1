"""How bfloat16 weights take updates that are smaller than their rounding step: `optimizer.precision`.

The kernel layer's `adamw_step` and `weight_step` do the arithmetic (`strata_kernels.ops.adamw` has the formulas). This
module holds what they need to know of the runtime's parameters: local tensors of DTensors, and which elements of which
parameter they are, so that random bits are the same however a parameter is sharded.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strata_kernels import Rounding, Shard
from strata_platform.spec import RunSpec
from tasks.runtime.optim.state_tensors import REMAINDER, new_slot

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
    """A number for each parameter, which its random bits depend on: the same in every process and every attempt."""

    @classmethod
    def of(cls, model: nn.Module, spec: RunSpec) -> WeightRounding:
        """What `optimizer.precision` asks for. Keys are hashes of parameters' names."""
        keys = {parameter: zlib.crc32(name.encode()) for name, parameter in model.named_parameters()}
        return cls(ROUNDINGS[spec.optimizer.precision], spec.seed, keys)

    def remainder_of(self, parameter: nn.Parameter, state: dict[str, Tensor], *, paged: bool = False) -> Tensor | None:
        """The parameter's remainder in `state`, zeros at first; None, and none is kept, where there is nothing to keep.

        A run may change `optimizer.precision` between attempts: it then starts from the rounded weights.
        """
        if self.mode != "master" or parameter.dtype != torch.bfloat16:
            state.pop(REMAINDER, None)
            return None
        if REMAINDER not in state:
            state[REMAINDER] = new_slot(parameter, parameter.shape, torch.int16, paged=paged)
        return state[REMAINDER]

    def shard_of(self, parameter: nn.Parameter) -> Shard:
        """Which elements of which parameter this process has."""
        key = self.keys[parameter]
        if not isinstance(parameter, DTensor):
            return Shard(key)
        # One chunk, or none where the others have all rows.
        chunks = parameter.__create_chunk_list__()
        if not chunks or not parameter._local_tensor.numel():
            return Shard(key)
        (chunk,) = chunks
        return Shard.of(key, parameter.shape, chunk.sizes, chunk.offsets)


def has_bfloat16(parameters: list[nn.Parameter]) -> bool:
    """Whether rounding can lose updates of any of these weights."""
    return any(parameter.dtype == torch.bfloat16 for parameter in parameters)


def local(tensor: Tensor) -> Tensor:
    """This process's part of `tensor`, without autograd. Cheaper than `to_local()`, for thousands of calls a step."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
