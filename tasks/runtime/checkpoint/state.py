"""What a checkpoint holds: weights, the optimizer's state, random states; by names that no framework or strategy knows.

Learning rate and data position are functions of the step, so the step is all that is kept of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from strata_kernels import join_weight, split_weight
from tasks.runtime.checkpoint.flat_shard import FlatShard, local_values, shard_of
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.models.lora import has_adapter
from tasks.runtime.optim.state_tensors import new_slot
from tasks.runtime.process.rng import random_states, restore_random_states

_OPTIMIZER, _RANDOM = "optimizer.", "random."

MODEL = "model."
"""What the name of a tensor of the model begins with."""

MASTER = "master"
"""The state tensor of an optimizer with fp32 master weights beside the bfloat16 ones that layers compute with."""

REMAINDER = "remainder"
"""The state tensor of an optimizer that keeps the low 16 bits of master weights alone."""


@runtime_checkable
class FlatStateOptimizer(Protocol):
    """An optimizer whose state is in memory that it has laid out itself, and not by the model's parameters."""

    def slots(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What this process has of a parameter's state."""

    def new_slot(self, parameter: nn.Parameter, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Where a slot of a parameter is to be read into; None where this process needs nothing of it."""

    def copy_weights_to_masters(self) -> None:
        """Start from the weights that the model has now."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the checkpoint; a tied one has the first of its names."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[MODEL + name] = shard_of(tensor)
    return tensors


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Those of `model_tensors` that a checkpoint has: under an adapter not the frozen ones, which are read anew."""
    tensors = model_tensors(model)
    if has_adapter(model):
        learned = {MODEL + name for name, parameter in model.named_parameters() if parameter.requires_grad}
        # Beside parameters and buffers a state dict has what quantized weights are read by.
        kept = learned | {MODEL + name for name, _ in model.named_buffers()}
        tensors = {name: tensor for name, tensor in tensors.items() if name in kept}
    return tensors


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
    """All tensors that this process has of a checkpoint: whole ones, and its parts of the distributed ones."""
    tensors = saved_tensors(model)
    for name, parameter in model.named_parameters():
        for slot, tensor in _slots(optimizer, parameter).items():
            tensors[f"{_OPTIMIZER}{slot}.{name}"] = tensor
    return tensors | {f"{_RANDOM}{rank}.{name}": state for name, state in random_states().items()}


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Types of the tensors of `model_tensors`."""
    return {name: tensor.dtype for name, tensor in model_tensors(model).items()}


def set_dtypes(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give an empty model the types of one with weights: some families keep some tensors in fp32 under any dtype."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if MODEL + name in dtypes:
            tensor.data = tensor.data.to(dtypes[MODEL + name])


def load_model(index: Index, model: nn.Module) -> None:
    """Fill the model, or this process's parts of it, with what the checkpoint has of it."""
    index.read(saved_tensors(model))


def read_model_tensors(index: Index) -> dict[str, Tensor]:
    """What the checkpoint has of the model, whole and on the CPU, by names in the model."""
    tensors = {key: index.empty(key) for key in index if key.startswith(MODEL)}
    index.read(tensors)
    return {key.removeprefix(MODEL): tensor for key, tensor in tensors.items()}


def load_optimizer(index: Index, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the state it had, split like the parameters are now. Call when the model is loaded."""
    parameters = dict(model.named_parameters())
    new_slot: Callable[..., Tensor | None] = partial(_new_slot, optimizer)
    if isinstance(optimizer, FlatStateOptimizer):
        optimizer.copy_weights_to_masters()
        new_slot = optimizer.new_slot
    else:
        # What the checkpoint does not have the optimizer had not then, either.
        optimizer.state.clear()
    tensors: dict[str, Tensor] = {}
    convert: list[Callable[[], None]] = []
    for key in index:
        if key.startswith(_OPTIMIZER):
            slot, name = key.removeprefix(_OPTIMIZER).split(".", 1)
            if name not in parameters:
                raise ValueError(f"the checkpoint has {slot} of {name!r}, which this model does not have")
            shape, dtype = index.shape(key), index.dtype(key)
            if isinstance(optimizer, FlatStateOptimizer) and slot == REMAINDER:
                tensors |= _join_master(optimizer, parameters[name], key, convert)
                continue
            if not isinstance(optimizer, FlatStateOptimizer) and slot == MASTER:
                tensors |= _split_master(optimizer, parameters[name], key, convert)
                continue
            if f"{_OPTIMIZER}{MASTER}.{name}" in index and shape == parameters[name].shape:
                # Moments of exact weights; those of rounded ones are rounded like them.
                dtype = parameters[name].dtype
            tensor = new_slot(parameters[name], slot, shape, dtype)
            if tensor is not None:
                tensors[key] = tensor
    index.read(tensors)
    for each in convert:
        each()


def _split_master(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, convert: list[Callable[[], None]]
) -> dict[str, Tensor]:
    """Read an fp32 master weight, to become the parameter and, of a bfloat16 one, the low bits beside it."""
    master = new_slot(parameter, parameter.shape, torch.float32, paged=False)

    def split() -> None:
        if parameter.dtype == torch.bfloat16:
            weight, low = split_weight(local_values(master))
            state = optimizer.state[parameter]
            state[REMAINDER] = new_slot(
                parameter, parameter.shape, torch.int16, paged=getattr(optimizer, "paged", False)
            )
            local_values(state[REMAINDER]).copy_(low)
            local_values(parameter).copy_(weight)
        else:
            local_values(parameter).copy_(local_values(master))

    convert.append(split)
    return {key: master}


def _join_master(
    optimizer: FlatStateOptimizer, parameter: nn.Parameter, key: str, convert: list[Callable[[], None]]
) -> dict[str, Tensor]:
    """Read the low bits of a bfloat16 parameter, to make its fp32 master weight whole."""
    master = optimizer.new_slot(parameter, MASTER, parameter.shape, torch.float32)
    if not isinstance(master, FlatShard):
        return {}
    low = FlatShard(master.shape, master.start, torch.zeros_like(master.flat, dtype=torch.int16))

    def join() -> None:
        master.flat.copy_(join_weight(master.flat.bfloat16(), low.flat))

    convert.append(join)
    return {key: low}


def load_random_states(index: Index, rank: int) -> None:
    """Continue this process's random numbers; only for the number of processes that the checkpoint was written by.

    A generator that it had not, such as a GPU's where it ran on the CPU, is left as it is.
    """
    kept = [name for name in random_states() if f"{_RANDOM}{rank}.{name}" in index]
    states = {name: index.empty(f"{_RANDOM}{rank}.{name}") for name in kept}
    index.read({f"{_RANDOM}{rank}.{name}": state for name, state in states.items()})
    restore_random_states(states)


def _slots(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    if isinstance(optimizer, FlatStateOptimizer):
        return optimizer.slots(parameter)
    slots: dict[str, Tensor] = optimizer.state.get(parameter, {})
    return slots


def _new_slot(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    # Where the optimizer would have it; PyTorch's own do not say.
    tensor = new_slot(parameter, shape, dtype, paged=getattr(optimizer, "paged", False))
    optimizer.state[parameter][name] = tensor
    return tensor
