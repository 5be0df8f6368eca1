"""What is replayed in place of a host function, with a stand-in for a compiled kernel that reads and writes by address.

On a GPU `test_operator.py` compares the replayed operators with calls through the dispatcher.
"""

import contextlib
import ctypes
import importlib.util
import sys
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

    name, function, packed_metadata = "scale_kernel", 0, (1, 1, 0)

    def __init__(self) -> None:
        self.count = 0

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit, *args) -> None:
        assert (x, y, z) == (3, 1, 1) and (launch_metadata, enter, exit) == (None, None, None)
        p_x, p_y, n, factor, constexpr = args
        assert constexpr is None
        values = (ctypes.c_float * n).from_address(p_x)
        (ctypes.c_float * n).from_address(p_y)[:] = [factor * value for value in values]
        self.count += 1

    def launch(self, x: Tensor, y: Tensor, factor: float, block: int = 4) -> None:
        """As `_launch.launch` starts and captures it."""
        n = y.numel()
        self.run(3, 1, 1, 0, 0, (), None, None, None, x.data_ptr(), y.data_ptr(), n, factor, None)
        launched = _launch._captured.get()
        if launched is not None:
            args = {"p_x": x, "p_y": y, "n": n, "factor": factor, "BLOCK": None}
            launched.append(_launch.Launched(self, (3,), args, {"BLOCK": block}))


@pytest.fixture
def kernel() -> Scale:
    return Scale()


@pytest.fixture(autouse=True)
def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU as device 0 of a driver without a GPU, with an empty launch cache and no checks."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(_launch_cache, "_cache", {})
    monkeypatch.setattr(_launch_cache, "_CHECKS", False)
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


def changing(kernel: Scale, change: str) -> Callable[[Tensor], Tensor]:
    """A host function that reads a constant of its module, which is not in the key, for one thing that it does."""

    def host(x: Tensor) -> Tensor:
        rows = 4 + (CONSTANT if change == "allocation" else 0)
        y = x.new_zeros(rows, 4) if change == "zeros" and CONSTANT else x.new_empty(rows, 4)
        factor = 1.0 + (CONSTANT if change == "argument" else 0)
        offset = CONSTANT if change == "pointer" else 0
        kernel.launch(x[offset:], y[offset:], factor, block=4 + (CONSTANT if change == "constexpr" else 0))
        if change == "launch" and CONSTANT:
            kernel.launch(x, y, factor)
        if change == "more" and CONSTANT:
            y.add_(1)
        return y

    return host


CONSTANT = 0
ALLOCATION = "_Allocation(shape={}, stride=(4, 1), dtype=torch.float32, zero={})"
# What differs, as recorded and now.
CHANGES = {
    "allocation": ("allocation 0", ALLOCATION.format((4, 4), False), ALLOCATION.format((5, 4), False)),
    "zeros": ("allocation 0", ALLOCATION.format((4, 4), False), ALLOCATION.format((4, 4), True)),
    "argument": ("launch 0, factor", "1.0", "2.0"),
    "pointer": ("launch 0, p_x", "_Pointer(tensor=0, offset=0)", "_Pointer(tensor=0, offset=16)"),
    "constexpr": ("launch 0, BLOCK", "4", "5"),
    "launch": ("launch 1, kernel", "nothing", "scale_kernel"),
    "more": ("host function", "nothing", "not replayable"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_check_finds_a_host_function_that_depends_on_more_than_the_key(kernel, change, monkeypatch) -> None:
    host, x = changing(kernel, change), torch.ones(4, 4)
    for checks in (False, True):
        monkeypatch.setattr(_launch_cache, "_CHECKS", checks)
        monkeypatch.setitem(globals(), "CONSTANT", 0)
        for _ in range(4):
            assert torch.equal(call(host, x), x)
        monkeypatch.setitem(globals(), "CONSTANT", 1)
        if not checks:
            assert torch.equal(call(host, x), x), "a stale replay, which nothing notices"
            continue
        with pytest.raises(RuntimeError, match=r"^strata::operator: the host function differs") as error:
            call(host, x)
        part, recorded, now = CHANGES[change]
        assert f"; {part}: recorded {recorded}, now {now}. A host function may depend only on" in str(error.value)


def test_a_check_lets_one_tensor_in_two_places_pass(kernel, monkeypatch) -> None:
    def host(gate: Tensor, up: Tensor) -> Tensor:
        y = torch.empty_like(gate)
        kernel.launch(up, y, 1.0)
        return y

    monkeypatch.setattr(_launch_cache, "_CHECKS", True)
    x, y = torch.randn(4), torch.randn(4)
    for gate, up in ((x, y), (x, y), (x, y), (x, x)):
        assert torch.equal(call(host, gate, up), up)


@pytest.mark.parametrize(("value", "checks"), [("1", True), ("0", False), (None, False)])
def test_the_environment_switches_checks_on(value, checks, monkeypatch) -> None:
    monkeypatch.delenv("STRATA_CHECK_LAUNCH_CACHE", raising=False)
    if value is not None:
        monkeypatch.setenv("STRATA_CHECK_LAUNCH_CACHE", value)
    spec = importlib.util.spec_from_file_location("strata_kernels.ops._launch_cache_again", _launch_cache.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module._CHECKS is checks
