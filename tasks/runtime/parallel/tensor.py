"""Tensor parallelism: the matrices of a layer cut over processes that compute the same rows.

transformers says for each family how its projections are cut (`base_model_tp_plan`), and PyTorch's styles cut them: of
attention a process has some of the heads, of the feed-forward layer some of the columns, and what it computes in
between are plain tensors of its own, which the kernel layer sees. The residual stream, and the norms on it, are whole
in every process. Embeddings and head are cut by the vocabulary; the fused loss takes a head of that kind as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PretrainedConfig, PreTrainedModel

from strata_platform.spec import RunSpec
from tasks.runtime.model import load_config

_STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    # The layer computes with all columns: every process gathers them, and cuts what it made of them again.
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
# Norms of heads, of which a process has some: whole weights, whose gradient is a sum over the processes.
_OF_HEADS = "replicated_with_grad_allreduce"

# What must be cut in equal parts, by the names that configurations have for it.
_CUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def require_divisible(spec: RunSpec) -> None:
    """Raises ValueError when the model cannot be cut into `parallel.tensor_parallel` parts. Reads no weights."""
    ways = spec.tensor_parallel
    if ways == 1:
        return
    config = load_config(spec)
    _plan(config)
    sizes = {name: getattr(config, name) for name in _CUT if getattr(config, name, None)}
    for name, size in sizes.items():
        if size % ways:
            others = ", ".join(str(n) for n in range(1, ways) if not any(size % n for size in sizes.values()))
            raise ValueError(
                f"parallel.tensor_parallel {ways} does not divide {name} {size} of model.name {spec.model.name!r}; "
                f"set it to one of {others}"
            )


def cut(model: PreTrainedModel, mesh: DeviceMesh, *, whole_logits: bool) -> None:
    """Cut the weights of `model`, which has no memory for them, over the one dimension of `mesh`.

    With `whole_logits` the head gives those of the whole vocabulary to every process. Without, its weight is cut, and
    nothing is hooked to it: the fused loss reads it.
    """
    base, plan = model.base_model, _plan(model.config)
    paths = dict(_expanded(base, plan))
    for path, style in paths.items():
        if style != _OF_HEADS:
            _apply(base.get_submodule(path), mesh, _STYLES[style]())
    for parent in {path.rpartition(".")[0] for path, style in paths.items() if style in _STYLES}:
        # Its input goes to several projections: the sum over the processes of its gradient is taken once.
        base.get_submodule(parent).register_forward_pre_hook(_Shared(mesh), with_kwargs=True)
    for path, module in base.named_modules():
        # Between projections, and not said to have all columns: it has seen those of this process alone.
        known = paths.get(path)
        between = known is None and "colwise" in _styles_in(paths, path.rpartition(".")[0])
        if (known == _OF_HEADS or between) and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(_Summing(mesh))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    _apply(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if tied:
        head.weight = embedding.weight
    for name, parameter in head.named_parameters():
        if not isinstance(parameter, DTensor):
            part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            head.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    if whole_logits:
        head.register_forward_pre_hook(lambda _, args: (_as_replicated(args[0], mesh),))
        head.register_forward_hook(lambda _, args, logits: logits.full_tensor())


def _apply(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    # None: every process cuts its part out of what it has, which is nothing but shapes.
    parallelize_module(module, mesh, style, src_data_rank=None)


def _plan(config: PretrainedConfig) -> dict[str, str]:
    """Paths in the base model, with `*` for the number of a layer → how it is cut."""
    told: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    # What it says of embeddings, in some versions, is left out.
    plan = {path: style for path, style in told.items() if path.startswith("layers.")}
    unknown = sorted(set(plan.values()) - {*_STYLES, _OF_HEADS})
    if not plan or unknown:
        reason = f"cuts it in ways that are not known here: {', '.join(unknown)}" if unknown else "does not say how"
        raise ValueError(
            f"parallel.tensor_parallel cuts the matrices of a model as transformers says, and for model type "
            f"{config.model_type!r} it {reason}; set parallel.tensor_parallel to 1"
        )
    return plan


def _styles_in(paths: dict[str, str], parent: str) -> set[str]:
    return {style for path, style in paths.items() if path.rpartition(".")[0] == parent}


def _expanded(base: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Paths of modules, each with its entry of the plan. A layer may lack one: not all are made alike."""
    for path, _ in base.named_modules():
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        if pattern in plan:
            yield path, plan[pattern]


def _as_replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """What every process of `mesh` has whole; the gradients that they have for it are summed."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


class _Shared:
    """Makes of a module's input, first or by name, a tensor of the mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (_as_replicated(args[0], self._mesh), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _as_replicated(kwargs["hidden_states"], self._mesh)}


class _Summing:
    """Sums the gradients of a module's weights over the processes of the mesh, in every backward pass."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # FSDP puts the same whole parameters there whenever it has gathered them.
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not hasattr(parameter, "_strata_summed"):
                parameter._strata_summed = parameter.register_hook(self._sum)  # type: ignore[attr-defined]

    def _sum(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self._group)
        return total
