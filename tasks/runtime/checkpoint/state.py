"""The tensors of a checkpoint: weights, optimizer state and random states.

Their names do not depend on the framework or the parallel strategy. The learning rate and the position in the
data are functions of the step, so a checkpoint stores the step only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from strata_kernels import join_weight, split_weight
from tasks.runtime.checkpoint.flat_shard import FlatShard, local_values, shard_of
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.optim.state_tensors import REMAINDER, new_state_tensor
from tasks.runtime.process.rng import random_states, restore_random_states

log = logging.getLogger(__name__)

_OPTIMIZER, _RANDOM = "optimizer.", "random."

# Muon's state of a weight.
_MUON = "momentum_buffer"

MODEL = "model."
"""Prefix of the names of the model's tensors."""

MASTER = "master"
"""Name of the optimizer state that holds fp32 master weights beside the bfloat16 weights of the layers."""


def has_adapter(model: nn.Module) -> bool:
    """Whether PEFT has added an adapter to the model."""
    return hasattr(model, "peft_config")


@runtime_checkable
class FlatStateOptimizer(Protocol):
    """An optimizer that keeps its state in flat buffers of its own instead of one tensor per parameter."""

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """This rank's state tensors of a parameter, by name."""

    def new_state_tensor(
        self, parameter: nn.Parameter, name: str, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor | None:
        """The tensor to load a parameter's state into; None when this rank needs none of it."""

    def copy_weights_to_masters(self) -> None:
        """Copy the model's current weights to the master weights."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the checkpoint; tied ones once, under the first name."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[MODEL + name] = shard_of(tensor)
    return tensors


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model_tensors` that a checkpoint stores: with an adapter, no frozen parameters."""
    tensors = model_tensors(model)
    if has_adapter(model):
        trainable = {MODEL + name for name, parameter in model.named_parameters() if parameter.requires_grad}
        # Listed by name, because a state dict also has the scales of quantized weights.
        kept = trainable | {MODEL + name for name, _ in model.named_buffers()}
        tensors = {name: tensor for name, tensor in tensors.items() if name in kept}
    return tensors


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
    """All tensors that this rank contributes to a checkpoint: replicated ones, and its shards of the sharded ones."""
    tensors = saved_tensors(model)
    for name, parameter in model.named_parameters():
        for entry, tensor in _state(optimizer, parameter).items():
            tensors[f"{_OPTIMIZER}{entry}.{name}"] = tensor
    return tensors | {f"{_RANDOM}{rank}.{name}": state for name, state in random_states().items()}


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes of the tensors of `model_tensors`."""
    return {name: tensor.dtype for name, tensor in model_tensors(model).items()}


def set_dtypes(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Set the dtypes of a model on the meta device to those of a loaded one.

    Some model families keep some tensors in fp32 whatever dtype is asked for.
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        if MODEL + name in dtypes:
            tensor.data = tensor.data.to(dtypes[MODEL + name])


def load_model(index: Index, model: nn.Module) -> None:
    """Load the checkpoint's weights into the model, or into this rank's shards of it."""
    index.read(saved_tensors(model))


def read_model_tensors(index: Index) -> dict[str, Tensor]:
    """The checkpoint's weights, unsharded and on the CPU, by their names in the model."""
    tensors = {key: index.empty(key) for key in index if key.startswith(MODEL)}
    index.read(tensors)
    return {key.removeprefix(MODEL): tensor for key, tensor in tensors.items()}


def load_optimizer(index: Index, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer state, sharded like the parameters are now. Call it after `load_model`."""
    parameters = dict(model.named_parameters())
    new_state_tensor: Callable[..., Tensor | None] = partial(_new_state_tensor, optimizer)
    if isinstance(optimizer, FlatStateOptimizer):
        optimizer.copy_weights_to_masters()
        new_state_tensor = optimizer.new_state_tensor
    else:
        # State that the checkpoint lacks did not exist when it was saved.
        optimizer.state.clear()
    tensors: dict[str, Tensor] = {}
    convert: list[Callable[[], None]] = []
    dropped = 0
    anew = _weights_that_muon_stepped(index, parameters, optimizer)
    for key in index:
        if key.startswith(_OPTIMIZER):
            entry, name = key.removeprefix(_OPTIMIZER).split(".", 1)
            if name not in parameters:
                raise ValueError(
                    f"the checkpoint has optimizer state {entry!r} of {name!r}, a parameter that this model lacks; "
                    "restore the model it was trained with, or choose another name"
                )
            if name in anew and entry in (_MUON, "step"):
                continue
            shape, dtype = index.shape(key), index.dtype(key)
            if isinstance(optimizer, FlatStateOptimizer) and entry == REMAINDER:
                tensors |= _join_master(optimizer, parameters[name], key, convert)
                continue
            if not isinstance(optimizer, FlatStateOptimizer) and entry in (MASTER, REMAINDER):
                rounded = parameters[name].dtype == torch.bfloat16
                if rounded and not getattr(optimizer, "keeps_remainder", False):
                    # Neither is to take memory in the first step.
                    dropped += 1
                    continue
                if entry == MASTER:
                    tensors |= _split_master(optimizer, parameters[name], key, convert)
                    continue
            beside_masters = f"{_OPTIMIZER}{MASTER}.{name}" in index and entry != "step"
            if beside_masters and shape == parameters[name].shape:
                # Beside fp32 master weights the moments are fp32, too; load them in the dtype of the parameter.
                dtype = parameters[name].dtype
            tensor = new_state_tensor(parameters[name], entry, shape, dtype)
            if tensor is not None:
                tensors[key] = tensor
    if dropped:
        log.warning(
            "the checkpoint's fp32 master weights of %d parameters are left out: the run goes on from the "
            "bfloat16 weights, because optimizer.precision is not 'fp32_master' now",
            dropped,
        )
    index.read(tensors)
    for function in convert:
        function()


def _weights_that_muon_stepped(
    index: Index, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> set[str]:
    """The names of weights with Muon's state in the checkpoint that AdamW steps now: earlier versions left Muon more.

    AdamW's groups have `betas`.
    """
    stepped = {name for name in parameters if f"{_OPTIMIZER}{_MUON}.{name}" in index}
    if not stepped:
        return stepped
    now = {parameter for group in optimizer.param_groups if "betas" in group for parameter in group["params"]}
    found = {name for name in stepped if parameters[name] in now}
    if found:
        log.warning("moments of %d weights begin anew: AdamW steps them now, not Muon", len(found))
    return found


def _split_master(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, convert: list[Callable[[], None]]
) -> dict[str, Tensor]:
    """Read an fp32 master weight; for a bfloat16 parameter, split it into the weight and its low 16 bits."""
    master = new_state_tensor(parameter, parameter.shape, torch.float32, paged=False)

    def split() -> None:
        if parameter.dtype == torch.bfloat16:
            weight, low = split_weight(local_values(master))
            state = optimizer.state[parameter]
            state[REMAINDER] = new_state_tensor(
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
    """Read the low 16 bits of a bfloat16 parameter and join them with the weight to its fp32 master weight."""
    master = optimizer.new_state_tensor(parameter, MASTER, parameter.shape, torch.float32)
    if not isinstance(master, FlatShard):
        return {}
    low = FlatShard(master.shape, master.start, torch.zeros_like(master.flat, dtype=torch.int16))

    def join() -> None:
        master.flat.copy_(join_weight(master.flat.bfloat16(), low.flat))

    convert.append(join)
    return {key: low}


def load_random_states(index: Index, rank: int) -> None:
    """Restore this rank's random states. Only valid with the same ranks as when the checkpoint was written.

    A generator that the checkpoint lacks, such as the GPU's after a run on the CPU, keeps its state.
    """
    kept = [name for name in random_states() if f"{_RANDOM}{rank}.{name}" in index]
    states = {name: index.empty(f"{_RANDOM}{rank}.{name}") for name in kept}
    index.read({f"{_RANDOM}{rank}.{name}": state for name, state in states.items()})
    restore_random_states(states)


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    if isinstance(optimizer, FlatStateOptimizer):
        return optimizer.optimizer_state(parameter)
    state: dict[str, Tensor] = optimizer.state.get(parameter, {})
    return state


def _new_state_tensor(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    # On the device where the optimizer itself would put it. PyTorch's own optimizers have no `paged`.
    tensor = new_state_tensor(parameter, shape, dtype, paged=getattr(optimizer, "paged", False))
    optimizer.state[parameter][name] = tensor
    return tensor
