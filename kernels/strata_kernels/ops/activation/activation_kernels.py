"""Activations of feed-forward layers, gated and ungated: one forward and one backward kernel for all of them.

    y  = m' · f(m · g) · u          m: gate multiplier, m': multiplier; ungated: no u
    dg = m' · m · dy · u · f'(m · g)                         du = m' · dy · f(m · g)

    silu        f = g · S(g)        f' = S(g) · (1 + g · (1 - S(g)))             S(x) = 1 / (1 + exp(-x))
    gelu        f = g · Φ(g)        f' = Φ(g) + g · exp(-g²/2) / sqrt(2π)        Φ(x) = (1 + erf(x / sqrt(2))) / 2
    gelu_tanh   f = g · S(2z)       f' = S(2z) · (1 + 2 · g · (1 - S(2z)) · dz/dg)
                                    z  = sqrt(2/π) · (g + 0.044715 · g³)         S(2z) = (1 + tanh(z)) / 2
    quick_gelu  f = g · S(a · g)    f' = S(a · g) · (1 + a · g · (1 - S(a · g))),  a = 1.702
    relu2       f = max(g, 0)²      f' = 2 · max(g, 0)

Axes: R rows of D features. A program computes BLOCK consecutive elements as vectors of VECTOR elements of one row, so
that rows may be strided (the halves of a packed projection) and no lane is idle at any D. Only gate and up are saved
for backward, which recomputes f and f'. Minimum bytes moved per element of y: 3·itemsize forward and 5·itemsize
backward; 2 and 3 without a gate. If a projection follows, the gradient of its weight needs y, and the backward kernel
writes y too, for one more itemsize: `activation_linear.py`.

If an FP8 matrix product follows, its scale needs the largest magnitude (amax) of y or of the gradients. The kernels
compute it by an integer `atomic_max` over the bits of |x|, which sort like the values with NaN as the largest; the
result does not depend on the order of programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _reciprocal(b_x):
    """1 / x for x >= 1 with a relative error of 3e-7, in two instructions. A division takes five, and the forward
    kernel is close to both the bandwidth and the instruction limit."""
    b_r = tl.rsqrt(b_x)
    return b_r * b_r


@triton.jit
def _sigmoid(b_x, PRECISE: tl.constexpr):
    """S(x) and 1 - S(x) of an fp32 block; PRECISE: for results that are not rounded to 16 bits."""
    if PRECISE:
        # exp(-x) as 2^n · 2^f with |f| <= 1/2, where the hardware's 2^f has an error of 1 ulp; the remainder r keeps
        # the part of x · log2(e) that fp32 rounds off. At ±128 the sigmoid is already 0 or 1.
        b_x = tl.minimum(tl.maximum(b_x, -128.0), 128.0)
        b_n = tl.floor(b_x * -1.4426950408889634 + 0.5)
        b_r = tl.fma(b_n, -0.693145751953125, -b_x)
        b_r = tl.fma(b_n, -1.42860682030941723212e-6, b_r)
        b_exp = tl.exp2(b_r * 1.4426950408889634) * tl.exp2(b_n)
        b_s = tl.div_rn(tl.full(b_x.shape, 1.0, tl.float32), 1.0 + b_exp)
        # 1 - S without cancellation; finite also where the exponential overflows and S is 0.
        b_rest = tl.minimum(b_exp, 1e38) * b_s
    else:
        b_s = _reciprocal(1.0 + tl.exp(-b_x))
        b_rest = 1.0 - b_s
    return b_s, b_rest


@triton.jit
def _normal(b_x, PRECISE: tl.constexpr):
    """Φ(x) and exp(-x²/2) of an fp32 block."""
    b_exp = tl.exp2(b_x * b_x * -0.7213475204444817)
    if PRECISE:
        b_cdf = 0.5 + 0.5 * tl.erf(b_x * 0.7071067811865476)
    else:
        # Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26 at |x| / sqrt(2), halved: 1 - Φ(|x|) is
        # exp(-x²/2) times a polynomial in t, error 8e-8. f' needs the same exponential.
        b_t = _reciprocal(1.0 + 0.231641888 * tl.abs(b_x))
        b_p = tl.fma(b_t, 0.5307027145, -0.7265760135)
        b_p = tl.fma(b_t, b_p, 0.7107068705)
        b_p = tl.fma(b_t, b_p, -0.142248368)
        b_tail = b_t * tl.fma(b_t, b_p, 0.127414796) * b_exp
        b_cdf = tl.where(b_x < 0, b_tail, 1.0 - b_tail)
    return b_cdf, b_exp


@triton.jit
def activate(b_x, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr):
    """f(x) and f'(x) of an fp32 block."""
    if ACTIVATION == "silu":
        b_s, b_rest = _sigmoid(b_x, PRECISE)
        b_f = b_x * b_s
        b_df = b_s * (1.0 + b_x * b_rest)
    elif ACTIVATION == "gelu":
        b_cdf, b_exp = _normal(b_x, PRECISE)
        b_f = b_x * b_cdf
        b_df = b_cdf + b_x * b_exp * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        # At ±16 the sigmoid is already 0 or 1; the cube of a larger x would overflow.
        b_h = tl.minimum(tl.maximum(b_x, -16.0), 16.0)
        b_h2 = b_h * b_h
        b_s, b_rest = _sigmoid(b_h * (1.5957691216057308 + 0.0713548162726009 * b_h2), PRECISE)
        b_f = b_x * b_s
        b_df = b_s * (1.0 + b_x * b_rest * (1.5957691216057308 + 0.2140644488178027 * b_h2))
    elif ACTIVATION == "quick_gelu":
        # At ±128 the sigmoid is already 0 or 1; 1.702 times a larger x could overflow.
        b_h = 1.702 * tl.minimum(tl.maximum(b_x, -128.0), 128.0)
        b_s, b_rest = _sigmoid(b_h, PRECISE)
        b_f = b_x * b_s
        b_df = b_s * (1.0 + b_h * b_rest)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        b_relu = tl.where(b_x < 0, 0.0, b_x)
        b_f = b_relu * b_relu
        b_df = 2.0 * b_relu
    return b_f, b_df


@triton.jit
def _offsets(n_rows, n_cols, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Rows [BLOCK / VECTOR, 1], features [BLOCK / VECTOR, VECTOR] and mask of this program's elements."""
    # Not tl.cdiv: its addition would overflow for n_cols just below 2^31.
    n_vectors = (n_cols - 1) // VECTOR + 1
    o_v = tl.program_id(0) * (BLOCK // VECTOR) + tl.arange(0, BLOCK // VECTOR)
    o_r = o_v // n_vectors
    o_d = (o_v - o_r * n_vectors).to(tl.int64)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    m = (o_r < n_rows)[:, None] & (o_d < n_cols)
    return o_r.to(tl.int64)[:, None], o_d, m


@triton.jit
def _note_largest(p_amax, b_x, PARTS: tl.constexpr):
    b_bits = b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(p_amax + tl.program_id(0) % PARTS, tl.max(tl.max(b_bits, axis=1), axis=0))


@triton.jit(do_not_specialize=["n_rows"])
def activation_fwd_kernel(
    p_g, p_u, p_y, p_amax, n_rows, n_cols, stride_g, stride_u, gate_multiplier, multiplier,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of y, and their amax unless p_amax is None. p_u is None without a gate."""
    o_r, o_d, m = _offsets(n_rows, n_cols, BLOCK, VECTOR)
    b_g = tl.load(p_g + o_r * stride_g + o_d, mask=m, other=0.0).to(tl.float32)
    b_y, _ = activate(b_g * gate_multiplier, ACTIVATION, PRECISE)
    if p_u is not None:
        b_y *= tl.load(p_u + o_r * stride_u + o_d, mask=m, other=0.0).to(tl.float32)
    b_y = (b_y * multiplier).to(p_y.dtype.element_ty)
    tl.store(p_y + o_r * n_cols + o_d, b_y, mask=m)
    if p_amax is not None:
        _note_largest(p_amax, b_y, PARTS)


@triton.jit(do_not_specialize=["n_rows"])
def activation_bwd_kernel(
    p_dy, p_g, p_u, p_dg, p_du, p_y, p_dg_amax, p_du_amax,
    n_rows, n_cols, stride_dy, stride_g, stride_u, stride_dg, stride_du, gate_multiplier, multiplier,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of dg and du, and of y unless p_y is None. p_u and p_du are None without a gate."""
    o_r, o_d, m = _offsets(n_rows, n_cols, BLOCK, VECTOR)
    b_dy = tl.load(p_dy + o_r * stride_dy + o_d, mask=m, other=0.0).to(tl.float32) * multiplier
    b_g = tl.load(p_g + o_r * stride_g + o_d, mask=m, other=0.0).to(tl.float32)
    b_f, b_df = activate(b_g * gate_multiplier, ACTIVATION, PRECISE)
    b_dg = b_dy * (b_df * gate_multiplier)
    b_y = b_f
    if p_u is not None:
        b_u = tl.load(p_u + o_r * stride_u + o_d, mask=m, other=0.0).to(tl.float32)
        b_dg *= b_u
        b_y *= b_u
        b_du = (b_dy * b_f).to(p_du.dtype.element_ty)
        tl.store(p_du + o_r * stride_du + o_d, b_du, mask=m)
        if p_du_amax is not None:
            _note_largest(p_du_amax, b_du, PARTS)
    if p_y is not None:
        tl.store(p_y + o_r * n_cols + o_d, (b_y * multiplier).to(p_y.dtype.element_ty), mask=m)
    b_dg = b_dg.to(p_dg.dtype.element_ty)
    tl.store(p_dg + o_r * stride_dg + o_d, b_dg, mask=m)
    if p_dg_amax is not None:
        _note_largest(p_dg_amax, b_dg, PARTS)
