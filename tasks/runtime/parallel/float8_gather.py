"""FSDP2 gathers the weights of FP8 layers in FP8: half of the bytes, and the bits that a cast after gathering has.

Each rank casts its shard with the scale of the whole weight, whose largest magnitude all ranks find together before a
forward pass. The backward pass gathers with the same scale, because a weight changes only after its own gradient.

FSDP2 asks a shard that has `fsdp_pre_all_gather` what to send, and `fsdp_post_all_gather` what it is
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py). It means these for classes of tensors. Here they are attributes of
plain tensors, which optimizers and checkpoints take as such.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from strata_kernels.ops.float8.cast import inverse_of
from strata_kernels.ops.float8.linear import quantize_weight
from tasks.runtime.models.float8 import Float8Linear

log = logging.getLogger(__name__)


def gather_in_float8(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Gather the weights of the layers in FP8 that have one scale in FP8. After sharding and materializing.

    Args:
        model: sharded by `fully_shard`.
        mesh: of the ranks that shard a weight.
        dtype: of forward passes, which gathered weights otherwise have.
    """
    gathered = []
    for module in model.modules():
        # PyTorch before 2.15 has no such list; it would round gradients to the dtype that was gathered.
        groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()) if isinstance(module, FSDPModule) else ()
        for parameter in (parameter for group in groups for parameter in group.fsdp_params):
            layer, name = parameter._module_info.module, parameter._module_info.param_name
            # FSDP2 replaces shards that it has to pad.
            even = parameter._orig_size[0] % mesh.size() == 0
            if type(layer) is Float8Linear and layer.scaling == "tensorwise" and name == "weight" and even:
                gathered.append(_Weight(layer, parameter._sharded_local_tensor))
                parameter._init_extensions()
    if not gathered:
        return

    def find_scales(*_: Any) -> None:
        _find_scales(gathered, mesh, dtype)

    # Before FSDP2's own, which gathers the first weights.
    model.register_forward_pre_hook(find_scales, prepend=True)
    log.info("training.float8: the weights of %d linear layers are gathered in FP8", len(gathered))


class _Weight:
    """A sharded weight as FSDP2 gathers it."""

    def __init__(self, layer: Float8Linear, shard: Tensor) -> None:
        self.layer, self.shard = layer, shard
        self.amax: Tensor | None = None
        """[1], int32: the bits of the largest magnitude of the whole weight."""
        asked: Any = shard
        asked.fsdp_pre_all_gather, asked.fsdp_post_all_gather = self._send, self._receive

    def _send(
        self,
        mesh: DeviceMesh,
        size: torch.Size,
        stride: tuple[int, ...],
        module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor], None]:
        assert self.amax is not None, "gathered before the first forward pass"
        values, _ = quantize_weight(self.shard.to(policy.param_dtype or self.shard.dtype), self.amax)
        # Not every collective knows FP8.
        return (values.view(torch.uint8),), None

    @staticmethod
    def _receive(
        outputs: tuple[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        (values,) = outputs
        # Of the first gathering; later ones fill the same memory.
        return (values.view(torch.float8_e4m3fn), (values,)) if out is None else None


@torch.no_grad()
def _find_scales(weights: list[_Weight], mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """The largest magnitude of each weight in the dtype of forward passes, by one collective.

    The factors that undo the scales are computed here, in the stream of the layers, which read them: FSDP2 gathers in
    streams of its own, whose memory is used again before the layers have run.
    """
    largest = torch.stack(torch._foreach_norm([weight.shard for weight in weights], float("inf")))
    # Rounding keeps the order. Compared as whole numbers, NaN is larger than all others.
    bits = largest.to(dtype).float().view(torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.MAX, mesh.get_group())
    for weight, amax, inverse in zip(weights, bits.split(1), inverse_of(bits).split(1), strict=True):
        weight.amax, weight.layer.weight_inverse = amax, inverse
