"""The host code of a step: tables of the tensors' addresses, and launches; formulas: see `adamw/__init__.py`.

Kernels read the tensors' addresses from a table on the device. `StepPlan` caches the tables between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._launch import is_recording, launch, takes_kernel
from . import step_kernels as kernel
from . import step_reference as reference
from .shard import Shard

Rounding = Literal["master", "stochastic", "nearest"]

_dtype = attrgetter("dtype")
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", None: "none"}


@dataclass(frozen=True)
class Launch:
    """Launch parameters: elements per block, elements per program, warps."""

    block: int
    chunk: int
    warps: int


_STEP = Launch(block=512, chunk=8192, warps=2)
_SCALARS = Launch(block=128, chunk=128, warps=4)
# Placeholder for an address in recorded launches: any 64-bit integer.
_ANY_ADDRESS = 2**35


@dataclass(frozen=True, slots=True)
class Tensors:
    """The list arguments of a step, of equal length. Moments, remainders and steps are optional."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Tensor] | None
    exp_avg_sqs: Sequence[Tensor] | None
    remainders: Sequence[Tensor | None] | None
    steps: Sequence[Tensor] | None
    shards: Sequence[Shard]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The other arguments of a step. advance: increment the tensors' steps."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    rounding: Rounding
    seed: int
    advance: bool


class Given(NamedTuple):
    """Device scalars, fp32 tensors of one element: `found_inf` and `gradient_scale`."""

    found_inf: Tensor | None = None
    gradient_scale: Tensor | None = None


class StepPlan:
    """Caches tables and launches between steps. Pass the same object to every step of the same tensors.

    A step rebuilds it if the address, size or dtype of a tensor has changed. It holds no reference to the caller's
    tensors.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._buckets: list[_Bucket] = []

    def update(
        self, tensors: Tensors, hyper: Hyperparameters, check: Callable[[Tensors, Hyperparameters], None]
    ) -> None:
        """Check the arguments and rebuild the tables if anything has changed since the previous step."""
        key = _plan_key(tensors, hyper)
        if self._key != key:
            check(tensors, hyper)
            groups = _group_by_kernel(tensors).items() if takes_kernel(tensors.weights[0]) else ()
            self._buckets = [_Bucket(tensors, hyper, members, signature) for signature, members in groups]
            self._key = key

    def run(self, tensors: Tensors, hyper: Hyperparameters, given: Given) -> None:
        """Run a step of the tensors of the last `update`."""
        for bucket in self._buckets:
            bucket.launch(tensors, hyper, given)
        weight = tensors.weights[0]
        if not takes_kernel(weight) and not weight.is_meta:
            _run_reference(tensors, hyper, given)


def _plan_key(tensors: Tensors, hyper: Hyperparameters) -> Any:
    """Everything that a plan is a function of; of the gradients' addresses only the alignment."""
    states = (tensors.exp_avgs, tensors.exp_avg_sqs, tensors.remainders, tensors.steps)
    key: list[Any] = [hyper.rounding, is_recording(), [*tensors.shards]]
    key += [[*map(Tensor.numel, tensor_list)] for tensor_list in (tensors.weights, tensors.gradients)]
    key += [[*map(_dtype, tensors.gradients)], [address & 15 for address in map(Tensor.data_ptr, tensors.gradients)]]
    for tensor_list in (tensors.weights, *states):
        present = [t for t in tensor_list or () if t is not None]
        key += [[*map(Tensor.data_ptr, present)], [*map(_dtype, present)]]
    key.append([t is None for t in tensors.remainders or ()])
    return key


class _Bucket:
    """Tensors that one launch updates: equal dtypes, and all or none aligned to 16 bytes."""

    def __init__(
        self, tensors: Tensors, hyper: Hyperparameters, members: list[int], signature: tuple[Any, ...]
    ) -> None:
        self._members = members
        self._device = device = tensors.weights[members[0]].device
        *dtypes, sharded_rows, aligned = signature
        self._options = {
            **dict(zip("WGMV", (_DTYPES[dtype] for dtype in dtypes), strict=True)),
            "ROUNDING": hyper.rounding, "CUT": sharded_rows, "ALIGNED": aligned,
            "BLOCK": _STEP.block, "CHUNK": _STEP.chunk, "num_warps": _STEP.warps,
            # No fused multiply-add, for bitwise equality with the reference.
            "enable_fp_fusion": False,
        }  # fmt: skip
        lists = (tensors.weights, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.remainders, tensors.steps)
        rows, sizes = [], []
        for i in members:
            shard, size = tensors.shards[i], tensors.weights[i].numel()
            addresses = [0 if some is None or (t := some[i]) is None else t.data_ptr() for some in lists]
            rows.append([*addresses, size, shard.key, *shard.place()])
            sizes.append(-(-size // _STEP.chunk))
        self._programs = sum(sizes)
        self._table = torch.tensor(rows, dtype=torch.int64).to(device)
        self._chunks = _chunks(sizes).to(device)
        self._scalars = torch.empty(len(members), kernel.SCALARS, dtype=torch.int32, device=device)
        self._zero, self._one = torch.zeros(1, device=device), torch.ones(1, device=device)
        self._sent: list[int] = []
        self._addresses = self._table

    def launch(self, tensors: Tensors, hyper: Hyperparameters, given: Given) -> None:
        """Launch a step of these tensors."""
        (beta1, beta1_low), (beta2, beta2_low) = map(_as_two_fp32, hyper.betas)
        count, seed = len(self._members), hyper.seed
        launch(
            kernel.scalars_kernel, (-(-count // _SCALARS.block),), self._table, self._scalars,
            self._zero if given.found_inf is None else given.found_inf,
            self._one if given.gradient_scale is None else given.gradient_scale,
            count, reference.to_int32(seed), reference.to_int32(seed >> 32),
            reference.to_fp32(hyper.lr), beta1, beta1_low, beta2, beta2_low, ADVANCE=hyper.advance,
            BLOCK=_SCALARS.block, num_warps=_SCALARS.warps, enable_fp_fusion=False,
        )  # fmt: skip
        constants = _constants(hyper)
        # Copies may be freed after the launch: the stream reuses their memory in order.
        gradients = [with_strides_of_weight(tensors.gradients[i], tensors.weights[i]) for i in self._members]
        launch(
            kernel.step_kernel, (self._programs,), self._chunks, self._table, self._scalars,
            self._send([gradient.data_ptr() for gradient in gradients]), count,
            constants.decay, constants.beta1, constants.rest1, constants.rest2, constants.eps, **self._options,
        )  # fmt: skip

    def _send(self, addresses: list[int]) -> int:
        """The address of a single tensor, or of a device array of all addresses, copied to the device if changed."""
        if self._device.type == "meta":
            return _ANY_ADDRESS
        if len(addresses) == 1:
            return addresses[0]
        if addresses != self._sent:
            # The allocator does not reuse pinned memory before the copy from it has finished.
            on_host = torch.tensor(addresses, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._addresses, self._sent = on_host.to(self._device, non_blocking=True), addresses
        return self._addresses.data_ptr()


def _group_by_kernel(tensors: Tensors) -> dict[tuple[Any, ...], list[int]]:
    """Indices of tensors, grouped by dtypes, by whether rows are sharded, and by alignment."""
    found: dict[tuple[Any, ...], list[int]] = {}
    lists = (tensors.weights, tensors.gradients, tensors.exp_avgs, tensors.exp_avg_sqs)
    for i in range(len(tensors.weights)):
        members = [None if some is None else some[i] for some in lists]
        remainder = None if tensors.remainders is None else tensors.remainders[i]
        aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (*members, remainder))
        sharded_rows = tensors.shards[i].row != tensors.shards[i].whole_row
        found.setdefault((*(None if t is None else t.dtype for t in members), sharded_rows, aligned), []).append(i)
    return found


def _chunks(sizes: list[int]) -> Tensor:
    """[programs, 2], int32: the tensor and the chunk of each program, for tensors with `sizes` chunks."""
    counts = torch.tensor(sizes)
    which = torch.repeat_interleave(counts)
    firsts = counts.cumsum(0) - counts
    return torch.stack((which, torch.arange(which.numel()) - firsts[which]), 1).int()


def _as_two_fp32(x: float) -> tuple[float, float]:
    """Two fp32 whose sum is x to 48 bits."""
    high = reference.to_fp32(x)
    return high, reference.to_fp32(x - high)


def _constants(hyper: Hyperparameters) -> reference.Constants:
    beta1, beta2 = hyper.betas
    values = (hyper.lr * hyper.weight_decay, beta1, 1.0 - beta1, 1.0 - beta2, hyper.eps)
    return reference.Constants(*map(reference.to_fp32, values))


def with_strides_of_weight(x: Tensor, weight: Tensor) -> Tensor:
    """x, or a copy of it if its strides differ from those of the weight."""
    if (x.is_contiguous() and weight.is_contiguous()) or x.stride() == weight.stride():
        return x
    return torch.empty_like(weight, dtype=x.dtype).copy_(x)


def _run_reference(tensors: Tensors, hyper: Hyperparameters, given: Given) -> None:
    if given.found_inf is not None and float(given.found_inf) != 0.0:
        return
    scale = 1.0 if given.gradient_scale is None else float(given.gradient_scale)
    betas = (_as_two_fp32(hyper.betas[0]), _as_two_fp32(hyper.betas[1]))
    for i, weight in enumerate(tensors.weights):
        step = 0
        if tensors.steps is not None:
            if hyper.advance:
                tensors.steps[i].add_(1.0)
            step = int(tensors.steps[i])
        scalars = reference.scalars_reference(
            step, tensors.shards[i].key, hyper.seed, reference.to_fp32(hyper.lr), betas,
        )  # fmt: skip
        exp_avg, exp_avg_sq, remainder = (
            None if some is None or (t := some[i]) is None else _flat(t)
            for some in (tensors.exp_avgs, tensors.exp_avg_sqs, tensors.remainders)
        )
        reference.step_reference(
            _flat(weight), _flat(with_strides_of_weight(tensors.gradients[i], weight)), exp_avg, exp_avg_sq, remainder,
            tensors.shards[i].place(), scalars, _constants(hyper), hyper.rounding, scale,
        )  # fmt: skip


def _flat(x: Tensor) -> Tensor:
    """x, contiguous up to a permutation of axes, as a 1-d view in memory order."""
    return x.as_strided((x.numel(),), (1,))
