"""The kernels of `adamw_step` and `weight_step`; formulas: see `adamw/__init__.py`.

Axes: n tensors, elements of a tensor in memory order, chunks of a tensor, blocks of a chunk. One launch updates many
tensors: a program updates one chunk, and reads addresses and size of its tensor from a table. An earlier kernel
computes the values that all chunks of a tensor share: bias corrections and random words.

Results are bitwise equal to `step_reference.py`: the same operations in the same order, division and square root
correctly rounded, no fused multiply-add, integers wrap around.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table of tensors, int64: addresses, size, then key and `Shard.place()`.
FIELDS = 10
_FIELDS: tl.constexpr = tl.constexpr(FIELDS)
_WEIGHT: tl.constexpr = tl.constexpr(0)
_EXP_AVG: tl.constexpr = tl.constexpr(1)
_EXP_AVG_SQ: tl.constexpr = tl.constexpr(2)
_REMAINDER: tl.constexpr = tl.constexpr(3)
_STEP: tl.constexpr = tl.constexpr(4)
_NUMEL: tl.constexpr = tl.constexpr(5)
_KEY: tl.constexpr = tl.constexpr(6)
_OFFSET: tl.constexpr = tl.constexpr(7)
_ROW: tl.constexpr = tl.constexpr(8)
_WHOLE_ROW: tl.constexpr = tl.constexpr(9)

# Columns of the table of scalars, int32: skip flag, bits of step size and bias correction (fp32), three random words,
# bits of the gradient scale (fp32).
SCALARS = 7
_SCALARS: tl.constexpr = tl.constexpr(SCALARS)

# Multipliers of a 32-bit hash with low bias (C. Wellons, hash-prospector), and the golden ratio.
_MIX_A: tl.constexpr = tl.constexpr(0x21F0AAAD)
_MIX_B: tl.constexpr = tl.constexpr(0x735A2D97)
_MIX_C: tl.constexpr = tl.constexpr(0xD35A2D97)
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B9)
# Bits of a step count, which is stored in fp32.
_STEP_BITS: tl.constexpr = tl.constexpr(24)
_NAN: tl.constexpr = tl.constexpr(0x7FC00000)


@triton.jit
def _mix(b_x):
    """A bijective hash of 32-bit words: each output bit depends on all input bits."""
    b_x = (b_x ^ (b_x >> 16)) * _MIX_A
    b_x = (b_x ^ (b_x >> 15)) * _MIX_B
    return b_x ^ (b_x >> 15)


@triton.jit
def _word(b_key, b_step, seed_low, seed_high, NUMBER: tl.constexpr):
    """A random word of (seed, key, step); words of different NUMBER are independent."""
    b_x = _mix((seed_low + tl.zeros_like(b_step)).to(tl.uint32) + (NUMBER + 1) * 0x3C6EF372)
    b_x = _mix((b_x + _GOLDEN) ^ (seed_high + tl.zeros_like(b_step)).to(tl.uint32))
    b_x = _mix((b_x + _GOLDEN) ^ b_key.to(tl.uint32))
    b_x = _mix((b_x + _GOLDEN) ^ (b_key >> 32).to(tl.uint32))
    return _mix((b_x + _GOLDEN) ^ b_step.to(tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def _power(b_base, b_n):
    """b_base ** b_n in fp64 by squaring, for integers 0 <= b_n < 2^24."""
    b_y = b_base * 0.0 + 1.0
    for i in range(_STEP_BITS):
        b_y = tl.where((b_n >> i) & 1 != 0, b_y * b_base, b_y)
        b_base = b_base * b_base
    return b_y


@triton.jit(do_not_specialize=["p_found_inf", "p_scale", "n", "seed_low", "seed_high"])
def scalars_kernel(
    p_tensors, p_scalars, p_found_inf, p_scale, n, seed_low, seed_high, lr, beta1, beta1_low, beta2, beta2_low,
    ADVANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill p_scalars, one row per tensor; ADVANCE: increment the tensors' steps unless found_inf.

    beta1 + beta1_low: the decay rate as a sum of two fp32; beta2 likewise.
    """
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_t = o_t < n
    p_row = p_tensors + o_t.to(tl.int64) * _FIELDS
    b_skip = (tl.load(p_found_inf) != 0.0).to(tl.int32) + tl.zeros([BLOCK], tl.int32)
    b_address = tl.load(p_row + _STEP, mask=m_t, other=0)
    p_step = b_address.to(tl.pointer_type(tl.float32))
    b_count = tl.load(p_step, mask=b_address != 0, other=0.0)
    if ADVANCE:
        b_count = tl.where(b_skip != 0, b_count, b_count + 1.0)
        tl.store(p_step, b_count, mask=b_address != 0)
    b_n = b_count.to(tl.int32)
    b_zero = tl.zeros([BLOCK], tl.float64)
    b_correction1 = 1.0 - _power(b_zero + beta1 + beta1_low, b_n)
    b_correction2 = 1.0 - _power(b_zero + beta2 + beta2_low, b_n)
    # Step 0 has no bias correction (1 - β⁰ = 0).
    b_size = (b_zero + lr) / tl.where(b_n > 0, b_correction1, 1.0)
    b_inverse = 1.0 / tl.where(b_n > 0, b_correction2, 1.0)
    b_key = tl.load(p_row + _KEY, mask=m_t, other=0)
    p_out = p_scalars + o_t.to(tl.int64) * _SCALARS
    tl.store(p_out, b_skip, mask=m_t)
    tl.store(p_out + 1, b_size.to(tl.float32).to(tl.int32, bitcast=True), mask=m_t)
    tl.store(p_out + 2, b_inverse.to(tl.float32).to(tl.int32, bitcast=True), mask=m_t)
    for i in tl.static_range(3):
        tl.store(p_out + 3 + i, _word(b_key, b_n, seed_low, seed_high, i), mask=m_t)
    b_scale = tl.load(p_scale) + tl.zeros([BLOCK], tl.float32)
    tl.store(p_out + 6, b_scale.to(tl.int32, bitcast=True), mask=m_t)


@triton.jit
def _pointer(p_field, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a field of the table; bf16 as int16, the upper half of fp32 bits."""
    p = tl.load(p_field).to(tl.pointer_type(tl.float32 if DTYPE == "fp32" else tl.int16))
    return tl.multiple_of(p, 16) if ALIGNED else p


@triton.jit
def _load(p, o, m, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    b = tl.load(p + o, mask=m, other=0) if MASKED else tl.load(p + o)
    return b if DTYPE == "fp32" else (b.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store(p, o, b, m, MASKED: tl.constexpr):
    if MASKED:
        tl.store(p + o, b, mask=m)
    else:
        tl.store(p + o, b)


@triton.jit
def _round(b, b_noise, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """b in DTYPE; bf16 is rounded up if its lower 16 bits plus 16 random bits carry, or to nearest even."""
    if DTYPE == "fp32":
        b_out = b
    else:
        b_bits = b.to(tl.int32, bitcast=True)
        b_up = 0x7FFF + ((b_bits >> 16) & 1) if ROUNDING == "nearest" else b_noise
        # For a NaN, the carry could reach the sign bit.
        b_out = (tl.where(b == b, b_bits + b_up, _NAN) >> 16).to(tl.int16)
    return b_out


@triton.jit
def _step_block(
    p_w, p_g, p_m, p_v, p_r, o, m, b_i, size, inverse, scale, word0, word1, word2,
    decay, beta1, rest1, rest2, eps,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, ROUNDING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    MASTER: tl.constexpr = W == "bf16" and ROUNDING == "master"
    b_w = _load(p_w, o, m, W, MASKED)
    if MASTER:
        b_r = tl.load(p_r + o, mask=m, other=0) if MASKED else tl.load(p_r + o)
        b_w = (b_w.to(tl.int32, bitcast=True) + b_r.to(tl.int32)).to(tl.float32, bitcast=True)
    b_u = _load(p_g, o, m, G, MASKED) * scale
    if G != "fp32":
        # Round to the gradient's dtype, as scaling it in place would.
        b_u = (_round(b_u, 0, G, "nearest").to(tl.int32) << 16).to(tl.float32, bitcast=True)
    b_hash = _hash(b_i, word0)
    if M != "none":
        b_m = beta1 * _load(p_m, o, m, M, MASKED) + rest1 * b_u
        b_v = _load(p_v, o, m, V, MASKED)
        b_v += rest2 * (b_u * b_u - b_v)
        b_noise = _noise(b_hash, word1, _MIX_B)
        _store(p_m, o, _round(b_m, b_noise & 0xFFFF, M, ROUNDING), m, MASKED)
        _store(p_v, o, _round(b_v, (b_noise >> 16) & 0xFFFF, V, ROUNDING), m, MASKED)
        b_u = tl.div_rn(b_m, tl.sqrt_rn(b_v * inverse) + eps)
    b_w -= size * b_u + decay * b_w
    if MASTER:
        b_bits = tl.where(b_w == b_w, b_w.to(tl.int32, bitcast=True), _NAN)
        _store(p_w, o, ((b_bits + 0x8000) >> 16).to(tl.int16), m, MASKED)
        _store(p_r, o, b_bits.to(tl.int16), m, MASKED)
    else:
        b_noise = _noise(b_hash, word2, _MIX_C) & 0xFFFF
        _store(p_w, o, _round(b_w, b_noise, W, ROUNDING), m, MASKED)


@triton.jit
def _index(o, first, column, row, whole_row, CUT: tl.constexpr):
    """Indices of the elements in the unsharded tensor, modulo 2^32."""
    if CUT:
        o_c = (column + o).to(tl.uint32)
        return first + o_c + o_c // row * (whole_row - row)
    return first + o.to(tl.uint32)


@triton.jit
def _hash(b_i, word):
    """First half of the hash of an element's index, shared by all of its random words."""
    b_x = b_i + word
    b_x = (b_x ^ (b_x >> 16)) * _MIX_A
    return b_x ^ (b_x >> 15)


@triton.jit
def _noise(b_x, word, MIX: tl.constexpr):
    """32 random bits, from the first half of a hash."""
    b_x = (b_x ^ word) * MIX
    return (b_x ^ (b_x >> 15)).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["gradients", "n"])
def step_kernel(
    p_chunks, p_tensors, p_scalars, gradients, n, decay, beta1, rest1, rest2, eps,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, ROUNDING: tl.constexpr,
    CUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of one of n tensors.

    p_chunks: [programs, 2], tensor and chunk of each program.
    gradients: address of the gradient if n is 1, else of an array of the gradients' addresses.
    decay: lr * weight_decay. rest1, rest2: 1 - beta1, 1 - beta2.
    CUT: whether tensors may be shards with incomplete rows.
    """
    i_p = tl.program_id(0)
    i_t = tl.load(p_chunks + 2 * i_p)
    start = tl.load(p_chunks + 2 * i_p + 1).to(tl.int64) * CHUNK
    p_row = p_tensors + i_t * _FIELDS
    p_own = p_scalars + i_t * _SCALARS
    skip = tl.load(p_own)
    size = tl.load(p_own + 1).to(tl.float32, bitcast=True)
    inverse = tl.load(p_own + 2).to(tl.float32, bitcast=True)
    word0 = tl.load(p_own + 3).to(tl.uint32, bitcast=True)
    word1 = tl.load(p_own + 4).to(tl.uint32, bitcast=True)
    word2 = tl.load(p_own + 5).to(tl.uint32, bitcast=True)
    scale = tl.load(p_own + 6).to(tl.float32, bitcast=True)
    n_o = tl.minimum(tl.load(p_row + _NUMEL) - start, CHUNK).to(tl.int32)
    if skip != 0:
        n_o = n_o * 0
    row, whole_row = tl.load(p_row + _ROW), tl.load(p_row + _WHOLE_ROW)
    first, column = tl.load(p_row + _OFFSET) + start, start * 0
    if CUT:
        column += start % row
        first += start // row * (whole_row - row) - column
    first, column = first.to(tl.uint32), column.to(tl.int32)
    row, whole_row = row.to(tl.uint32), whole_row.to(tl.uint32)

    address = gradients
    if n != 1:
        address = tl.load(gradients.to(tl.pointer_type(tl.int64)) + i_t)
    p_g = address.to(tl.pointer_type(tl.float32 if G == "fp32" else tl.int16))
    p_g = (tl.multiple_of(p_g, 16) if ALIGNED else p_g) + start
    p_w = _pointer(p_row + _WEIGHT, W, ALIGNED) + start
    p_m = _pointer(p_row + _EXP_AVG, M, ALIGNED) + start
    p_v = _pointer(p_row + _EXP_AVG_SQ, V, ALIGNED) + start
    p_r = _pointer(p_row + _REMAINDER, "bf16", ALIGNED) + start
    # No mask for complete blocks: a mask of unknown length would prevent vectorized loads.
    for i in range(0, n_o // BLOCK * BLOCK, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_i = _index(o, first, column, row, whole_row, CUT)
        _step_block(
            p_w, p_g, p_m, p_v, p_r, o, o < n_o, b_i, size, inverse, scale, word0, word1, word2,
            decay, beta1, rest1, rest2, eps, W, G, M, V, ROUNDING, False,
        )  # fmt: skip
    if n_o % BLOCK != 0:
        o = n_o // BLOCK * BLOCK + tl.arange(0, BLOCK)
        b_i = _index(o, first, column, row, whole_row, CUT)
        _step_block(
            p_w, p_g, p_m, p_v, p_r, o, o < n_o, b_i, size, inverse, scale, word0, word1, word2,
            decay, beta1, rest1, rest2, eps, W, G, M, V, ROUNDING, True,
        )  # fmt: skip
