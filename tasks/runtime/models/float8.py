"""FP8 products in the linear layers of a model: `training.float8`.

Only the class of a layer changes: names, hooks, the weight and its dtype stay, so checkpoints, optimizers and export
know nothing of it. Weights that an adapter leaves frozen are FP8 in memory, too, where a process holds them whole:
`quantize_frozen_weights`. The model is read exactly, and its fingerprint and export use exact weights.

On a GPU, `keep_slow_layers` measures a layer of each shape before training, and gives those back their class for which
FP8 is not faster. A checkpoint keeps their names, so that a resumed run computes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from strata_kernels.ops.float8.cast import ALIGNMENT
from strata_kernels.ops.float8.largest import finding_largest
from strata_kernels.ops.float8.linear import Scaling, float8_linear, float8_stored_linear, quantize_weight
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import SCORE, Model
from strata_platform.spec.sections.training import Training
from tasks.runtime.models.build import build_model_on_meta
from tasks.runtime.models.media.multimodal import is_multimodal
from tasks.runtime.models.score_head import scores
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

# The first chips with tensor cores for FP8: Ada, then Hopper.
_CAPABILITY = (8, 9)
# Small layers whose output decides by comparison, and the adapter's own, which stay exact.
_EXACT_NAMES = frozenset({"gate", "router", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})
# Of a measurement.
_WARMUPS, _REPEATS = 3, 10
# Cycles of the GPU, about 30 ms: longer than the host takes for the repeats.
_WAIT = 50_000_000
FLOAT8 = "float8"
"""The entry of a checkpoint's metadata."""


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in FP8."""

    scaling: Scaling
    weight_inverse: Tensor
    """Of a weight that is gathered in FP8, what undoes its scale: [1]."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        if self.weight.dtype is torch.float8_e4m3fn:
            return float8_stored_linear(x, self.weight, self.weight_inverse, self.bias)
        return float8_linear(x, self.weight, self.bias, scaling=self.scaling)

    def project_activation(self, activate: Callable[..., Tensor]) -> Tensor:
        """`self(activate())`, where the activation notes the scale for the cast of its result."""
        with finding_largest() if self.scaling == "tensorwise" else nullcontext():
            x = activate()
        return self(x)


class Float8FrozenLinear(nn.Linear):
    """A linear layer whose weight, bytes of FP8 values, is never trained."""

    weight_inverse: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        return float8_stored_linear(x, self.weight.view(torch.float8_e4m3fn), self.weight_inverse, self.bias)

    def project_activation(self, activate: Callable[..., Tensor]) -> Tensor:
        """`self(activate())`, where the activation notes the scale for the cast of its result."""
        with finding_largest():
            x = activate()
        return self(x)


def require_float8(training: Training) -> None:
    """Raises ValueError if this machine's GPU has no FP8. Without a GPU, FP8 is emulated."""
    if training.float8 == "none" or not torch.cuda.is_available():
        return
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if capability < _CAPABILITY:
        raise ValueError(
            f"training.float8 {training.float8!r} needs a GPU that multiplies in FP8, of compute capability 8.9 "
            f"or later (Ada, Hopper, Blackwell), and {name} has {capability[0]}.{capability[1]}; "
            "set training.float8 to 'none'"
        )


def require_float8_layers(model: Model, training: Training) -> None:
    """Raises ValueError if no layer of the model can multiply in FP8. Reads only its configuration."""
    if training.float8 == "none":
        return
    found, _ = _linear_layers(build_model_on_meta(model))
    if not found:
        raise ValueError(
            f"training.float8 {training.float8!r}: model.name {model.name!r} has no linear layer with sizes "
            f"divisible by {ALIGNMENT} beside its head; set training.float8 to 'none'"
        )


def use_float8(model: PreTrainedModel, training: Training) -> None:
    """Make the linear layers of `model` multiply in FP8 as `training.float8` says. Changes it in place.

    Not the head, routers, adapters, layers of a vision tower, and layers with sizes that 16 does not divide.
    """
    if training.float8 == "none":
        return
    found, others = _linear_layers(model)
    for layer in found.values():
        _set_class(layer, Float8Linear)
        layer.scaling = training.float8  # type: ignore[assignment]
    log.info("training.float8 %s: %d linear layers multiply in FP8", training.float8, len(found))
    for path in others:
        log.info("training.float8: %s stays exact, because %d does not divide its sizes", path, ALIGNMENT)


def _linear_layers(model: PreTrainedModel) -> tuple[dict[str, nn.Linear], list[str]]:
    """The layers that can multiply in FP8 by their paths, and the paths of those whose sizes do not fit."""
    head = getattr(model, SCORE) if scores(model) else model.get_output_embeddings()
    within = set(model.get_decoder().modules()) if is_multimodal(model.config) else None
    found, others = {}, []
    for path, layer in model.named_modules():
        named = _EXACT_NAMES.intersection(path.split("."))
        if type(layer) is not nn.Linear or layer is head or named or (within is not None and layer not in within):
            continue
        if layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT:
            others.append(path)
        else:
            found[path] = layer
    return found, others


def float8_layers(model: nn.Module) -> dict[str, Float8Linear]:
    """The layers that multiply in FP8 with a weight that is not, by their paths."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, Float8Linear)}


def keep_slow_layers(
    model: nn.Module, spec: RunSpec, processes: Processes, dtype: torch.dtype, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Give layers back their exact products where those are faster on this GPU. A collective.

    A resumed run keeps what its checkpoint's `metadata` names.

    Returns:
        What the metadata of checkpoints say of it; {} without `training.float8`.
    """
    scaling, layers = spec.training.float8, float8_layers(model)
    if scaling == "none":
        return {}
    kept = metadata.get(FLOAT8, {})
    if kept.get("scaling") == scaling:
        exact = set(kept["exact"])
    else:
        tokens = spec.training.micro_batch_size * spec.data.sequence_length // spec.parallel.context_parallel
        exact = set(processes.on_main(lambda: _slow_layers(layers, scaling, tokens, dtype, processes.device)))
    for path in exact & layers.keys():
        _set_class(layers[path], nn.Linear)
    if processes.device.type == "cpu" and processes.is_main:
        log.warning("training.float8: this machine has no GPU; FP8 is emulated, with its results and slower than exact")
    return {FLOAT8: {"scaling": scaling, "exact": sorted(exact)}}


@dataclass(frozen=True)
class _Cost:
    """Milliseconds of a forward and backward pass of a layer: of the GPU, and of the host that launches it."""

    gpu: float
    host: float

    def of(self, *, host_bound: bool) -> float:
        """What the run waits for."""
        return max(self.gpu, self.host) if host_bound else self.gpu


def _slow_layers(
    layers: Mapping[str, Float8Linear], scaling: Scaling, tokens: int, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """The paths of layers whose products in `dtype` take no longer than in FP8. Measures each shape once."""
    if device.type != "cuda":
        return []
    shapes: dict[tuple[int, int, bool], list[str]] = {}
    for path, layer in layers.items():
        shapes.setdefault((layer.out_features, layer.in_features, layer.weight.requires_grad), []).append(path)
    costs = {shape: _costs(tokens, *shape, scaling, dtype, device) for shape in shapes}
    # The host runs ahead of the GPU, unless all layers together take it longer.
    in_all = [(len(shapes[shape]), float8) for shape, (_, float8) in costs.items()]
    host_bound = sum(n * cost.host for n, cost in in_all) > sum(n * cost.gpu for n, cost in in_all)
    slow = []
    for shape, (exact, float8) in costs.items():
        before, after = (cost.of(host_bound=host_bound) for cost in (exact, float8))
        log.info(
            "training.float8: %d tokens, %d -> %d: %.3f ms exact, %.3f ms in FP8: %d layers %s",
            tokens, shape[1], shape[0], before, after, len(shapes[shape]),
            "in FP8" if after < before else "stay exact",
        )  # fmt: skip
        if after >= before:
            slow += shapes[shape]
    if slow:
        log.info("training.float8: FP8 is not faster in %s", ", ".join(slow))
    return slow


def _costs(
    tokens: int, outputs: int, inputs: int, trained: bool, scaling: Scaling, dtype: torch.dtype, device: torch.device
) -> tuple[_Cost, _Cost]:
    """Of a layer, exact and in FP8."""
    x = torch.randn(tokens, inputs, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(outputs, inputs, dtype=dtype, device=device, requires_grad=trained)
    dy = torch.randn(tokens, outputs, dtype=dtype, device=device)
    leaves = [x, weight] if trained else [x]

    def cost(multiply: Callable[[Tensor], Tensor]) -> _Cost:
        for _ in range(_WARMUPS):
            torch.autograd.grad(multiply(x), leaves, dy)
        torch.cuda.synchronize(device)
        # The GPU waits until the host is done, or gaps between small kernels would count as theirs.
        torch.cuda._sleep(_WAIT)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        started = perf_counter()
        for _ in range(_REPEATS):
            torch.autograd.grad(multiply(x), leaves, dy)
        host = perf_counter() - started
        end.record()
        end.synchronize()
        return _Cost(begin.elapsed_time(end) / _REPEATS, 1000 * host / _REPEATS)

    exact = cost(lambda x: functional.linear(x, weight))
    if trained or scaling == "rowwise":
        return exact, cost(lambda x: float8_linear(x, weight, scaling=scaling))
    packed, inverse = quantize_weight(weight)
    return exact, cost(lambda x: float8_stored_linear(x, packed, inverse))


def saves_frozen_weights(spec: RunSpec) -> bool:
    """Whether frozen weights under an adapter are FP8 in memory: with one scale, where no strategy shards them."""
    return spec.training.float8 == "tensorwise" and spec.adapter.type == "lora" and spec.parallel.type != "fsdp"


def quantize_frozen_weights(model: nn.Module, spec: RunSpec, device: torch.device) -> None:
    """Keep the frozen weights of layers that multiply in FP8 as FP8 on `device`, one after the other.

    Their bytes are parameters of type uint8, which every collective can send.
    """
    if not saves_frozen_weights(spec):
        return
    for layer in float8_layers(model).values():
        quantize_frozen_weight(layer, device)


def quantize_frozen_weight(layer: nn.Module, device: torch.device) -> None:
    """Keep the weight of `layer` as FP8 on `device`, if the layer multiplies in FP8 and the weight is frozen."""
    if not isinstance(layer, Float8Linear) or layer.weight.requires_grad:
        return
    if layer.weight.is_meta:
        values, inverse = torch.empty_like(layer.weight, dtype=torch.uint8), layer.weight.new_empty(1).float()
    else:
        values, inverse = quantize_weight(layer.weight.to(device))
    layer.weight = nn.Parameter(values.view(torch.uint8), requires_grad=False)
    layer.register_buffer("weight_inverse", inverse, persistent=False)
    _set_class(layer, Float8FrozenLinear)


def _set_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    layer.__class__ = cls
