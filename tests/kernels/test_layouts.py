"""Every operator on inputs and incoming gradients of every memory layout, against PyTorch and fp64."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import strata_kernels
from tests.kernels.helpers.memory_layouts import layouts
from tests.kernels.helpers.operators import OPERATORS, Operator

LOSSES = ("cross_entropy", "log_softmax", "linear_", "jsd", "kl_div", "tvd")


def dtypes(name: str) -> list[torch.dtype]:
    """On a GPU bf16 too, where pointers are aligned in another way; PyTorch's losses would be in bf16, ours are not."""
    is_loss = any(word in name for word in LOSSES)
    return [torch.float32] + [torch.bfloat16] * (torch.cuda.is_available() and not is_loss)


def test_every_operator_is_here() -> None:
    public = {name: getattr(strata_kernels, name) for name in strata_kernels.__all__}
    # Those of an optimizer's step have no gradient.
    operators = {
        name
        for name, value in public.items()
        if inspect.isfunction(value) and ".ops." in value.__module__ and "adamw" not in value.__module__
    }
    assert operators == {name.split()[0] for name in OPERATORS}


def positions(operator: Operator) -> list[str]:
    return [*operator.trained, *operator.given, *(f"gradient {i}" for i in range(len(operator.results))), "all"]


def variants(tensors: list[Tensor], which: int, part: int) -> Iterator[tuple[str, list[Tensor]]]:
    """The tensors with one of them, or all from len(tensors) on, in every layout.

    part: 3 for every third layout where one tensor alone is laid out; tensors begin with different ones.
    """
    if which < len(tensors):
        for name, laid_out in list(layouts(tensors[which]))[which % part :: part]:
            yield name, [*tensors[:which], laid_out, *tensors[which + 1 :]]
        return
    ways = [list(layouts(x)) for x in tensors]
    for i in range(max(map(len, ways))):
        # Not the same layout for all of them, where they have not as many.
        names, chosen = zip(*(way[(i + j) % len(way)] for j, way in enumerate(ways)), strict=True)
        yield ", ".join(names), list(chosen)


@pytest.mark.parametrize(
    ("name", "position", "dtype"),
    [
        (name, position, dtype)
        for name, operator in OPERATORS.items()
        for position in positions(operator)
        for dtype in dtypes(name)
    ],
)
def test_every_layout(name, position, dtype, path, device, within_bar, poisoned) -> None:
    operator = OPERATORS[name]
    inputs = [x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in operator.inputs().values()]
    incoming = [torch.randn(shape).to(device, dtype) for shape in operator.results]
    names, found = [], []
    # The interpreter takes its time. It has each tensor in each layout where all are laid out.
    part = 3 if path == "interpreter" else 1
    for layout, laid_out in variants([*inputs, *incoming], positions(operator).index(position), part):
        dense = [x.clone(memory_format=torch.contiguous_format) for x in laid_out]
        wide = [x.double() if x.is_floating_point() else x for x in dense]
        names.append(layout)
        found.append(
            [
                operator.differentiate(function, tensors[: len(inputs)], tensors[len(inputs) :])
                for function, tensors in ((operator.ours, laid_out), (operator.torchs, dense), (operator.torchs, wide))
            ]
        )
        assert all(torch.equal(x, y) for x, y in zip(laid_out, dense, strict=True)), f"{layout}: written to"
    # Together: where a tensor of equal values leaves a gradient of zero, there is nothing to be relative to.
    for i in range(len(found[0][0])):
        ours, theirs, exact = (torch.stack([results[way][i] for results in found]) for way in range(3))
        try:
            within_bar(ours, theirs, exact, operator.roundings)
        except AssertionError as error:
            distances = (ours - exact).abs().nan_to_num(torch.inf).flatten(1).amax(1)
            error.add_note(f"result or gradient {i}; {position}: {names[int(distances.argmax())]}")
            raise
