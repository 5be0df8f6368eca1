"""Expert parallelism: each rank of a group has some experts of every layer, and computes them for the whole group.

The ranks of a group read rows of their own, and FSDP shards all but the experts over all ranks, as without it. Before
the experts of a layer, each rank gathers the tokens of its group and what the router gave them. The fused operator
skips the experts of other ranks. Behind it, each rank sends the others what its experts make of their tokens, and sums
what it gets. So a token's experts meet the same weights as in one process, wherever they are.

A layer sends (P - 1) · T · H values per rank and direction, for P ranks in a group, T tokens of a rank and H features.
To send every token to each of its K experts instead takes K · (P - 1) / P · T · H: less only if K < P.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from strata_kernels.patch.discover_experts import has_experts
from strata_kernels.patch.structure import original_class
from strata_platform.spec import RunSpec
from tasks.runtime.models.adapters.quantization import NF4_BLOCK
from tasks.runtime.models.build import build_model_on_meta, patch
from tasks.runtime.parallel.collectives import Group
from tasks.runtime.parallel.parallel_linear import shard_parameters

# Rows of the operator are rounded up to this part of those that a rank has on average: few sizes for the allocator and
# the launch cache.
_BUCKETS = 8
# Triton compiles another kernel if the number of rows is not a multiple of 16.
_MULTIPLE = 16


def require_expert_parallel_support(spec: RunSpec) -> None:
    """Raises ValueError if `parallel.expert_parallel` does not support the model. Reads no weights."""
    ways = spec.parallel.expert_parallel
    if ways == 1:
        return
    field, name = f"parallel.expert_parallel {ways}", spec.model.name
    model = build_model_on_meta(spec.model)
    report = patch(model, spec.kernels)
    assert report is not None, "the spec takes the fused operator"
    kept, modules = report.kept.get("experts", ()), patched_experts(model)
    if kept or not modules:
        reason = f"keeps code of its own: {kept[0]}" if kept else "has no experts that the operator computes"
        raise ValueError(
            f"{field} needs experts that the fused operator computes, and model.name {name!r} {reason}; set "
            "parallel.expert_parallel to 1"
        )
    shards = spec.model_shards // ways
    for experts in modules:
        for parameter in experts.parameters(recurse=False):
            if spec.packs_experts and parameter.dim() == 3 and parameter[0].numel() % NF4_BLOCK:
                raise ValueError(
                    f"{field} splits packed weights by experts, but an expert has {parameter[0].numel()} weights, no "
                    f"multiple of {NF4_BLOCK}; set parallel.expert_parallel to 1, or adapter.quantization to 'none'"
                )
            dimension = shard_dimension(parameter, ways, shards)
            if dimension != 0 and spec.optimizer.type == "adamw_8bit":
                raise ValueError(
                    f"{field} leaves {parameter.shape[0] // ways} experts to {shards} processes, which takes parts of "
                    "their rows, but optimizer.type 'adamw_8bit' scales moments by blocks of whole rows; raise "
                    "parallel.expert_parallel, or set optimizer.type to 'adamw'"
                )


def shard_dimension(weight: Tensor, ways: int, shards: int) -> Literal[0, 1]:
    """The dimension of `weight` [E, N, ...] that FSDP shards over `shards` ranks with equal experts of `ways`.

    Raises:
        ValueError: experts are not divisible by `ways`, or what is left by `shards` in neither dimension.
    """
    experts, width = weight.shape[:2]
    if experts % ways:
        divisors = ", ".join(str(n) for n in range(1, ways) if experts % n == 0)
        raise ValueError(
            f"parallel.expert_parallel {ways} does not divide the {experts} experts of a layer; set it to a divisor of "
            f"the number of processes such as {divisors}"
        )
    if experts // ways % shards == 0:
        return 0
    if width % shards == 0:
        return 1
    raise ValueError(
        f"parallel.expert_parallel {ways} leaves {experts // ways} experts with {width} features to {shards} "
        "processes, which divide neither; raise parallel.expert_parallel, or start another number of processes"
    )


def patched_experts(model: nn.Module) -> list[nn.Module]:
    """The modules in `model` whose experts the fused operator computes, in the order of the layers."""
    return [module for module in model.modules() if has_experts(module) and original_class(module) is not type(module)]


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> list[ParallelExperts]:
    """Split the experts of `model`, which is on the meta device and patched, over `mesh`, which has one dimension.

    Only their classes change: names, hooks and the state dict stay.

    Returns:
        The modules of experts. Their parameters are DTensors on `mesh`.
    """
    modules: list[Any] = patched_experts(model)
    longest = _Longest()
    for number, experts in enumerate(modules):
        parameters, packed = list(experts.parameters(recurse=False)), vars(experts).get("restore_weight")
        cls: Any = type(experts)
        experts.__class__ = _parallel(cls)
        experts.group, experts.longest, experts.is_first = Group.of(mesh), longest, number == 0
        experts.count = (packed.count if packed else parameters[0].shape[0]) // mesh.size()
        experts.begin = mesh.get_local_rank() * experts.count
        shard_parameters(experts, mesh, [Shard(0)] * len(parameters))
    return modules


class _Longest:
    """The most tokens that a rank has in the current forward pass: shorter ones are padded for the collectives."""

    tokens = 0

    def agree(self, tokens: int) -> None:
        """A collective of the host, so that no rank waits for its device."""
        if not dist.is_initialized():
            return
        most = torch.tensor(tokens)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        self.tokens = int(most)


class ParallelExperts(nn.Module):
    """The part of a module of experts that one rank has."""

    group: Group
    longest: _Longest
    is_first: bool
    # How many experts are here, and the number of the first one.
    count: int
    begin: int
    restore_weight: Any

    def local_weight(self, name: str) -> Tensor:
        """The part of a weight or bias. Its gradient is divided by the ranks of the group."""
        weight = getattr(self, name)
        assert isinstance(weight, DTensor)
        # FSDP averages over ranks that have the same experts, and the loss is scaled for an average over all.
        local: Tensor = _ScaleGradient.apply(weight.to_local(), 1 / self.group.size)
        return local

    def keep_scales(self) -> None:
        """Of packed weights, once they are there: keep the scales of this rank's experts."""
        if "restore_weight" in vars(self):
            self.restore_weight.keep_scales(self.begin, self.count)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **options: Any) -> Tensor:
        """[T, H], [T, K], [T, K] → [T, H]."""
        tokens, group = hidden_states.shape[0], self.group
        if self.is_first:
            self.longest.agree(tokens)
        more = self.longest.tokens - tokens
        # No rank has an expert below 0.
        index = group.all_gather(_padded(top_k_index.int(), more, -1)) - self.begin
        own = (index >= 0) & (index < self.count)
        slots = _HostCount(own)
        x = _GatherTokens.apply(_padded(hidden_states, more), group)
        weights = _GatherTokens.apply(_padded(top_k_weights, more), group)
        if options.get("adapters"):
            # Those of all experts are here. FSDP averages their gradients over all ranks, of which one per group has
            # some of an expert: the average that the loss is scaled for.
            options["adapters"] = {name: self._own(adapter) for name, adapter in options["adapters"].items()}
        # A rank's share of all slots, if experts are in equal use.
        mean = own.numel() // group.size
        parts = super().forward(x, index, weights, max_slots=_rounded_up(slots.get(mean), mean), **options)
        whole: Tensor = _SumTokens.apply(parts, group)
        # FSDP warns of modules that return a view.
        return whole[:tokens].clone() if more else whole

    def _own(self, adapter: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor, float]:
        left, right, scale = adapter
        own = slice(self.begin, self.begin + self.count)
        return left[own], right[own], scale


@cache
def _parallel(cls: Any) -> Any:
    return type(cls.__name__, (ParallelExperts, cls), {"__module__": cls.__module__})


def _padded(x: Tensor, more: int, value: int = 0) -> Tensor:
    return functional.pad(x, (0, 0, 0, more), value=value) if more else x


def _rounded_up(slots: int, mean: int) -> int:
    step = -(-max(mean, 1) // (_BUCKETS * _MULTIPLE)) * _MULTIPLE
    return max(-(-slots // step), 1) * step


class _HostCount:
    """How many are true. The copy to the host runs while the device goes on."""

    def __init__(self, true: Tensor) -> None:
        self._count = None if true.is_meta else true.sum().to("cpu", non_blocking=True)
        self._arrived = torch.cuda.current_stream(true.device).record_event() if true.is_cuda else None

    def get(self, otherwise: int) -> int:
        """Wait for it. `otherwise` is the result for a meta tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return otherwise if self._count is None else int(self._count)


class _ScaleGradient(torch.autograd.Function):
    """Identity; the backward pass multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _GatherTokens(torch.autograd.Function):
    """[T, ...] → [size T, ...], the tokens of all ranks; the backward pass sums their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_scatter(gradient), None


class _SumTokens(torch.autograd.Function):
    """[size T, ...] → [T, ...], the sum over ranks of what they have for this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum_scatter(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradient), None
