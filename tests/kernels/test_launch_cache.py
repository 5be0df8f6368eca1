"""What is replayed in place of a host function, with a stand-in for a compiled kernel that reads and writes by address.

On a GPU `test_operator.py` compares the replayed operators with calls through the dispatcher.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from triton import knobs

from strata_kernels.ops import _launch, _launch_cache
from strata_kernels.ops._launch_cache import TENSOR_TYPES, cache_key, run_cached


class Scale:
    """y[i] = x[i] * factor for n fp32 values, and how often it was launched."""

    function, packed_metadata = 0, (1, 1, 0)

    def __init__(self) -> None:
        self.count = 0

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit, *args) -> None:
        assert (x, y, z) == (3, 1, 1) and (launch_metadata, enter, exit) == (None, None, None)
        p_x, p_y, n, factor, constexpr = args
        assert constexpr is None
        values = (ctypes.c_float * n).from_address(p_x)
        (ctypes.c_float * n).from_address(p_y)[:] = [factor * value for value in values]
        self.count += 1

    def launch(self, x: Tensor, y: Tensor, factor: float) -> None:
        """As `_launch.launch` starts and notes it."""
        n = y.numel()
        self.run(3, 1, 1, 0, 0, (), None, None, None, x.data_ptr(), y.data_ptr(), n, factor, None)
        launched = _launch._launched.get()
        if launched is not None:
            launched.append(_launch.Launched(self, (3,), (x, y, n, factor, None)))


@pytest.fixture
def kernel() -> Scale:
    return Scale()


@pytest.fixture(autouse=True)
def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU as device 0 of a driver without a GPU, with an empty launch cache."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(_launch_cache, "_cache", {})
    yield


def call(host: Callable[..., object], *args: object) -> object:
    """One call of the operator whose host function is `host`."""
    _, *key = cache_key("operator", [TENSOR_TYPES | {type(None), float}] * len(args), args)[0]
    return run_cached(host, args, (0, *key), [x.data_ptr() for x in args if isinstance(x, Tensor)])


def entry() -> object:
    [found] = _launch_cache._cache.values()
    return found


def test_the_third_call_of_a_key_is_replayed_on_its_own_tensors(kernel) -> None:
    runs = []

    def host(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        runs.append(x)
        middle, y = x.new_empty(x.shape), torch.empty_like(x)
        kernel.launch(x.reshape(-1), middle, factor)
        kernel.launch(middle, y.view_as(y), 10.0)
        return y, middle

    for i in range(5):
        x = torch.full((4, 3), float(i))
        y, middle = call(host, x, 2.0)
        assert torch.equal(y, 20 * x) and torch.equal(middle, 2 * x)
    assert len(runs) == 2 and kernel.count == 10
    # Another key: another number, other strides, another shape.
    for args in ((x, 3.0), (x.new_empty(3, 4).t(), 2.0), (x[:2], 2.0)):
        call(host, *args)
    assert len(runs) == 5


def test_parts_of_a_tensor_are_found_again(kernel) -> None:
    def host(x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        y = x.new_empty(first.shape)
        kernel.launch(second, y, 1.0)
        return y

    for _ in range(4):
        x = torch.randn(6)
        assert torch.equal(call(host, x), x[3:])
    assert isinstance(entry(), _launch_cache._Replay)


def test_neighbors_in_one_projection_are_told_apart(kernel) -> None:
    def host(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        y_q, y_k = torch.empty_like(q), torch.empty_like(k)
        kernel.launch(q, y_q, 1.0)
        kernel.launch(k, y_k, 2.0)
        return y_q, y_k

    for i in range(4):
        q, k = torch.randn(8).chunk(2) if i % 2 else (torch.randn(4), torch.randn(4))
        y_q, y_k = call(host, q, k)
        assert torch.equal(y_q, q) and torch.equal(y_k, 2 * k)


def test_a_call_with_one_tensor_in_two_places_is_not_traced(kernel) -> None:
    def host(gate: Tensor, up: Tensor) -> Tensor:
        y = torch.empty_like(gate)
        kernel.launch(up, y, 1.0)
        return y

    x = torch.randn(4)
    for _ in range(3):
        assert torch.equal(call(host, x, x), x)
    assert not isinstance(entry(), _launch_cache._Replay)
    for gate, up in ((x, 2 * x), (x, 3 * x), (x, x), (2 * x, x)):
        assert torch.equal(call(host, gate, up), up)
    assert isinstance(entry(), _launch_cache._Replay)


def test_zeros_and_shapes_of_results(kernel) -> None:
    def host(x: Tensor) -> Tensor:
        y = x.new_zeros(x.numel())
        return y.view(x.shape)

    for _ in range(4):
        y = call(host, torch.ones(2, 3))
        assert y.shape == (2, 3) and not y.any()
    assert isinstance(entry(), _launch_cache._Replay)


@pytest.mark.parametrize(
    "more",
    [
        lambda x: x.clone(),
        lambda x: x.new_empty(x.shape).fill_(1),
        lambda x: torch.randn(x.shape),
        lambda x: x.new_empty(9)[:4],
        lambda x: x.new_empty(int(x[0].item()) or 1),
        lambda x: (y := x.new_empty(4), y.view(2, 2)),
        lambda x: x,
    ],
    ids=["copy", "fill", "random", "part", "read", "twice", "argument"],
)
def test_a_host_function_that_does_more_runs_every_time(more) -> None:
    runs = []

    def host(x: Tensor) -> object:
        runs.append(x)
        return more(x)

    for _ in range(5):
        call(host, torch.ones(4))
    assert len(runs) == 5 and entry() == "not replayable"


def test_hooks_see_real_launches(kernel, monkeypatch) -> None:
    def host(x: Tensor) -> Tensor:
        runs.append(x)
        y = torch.empty_like(x)
        kernel.launch(x, y, 1.0)
        return y

    runs: list[Tensor] = []
    for _ in range(3):
        call(host, torch.ones(4))
    assert len(runs) == 2
    hooks = knobs.runtime.launch_enter_hook
    hooks.add(print)
    call(host, torch.ones(4))
    hooks.remove(print)
    for name, value in (("launch_exit_hook", print), ("debug", True)):
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, name, value)
            call(host, torch.ones(4))
    assert len(runs) == 5
    call(host, torch.ones(4))
    assert len(runs) == 5


def test_the_cache_keeps_no_tensor_alive(kernel) -> None:
    kept = []

    def host(x: Tensor) -> Tensor:
        middle, y = torch.empty_like(x), torch.empty_like(x)
        kept.extend(weakref.ref(tensor) for tensor in (x, middle, y))
        kernel.launch(x, middle, 1.0)
        kernel.launch(middle, y, 1.0)
        return y

    for _ in range(3):
        call(host, torch.ones(4))
    assert isinstance(entry(), _launch_cache._Replay) and len(kept) == 6 and not any(ref() is not None for ref in kept)


def test_a_call_that_raises_is_not_recorded(kernel) -> None:
    def host(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        if fails:
            raise MemoryError
        kernel.launch(x, y, 1.0)
        return y

    x = torch.randn(4)
    for fails in (False, True, True):
        with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
            call(host, x)
    fails = False
    assert all(torch.equal(call(host, x), x) for _ in range(3)) and isinstance(entry(), _launch_cache._Replay)


def test_the_cache_is_bounded(kernel, monkeypatch) -> None:
    monkeypatch.setattr(_launch_cache, "_MAX_ENTRIES", 3)
    for n in range(1, 9):
        call(lambda x: torch.empty_like(x), torch.ones(n))
        assert len(_launch_cache._cache) <= 3
