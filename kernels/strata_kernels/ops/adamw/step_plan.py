"""Where the tensors of an optimizer step are, and the launches that serve them; see `adamw/__init__.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from .._launch import is_recording, launch, takes_kernel
from . import step_kernels as kernel
from . import step_reference as reference

Rounding = Literal["master", "stochastic", "nearest"]

_dtype = attrgetter("dtype")
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", None: "none"}


@dataclass(frozen=True)
class Launch:
    """Elements of a block and of a program, warps of a program."""

    block: int
    chunk: int
    warps: int


_STEP = Launch(block=512, chunk=8192, warps=2)
_SCALARS = Launch(block=128, chunk=128, warps=4)
# A column within a chunk is counted in 32 bits.
_LONGEST_ROW = 2**31 - 2**20
# For the address of an array in a plan: any integer of 64 bits.
_SOME_ADDRESS = 2**35


@dataclass(frozen=True, slots=True)
class Shard:
    """Which elements of which tensor these are, which decides their random bits.

    key: the whole tensor's number, the same in every process and every run, different for each tensor of a model.
    offset: the index of the shard's first element in the whole tensor, in row-major order.
    row: the length of the shard's rows, and whole_row of the rows that they are cut from; 0 where rows are whole.

    Element i of the shard has the index offset + i // row · whole_row + i % row. Indices count modulo 2^32: elements
    that far apart share their random bits.
    """

    key: int
    offset: int = 0
    row: int = 0
    whole_row: int = 0

    def __post_init__(self) -> None:
        if not -(2**63) <= self.key < 2**63 or self.offset < 0:
            raise ValueError(f"key must be a 64-bit integer and offset at least 0, got {self}")
        if not 0 <= self.row <= self.whole_row or (self.row == 0) != (self.whole_row == 0):
            raise ValueError(f"0 < row <= whole_row must hold, or both be 0, got {self}")
        if self.row != self.whole_row and self.row > _LONGEST_ROW:
            raise ValueError(f"a cut row must be shorter than {_LONGEST_ROW}, got {self}")

    @classmethod
    def of(cls, key: int, shape: Sequence[int], local_shape: Sequence[int], offsets: Sequence[int]) -> Shard:
        """The shard of a tensor of `shape` that starts at `offsets`, cut along its first axis and at most one other.

        `torch.distributed.tensor._utils.compute_local_shape_and_global_offset` gives the last two for a DTensor.

        Raises:
            ValueError: two axes but the first are cut.

        Example:
            >>> Shard.of(7, (8, 6), (4, 3), (4, 3))
            Shard(key=7, offset=27, row=3, whole_row=6)
        """
        if not len(shape) == len(local_shape) == len(offsets):
            raise ValueError(f"shape, local_shape and offsets must be of one length: {shape}, {local_shape}, {offsets}")
        offset = sum(at * math.prod(shape[axis + 1 :]) for axis, at in enumerate(offsets))
        cut = [axis for axis in range(1, len(shape)) if local_shape[axis] != shape[axis]]
        if len(cut) > 1:
            raise ValueError(f"a tensor may be cut along its first axis and one other, {local_shape} of {shape} is not")
        if not cut or 0 in local_shape:
            return cls(key, offset)
        return cls(key, offset, math.prod(local_shape[cut[0] :]), math.prod(shape[cut[0] :]))

    def place(self) -> tuple[int, int, int]:
        """offset, row and whole row, of which the latter are equal and positive where rows are whole."""
        return self.offset, self.row or 1, self.whole_row or 1


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a step works on: lists of one length; moments, remainders and steps may be missing."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Tensor] | None
    exp_avg_sqs: Sequence[Tensor] | None
    remainders: Sequence[Tensor | None] | None
    steps: Sequence[Tensor] | None
    shards: Sequence[Shard]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The hyperparameters of a step. advance: count its steps up."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    rounding: Rounding
    seed: int
    advance: bool


class StepPlan:
    """Where the tensors of a step are, kept from one step to the next: give the same object every time.

    It is filled by the first step, and anew when a tensor has moved or has another size or dtype. It holds no tensor of
    the caller's. Steps of different tensors need plans of their own.
    """

    def __init__(self) -> None:
        self._facts: Any = None
        self._buckets: list[_Bucket] = []

    def update(self, tensors: Tensors, numbers: Numbers, check: Callable[[Tensors, Numbers], None]) -> None:
        """Find out where the tensors are, after a check, unless nothing has changed since the step before."""
        facts = _facts(tensors, numbers)
        if self._facts != facts:
            check(tensors, numbers)
            alike = _alike(tensors).items() if takes_kernel(tensors.weights[0]) else ()
            self._buckets = [_Bucket(tensors, numbers, members, signature) for signature, members in alike]
            self._facts = facts

    def run(self, tensors: Tensors, numbers: Numbers, found_inf: Tensor | None) -> None:
        """A step of the tensors that `update` was called with."""
        for bucket in self._buckets:
            bucket.launch(tensors, numbers, found_inf)
        weight = tensors.weights[0]
        if not takes_kernel(weight) and not weight.is_meta:
            _run_reference(tensors, numbers, found_inf)


def _facts(tensors: Tensors, numbers: Numbers) -> Any:
    """What a plan depends on: equal facts, equal plan. Of the gradients' addresses only the alignment matters."""
    states = (tensors.exp_avgs, tensors.exp_avg_sqs, tensors.remainders, tensors.steps)
    facts: list[Any] = [numbers.rounding, is_recording(), [*tensors.shards]]
    facts += [[*map(Tensor.numel, some)] for some in (tensors.weights, tensors.gradients)]
    facts += [[*map(_dtype, tensors.gradients)], [address & 15 for address in map(Tensor.data_ptr, tensors.gradients)]]
    for some in (tensors.weights, *states):
        present = [t for t in some or () if t is not None]
        facts += [[*map(Tensor.data_ptr, present)], [*map(_dtype, present)]]
    facts.append([t is None for t in tensors.remainders or ()])
    return facts


class _Bucket:
    """The tensors of a step that one launch serves: of the same dtypes, all aligned to 16 bytes or not all."""

    def __init__(self, tensors: Tensors, numbers: Numbers, members: list[int], signature: tuple[Any, ...]) -> None:
        self._members = members
        self._device = device = tensors.weights[members[0]].device
        *dtypes, cut, aligned = signature
        self._options = {
            **dict(zip("WGMV", (_DTYPES[dtype] for dtype in dtypes), strict=True)),
            "ROUNDING": numbers.rounding, "CUT": cut, "ALIGNED": aligned,
            "BLOCK": _STEP.block, "CHUNK": _STEP.chunk, "num_warps": _STEP.warps,
            # No product is fused with a sum: the bits are those of the reference.
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
        self._zero = torch.zeros(1, device=device)
        self._sent: list[int] = []
        self._addresses = self._table

    def launch(self, tensors: Tensors, numbers: Numbers, found_inf: Tensor | None) -> None:
        """A step of these tensors."""
        (beta1, beta1_low), (beta2, beta2_low) = map(_halves, numbers.betas)
        count, seed = len(self._members), numbers.seed
        launch(
            kernel.scalars_kernel, (-(-count // _SCALARS.block),), self._table, self._scalars,
            self._zero if found_inf is None else found_inf, count, reference.signed(seed), reference.signed(seed >> 32),
            reference.to_fp32(numbers.lr), beta1, beta1_low, beta2, beta2_low,
            ADVANCE=numbers.advance, BLOCK=_SCALARS.block, num_warps=_SCALARS.warps, enable_fp_fusion=False,
        )  # fmt: skip
        shares = _shares(numbers)
        # Copies for the strides' sake live until the launch: later allocations of this stream come after it.
        gradients = [laid_out(tensors.gradients[i], tensors.weights[i]) for i in self._members]
        launch(
            kernel.step_kernel, (self._programs,), self._chunks, self._table, self._scalars,
            self._send([gradient.data_ptr() for gradient in gradients]), count,
            shares.decay, shares.beta1, shares.rest1, shares.rest2, shares.eps, **self._options,
        )  # fmt: skip

    def _send(self, addresses: list[int]) -> int:
        """The one address, or that of the addresses on the device, where they are sent if they have changed."""
        if self._device.type == "meta":
            return _SOME_ADDRESS
        if len(addresses) == 1:
            return addresses[0]
        if addresses != self._sent:
            # Pinned memory is not used again before its copy is done.
            here = torch.tensor(addresses, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._addresses, self._sent = here.to(self._device, non_blocking=True), addresses
        return self._addresses.data_ptr()


def _alike(tensors: Tensors) -> dict[tuple[Any, ...], list[int]]:
    """The indices of tensors that one launch serves, by dtypes of weight, gradient and moments, and more."""
    found: dict[tuple[Any, ...], list[int]] = {}
    lists = (tensors.weights, tensors.gradients, tensors.exp_avgs, tensors.exp_avg_sqs)
    for i in range(len(tensors.weights)):
        members = [None if some is None else some[i] for some in lists]
        remainder = None if tensors.remainders is None else tensors.remainders[i]
        aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (*members, remainder))
        cut = tensors.shards[i].row != tensors.shards[i].whole_row
        found.setdefault((*(None if t is None else t.dtype for t in members), cut, aligned), []).append(i)
    return found


def _chunks(sizes: list[int]) -> Tensor:
    """[programs, 2], int32: each program's tensor and chunk, for tensors of so many chunks."""
    counts = torch.tensor(sizes)
    which = torch.repeat_interleave(counts)
    firsts = counts.cumsum(0) - counts
    return torch.stack((which, torch.arange(which.numel()) - firsts[which]), 1).int()


def _halves(x: float) -> tuple[float, float]:
    """Two fp32 whose sum is x, to 48 bits."""
    high = reference.to_fp32(x)
    return high, reference.to_fp32(x - high)


def _shares(numbers: Numbers) -> reference.Shares:
    beta1, beta2 = numbers.betas
    values = (numbers.lr * numbers.weight_decay, beta1, 1.0 - beta1, 1.0 - beta2, numbers.eps)
    return reference.Shares(*map(reference.to_fp32, values))


def laid_out(x: Tensor, weight: Tensor) -> Tensor:
    """x, or a copy of it, whose elements are in memory as the weight's."""
    if (x.is_contiguous() and weight.is_contiguous()) or x.stride() == weight.stride():
        return x
    return torch.empty_like(weight, dtype=x.dtype).copy_(x)


def _run_reference(tensors: Tensors, numbers: Numbers, found_inf: Tensor | None) -> None:
    if found_inf is not None and float(found_inf) != 0.0:
        return
    betas = (_halves(numbers.betas[0]), _halves(numbers.betas[1]))
    for i, weight in enumerate(tensors.weights):
        step = 0
        if tensors.steps is not None:
            if numbers.advance:
                tensors.steps[i].add_(1.0)
            step = int(tensors.steps[i])
        scalars = reference.scalars_reference(
            step, tensors.shards[i].key, numbers.seed, reference.to_fp32(numbers.lr), betas,
        )  # fmt: skip
        exp_avg, exp_avg_sq, remainder = (
            None if some is None or (t := some[i]) is None else _in_memory(t)
            for some in (tensors.exp_avgs, tensors.exp_avg_sqs, tensors.remainders)
        )
        reference.step_reference(
            _in_memory(weight), _in_memory(laid_out(tensors.gradients[i], weight)), exp_avg, exp_avg_sq, remainder,
            tensors.shards[i].place(), scalars, _shares(numbers), numbers.rounding,
        )  # fmt: skip


def _in_memory(x: Tensor) -> Tensor:
    """A dense x as [elements], in the order of its memory."""
    return x.as_strided((x.numel(),), (1,))
