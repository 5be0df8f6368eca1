"""Every operator differentiated twice: what PyTorch gives in fp64, or an error, and never a term that is left out."""

import pytest
import torch
from torch import Tensor

from tests.kernels.helpers.operators import OPERATORS, Function

# Losses, whose gradient is computed once, in chunks; and a norm of which nobody needs more.
ONCE = (
    "cross_entropy",
    "logprobs",
    "log_softmax",
    "jsd",
    "kl_div",
    "distillation",
    "tvd",
    "preference",
    "kto",
    "grpo",
    "dyt",
    "cosine",
)
REFUSED = {name for name in OPERATORS if any(part in name for part in ONCE)}


def second_gradients(function: Function, inputs: list[Tensor], trained: int, outer: str) -> list[Tensor]:
    """The gradients of a squared gradient's sum.

    outer: what is done with the results. After "linear" their incoming gradient is a constant, so that only the
    operator itself makes the second derivative; after "square" it depends on them.
    """
    leaves = [x.detach().requires_grad_() for x in inputs[:trained]]
    results = function(*leaves, *inputs[trained:])
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x**3).sum() for x in leaves)
    for y in results:
        factor = torch.randn(y.shape, generator=generator).to(y.device, y.dtype)
        loss = loss + (y * factor if outer == "linear" else y.square() * factor).sum()
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves))


@pytest.mark.parametrize("outer", ["linear", "square"])
@pytest.mark.parametrize("name", OPERATORS)
def test_twice(name, outer, device, within_bar) -> None:
    operator = OPERATORS[name]
    inputs = [x.to(device) for x in operator.inputs().values()]
    trained = len(operator.trained)
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match="can be differentiated only once; leave out create_graph=True"):
            second_gradients(operator.ours, inputs, trained, outer)
        return
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    found = [
        second_gradients(function, tensors, trained, outer)
        for function, tensors in ((operator.ours, inputs), (operator.torchs, inputs), (operator.torchs, wide))
    ]
    for each in zip(*found, strict=True):
        within_bar(*each)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "qk_norm_rope"])
def test_without_weights_that_are_trained(name, device, within_bar) -> None:
    """As for a gradient penalty on the input of a frozen model."""
    operator = OPERATORS[name]
    inputs = [x.to(device) for x in operator.inputs().values()]
    trained = sum(len(shape) > 1 for shape in operator.trained.values())
    found = [
        second_gradients(function, tensors, trained, "linear")
        for function, tensors in (
            (operator.ours, inputs), (operator.torchs, inputs), (operator.torchs, [x.double() for x in inputs])
        )
    ]  # fmt: skip
    for each in zip(*found, strict=True):
        within_bar(*each)
