"""Where a step's time goes: the kind of a kernel, and what is idle."""

from types import SimpleNamespace

import pytest

from benchmarks.kinds import OTHERS, kind_of, kinds_of


# Names as profiles of steps have them.
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNN", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(...)", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("step_kernel", "optimizer"),
        ("eight_bits_kernel", "optimizer"),
        ("rows_kernel", "matrix products"),
        ("weight_bwd_kernel", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor>", "norm and clipping of gradients"),
        ("Memcpy DtoH (Device -> Pinned)", "copies and fills"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copies and fills"),
        ("swiglu_kernel", OTHERS),
        ("gate_bwd_kernel", OTHERS),
    ],
)
def test_a_kernel_has_its_kind(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def event(name: str, begin: float, end: float, device: str = "CUDA") -> SimpleNamespace:
    """In microseconds, as `torch.profiler` has them."""
    return SimpleNamespace(
        name=name, device_type=SimpleNamespace(name=device), time_range=SimpleNamespace(start=begin, end=end)
    )


def test_time_is_summed_by_kind_and_what_runs_at_once_is_counted_once() -> None:
    events = [
        event("nvjet_tst", 1000, 3000),
        # Half of it beside the product.
        event("step_kernel", 2000, 4000),
        event("swiglu_kernel", 5000, 5500),
        event("swiglu_kernel", 5500, 5600),
        # None of these is a kernel.
        event("ProfilerStep#3", 0, 9000),
        event("aten::mm", 0, 9000, "CPU"),
    ]
    sums, longest = kinds_of(SimpleNamespace(events=lambda: events))
    assert sums == pytest.approx(
        {"whole": 4.6, "matrix products": 2.0, "optimizer": 2.0, OTHERS: 0.6, "idle": 1.0, "beside others": 1.0}
    )
    assert longest == [("swiglu_kernel", pytest.approx(0.6))]
