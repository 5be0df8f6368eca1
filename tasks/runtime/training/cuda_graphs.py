"""Replay the forward and the backward pass of a micro-batch as CUDA graphs (`training.cuda_graphs`).

A small model's step takes the host longer than the GPU: a micro-batch of a 0.6B model launches some 3,000 kernels. A
CUDA graph launches all of them at once. Two graphs are captured for each shape of a micro-batch, one for each pass, and
every framework replays them where it would compute the loss and call `backward`.

Nothing that a graph computes outlives a step: the activations and gradients of both graphs of a shape lie in the same
memory, in a pool that other batches cannot use. Results of norms and rotations are recomputed in the backward pass
instead of being kept: the host, for which that is work, does it once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from strata_kernels.ops.recompute import recomputing
from strata_platform.spec import RunSpec
from strata_platform.spec.rules.cuda_graph_rules import cuda_graph_rules
from strata_platform.spec.sections.training import Training
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch
from tasks.runtime.models.attention.recurrent_layers import recurrent_layers
from tasks.runtime.models.dropout import dropout_rates
from tasks.runtime.models.media.multimodal import is_multimodal
from tasks.runtime.objectives.objective import MicroBatchLoss, Objective, ObjectiveContext
from tasks.runtime.objectives.training_step import TrainingStep
from tasks.runtime.optim.gradient_sums import GradientSums
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# Micro-batches that run without graphs at first. Kernels are compiled in the first; the others are timed.
_WARMUP = 4
# With `auto`, graphs are worth their while if the host takes this share of the time of a forward pass, or more.
_HOST_BOUND = 0.8
# Each takes memory; micro-batches of further shapes run without graphs.
_MOST_GRAPHS = 24
# The fewest sequences of a batch that it is padded to, with empty ones: few shapes instead of one for every number.
_FEWEST_SEQUENCES = 16


def with_cuda_graphs(
    step: TrainingStep, spec: RunSpec, processes: Processes, sums: GradientSums | None = None
) -> Objective:
    """The objective of `step`, with CUDA graphs if `training.cuda_graphs` asks for them and the run supports them.

    sums: of the gradients of micro-batches.

    Raises:
        ValueError: `training.cuda_graphs` is true, and the run does not support them.
    """
    if spec.training.cuda_graphs is False:
        return step.objective
    reason = unsupported_reason(step, spec, processes)
    if reason is None:
        return CudaGraphs(step.objective, spec.training, sums)
    if spec.training.cuda_graphs is True:
        raise ValueError(f"training.cuda_graphs is true, but {reason}; set training.cuda_graphs to auto")
    if processes.device.type == "cuda" and processes.is_main:
        log.info("CUDA graphs: off, %s", reason)
    return step.objective


def unsupported_reason(step: TrainingStep, spec: RunSpec, processes: Processes) -> str | None:
    """What of a run has no CUDA graph; None if all has one.

    A graph repeats the same kernels on the same addresses: shapes must repeat, and the host must not wait for the GPU.
    Random numbers are those that the GPU's generator would draw without graphs: PyTorch advances it for each replay.
    """
    for rule in cuda_graph_rules(spec):
        if rule.broken:
            return f"{rule.field} {rule.reason}"
    config = step.model.config
    dropout = _dropout(step.model)
    reasons = {
        "the run has no NVIDIA GPU": processes.device.type != "cuda" or bool(torch.version.hip),
        "attention runs with masks, for which the host waits": not step.varlen,
        f"{', '.join(dropout[:3])} of the model draws random numbers": bool(dropout),
        "the model has recurrent layers, whose sizes the host reads": bool(recurrent_layers(step.model)),
        "the model is a mixture of experts": _has_experts(step.model),
        "the model also takes other input than text, of other sizes in each batch": is_multimodal(config),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _dropout(model: Any) -> list[str]:
    """Rates in the model's config, and modules, by which the model itself drops out; not those of adapters."""
    ends = ("dropout", "dropout_prob", "_pdrop", "layerdrop")
    rates = [name for name, rate in vars(model.config).items() if name.endswith(ends) and rate]
    return rates + [path for path, _, _ in dropout_rates(model) if "lora_dropout" not in path]


def _has_experts(model: nn.Module) -> bool:
    return any(name.endswith("experts") for name, _ in model.named_modules())


class CudaGraphs:
    """An objective that replays the micro-batches of `objective` as CUDA graphs, once it has seen their shape."""

    def __init__(self, objective: Objective, training: Training, sums: GradientSums | None) -> None:
        self._objective, self._sums = objective, sums
        self.unit = objective.unit
        self._always = training.cuda_graphs is True
        # Sums have memory of their own.
        self._accumulates = training.gradient_accumulation_steps > 1 and sums is None
        # The compiler decides which activations compiled layers keep.
        self._context: Callable[[], AbstractContextManager[None]] = nullcontext if training.compile else recomputing
        self._passes = _TimedPasses()
        # The optimizer's state takes its memory at the end of the first step.
        self._warmup = max(_WARMUP, training.gradient_accumulation_steps + 1)
        self._seen: set[_Shape] = set()
        self._graphs: dict[_Shape, _Graphs] = {}
        self._off = self._full = False
        # Bytes of the memory that all graphs share.
        self._held = 0
        self._pool: Any = None
        self._stream: Any = None

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """As the objective."""
        return self._objective.prepare(context)

    def metadata(self) -> dict[str, Any]:
        """As the objective."""
        return self._objective.metadata()

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """As the objective."""
        return self._objective.step_batches(model, batches, processes)

    def rolled_back(self) -> None:
        """As the objective."""
        self._objective.rolled_back()

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """As the objective."""
        return self._objective.prepare_validation(model, data, spec)

    def example_row(self, tokens: Tensor) -> Batch:
        """As the objective."""
        return self._objective.example_row(tokens)

    def count(self, batch: Batch) -> Tensor:
        """As the objective."""
        return self._objective.count(batch)

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """As the objective."""
        self._objective.before_step(model, batches, processes, max_targets)

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """As the objective, with the same bits, by the graphs of the batch's shape if there are some."""
        if self._off:
            return self._objective.micro_batch_loss(model, batch, items, max_targets)
        if self._warmup:
            self._warmup -= 1
            with self._passes, self._context():
                loss = self._objective.micro_batch_loss(model, batch, items, max_targets)
            if not self._warmup:
                self._decide()
            return loss
        batch = pad_sequences(batch)
        shape = _shape(batch, max_targets)
        if self._graphs and not next(iter(self._graphs.values())).is_valid():
            # Something replaced the weights' memory, which the graphs still read.
            self._graphs.clear()
            self._pool, self._held = None, 0
        if shape not in self._graphs:
            # The first of a shape may compile kernels, which a capture must not.
            captured = shape in self._seen and len(self._graphs) < _MOST_GRAPHS and self._fits()
            self._seen.add(shape)
            if not captured:
                with self._context():
                    return self._objective.micro_batch_loss(model, batch, items, max_targets)
            self._capture(shape, model, batch, items, max_targets)
            if self._off:
                return self._objective.micro_batch_loss(model, batch, items, max_targets)
        return MicroBatchLoss(self._graphs[shape].loss(batch, items, accumulates=self._accumulates), {})

    def _decide(self) -> None:
        """After the warm-up."""
        share = self._passes.host_share()
        if share < _HOST_BOUND and not self._always:
            self._off = True
            log.info("CUDA graphs: off, the host takes %.0f %% of the time of a forward pass", 100 * share)
        else:
            log.info("CUDA graphs: on, the host takes %.0f %% of the time of a forward pass", 100 * share)

    def _fits(self) -> bool:
        """Whether the graphs of one more shape leave memory for a batch that runs without."""
        if not (self._always or self._full):
            largest, free = self._passes.memory(), _free_memory()
            needed = largest + max(largest - self._held, 0)
            self._full = needed > free
            if self._full:
                log.info(
                    "CUDA graphs: %s, because %.1f GiB of memory are free, and a further shape beside a batch without "
                    "graphs may take %.1f",
                    f"no more than {len(self._graphs)}" if self._graphs else "off", free / 2**30, needed / 2**30,
                )  # fmt: skip
        return not self._full

    def _capture(self, shape: _Shape, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None) -> None:
        """Capture the graphs of a shape. Turns graphs off if that fails."""
        if self._pool is None:
            # The allocator uses memory again only on the stream that had it: another stream for each shape would have
            # memory of its own in the same pool.
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        free = _free_memory()
        try:
            with self._context():
                self._graphs[shape] = _Graphs.capture(
                    self._objective, model, batch, items, max_targets, self._pool, self._stream, self._sums
                )
            self._held += max(free - _free_memory(), 0)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            if self._always:
                raise ValueError(
                    f"training.cuda_graphs is true, but a micro-batch was not captured: {reason}. Set "
                    "training.cuda_graphs to false"
                ) from error
            self._off = True
            self._graphs.clear()
            log.warning("CUDA graphs: off, because a micro-batch was not captured: %s", reason)


# Names and sizes of the tensors of a batch, and the bound of its targets.
_Shape = tuple[tuple[tuple[str, torch.Size], ...], int | None]


def _shape(batch: Batch, max_targets: int | None) -> _Shape:
    return tuple((name, tensor.shape) for name, tensor in batch.items()), max_targets


def pad_sequences(batch: Batch) -> Batch:
    """Pad `cu_seqlens` with empty sequences to a power of two.

    A batch in which each row is one sequence stays as it is: its attention is plainly causal.
    """
    ends = batch["cu_seqlens"]
    sequences = ends.shape[1] - 1
    if sequences == batch["input_ids"].shape[0]:
        return batch
    padded = max(_FEWEST_SEQUENCES, 1 << (sequences - 1).bit_length())
    return {**batch, "cu_seqlens": pad(ends, (0, padded - sequences), mode="replicate")}


def _free_memory() -> int:
    """Bytes of the GPU that nobody uses."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class _TimedPasses:
    """Compares the host's time for a forward pass with that of the GPU. A context manager around each pass."""

    def __init__(self) -> None:
        self._passes: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []
        self._began = 0.0
        self._allocated = 0

    def __enter__(self) -> None:
        self._allocated = torch.cuda.memory_allocated()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._passes.append((0.0, event, torch.cuda.Event(enable_timing=True)))
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        _, began, ended = self._passes[-1]
        self._passes[-1] = (time.perf_counter() - self._began, began, ended)
        ended.record()

    def host_share(self) -> float:
        """The host's seconds over the GPU's, of the pass where that is least: in others the host may have compiled a
        kernel. Waits for the GPU."""
        timed = self._passes[1:]
        timed[-1][2].synchronize()
        return min(host / (began.elapsed_time(ended) / 1e3) for host, began, ended in timed)

    def memory(self) -> int:
        """Bytes that a forward and backward pass takes at its peak, beside what is there before."""
        return torch.cuda.max_memory_allocated() - self._allocated


@dataclass
class _Graphs:
    """The graphs of a forward and of a backward pass, and the tensors that they read and write."""

    inputs: Mapping[str, Tensor]
    items: Tensor
    result: Tensor
    """The loss, a scalar."""
    seed: Tensor
    """The gradient of the loss."""
    gradients: Mapping[nn.Parameter, Tensor]
    """In memory that the next replay of any graph overwrites."""
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    sums: GradientSums | None
    weights: Mapping[Tensor, int]
    """Parameters and buffers, and the addresses at which the graphs expect them."""
    anchor: Tensor = field(init=False)
    """Makes autograd call the backward pass."""

    def __post_init__(self) -> None:
        self.anchor = torch.zeros((), device=self.seed.device, requires_grad=True)

    @classmethod
    def capture(
        cls,
        objective: Objective,
        model: nn.Module,
        batch: Batch,
        items: Tensor,
        max_targets: int | None,
        pool: Any,
        stream: torch.cuda.Stream,
        sums: GradientSums | None,
    ) -> _Graphs:
        """Capture both passes of `batch`, whose kernels are compiled. Gradients of `model` stay as they are."""
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kept = [parameter.grad for parameter in learned]
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        items = items.clone()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads, which load data and save checkpoints, may use the GPU in the meantime.
        options: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        try:
            for parameter in learned:
                parameter.grad = None
            with torch.cuda.graph(forward, **options):
                share = objective.micro_batch_loss(model, inputs, items, max_targets)
            assert not share.metrics
            seed = torch.ones_like(share.loss)
            with torch.cuda.graph(backward, **options), nullcontext() if sums is None else sums.paused():
                share.loss.backward(seed)
            # Only the addresses of gradients are kept: with the tensors themselves, the gradients of each shape would
            # have memory of their own, and all of them would lie beside the activations.
            gradients = {parameter: _alias(parameter.grad) for parameter in learned if parameter.grad is not None}
        finally:
            for parameter, gradient in zip(learned, kept, strict=True):
                parameter.grad = gradient
        weights = {tensor: tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        return cls(inputs, items, share.loss.detach(), seed, gradients, forward, backward, sums, weights)

    def is_valid(self) -> bool:
        """Whether the weights are where they were at the capture."""
        return all(tensor.data_ptr() == address for tensor, address in self.weights.items())

    def loss(self, batch: Batch, items: Tensor, *, accumulates: bool) -> Tensor:
        """Replay the forward pass. The backward pass of the result, a scalar, replays the other.

        accumulates: whether gradients have to last beyond the next replay.
        """
        for name, tensor in self.inputs.items():
            tensor.copy_(batch[name], non_blocking=True)
        self.items.copy_(items)
        result: Tensor = _Replay.apply(self.anchor, self, accumulates)
        return result

    def add_gradients(self, *, accumulates: bool) -> None:
        """Add the gradients of the replayed pass to those of the parameters, or to their sums."""
        if self.sums is not None and self.sums.active:
            return self.sums.add(self.gradients)
        held = [(p.grad, gradient) for p, gradient in self.gradients.items() if p.grad is not None]
        if held:
            torch._foreach_add_([gradient for gradient, _ in held], [own for _, own in held])
        for parameter, own in self.gradients.items():
            if parameter.grad is None:
                parameter.grad = own.clone() if accumulates else own


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graphs: _Graphs, accumulates: bool) -> Tensor:
        ctx.graphs, ctx.accumulates = graphs, accumulates
        graphs.forward.replay()
        return graphs.result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.graphs.seed.copy_(gradient)
        ctx.graphs.backward.replay()
        ctx.graphs.add_gradients(accumulates=ctx.accumulates)
        return None, None, None


def _alias(tensor: Tensor) -> Tensor:
    """A tensor in the memory of `tensor`, which does not keep it allocated."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _Memory(tensor.data_ptr(), size * tensor.element_size())
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Bytes on a GPU, as PyTorch reads them from other libraries."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
