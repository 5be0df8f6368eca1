"""Functions that kernels may take from the GPU in one instruction each (FAST), which flushes denormal numbers to zero.

The interpreter knows no assembly: there, and where an approximation is not exact enough, FAST is false.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp2(b_x, FAST: tl.constexpr):
    """2 to the power of numbers; FAST 0 for results below 1e-38."""
    if FAST:
        b_y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)
    else:
        b_y = tl.exp2(b_x)
    return b_y


@triton.jit
def log2(b_x, FAST: tl.constexpr):
    """Logarithm to the base 2; FAST 2e-7 off for numbers between 0 and 1."""
    if FAST:
        b_y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)
    else:
        b_y = tl.log2(b_x)
    return b_y


@triton.jit
def reciprocal(b_x, FAST: tl.constexpr):
    """1 / x."""
    if FAST:
        b_y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)
    else:
        b_y = 1.0 / b_x
    return b_y


@triton.jit
def sqrt(b_x, FAST: tl.constexpr):
    """Square root."""
    if FAST:
        b_y = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)
    else:
        b_y = tl.sqrt(b_x)
    return b_y
