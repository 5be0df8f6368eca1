"""Functions that kernels may take from the GPU in one instruction each (FAST), which flushes denormal numbers to zero.

The interpreter knows no assembly: there, and where an approximation is not exact enough, FAST is false. A GPU's own
logarithm, also Triton's, is 2e-7 of itself off, 1.6e-6 for a sum of 100, and its exponential is off by as many last
halves of a place as the argument has units: `log_parts`, `log` and `exp` are for what fp32 is to hold.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# ln 2 as two numbers, the first of which times an exponent is exact.
_LN2_HIGH: tl.constexpr = tl.constexpr(0.693359375)
_LN2_LOW: tl.constexpr = tl.constexpr(-2.1219444005469058e-4)


@triton.jit
def log_parts(b_x):
    """(a, b) with ln x = a + b, a exact, b of up to 0.4; of 0, infinity and NaN b is the logarithm. x: no denormals."""
    bits = b_x.to(tl.int32, bitcast=True)
    # By powers of 2 from between √½ and √2.
    b_e = (bits - 0x3F3504F3) >> 23
    b_m = (bits - (b_e << 23)).to(tl.float32, bitcast=True)
    b_s = tl.div_rn(b_m - 1.0, b_m + 1.0)
    b_q = b_s * b_s
    b_r = b_q * (0.6666666667 + b_q * (0.4 + b_q * (0.2857142857 + b_q * 0.2222222222)))
    b_e = b_e.to(tl.float32)
    b_b = 2.0 * b_s + (b_s * b_r + b_e * _LN2_LOW)
    b_b = tl.where(b_x == 0.0, -float("inf"), tl.where(b_x < float("inf"), b_b, b_x))
    return b_e * _LN2_HIGH, b_b


@triton.jit
def log(b_x):
    """Natural logarithm of numbers that are not denormal, as exact as fp32 is."""
    b_a, b_b = log_parts(b_x)
    return b_a + b_b


@triton.jit
def exp(b_x):
    """e to the power of numbers up to 88, about 2e-7 of itself off; 0 for results below 1e-38."""
    b_x = tl.where(b_x < -120.0, -120.0, b_x)
    b_n = tl.floor(b_x * 1.4426950408889634 + 0.5)
    b_r = b_x - b_n * _LN2_HIGH - b_n * _LN2_LOW
    return tl.exp2(b_r * 1.4426950408889634) * tl.exp2(b_n)


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
