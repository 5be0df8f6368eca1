"""Tensor parallelism: the matrices of a layer cut over processes that compute the same rows.

transformers says for each family how its projections are cut (`base_model_tp_plan`): of attention a process has some of
the heads, of the feed-forward layer some of the columns, and what it computes are plain tensors of its own, which the
kernel layer sees. The residual stream, and the norms on it, are whole in every process. Embeddings and head are cut by
the vocabulary; the fused loss takes a head of that kind as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PretrainedConfig, PreTrainedModel

from strata_platform.spec import RunSpec
from tasks.runtime.models.build import load_config
from tasks.runtime.parallel.collectives import CopyToGroup, Group
from tasks.runtime.parallel.parallel_linear import (
    ColumnParallelLinear,
    GatheredColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    SplitRowParallelLinear,
    make_parallel,
    shard_parameters,
)

_KINDS: dict[str, type[ParallelLinear]] = {
    "colwise": ColumnParallelLinear,
    "rowwise": RowParallelLinear,
    # The layer computes with all columns: every process gathers them, and cuts what it made of them again.
    "colwise_gather_output": GatheredColumnParallelLinear,
    "rowwise_split_input": SplitRowParallelLinear,
}
# Norms of heads, of which a process has some: whole weights, whose gradient is a sum over the processes.
_HEAD_NORM = "replicated_with_grad_allreduce"

# What must be cut in equal parts, by the names that configurations have for it.
_DIVISIBLE = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def require_tensor_parallel_support(spec: RunSpec) -> None:
    """Raises ValueError when the model cannot be cut into `parallel.tensor_parallel` parts. Reads no weights."""
    ways = spec.tensor_parallel
    if ways == 1:
        return
    config = load_config(spec.model)
    _plan(config)
    sizes = {name: getattr(config, name) for name in _DIVISIBLE if getattr(config, name, None)}
    for name, size in sizes.items():
        if size % ways:
            others = ", ".join(str(n) for n in range(1, ways) if not any(size % n for size in sizes.values()))
            raise ValueError(
                f"parallel.tensor_parallel {ways} does not divide {name} {size} of model.name {spec.model.name!r}; "
                f"set it to one of {others}"
            )


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh, *, whole_logits: bool) -> None:
    """Cut the weights of `model`, which has no memory for them, over the one dimension of `mesh`.

    With `whole_logits` the head gives those of the whole vocabulary to every process. Without, its weight is cut, and
    nothing is hooked to it: the fused loss reads it.
    """
    base, plan = model.base_model, _plan(model.config)
    paths = dict(_expanded(base, plan))
    for path, style in paths.items():
        if style != _HEAD_NORM:
            make_parallel(base.get_submodule(path), _KINDS[style], mesh)
    for parent in {path.rpartition(".")[0] for path, style in paths.items() if style in _KINDS}:
        # Its input goes to several projections: the sum over the processes of its gradient is taken once.
        base.get_submodule(parent).register_forward_pre_hook(_SumInputGradients(mesh), with_kwargs=True)
    of_heads: dict[str, list[nn.Module]] = {}
    for path, module in base.named_modules():
        # Between projections, and not said to have all columns: it has seen those of this process alone.
        known = paths.get(path)
        between = known is None and "colwise" in _styles_in(paths, path.rpartition(".")[0])
        if known == _HEAD_NORM or between:
            of_heads.setdefault(_layer_of(path), []).append(module)
    for layer, modules in of_heads.items():
        # Not on the modules: what a layer does inside may be compiled, or be a recomputation, which hooks nothing.
        base.get_submodule(layer).register_forward_pre_hook(_SumWeightGradients(mesh, modules))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    shard_parameters(embedding, mesh, (Shard(0),))
    if tied:
        head.weight = embedding.weight
    shard_parameters(head, mesh, (Shard(0), Shard(0)))
    for module in (embedding, head) if whole_logits else (embedding,):
        module.register_forward_pre_hook(lambda _, args: (_as_replicated(args[0], mesh),))
        # Waits for it: a compiled layer gives no gradient to what is still under way.
        module.register_forward_hook(lambda _, args, found: found.full_tensor())


def _plan(config: PretrainedConfig) -> dict[str, str]:
    """Paths in the base model, with `*` for the number of a layer → how it is cut."""
    told: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    # What it says of embeddings, in some versions, is left out.
    plan = {path: style for path, style in told.items() if path.startswith("layers.")}
    unknown = sorted(set(plan.values()) - {*_KINDS, _HEAD_NORM})
    # Gradients are summed where the input of a part of a layer comes in. Behind its row-cut projection all is whole
    # again; a part without one may have another input in the middle, which is nobody's.
    columns, rows = _parents(plan, ColumnParallelLinear), _parents(plan, RowParallelLinear, SplitRowParallelLinear)
    unclosed = sorted(columns - rows)
    if not plan or unknown or unclosed:
        reason = "does not say how"
        if unknown:
            reason = f"cuts it in ways that are not known here: {', '.join(unknown)}"
        elif unclosed:
            reason = f"cuts only columns of {', '.join(unclosed)}, of which gradients are not known here"
        raise ValueError(
            f"parallel.tensor_parallel cuts the matrices of a model as transformers says, and for model type "
            f"{config.model_type!r} it {reason}; set parallel.tensor_parallel to 1"
        )
    return plan


def _parents(plan: dict[str, str], *kinds: type[ParallelLinear]) -> set[str]:
    """The parts of layers that have such projections."""
    return {path.split(".")[-2] for path, style in plan.items() if style in _KINDS and issubclass(_KINDS[style], kinds)}


def _layer_of(path: str) -> str:
    """layers.3.self_attn.q_norm → layers.3"""
    return ".".join(path.split(".")[:2])


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


class _SumInputGradients:
    """Adds up the gradients of a module's input, the first or that by name, over the processes of the mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = Group.of(mesh)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (CopyToGroup.apply(args[0], self._group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": CopyToGroup.apply(kwargs["hidden_states"], self._group)}


class _SumWeightGradients:
    """Before a layer: sums the gradients of the weights of modules in it over the mesh, in every backward pass."""

    def __init__(self, mesh: DeviceMesh, modules: Sequence[nn.Module]) -> None:
        self._group, self._modules = Group.of(mesh), modules

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        # FSDP puts the same whole parameters there whenever it has gathered them.
        for parameter in (found for module in self._modules for found in module.parameters(recurse=False)):
            if parameter.requires_grad and not hasattr(parameter, "_strata_summed"):
                parameter._strata_summed = parameter.register_hook(self._group.all_reduce)  # type: ignore[attr-defined]
