"""Which path an operator takes, and what is noted in place of a launch."""

import pytest
import torch
import triton
import triton.language as tl

from strata_kernels import rms_norm
from strata_kernels.ops._launch import is_recording, launch, recording, runs_triton, takes_kernel
from tests.kernels.conftest import INTERPRETED
from tests.kernels.helpers.operators import OPERATORS


@triton.jit
def double_kernel(p_x, p_y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o, 2 * tl.load(p_x + o, mask=o < n), mask=o < n)


def test_the_kernel_runs_where_triton_does(path, device) -> None:
    x = torch.arange(5.0, device=device)
    assert runs_triton(x) == takes_kernel(x) == (path != "reference")
    assert not takes_kernel(x.double())
    y = torch.zeros_like(x)
    if path == "reference":
        with pytest.raises(AssertionError, match="cpu tensors need TRITON_INTERPRET=1"):
            launch(double_kernel, (1,), x, y, 5, BLOCK=8)
    else:
        launch(double_kernel, (1,), x, y, 5, BLOCK=8)
        assert torch.equal(y, 2 * x)


def test_an_empty_grid_launches_nothing(device) -> None:
    x = torch.zeros(0, device=device)
    launch(double_kernel, (0,), x, x, 0, BLOCK=8)


def test_launches_are_noted_in_order_and_not_made(device) -> None:
    x = torch.ones(4, device=device)
    y = torch.zeros_like(x)
    with recording() as calls:
        launch(double_kernel, (1,), x, y, 4, BLOCK=4, num_warps=1)
        launch(double_kernel, (0,), x, y, 0, BLOCK=8)
    assert [(call.kernel, call.args[2], call.kwargs["BLOCK"]) for call in calls] == [
        (double_kernel, 4, 4),
        (double_kernel, 0, 8),
    ]
    assert calls[0].kwargs == {"BLOCK": 4, "num_warps": 1, "enable_fp_fusion": True}
    assert torch.equal(y, torch.zeros_like(x))


def test_recording_ends_with_its_block_and_nests() -> None:
    with pytest.raises(KeyError), recording():
        raise KeyError
    assert not is_recording()
    with recording() as outer:
        with recording() as inner:
            rms_norm(torch.empty(2, 4, device="meta"))
        assert is_recording() and len(inner) == 1 and not outer


def test_meta_tensors_take_the_kernel_path_only_while_recording() -> None:
    x = torch.empty(6, 8, device="meta", requires_grad=True)
    weight = torch.empty(8, device="meta", requires_grad=True)
    rms_norm(x, weight).sum().backward()
    assert x.grad.shape == (6, 8) and not takes_kernel(x)
    with recording() as calls:
        rms_norm(x, weight).sum().backward()
    names = [call.kernel.__name__ for call in calls]
    assert names == ["norm_fwd_kernel", "norm_bwd_kernel"]


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["rms_norm", "qk_norm_rope", "swiglu", "experts", "selective_log_softmax", "linear_jsd"]
)
def test_the_faster_interpreter_has_the_bits_of_tritons(name, dtype) -> None:
    from tests.kernels.helpers import fast_interpreter

    operator = OPERATORS[name]
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in operator.inputs().values()]
    incoming = [torch.randn(shape).to(dtype) for shape in operator.results]
    fast = operator.differentiate(operator.ours, inputs, incoming)
    fast_interpreter.patch.undo()
    try:
        plain = operator.differentiate(operator.ours, inputs, incoming)
    finally:
        fast_interpreter.speed_up()
    assert all(torch.equal(x, y) for x, y in zip(fast, plain, strict=True))
