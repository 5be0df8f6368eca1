"""Tensor parallelism: the matrices of each layer are sharded over ranks that compute the same rows.

transformers' `base_model_tp_plan` names the placement of each projection. A rank has some of the attention heads and
some of the columns of the feed-forward layer; they are plain local tensors, which the kernel layer sees. The residual
stream and its norms are replicated. Embedding and head are sharded by the vocabulary, and the fused loss takes such a
head directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PretrainedConfig, PreTrainedModel

from strata_platform.spec.run_spec import Parallel
from strata_platform.spec.sections.model import Model
from tasks.runtime.models.config import load_config
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
    # The layer needs all columns: every rank gathers them and shards the result again.
    "colwise_gather_output": GatheredColumnParallelLinear,
    "rowwise_split_input": SplitRowParallelLinear,
}
# Norms of query and key heads: replicated weights, whose gradients are summed because a rank has only some heads.
_HEAD_NORM = "replicated_with_grad_allreduce"

# Sizes that `parallel.tensor_parallel` has to divide, by their names in a configuration.
_DIVISIBLE = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def require_tensor_parallel_support(model: Model, parallel: Parallel) -> None:
    """Raises ValueError if `parallel.tensor_parallel` does not support the model. Reads only its configuration."""
    tp_size = parallel.tensor_parallel
    if tp_size == 1:
        return
    config = load_config(model)
    _plan(config)
    sizes = {name: getattr(config, name) for name in _DIVISIBLE if getattr(config, name, None)}
    for name, size in sizes.items():
        if size % tp_size:
            others = ", ".join(str(n) for n in range(1, tp_size) if not any(size % n for size in sizes.values()))
            raise ValueError(
                f"parallel.tensor_parallel {tp_size} does not divide {name} {size} of model.name {model.name!r}; "
                f"set it to one of {others}"
            )


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh, *, whole_logits: bool) -> None:
    """Shard the weights of `model`, which are on the meta device, over `mesh`, which has one dimension.

    With `whole_logits` a head over the vocabulary returns all logits on every rank. Otherwise its weight is sharded
    without hooks, for the fused loss.
    """
    base, plan = model.base_model, _plan(model.config)
    paths = dict(_expanded(base, plan))
    for path, style in paths.items():
        if style != _HEAD_NORM:
            make_parallel(base.get_submodule(path), _KINDS[style], mesh)
    for parent in {path.rpartition(".")[0] for path, style in paths.items() if style in _KINDS}:
        # The input goes to several projections; one hook sums its gradient over the group once.
        base.get_submodule(parent).register_forward_pre_hook(_SumInputGradients(mesh), with_kwargs=True)
    of_heads: dict[str, list[nn.Module]] = {}
    for path, module in base.named_modules():
        # A module between the projections that the plan does not list has seen only the local columns or heads.
        known = paths.get(path)
        between = known is None and "colwise" in _styles_in(paths, path.rpartition(".")[0])
        if known == _HEAD_NORM or between:
            of_heads.setdefault(_layer_of(path), []).append(module)
    for layer, modules in of_heads.items():
        # The hook sits on the layer, because modules inside may be compiled or recomputed, which bypasses their hooks.
        base.get_submodule(layer).register_forward_pre_hook(_SumWeightGradients(mesh, modules))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    shard_parameters(embedding, mesh, (Shard(0),))
    if tied:
        head.weight = embedding.weight
    # A model that scores texts has no head over the vocabulary; its one row of weights is replicated, as norms are.
    if head is not None:
        shard_parameters(head, mesh, (Shard(0), Shard(0)))
    for module in (embedding, head) if whole_logits and head is not None else (embedding,):
        module.register_forward_pre_hook(lambda _, args: (_as_replicated(args[0], mesh),))
        # full_tensor waits for the collective: a compiled layer does not propagate gradients to an unfinished one.
        module.register_forward_hook(lambda _, args, found: found.full_tensor())


def _plan(config: PretrainedConfig) -> dict[str, str]:
    """Paths in the base model, with `*` for a layer's number → placement style."""
    plan_of_family: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    # Some versions also list embeddings and head; `apply_tensor_parallel` handles those.
    plan = {path: style for path, style in plan_of_family.items() if path.startswith("layers.")}
    unknown = sorted(set(plan.values()) - {*_KINDS, _HEAD_NORM})
    # Gradients are summed at the input of a block (attention, MLP). After its row-sharded projection the values are
    # whole again. A block without such a projection could have another input in the middle, without a hook.
    columns, rows = _parents(plan, ColumnParallelLinear), _parents(plan, RowParallelLinear, SplitRowParallelLinear)
    unclosed = sorted(columns - rows)
    if not plan or unknown or unclosed:
        reason = "does not exist"
        if unknown:
            reason = f"has unknown styles: {', '.join(unknown)}"
        elif unclosed:
            reason = f"shards only the columns of {', '.join(unclosed)}, whose gradients would be incomplete"
        raise ValueError(
            "parallel.tensor_parallel needs a sharding plan of transformers, and that for model type "
            f"{config.model_type!r} {reason}; set parallel.tensor_parallel to 1"
        )
    return plan


def _parents(plan: dict[str, str], *kinds: type[ParallelLinear]) -> set[str]:
    """Names of the blocks that contain projections of `kinds`."""
    return {path.split(".")[-2] for path, style in plan.items() if style in _KINDS and issubclass(_KINDS[style], kinds)}


def _layer_of(path: str) -> str:
    """layers.3.self_attn.q_norm → layers.3"""
    return ".".join(path.split(".")[:2])


def _styles_in(paths: dict[str, str], parent: str) -> set[str]:
    return {style for path, style in paths.items() if path.rpartition(".")[0] == parent}


def _expanded(base: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Module paths with their entry of the plan. A layer may lack a module, because layers can differ."""
    for path, _ in base.named_modules():
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        if pattern in plan:
            yield path, plan[pattern]


def _as_replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a tensor that every rank of `mesh` has whole; its gradients are summed."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


class _SumInputGradients:
    """Sums the gradient of a module's first input, or of `hidden_states`, over the group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = Group.of(mesh)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (CopyToGroup.apply(args[0], self._group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": CopyToGroup.apply(kwargs["hidden_states"], self._group)}


class _SumWeightGradients:
    """Before a layer runs: hooks the weights of `modules` to sum their gradients over the group."""

    def __init__(self, mesh: DeviceMesh, modules: Sequence[nn.Module]) -> None:
        self._group, self._modules = Group.of(mesh), modules

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        # After each gather FSDP puts the same parameter objects back, so one hook per parameter is enough.
        for parameter in (found for module in self._modules for found in module.parameters(recurse=False)):
            if parameter.requires_grad and not hasattr(parameter, "_strata_summed"):
                parameter._strata_summed = parameter.register_hook(self._group.all_reduce)  # type: ignore[attr-defined]
