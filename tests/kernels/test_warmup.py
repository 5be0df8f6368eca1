"""Plans, what Triton makes of them, and the report."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import native_specialize_impl

from strata_kernels import linear_cross_entropy, rms_norm, rope, swiglu
from strata_kernels.ops._launch import launch
from strata_kernels.warmup import (
    Compiled,
    Failed,
    Plan,
    Pointer,
    Specialization,
    WarmupReport,
    count_compiles,
    record,
    warmup,
)
from strata_kernels.warmup.compile import _compile_all
from strata_kernels.warmup.cross_compile import target_of

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@triton.jit(do_not_specialize=["n"])
def add_kernel(p_x, p_y, n, stride, factor, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o * stride, factor * tl.load(p_x + o * stride, mask=o < n), mask=o < n)


@triton.jit
def broken_kernel(p_x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0, "no such block")
    tl.store(p_x, 0.0)


def add(x: torch.Tensor, n: int = 7, stride: int = 3, **options: int) -> None:
    launch(add_kernel, (1,), x, torch.empty_like(x), n, stride, 2.0, **{"BLOCK": 8, **options})


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def layer(batch: int, positions: int, width: int = 256, dtype: torch.dtype = torch.bfloat16) -> None:
    """A forward and backward pass through every operator."""
    x = rms_norm(meta(batch, positions, width, dtype=dtype), meta(width, dtype=dtype))
    q, k = (x[..., :n].reshape(batch, positions, -1, 32).transpose(1, 2) for n in (width, width // 2))
    cos, sin = torch.empty(2, batch, positions, 32, dtype=dtype, device="meta")
    q, _ = rope(q, k, cos, sin)
    x = swiglu(x, q.transpose(1, 2).reshape(x.shape))
    target = torch.empty(batch, positions, dtype=torch.int64, device="meta")
    linear_cross_entropy(x, meta(1000, width, dtype=dtype), target).backward()


def test_a_plan_has_each_specialization_once() -> None:
    x = torch.empty(64, device="meta")
    assert len(record(lambda: [add(x), add(x), add(x, n=16), add(x, stride=5), add(x, stride=7)])) == 1
    different = [{}, {"stride": 1}, {"stride": 16}, {"stride": 2**40 + 1}, {"BLOCK": 16}, {"num_warps": 8}]
    assert len(record(lambda: [add(x, **options) for options in different])) == len(different)
    assert len(record(lambda: [add(x), add(x[1:]), add(x.half()), add(x[4:])])) == 3


def test_plans_add_up_without_repetition() -> None:
    plans = [record(lambda shape=shape: layer(*shape)) for shape in ((2, 64), (4, 64), (4, 128))]
    assert len(plans[0] + plans[1]) == len(plans[0]) == len(plans[0] + plans[2])
    wider = record(lambda: layer(2, 64, width=512))
    assert len(plans[0] + wider) > len(plans[0])


def test_a_plan_of_a_layer_names_every_kernel() -> None:
    plan = record(lambda: layer(2, 64))
    assert {item.name for item in plan.specializations} == {
        "cross_entropy_kernel", "multiply_kernel", "norm_bwd_kernel", "norm_fwd_kernel", "rope_kernel",
        "activation_bwd_kernel", "activation_fwd_kernel",
    }  # fmt: skip
    (item,) = (item for item in plan.specializations if item.name == "norm_fwd_kernel")
    assert "p_x=*bfloat16, " in item.signature and "D=256, CENTER=False, CAST=llama" in item.signature


def test_the_layout_of_a_gradient_does_not_change_the_plan() -> None:
    def step(transpose: bool) -> None:
        q, k = (meta(2, 64, heads, 32).transpose(1, 2) for heads in (8, 4))
        cos, sin = torch.empty(2, 2, 64, 32, dtype=torch.bfloat16, device="meta")
        y = rope(q, k, cos, sin)
        torch.autograd.backward(y, [torch.empty_like(x) if transpose else torch.empty_like(x).contiguous() for x in y])

    assert record(lambda: step(True)) == record(lambda: step(False))


INTEGERS = [0, 1, 2, 16, 17, 48, 2**31 - 1, 2**31, 2**31 + 16, 2**40 + 1]


def specialize(value: object, param: object, backend: type = BaseBackend) -> object:
    """Triton's own answer: the type, and the class within it."""
    aligned = not param.do_not_specialize_on_alignment
    return native_specialize_impl(backend, value, param.is_const, not param.do_not_specialize, aligned)


@pytest.mark.parametrize("stride", INTEGERS)
@pytest.mark.parametrize("n", INTEGERS)
def test_stand_ins_are_specialized_as_the_real_values(n, stride) -> None:
    for x in (torch.empty(64, device="meta"), torch.empty(64, device="meta")[1:]):
        (item,) = record(lambda x=x: add(x, n, stride)).specializations
        real = {"p_x": x, "p_y": torch.empty_like(x), "n": n, "stride": stride, "factor": 2.0}
        for param in add_kernel.params:
            if not param.is_constexpr:
                assert specialize(dict(item.arguments)[param.name], param) == specialize(real[param.name], param)


@pytest.mark.parametrize("n", [1, 78, 114, 132, 304])
def test_a_plan_is_the_same_for_every_number_of_multiprocessors(n, monkeypatch) -> None:
    plan = record(lambda: layer(2, 64))
    users = [module for name, module in sys.modules.items() if name.startswith("strata_kernels.ops.")]
    users = [module for module in users if hasattr(module, "multiprocessors")]
    assert len(users) > 3
    for module in users:
        monkeypatch.setattr(module, "multiprocessors", lambda device: n)
    assert record(lambda: layer(2, 64)) == plan


def test_a_plan_is_saved_and_read_back() -> None:
    x = torch.empty(64, device="meta")
    plan = record(lambda: [layer(2, 64), add(x[1:], n=2**40, stride=1, num_warps=8)])
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.hash == plan.hash
    assert Plan(plan.specializations[::-1]).hash == plan.hash != Plan(plan.specializations[1:]).hash


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda text: text[:-9], "this is not a plan"),
        (lambda text: "[]", "this is not a plan"),
        (lambda text: text.replace("add_kernel", "no_kernel"), "_kernel', which is missing"),
        (lambda text: text.replace("tests.kernels", "tests.nowhere"), "_kernel', which is missing"),
        (lambda text: text.replace('"BLOCK": 8', '"BLOCK": 16'), "the plan was edited"),
    ],
)
def test_an_invalid_plan_is_rejected(edit, problem) -> None:
    text = record(lambda: add(torch.empty(64, device="meta"))).to_json()
    with pytest.raises(ValueError, match=problem):
        Plan.from_json(edit(text))


def test_amd_compiles_for_near_memory_apart_and_has_no_options_of_nvidias() -> None:
    """NVIDIA compiles one kernel where AMD compiles two, and no PTX goes to AMD."""
    far = torch.empty(2**31 + 16, dtype=torch.int8, device="meta")
    near = far[: 2**20].clone()
    plan = record(lambda: [add(far), add(near), layer(2, 64)])
    assert len(plan) == len(plan.on(target_of("gfx942"))) == len(plan.on(target_of("sm_90"))) + 1
    options = [dict((*item.arguments, *item.options)) for item in plan.on(target_of("gfx942")).specializations]
    assert not any("maxnreg" in given or given.get("REPACK") for given in options)
    assert any("maxnreg" in dict(item.options) for item in plan.on(target_of("sm_90")).specializations)
    param = add_kernel.params[0]
    for x in (far, near):
        (item,) = record(lambda x=x: add(x)).on(target_of("gfx942")).specializations
        assert isinstance(dict(item.arguments)["p_x"], Pointer)
        assert specialize(dict(item.arguments)["p_x"], param, HIPBackend) == specialize(x, param, HIPBackend)


@pytest.fixture
def sm_90(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Triton compiles for an H100 or H200 without one, into an empty cache."""

    class Driver:
        """What the compiler asks of a driver."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    kernels = [item.kernel for item in record(lambda: layer(2, 64)).specializations] + [add_kernel, broken_kernel]
    for kernel in kernels:
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield


def forget(plan: Plan) -> None:
    """As a new process would, with the cache directory alone."""
    for item in plan.specializations:
        item.kernel.device_caches.clear()


def test_all_kernels_compile_for_sm_90_without_spills(sm_90, tmp_path) -> None:
    plan = record(lambda: layer(2, 64, width=4096))
    with count_compiles() as compiles:
        kernels = [item.compile() for item in plan.specializations]
    assert compiles.count == len(plan) and not compiles.cached
    for kernel in kernels:
        ptx = tmp_path / "kernel.ptx"
        ptx.write_text(kernel.asm["ptx"])
        command = [get_ptxas(90).path, "-arch=sm_90a", "-v", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "0 bytes spill stores" in said, f"{kernel.name}: {said}"


def test_compiled_once_then_found_in_the_cache(sm_90) -> None:
    x = torch.empty(64, device="meta")
    plan = record(lambda: [add(x, stride=stride) for stride in (1, 2, 16)])
    first = _compile_all(plan, lambda item: item.compile(), workers=2, timeout=None)
    forget(plan)
    second = _compile_all(plan, lambda item: item.compile(), workers=2, timeout=None)
    assert [(item.name, item.hit) for item in first] == [("add_kernel", False)] * 3
    assert [(item.signature, item.hit) for item in second] == [(item.signature, True) for item in first]


def test_a_launch_finds_what_the_plan_compiled(sm_90) -> None:
    """The key of the real call, here on meta tensors at odd addresses, is among those of the plan."""
    x = torch.empty(64, device="meta")
    plan = record(lambda: [add(x), add(x[1:], stride=1)])
    for item in plan.specializations:
        item.compile()
    with count_compiles() as compiles:
        for view, n, stride in ((x[4:], 9, 5), (x[3:], 64, 1), (x[8:], 2**20, 7)):
            args = (view, torch.empty_like(view), n, stride, 2.0)
            add_kernel.warmup(*args, BLOCK=8, enable_fp_fusion=True, grid=(1,))
    assert compiles.count == len(compiles.cached) == 0


def test_a_kernel_that_does_not_compile_is_reported(sm_90) -> None:
    x = torch.empty(64, device="meta")
    plan = record(lambda: [launch(broken_kernel, (1,), x, BLOCK=8), add(x)])
    failed, compiled = _compile_all(plan, lambda item: item.compile(), workers=2, timeout=None)
    assert isinstance(failed, Failed) and "no such block" in failed.error and failed.name == "broken_kernel"
    assert isinstance(compiled, Compiled)


def test_what_is_not_ready_in_time_is_reported() -> None:
    x = torch.empty(64, device="meta")
    plan = record(lambda: [add(x), add(x, stride=1), add(x, stride=16)])
    release = threading.Event()

    def load(item: Specialization) -> None:
        if dict(item.arguments)["stride"] == 1:
            release.wait(60)

    results = _compile_all(plan, load, workers=1, timeout=0.2)
    release.set()
    assert [type(result) for result in results] == [Compiled, Failed, Failed]
    assert results[1].error == "not ready after 0.2 s"


def test_counting_ends_with_its_block_and_tells_other_listeners(sm_90) -> None:
    x = torch.empty(64, device="meta")
    plan = record(lambda: [add(x), add(x, stride=1)])
    with count_compiles() as outer:
        with count_compiles() as inner:
            plan.specializations[0].compile()
        plan.specializations[1].compile()
    assert inner.compiled == ["add_kernel"] and outer.compiled == ["add_kernel"] * 2
    assert triton.knobs.compilation.listener is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_do() -> None:
    plan = record(lambda: layer(2, 64))
    report = min((warmup(plan) for _ in range(3)), key=lambda report: report.seconds)
    assert report.seconds < 0.05
    assert report.device == "cpu" and report.planned == len(plan) and not report.compiled and not report.failed
    assert report.summary() == "nothing to warm up on cpu: no GPU here, operators run their PyTorch reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_does_not_start_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    report = warmup(record(lambda: layer(2, 64)))
    assert report.skipped is not None and report.skipped.startswith("CUDA does not start (")


def test_the_report_is_plain_data_and_one_line() -> None:
    kernel, failure = Compiled("a", "x=*bfloat16", 0.25, True), Failed("b", "n=2", "ValueError: no")
    report = WarmupReport("NVIDIA H200", 3, (kernel, Compiled("c", "", 1.0, False)), (failure,), 1.25)
    assert report.summary() == "3 kernels on NVIDIA H200 in 1.2 s: 1 compiled, 1 cached, 1 failed"
    data = json.loads(json.dumps(report.to_dict()))
    assert data["hits"] == 1 and "skipped" not in data
    assert data["compiled"][0] == {"name": "a", "signature": "x=*bfloat16", "seconds": 0.25, "hit": True}
    assert data["failed"] == [{"name": "b", "signature": "n=2", "error": "ValueError: no"}]


@needs_gpu
def test_a_warm_run_compiles_nothing(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan = record(lambda: layer(2, 72, width=384, dtype=torch.float16))
    forget(plan)
    cold = warmup(plan)
    assert not cold.failed and cold.hits == 0 and len(cold.compiled) == len(plan)
    forget(plan)
    warm = warmup(plan)
    assert not warm.failed and warm.hits == len(plan)

    x = torch.randn(2, 72, 384, dtype=torch.float16, device="cuda", requires_grad=True)
    weight = torch.ones(384, dtype=torch.float16, device="cuda", requires_grad=True)
    head = torch.randn(1000, 384, dtype=torch.float16, device="cuda", requires_grad=True)
    cos, sin = torch.randn(2, 2, 72, 32, dtype=torch.float16, device="cuda")
    with count_compiles() as compiles:
        y = rms_norm(x, weight)
        q, k = (y[..., :n].reshape(2, 72, -1, 32).transpose(1, 2) for n in (384, 192))
        y = swiglu(y, rope(q, k, cos, sin)[0].transpose(1, 2).reshape(y.shape))
        linear_cross_entropy(y, head, torch.zeros(2, 72, dtype=torch.int64, device="cuda")).backward()
        torch.cuda.synchronize()
    assert compiles.count == 0 and not compiles.cached


@needs_gpu
def test_a_failure_on_the_gpu_is_reported_not_raised() -> None:
    plan = record(lambda: launch(broken_kernel, (1,), torch.empty(64, device="meta"), BLOCK=8))
    report = warmup(plan, workers=1, timeout=60)
    assert len(report.failed) == 1 and not report.compiled
    assert warmup(Plan(())).summary().endswith("the plan is empty")
