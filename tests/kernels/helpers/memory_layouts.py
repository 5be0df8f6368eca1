"""Every memory layout in which PyTorch can hand a tensor to an operator, as an input or as an incoming gradient."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def layouts(values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, a tensor of the shape of `values` in that layout), for every layout but the dense one.

    Expanded and overlapping layouts repeat some of the values, all others hold `values`. The memory around and between
    the elements is NaN, or the largest integer: who reads it shows it.
    """
    shape, axes = values.shape, tuple(range(values.dim()))
    for order in _orders(axes):
        # The gradient of k in `q @ k.transpose(2, 3)`, eager attention, is laid out in memory order (0, 1, 3, 2).
        yield f"memory order {order}", _place(values, _strides(shape, order))
    yield "misaligned", _place(values, _strides(shape, axes), offset=1)
    yield "part of wider rows", _place(values, _strides(shape, axes, gap=16), offset=8)
    yield "part of wider rows, misaligned", _place(values, _strides(shape, axes, gap=3), offset=1)
    yield "every other feature", _place(values, _strides(shape, axes, step=2))
    if axes[1:]:
        first, *others = _strides(shape, axes)
        yield "every other one of the first axis", _place(values, (2 * first, *others))
        for axis in axes:
            yield f"expanded along axis {axis}", values.narrow(axis, 0, 1).clone().expand(shape)
    # The gradient of a sum.
    yield "expanded along every axis", values.flatten()[:1].clone().view([1] * len(shape)).expand(shape)
    if axes[1:]:
        # What `Tensor.unfold` gives: each row starts one element after the row before it.
        yield "overlapping rows", values.flatten()[: sum(shape)].clone().as_strided(shape, [1] * len(shape))


def _orders(axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Two axes exchanged, and all of them rotated."""
    exchanged = [tuple({a: b, b: a}.get(axis, axis) for axis in axes) for a, b in itertools.combinations(axes, 2)]
    return sorted({*exchanged, *(axes[i:] + axes[:i] for i in axes[1:])})


def _strides(shape: Sequence[int], order: Sequence[int], step: int = 1, gap: int = 0) -> tuple[int, ...]:
    """Strides with the axes in memory from the outermost to the innermost, and `gap` elements after each row."""
    strides, stride = [0] * len(shape), step
    for axis in reversed(order):
        strides[axis] = stride
        stride = stride * shape[axis] + (gap if axis == order[-1] else 0)
    return tuple(strides)


def _place(values: Tensor, strides: Sequence[int], offset: int = 0) -> Tensor:
    size = offset + sum((n - 1) * stride for n, stride in zip(values.shape, strides, strict=True)) + 1
    poison = float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).max
    memory = torch.full((size + 16,), poison, dtype=values.dtype, device=values.device)
    return memory.as_strided(values.shape, strides, offset).copy_(values)
