"""DeepSpeed ZeRO: its engine shards the optimizer state, the gradients (stage 2) and the weights (stage 3).

The engine averages gradients during the backward pass, clips and steps. Checkpoints store its flat buffers by the names
and shapes of the model's parameters, like the state of every other strategy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.parallel import Deepspeed as Settings
from tasks.runtime.checkpoint.flat_shard import FlatShard, register_flat_shard, shard_of
from tasks.runtime.checkpoint.state import MASTER
from tasks.runtime.models.build import is_on_meta, materialize, move_to_device
from tasks.runtime.parallel.whole_model import WholeCopy, WholeModel
from tasks.runtime.process.ranks import Processes

# DeepSpeed's default bucket size in elements; a small model needs less.
_BUCKET = 500_000_000


class Deepspeed:
    """Runs the model under DeepSpeed's engine."""

    def __init__(self, spec: RunSpec, processes: Processes) -> None:
        assert isinstance(spec.parallel, Settings)
        self._spec, self._settings, self._processes = spec, spec.parallel, processes
        self._engine: Any = None
        self._optimizer: ZeroOptimizer | None = None

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """Prepare the model. `attach_optimizer` shards it, because the optimizer is built from whole weights."""
        _require_one_dtype(model)
        if self._settings.stage < 3 or self._spec.is_quantized:
            # 4-bit weights are quantized on the device, so they are whole there until stage 3 shards them.
            move_to_device(model, self._processes.device)
        elif is_on_meta(model):
            # Pages that are never written take no host memory.
            materialize(model, torch.device("cpu"))
        return model

    def attach_optimizer(
        self, wrapped: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Start the engine, which broadcasts the weights of rank 0."""
        assert isinstance(wrapped, PreTrainedModel)
        deepspeed, config = _import_deepspeed(self._processes.device), self._config(wrapped)
        if self._settings.stage == 3:
            self._partition(wrapped, config, deepspeed)
        engine, *_ = deepspeed.initialize(model=wrapped, optimizer=optimizer, config=config, dist_init_required=False)
        if self._settings.stage == 3:
            self._register_weight_shards(wrapped)
        self._engine, self._optimizer = engine, ZeroOptimizer(engine, self._processes.rank)
        return _EngineModule(engine), self._optimizer

    @contextmanager
    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
        """Average the gradients: stages 2 and 3 after every backward pass, stage 1 after the last."""
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def whole_model(self, model: PreTrainedModel) -> WholeModel:
        """The model itself, or under stage 3, which shards weights, a copy."""
        if self._settings.stage < 3:
            return WholeModel(model)
        return WholeCopy(model, self._processes.device, None, _gather)

    def evaluation(self, wrapped: nn.Module) -> AbstractContextManager[nn.Module]:
        """Yield the engine, which gathers the weights of stage 3."""
        return nullcontext(wrapped)

    def clip(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Leave clipping to the engine's step, which fills in the norm."""
        assert self._optimizer is not None
        return self._optimizer.next_norm()

    def skip_step(self, optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
        """Read `skip` on the host: the engine synchronizes with the device in every step anyway."""
        assert self._optimizer is not None
        self._optimizer.skip_next_step = bool(skip)

    def _config(self, model: PreTrainedModel) -> dict[str, Any]:
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        zero: dict[str, Any] = {"stage": self._settings.stage, "reduce_bucket_size": min(learned, _BUCKET)}
        for name in ("offload_optimizer", "offload_param"):
            if getattr(self._settings, name) == "cpu":
                zero[name] = {"device": "cpu", "pin_memory": self._processes.device.type == "cuda"}
        return {
            # DeepSpeed sees one micro-batch; `backward_pass` tells it which one is the last of a step.
            "train_micro_batch_size_per_gpu": self._spec.training.micro_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._spec.optimizer.max_grad_norm,
            "zero_optimization": zero,
            "bf16": {"enabled": model.dtype == torch.bfloat16},
            **self._gradient_dtype(model),
            # Keep Strata's optimizer, also for offloaded state: DeepSpeed's own CPU optimizer compiles at its first
            # use.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }

    def _gradient_dtype(self, model: PreTrainedModel) -> dict[str, Any]:
        """The dtype in which stages 2 and 3 add gradients. Stage 1 leaves them to `GradientSums`; with this setting it
        would have another optimizer, whose state checkpoints do not know.
        """
        if model.dtype != torch.bfloat16 or self._settings.stage == 1 or not self._spec.training.sums_in_float32:
            return {}
        return {"data_types": {"grad_accum_dtype": "fp32"}}

    def _partition(self, model: PreTrainedModel, config: dict[str, Any], deepspeed: ModuleType) -> None:
        """Stage 3: broadcast one weight at a time from rank 0 and keep this rank's shard of it."""
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._processes.device)
        deepspeed.zero.Init(module=model, config_dict_or_path=config)

    def _register_weight_shards(self, model: PreTrainedModel) -> None:
        """Stage 3: give checkpoints the shards. A parameter is empty except while its layer runs."""
        for parameter in model.parameters():
            register_flat_shard(parameter, partial(_weights, parameter, self._processes.rank))
        # The fused loss reads the head's weight without calling the head. DeepSpeed gathers that weight too, because it
        # notices reads of missing weights in a forward pass. The head therefore needs no hooks, and the kernel layer
        # rejects a head with hooks.
        head = model.get_output_embeddings()
        if head is not None:
            head._forward_pre_hooks.clear()
            head._forward_hooks.clear()


class _EngineModule(nn.Module):
    """The engine as a plain module, because accelerate and Lightning treat a DeepSpeed engine in a special way."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.engine(*inputs, **options)


def _gather(parameter: nn.Parameter) -> Tensor:
    """All of a parameter that stage 3 has sharded. A collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed, log only its errors, and let it use the current process group."""
    import deepspeed
    from deepspeed.utils import groups

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # On a CPU, DeepSpeed would compile an operator for shared-memory messages at every first start.
        deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed caches process groups, also those that an earlier run in this process destroyed.
    groups._release_process_group_references()
    module: ModuleType = deepspeed
    return module


def _require_one_dtype(model: PreTrainedModel) -> None:
    """Raises ValueError if parameters differ in dtype: a flat buffer has one dtype and would round fp32 parameters."""
    others = [name for name, parameter in model.named_parameters() if parameter.dtype != model.dtype]
    if others:
        raise ValueError(
            f"parallel.type 'deepspeed' needs all weights in one dtype, but {others[0]!r} is not "
            f"{str(model.dtype)[6:]} like the rest; set model.dtype to 'float32', or parallel.type to 'fsdp', which "
            "has parallel.compute_dtype"
        )


def _weights(parameter: Any, rank: int) -> FlatShard:
    """This rank's shard of a parameter under stage 3. Shards have equal sizes; padding fills the last ones."""
    size = parameter.ds_tensor.numel()
    start = min(rank * size, parameter.ds_numel)
    flat = parameter.ds_tensor.data.narrow(0, 0, min(size, parameter.ds_numel - start))
    return FlatShard(parameter.ds_shape, start, flat)


@dataclass(frozen=True)
class _Span:
    """The elements of one parameter whose optimizer state is on this rank."""

    shape: torch.Size
    """Shape of the whole parameter."""
    start: int
    """Index of the first element in the parameter."""
    size: int
    flat: Tensor
    """fp32 weights of many parameters. The optimizer's state is keyed by this tensor and has its shape."""
    begin: int
    """Index of the first element in `flat`."""

    def of(self, flat: Tensor) -> FlatShard:
        """The same elements of `flat`, which holds weights or one of their moments."""
        return FlatShard(self.shape, self.start, flat.detach().narrow(0, self.begin, self.size))


class ZeroOptimizer(torch.optim.Optimizer):
    """The engine's step, with the optimizer state by model parameter instead of by flat buffer."""

    def __init__(self, engine: Any, rank: int) -> None:
        # Without the constructor of the base class: groups and state belong to the optimizer that the engine steps.
        inner = engine.basic_optimizer
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state
        self._engine = engine
        self._spans = dict(_spans(engine, rank))
        # If layers compute with rounded weights, the fp32 master weights are state as well.
        self._has_masters = any(parameter.dtype != span.flat.dtype for parameter, span in self._spans.items())
        self._norm: Tensor | None = None
        self.skip_next_step = False
        """Whether the next step must not change the weights."""

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """This rank's shard of a parameter's state."""
        span, state = self._spans.get(parameter), dict[str, Tensor]()
        if span is not None:
            if self._has_masters:
                state[MASTER] = span.of(span.flat)
            for name, value in self.state.get(span.flat, {}).items():
                state[name] = span.of(value) if value.shape == span.flat.shape else value
        return state

    def new_state_tensor(
        self, parameter: nn.Parameter, name: str, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor | None:
        """Memory of the engine for one entry of a checkpoint, in the engine's dtype; None if the engine has no such
        entry.
        """
        span = self._spans.get(parameter)
        if span is None:
            return None
        if name == MASTER:
            return span.of(span.flat) if self._has_masters else None
        # Moments have the parameter's shape. `step` is a scalar, even for a parameter with one element.
        state, split = self.state[span.flat], shape == span.shape and name != "step"
        if name not in state:
            like = span.flat.detach()
            state[name] = torch.zeros_like(like) if split else like.new_zeros(shape, dtype=dtype)
        tensor: Tensor = state[name]
        return span.of(tensor) if split else tensor

    def copy_weights_to_masters(self) -> None:
        """Copy the model's weights to the fp32 masters. Call it after loading other weights into the model."""
        for parameter, span in self._spans.items():
            part = shard_of(parameter)
            weights = part.flat if isinstance(part, FlatShard) else part.flatten().narrow(0, span.start, span.size)
            span.of(span.flat).flat.copy_(weights)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, update the weights and free the gradients. A skipped or non-finite step only frees the gradients."""
        outcome = None if closure is None else closure()
        with _skipping_step(self._engine.optimizer) if self.skip_next_step else nullcontext() as norms:
            self._engine.step()
        if self._norm is not None:
            self._norm.fill_(self._engine.get_global_grad_norm() if norms is None else _total(norms))
            self._norm = None
        return outcome

    def next_norm(self) -> Tensor:
        """The gradient norm before clipping. The next step fills it in."""
        self._norm = torch.zeros((), device=self._engine.device)
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the step frees the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: checkpoints store the state by the names of parameters."""
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, for the same reason."""


@contextmanager
def _skipping_step(zero: Any) -> Iterator[list[float]]:
    """Make the engine read an infinite norm, so that it frees the gradients without a step. Yields the real norms."""
    norms: list[float] = []
    # Stages 1 and 2 compute one norm, and stage 3 computes one for each group of parameters.
    name = "_get_norm_groups" if hasattr(zero, "_get_norm_groups") else "scaled_global_norm"
    measure = getattr(zero, name)

    def infinite() -> Any:
        found = measure()
        norms.extend(map(float, found if isinstance(found, list) else [found]))
        return [math.inf] if isinstance(found, list) else math.inf

    setattr(zero, name, infinite)
    try:
        yield norms
    finally:
        delattr(zero, name)


def _total(norms: list[float]) -> float:
    """The norm of all gradients. The engine reports -1 for a norm that is not finite."""
    return math.hypot(*norms) if norms and min(norms) >= 0 else math.inf


def _spans(engine: Any, rank: int) -> Iterator[tuple[Any, _Span]]:
    """The parameters whose optimizer state is on this rank, with its location."""
    zero = engine.optimizer
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_shape"):
            group, begin, _ = zero.grad_position[zero.get_param_id(parameter)]
            flat, part = zero.fp32_partitioned_groups_flat[group], _weights(parameter, rank)
            span = _Span(parameter.ds_shape, part.start, part.flat.numel(), flat, begin)
        elif parameter._hp_mapping is not None:
            mapping = parameter._hp_mapping
            flat, begin = zero.single_partition_of_fp32_groups[mapping.param_group_index], mapping.hp_fragment_address
            part = mapping.lp_fragment_address
            span = _Span(parameter.shape, part.start, part.numel, flat, begin.start)
        else:
            continue
        if span.size:
            yield parameter, span
