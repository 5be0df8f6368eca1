"""Where the time of a step goes: the kernels of a profile, summed by what they do."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

# A kernel is of the first kind whose pattern its name has.
KINDS = {
    # The last are those of experts.
    "matrix products": r"nvjet|gemm|cutlass|xmma|splitK|cublas|^rows_kernel|^weight_bwd_kernel",
    "attention": r"flash|fmha|sdpa|cudnn",
    "optimizer": r"^step_kernel|^scalars_kernel|^eight_bits_kernel|FusedAdam|adam",
    "norm and clipping of gradients": r"LpNorm|lpnorm|norm_kernel.*reduce|multi_tensor_apply",
    "copies and fills": r"[Mm]emcpy|[Mm]emset|FillFunctor",
}
OTHERS = "elementwise and loss"


def kind_of(kernel: str) -> str:
    """The kind of a kernel with this name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), OTHERS)


def kinds_of(profiler: Any) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Milliseconds by kind, and of the longest kernels of no kind.

    "idle": when none ran. "beside others": what kernels took while another ran.
    """
    spans, sums, others = [], Counter[str](), Counter[str]()
    for event in profiler.events():
        if event.device_type.name != "CUDA" or event.name.startswith(("gpu_", "ProfilerStep")):
            continue
        begin, end = event.time_range.start, event.time_range.end
        spans.append((begin, end))
        kind = kind_of(event.name)
        sums[kind] += (end - begin) / 1e3
        if kind == OTHERS:
            others[event.name] += (end - begin) / 1e3
    busy, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    found = {kind: sums[kind] for kind in (*KINDS, OTHERS) if sums[kind]}
    return {
        "whole": whole / 1e3, **found, "idle": (whole - busy) / 1e3, "beside others": sum(sums.values()) - busy / 1e3
    }, others.most_common(12)  # fmt: skip
