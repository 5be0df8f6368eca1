"""selective_log_softmax against PyTorch in the same dtype and in fp64."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strata_kernels import selective_log_softmax

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 7), (5, 300), (3, 5001)]


def plain(logits: Tensor, index: Tensor, temperature: float = 1.0) -> Tensor:
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_p.gather(-1, index if index.dim() == logits.dim() else index[..., None]).view(index.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("classes", [(), (1,), (4,)], ids=["one", "one of a list", "four"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_matches_fp64(temperature, classes, shape, dtype, device, compare, poisoned) -> None:
    logits = (2 * torch.randn(shape)).to(device, dtype)
    # Some classes are asked for twice.
    index = torch.randint(shape[1], (shape[0], *classes), device=device)
    if classes == (4,):
        index[0, 1] = index[0, 3]
    compare(
        lambda x: selective_log_softmax(x, index, temperature=temperature),
        lambda x: plain(x, index, temperature),
        [logits],
    )


def test_compiled_equals_eager(device, gradients) -> None:
    logits, index = torch.randn(2, 3, 30, device=device), torch.randint(30, (2, 3, 2), device=device)
    function = lambda x: selective_log_softmax(x.sin(), index).exp()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(function, [logits]), gradients(compiled, [logits]), strict=True):
        assert torch.equal(a, b)


def test_fp64_is_differentiated_exactly(device) -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, device=device, requires_grad=True)
    index = torch.randint(6, (4, 3), device=device)
    assert torch.autograd.gradcheck(lambda x: selective_log_softmax(x, index, temperature=0.6), logits)


def test_transforms_of_functions_see_plain_pytorch(device) -> None:
    logits, index = torch.randn(4, 6, device=device), torch.randint(6, (4,), device=device)
    call: Callable[..., Tensor] = lambda x, f: f(x, index, temperature=0.7).sum()  # noqa: E731
    for a, b in zip(*(torch.func.grad_and_value(call)(logits, f) for f in (selective_log_softmax, plain)), strict=True):
        torch.testing.assert_close(a, b)


def test_double_backward_is_refused(device) -> None:
    logits = torch.randn(4, 6, device=device, requires_grad=True)
    loss = selective_log_softmax(logits, torch.zeros(4, dtype=torch.int64, device=device)).sum()
    with pytest.raises(NotImplementedError, match="only once"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize(
    ("shape", "index", "options", "message"),
    [
        ((4, 0), (4,), {}, "V > 0"),
        ((4, 6), (3,), {}, "index int64"),
        ((4, 6), (4, 0), {}, "at least one class"),
        ((4, 6), (4, 2, 2), {}, "index int64"),
        ((4, 6), (4,), {"temperature": 0.0}, "must be positive"),
    ],
    ids=str,
)
def test_wrong_arguments(shape, index, options, message, device) -> None:
    with pytest.raises(ValueError, match=message):
        selective_log_softmax(
            torch.zeros(shape, device=device), torch.zeros(index, dtype=torch.int64, device=device), **options
        )
