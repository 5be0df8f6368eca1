"""How `benchmarks.ops` describes an operator, and the shapes at which it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from .measure import Function
from .reference import Shape

Inputs = Callable[[Shape, torch.dtype, torch.device], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A shape, and the bars of what is measured there, by column: `share` is held at least, all else at most.

    wall: the host bounds this case, so its wall time is what counts.
    told: keywords of our function alone: what the host knows of these inputs, or how exact it is to be.
    """

    shape: Shape
    bars: Mapping[str, float] = field(default_factory=dict)
    wall: bool = False
    told: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Operator:
    """One operator.

    ours, torch: called with the inputs; the second is what eager PyTorch does.
    inputs: (shape, dtype, device) → tensors; those that require gradients are differentiated.
    cases: what is measured, beside the peers.
    sweep: what is measured to find cliffs: one axis, its sizes, and the sizes of the other axes.
    bytes: bytes per element of `elements` that forward and backward move at the least, bf16; 0 if bound by FLOPs.
    elements: the number that `bytes` counts by.
    flops: floating-point operations of forward and backward.
    exact: the truth, called in fp64; by default `torch`.
    products: the matrix products alone, for an operator that is built around them.
    waits: whether `torch` waits for the host, so that neither a CUDA graph nor `torch.compile` can hold it.
    label: a shape as tables show it.
    """

    name: str
    ours: Function
    torch: Function
    inputs: Inputs
    cases: tuple[Case, ...]
    sweep: tuple[str, tuple[int, ...], Shape] | None = None
    bytes: int = 0
    elements: Callable[[Shape], int] = lambda shape: shape["rows"] * shape["features"]
    flops: Callable[[Shape], float] = lambda shape: 0
    exact: Function | None = None
    products: Function | None = None
    waits: bool = False
    label: Callable[[Shape], str] = lambda shape: "x".join(map(str, shape.values()))

    def sweep_cases(self) -> tuple[Case, ...]:
        """The sweep as cases without bars."""
        if self.sweep is None:
            return ()
        axis, sizes, others = self.sweep
        return tuple(Case({**others, axis: size}) for size in sizes)


def in_case(operator: Operator, case: Case) -> Operator:
    """The operator with our function as it is called in `case`."""
    return replace(operator, ours=partial(operator.ours, **case.told))
