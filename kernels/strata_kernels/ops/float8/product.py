"""Products of FP8 matrices: cuBLAS on a GPU, emulated in fp32 on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def product(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`(a * a_inverse) @ (b * b_inverse).T` in `dtype`, summed in fp32.

    Args:
        a: [M, K], FP8, contiguous; K divisible by 16.
        b: [N, K], FP8, contiguous; N divisible by 16.
        a_inverse, b_inverse: [1] and [1], or [M, 1] and [N, 1], fp32.
        fast: accumulate in the tensor cores' narrower accumulators.
        out: output buffer [M, N] in `dtype`, or None.
    """
    if a.device.type == "cpu":
        y = ((a.float() * a_inverse) @ (b.float() * b_inverse).t()).to(dtype)
        return y if out is None else out.copy_(y)
    if a_inverse.numel() == b_inverse.numel() == 1:
        a_inverse, b_inverse, given = a_inverse.view(()), b_inverse.view(()), dtype
    else:
        # With row scales, PyTorch's product only supports bf16 output.
        b_inverse, given = b_inverse.view(1, -1), torch.bfloat16
    if out is not None and given == dtype:
        torch._scaled_mm(a, b.t(), a_inverse, b_inverse, out_dtype=given, use_fast_accum=fast, out=out)
        return out
    y = torch._scaled_mm(a, b.t(), a_inverse, b_inverse, out_dtype=given, use_fast_accum=fast).to(dtype)
    return y if out is None else out.copy_(y)
