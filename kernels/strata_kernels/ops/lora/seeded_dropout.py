"""Dropout whose mask is a function of a seed, so that backward recomputes the mask instead of saving it.

    keep(i) = uniform(seed, i) >= p          dropped = keep · x · 1 / (1 - p)

uniform is Philox, as `triton.language.randint4x`; each draw decides four elements. Plain PyTorch uses a torch.Generator
with the seed, so its mask differs.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch, takes_kernel
from .._operator import Operator, operator

# Elements of a program: four parts, one for each number that a call of Philox draws.
_BLOCK, _WARPS = 4096, 4


@triton.jit
def seeded_dropout_kernel(p_x, p_base, p_y, p_seed, n, p, BLOCK: tl.constexpr):
    """y = dropout(x), plus base unless p_base is None; contiguous tensors of n elements."""
    PART: tl.constexpr = BLOCK // 4
    i_block = tl.program_id(0).to(tl.int64)
    o_part = tl.arange(0, PART)
    b_bits = tl.randint4x(tl.load(p_seed), i_block * PART + o_part)
    scale = 1.0 / (1.0 - p)
    for part in tl.static_range(4):
        o_x = i_block * BLOCK + part * PART + o_part
        m = o_x < n
        b_x = tl.load(p_x + o_x, mask=m, other=0.0).to(tl.float32)
        b_y = tl.where(tl.uint_to_uniform_float(b_bits[part]) >= p, b_x * scale, 0.0)
        if p_base is not None:
            b_y += tl.load(p_base + o_x, mask=m, other=0.0).to(tl.float32)
        tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty), mask=m)


@operator("seeded_dropout(Tensor x, Tensor? base, Tensor seed, float p) -> Tensor")
class _SeededDropout(Operator):
    """dropout(x), plus base; both contiguous."""

    @staticmethod
    def forward(x: Tensor, base: Tensor | None, seed: Tensor, p: float) -> Tensor:
        if not takes_kernel(x):
            # Reproducible on a CPU; on other devices, PyTorch's generator of the device.
            generator = torch.Generator(x.device).manual_seed(int(seed))
            keep = torch.rand(x.shape, generator=generator, device=x.device) >= p
            y = torch.where(keep, x * (1 / (1 - p)), 0)
            return y if base is None else y + base
        y = torch.empty_like(x)
        launch(
            seeded_dropout_kernel, (-(-x.numel() // _BLOCK),), x, base, y, seed, x.numel(), p,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        return y

    @staticmethod
    def fake(x: Tensor, base: Tensor | None, seed: Tensor, p: float) -> Tensor:
        return torch.empty_like(x)


def seeded_dropout(x: Tensor, seed: Tensor, p: float, *, base: Tensor | None = None) -> Tensor:
    """`torch.dropout(x, p, train=True) + base`, with the mask of `seed`. Not differentiable.

    Args:
        x: any shape, bf16 | fp16 | fp32 | fp64.
        seed: int64, one element, on the device of x.
        p: probability of an element to be dropped, in [0, 1).
        base: same shape and dtype as x, or None.
    """
    y: Tensor = _SeededDropout.apply(x.contiguous(), None if base is None else base.contiguous(), seed, p)
    return y
