"""Elementary functions, each one approximate PTX instruction with FAST, which flushes denormals to zero.

FAST is false in Triton's interpreter, which has no assembly, and where the approximation is not accurate enough.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp2(b_x, FAST: tl.constexpr):
    """2^x. FAST: 0 for results below 1e-38."""
    if FAST:
        b_y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)
    else:
        b_y = tl.exp2(b_x)
    return b_y


@triton.jit
def log2(b_x, FAST: tl.constexpr):
    """log2(x). FAST: absolute error 2e-7 for x in (0, 1)."""
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
