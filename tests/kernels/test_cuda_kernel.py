"""Kernels in CUDA C++: recorded, compiled without a GPU, and kept in Triton's cache directory as Triton's are."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from triton import knobs

from strata_kernels import jsd
from strata_kernels.ops import _cuda_kernel
from strata_kernels.ops._cuda_kernel import CudaKernel
from strata_kernels.ops.divergence.cluster_kernel import cluster_divergence, cluster_of
from strata_kernels.ops.divergence.divergence_reference import Form
from strata_kernels.ops.divergence.divergence_rows import divergence_rows
from strata_kernels.warmup import Plan, bake, record, triton_cache
from strata_kernels.warmup.compile_counter import count_compiles
from strata_kernels.warmup.cross_compile import stub_driver, target_of


def plan_of(vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> Plan:
    logits = torch.empty(64, vocabulary, dtype=dtype, device="meta", requires_grad=True)
    return record(lambda: jsd(logits, torch.empty_like(logits)).backward())


def test_a_plan_has_the_kernel_of_each_gpu() -> None:
    """Hopper GPUs have the CUDA kernel, others the Triton kernel; a plan is made without knowing which."""
    plan = plan_of(131072)
    names = lambda plan: {item.name for item in plan.specializations}  # noqa: E731
    assert {"cluster_divergence", "narrow_divergence_kernel"} <= names(plan.on(target_of("sm_90")))
    for arch in ("sm_80", "sm_100", "gfx942"):
        assert "cluster_divergence" not in names(plan.on(target_of(arch)))
    assert names(Plan.from_json(plan.to_json())) == names(plan)


@pytest.mark.parametrize(
    ("vocabulary", "cluster"),
    [(8000, None), (32000, 2), (50304, 4), (81920, None), (128256, 8), (131072, 8), (131080, None)],
)
def test_rows_that_fill_a_cluster_take_it(vocabulary, cluster) -> None:
    assert cluster_of(vocabulary) == cluster
    items = [item for item in plan_of(vocabulary).specializations if item.kernel is cluster_divergence]
    assert [dict(item.arguments)["CLUSTER"] for item in items] == [cluster] * (cluster is not None)
    assert all(item.kernel is not cluster_divergence for item in plan_of(vocabulary, torch.float16).specializations)


def test_it_is_compiled_without_a_gpu_once(tmp_path: Path) -> None:
    """`bake` verifies that a new process finds it; its entry is valid, also in a store and after a move."""
    plan = plan_of(131072)
    plan = Plan(tuple(item for item in plan.specializations if item.kernel is cluster_divergence))
    (baked,) = bake.bake(plan, ["sm_90"], tmp_path)
    assert [kernel.name for kernel in baked.compiled] == ["cluster_divergence"] and not baked.failed
    (key,) = triton_cache.keys(baked.folder)
    files = triton_cache.load(baked.folder, key)
    assert files["cluster_divergence.cubin"].startswith(b"\x7fELF")
    moved = baked.folder.rename(tmp_path / "moved")
    triton_cache.relocate(moved)
    with knobs.cache.scope():
        knobs.cache.dir = str(moved)
        with count_compiles() as compiles:
            cluster_divergence.compile({"CLUSTER": 8})
        assert (compiles.compiled, compiles.cached) == ([], ["cluster_divergence"])
        with count_compiles() as compiles:
            cluster_divergence.compile({"CLUSTER": 4})
        assert (compiles.compiled, compiles.cached) == (["cluster_divergence"], [])


def test_a_source_that_does_not_compile_is_reported_with_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC does not compile bad.cu: (.|\n)*undefined"):
        _cuda_kernel._compile("__global__ void bad() { undefined(); }", "bad.cu", ["--gpu-architecture=sm_90a"])


@pytest.mark.skipif(find_spec("cuda.bindings") is None, reason="not installed")
def test_where_it_cannot_be_compiled_the_triton_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("no libnvrtc")

    monkeypatch.setattr(CudaKernel, "compile", refuse)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    device = torch.device("cuda", 77)
    with stub_driver(target_of("sm_90")), pytest.warns(UserWarning, match="a slower kernel is: no libnvrtc"):
        assert cluster_divergence.resident_clusters(device, CLUSTER=2) == 0
    with stub_driver(target_of("sm_80")):
        assert cluster_divergence.resident_clusters(device, CLUSTER=4) == 0


def test_a_missing_package_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cluster_divergence, "_compiled", {})
    _cuda_kernel._compiler_version.cache_clear()
    with stub_driver(target_of("sm_90")), pytest.warns(UserWarning, match="a slower kernel is: .*cuda.bindings"):
        assert cluster_divergence.resident_clusters(torch.device("cuda", 79), CLUSTER=2) == 0


@pytest.mark.skipif(find_spec("cuda.bindings") is None, reason="not installed")
def test_a_baked_cache_without_it_that_is_read_only_leaves_the_triton_kernel(monkeypatch, tmp_path: Path) -> None:
    """As of an image that was baked without `cuda.bindings`."""
    (cache := tmp_path / "baked").touch()  # No folder can be made in a file, not even by root.
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with knobs.cache.scope(), stub_driver(target_of("sm_90")):
        knobs.cache.dir = str(cache)
        with pytest.warns(UserWarning, match="a slower kernel is: .*Not a directory"):
            assert cluster_divergence.resident_clusters(torch.device("cuda", 78), CLUSTER=2) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_thread_that_has_not_used_the_gpu_launches_it() -> None:
    from cuda.bindings import driver

    device = torch.device("cuda")
    z, t = torch.randn(2, 64, 131072, dtype=torch.bfloat16, device=device)
    if cluster_divergence.resident_clusters(z.device, CLUSTER=8) == 0:
        pytest.skip("no Hopper GPU")
    target, loss = torch.zeros(64, dtype=torch.int64, device=device), torch.empty(64, device=device)
    expected, dz = jsd(z, t, reduction="none"), torch.empty_like(z)
    scale, form = torch.ones(1, device=device).expand(64), Form("jsd")
    torch.cuda.synchronize()

    def launch() -> None:
        assert driver.cuCtxSetCurrent(0)[0] == 0
        divergence_rows(z, t, target, scale, loss, form, dz)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch).result()
    torch.cuda.synchronize()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
