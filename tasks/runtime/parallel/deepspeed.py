"""DeepSpeed's ZeRO: optimizer state, then gradients, then weights split over the processes, by its engine.

The engine averages gradients while the backward pass runs, clips and steps; what it keeps in flat memory is saved and
loaded by the names and shapes of the model's parameters, like that of every other strategy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from strata_platform.spec.parallel import Deepspeed as Settings
from tasks.runtime.checkpoint.flat_shard import FlatShard, register_flat_shard, shard_of
from tasks.runtime.checkpoint.state import MASTER
from tasks.runtime.models.build import is_on_meta, materialize, move_to_device
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# DeepSpeed's own, which is more memory than a small model has.
_BUCKET = 500_000_000


class Deepspeed:
    """The model under DeepSpeed's engine."""

    def __init__(self, spec: RunSpec, processes: Processes) -> None:
        assert isinstance(spec.parallel, Settings)
        self._spec, self._settings, self._processes = spec, spec.parallel, processes
        self._engine: Any = None
        self._optimizer: ZeroOptimizer | None = None

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """The model itself; it is split when there is an optimizer, which goes by the shapes of whole weights."""
        _require_one_dtype(model)
        if self._settings.stage < 3 or self._spec.is_quantized:
            # Weights are packed on the device, so packed ones are there whole before stage 3 splits them.
            move_to_device(model, self._processes.device)
        elif is_on_meta(model):
            # What is not written to takes no memory of the host.
            materialize(model, torch.device("cpu"))
        return model

    def attach_optimizer(
        self, wrapped: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The engine, which starts with the main process's weights, and its steps."""
        assert isinstance(wrapped, PreTrainedModel)
        deepspeed, config = _import_deepspeed(self._processes.device), self._config(wrapped)
        if self._settings.stage == 3:
            self._split(wrapped, config, deepspeed)
        engine, *_ = deepspeed.initialize(model=wrapped, optimizer=optimizer, config=config, dist_init_required=False)
        if self._settings.stage == 3:
            self._register_weight_shards(wrapped)
        self._engine, self._optimizer = engine, ZeroOptimizer(engine, self._processes.rank)
        return _EngineModule(engine), self._optimizer

    @contextmanager
    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
        """Gradients of stages 2 and 3 are split after every backward pass, those of stage 1 after the last one."""
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def clip(self, wrapped: nn.Module, max_norm: float) -> Tensor:
        """Left to the engine's step, which also fills in the norm."""
        assert self._optimizer is not None
        return self._optimizer.next_norm()

    def skip_step(self, optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
        """The engine waits for the device in every step anyway."""
        assert self._optimizer is not None
        self._optimizer.skip_next_step = bool(skip)

    def _config(self, model: PreTrainedModel) -> dict[str, Any]:
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        zero: dict[str, Any] = {"stage": self._settings.stage, "reduce_bucket_size": min(learned, _BUCKET)}
        for name in ("offload_optimizer", "offload_param"):
            if getattr(self._settings, name) == "cpu":
                zero[name] = {"device": "cpu", "pin_memory": self._processes.device.type == "cuda"}
        return {
            # Of the batch DeepSpeed knows one micro-batch: `backward_pass` says which is a step's last.
            "train_micro_batch_size_per_gpu": self._spec.training.micro_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._spec.optimizer.max_grad_norm,
            "zero_optimization": zero,
            "bf16": {"enabled": model.dtype == torch.bfloat16},
            # The project's optimizer, also for steps on the host: DeepSpeed's own is compiled at its first use.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }

    def _split(self, model: PreTrainedModel, config: dict[str, Any], deepspeed: ModuleType) -> None:
        """Move one weight at a time to the device, give all processes the main one's, and keep a part of it."""
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._processes.device)
        deepspeed.zero.Init(module=model, config_dict_or_path=config)

    def _register_weight_shards(self, model: PreTrainedModel) -> None:
        """Under stage 3 a parameter is empty but for the time that its layer runs."""
        for parameter in model.parameters():
            register_flat_shard(parameter, partial(_weights, parameter, self._processes.rank))
        # The fused loss reads the head's weight without calling it. That gathers it, too, because DeepSpeed sees what a
        # forward pass reads of weights that are not there. So its hooks on the head are not needed, and the kernel
        # layer refuses a head that has any.
        head = model.get_output_embeddings()
        if head is not None:
            head._forward_pre_hooks.clear()
            head._forward_hooks.clear()


class _EngineModule(nn.Module):
    """The engine as any other module: a framework that knows DeepSpeed's own would drive it in a way of its own."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.engine(*inputs, **options)


def _import_deepspeed(device: torch.device) -> ModuleType:
    """DeepSpeed, quiet but for errors, for the process group that there is."""
    import deepspeed
    from deepspeed.utils import groups

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # What it knows to compile: on a CPU an operator for messages in shared memory, at every first start.
        deepspeed.ops.__compatible_ops__ = {}
    # A process group that was left, as by an earlier run in this process, is remembered.
    groups._release_process_group_references()
    module: ModuleType = deepspeed
    return module


def _require_one_dtype(model: PreTrainedModel) -> None:
    """Weights lie in flat memory of one type: what a family of models keeps in fp32 would be rounded."""
    others = [name for name, parameter in model.named_parameters() if parameter.dtype != model.dtype]
    if others:
        raise ValueError(
            f"parallel.type 'deepspeed' trains a model in one type, and {others[0]!r} is not {str(model.dtype)[6:]} "
            "like the rest; set model.dtype to 'float32', beside which parallel.type 'fsdp' has parallel.compute_dtype"
        )


def _weights(parameter: Any, rank: int) -> FlatShard:
    """This process's part under stage 3: as many elements for each, the last ones filled up."""
    size = parameter.ds_tensor.numel()
    start = min(rank * size, parameter.ds_numel)
    flat = parameter.ds_tensor.data.narrow(0, 0, min(size, parameter.ds_numel - start))
    return FlatShard(parameter.ds_shape, start, flat)


@dataclass(frozen=True)
class _Span:
    """Where this process has the optimizer state of some elements of a parameter."""

    shape: torch.Size
    """Of the parameter."""
    start: int
    """Number of the first element in the parameter."""
    size: int
    flat: Tensor
    """fp32 weights of many parameters, one after the other; the optimizer's state is by this tensor, and like it."""
    begin: int
    """Number of the first element in `flat`."""

    def of(self, flat: Tensor) -> FlatShard:
        """The same span of the weights, or in a moment of them."""
        return FlatShard(self.shape, self.start, flat.detach().narrow(0, self.begin, self.size))


class ZeroOptimizer(torch.optim.Optimizer):
    """The engine's step, and the state of its optimizer by the parameters of the model instead of by flat memory."""

    def __init__(self, engine: Any, rank: int) -> None:
        # Not the base class's: groups and state are those of the optimizer that the engine steps.
        inner = engine.basic_optimizer
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state
        self._engine = engine
        self._spans = dict(_spans(engine, rank))
        # Where layers compute with rounded weights, the exact ones are state as well.
        self._has_masters = any(parameter.dtype != span.flat.dtype for parameter, span in self._spans.items())
        self._norm: Tensor | None = None
        self.skip_next_step = False
        """Whether the next step is not to be taken."""

    def slots(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """This process's part of a parameter's state."""
        span, slots = self._spans.get(parameter), dict[str, Tensor]()
        if span is not None:
            if self._has_masters:
                slots[MASTER] = span.of(span.flat)
            for name, value in self.state.get(span.flat, {}).items():
                slots[name] = span.of(value) if value.shape == span.flat.shape else value
        return slots

    def new_slot(self, parameter: nn.Parameter, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Memory for what a checkpoint has of a parameter's state: the engine's own, in its own type, if it has any."""
        span = self._spans.get(parameter)
        if span is None:
            return None
        if name == MASTER:
            return span.of(span.flat) if self._has_masters else None
        # Moments are like the parameter; a count of steps is not, though one of a single element has its shape.
        state, split = self.state[span.flat], shape == span.shape and name != "step"
        if name not in state:
            like = span.flat.detach()
            state[name] = torch.zeros_like(like) if split else like.new_zeros(shape, dtype=dtype)
        slot: Tensor = state[name]
        return span.of(slot) if split else slot

    def copy_weights_to_masters(self) -> None:
        """Start from the weights that the model has now. Call when others were loaded into it."""
        for parameter, span in self._spans.items():
            part = shard_of(parameter)
            weights = part.flat if isinstance(part, FlatShard) else part.flatten().narrow(0, span.start, span.size)
            span.of(span.flat).flat.copy_(weights)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, update, and free the gradients; the latter alone where they are not finite or the step is withheld."""
        outcome = None if closure is None else closure()
        with _skipping_step(self._engine.optimizer) if self.skip_next_step else nullcontext() as norms:
            self._engine.step()
        if self._norm is not None:
            self._norm.fill_(self._engine.get_global_grad_norm() if norms is None else _total(norms))
            self._norm = None
        return outcome

    def next_norm(self) -> Tensor:
        """Norm of the gradients before they are clipped, which the next step fills in."""
        self._norm = torch.zeros((), device=self._engine.device)
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: the step frees them."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a checkpoint has the state, by the names of parameters."""
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do, likewise."""


@contextmanager
def _skipping_step(zero: Any) -> Iterator[list[float]]:
    """Within, the engine takes its gradients for infinite, and frees them without a step; yields their norms."""
    norms: list[float] = []
    # Of stages 1 and 2 a norm, of stage 3 one for each group of parameters.
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
    """Of all gradients; the engine says -1 for what is not finite."""
    return math.hypot(*norms) if norms and min(norms) >= 0 else math.inf


def _spans(engine: Any, rank: int) -> Iterator[tuple[Any, _Span]]:
    """Where this process has the state of which parameters."""
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
