"""Kernels to bake: one that compiles, one that does not, one that takes the compiler's process with it."""

import os

import torch
import triton
import triton.language as tl

from strata_kernels.ops._launch import launch


@triton.jit
def _scaled(b_x, SCALE: tl.constexpr):
    return b_x * SCALE


@triton.jit
def good_kernel(p_x, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_x + o, _scaled(tl.load(p_x + o, mask=o < n), SCALE), mask=o < n)


@triton.jit
def broken_kernel(p_x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0, "no such block")
    tl.store(p_x, 0.0)


@triton.constexpr_function
def _crash(BLOCK):
    # As Triton lets a kernel name it.
    getattr(os, "_exit")(1)  # noqa: B009


@triton.jit
def crashing_kernel(p_x, BLOCK: tl.constexpr):
    SIZE: tl.constexpr = _crash(BLOCK)
    tl.store(p_x + tl.arange(0, SIZE), 0.0)


def good(scale: float = 2.0, dtype: torch.dtype = torch.float32, n: int = 7) -> None:
    launch(good_kernel, (1,), torch.empty(64, dtype=dtype, device="meta"), n, SCALE=scale, BLOCK=16, num_warps=1)


def broken() -> None:
    launch(broken_kernel, (1,), torch.empty(64, device="meta"), BLOCK=8)


def crashing() -> None:
    launch(crashing_kernel, (1,), torch.empty(64, device="meta"), BLOCK=8)
