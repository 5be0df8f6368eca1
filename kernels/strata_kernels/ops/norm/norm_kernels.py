"""Normalization over the last axis: one forward and one backward kernel for RMSNorm, add + RMSNorm, and LayerNorm.

    h    = x + residual, rounded to the dtype of x; h = x without a residual
    x̂    = (h - mean) · rstd                   mean of h; 0 for RMSNorm
    rstd = 1 / sqrt(mean((h - mean)²) + eps)
    y    = x̂ · (offset + w) + b                offset + w is 1 without a weight, b is 0 without a bias

    g    = dy · (offset + w)
    dx   = rstd · (g - mean(g) - x̂ · mean(g · x̂)) + dh           mean(g) only for LayerNorm; dh only if h is an output
    dw   = Σ_rows dy · x̂                       db = Σ_rows dy

Axes: R rows (all leading axes), D features. A row is split into CHUNKS blocks of BLOCK features, so that D is not
padded to the next power of two. Narrow rows stay in registers, in their input dtype, while they are reduced (KEEP);
wider rows are loaded again, from L2.

In forward, a program computes one tile of rows. In backward, it loops over tiles, with prefetch into shared memory; dw
and db are accumulated in registers, and each program stores one fp32 row of partial sums. A second kernel adds these
rows. Where a second launch costs more than the sum, the last program of each group to finish adds the group's rows, and
the last group adds the groups'. Both orders are fixed, so results are bitwise reproducible. If dw of a row does not fit
into the registers of one program, SPLIT programs share the row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _columns(i, m_r, D: tl.constexpr, BLOCK: tl.constexpr):
    """Block i of the features: offsets [BLOCK], their mask [BLOCK], and the mask [ROWS, BLOCK]."""
    o_d = i * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    return o_d, m_d, m_r[:, None] & m_d[None, :]


@triton.jit
def _load(p_x, o_r, stride, o_d, m):
    return tl.load(p_x + o_r[:, None] * stride + o_d[None, :], mask=m, other=0.0)


@triton.jit
def _store(p_x, o_r, stride, o_d, b_x, m):
    tl.store(p_x + o_r[:, None] * stride + o_d[None, :], b_x.to(p_x.dtype.element_ty), mask=m)


@triton.jit
def _widen(b_x, REPACK: tl.constexpr):
    """The block in fp32. REPACK: no-op PTX, or the compiler would keep an earlier fp32 copy in registers."""
    if REPACK and b_x.dtype.primitive_bitwidth == 16:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2)
    return b_x.to(tl.float32)


@triton.jit
def _again(b_x, i: tl.constexpr, p_x, o_r, stride, o_d, m, KEEP: tl.constexpr, REPACK: tl.constexpr):
    """Block i of the rows in fp32: from registers (b_x) if KEEP, else loaded again."""
    return _widen(b_x[i], REPACK) if KEEP else _load(p_x, o_r, stride, o_d, m).to(tl.float32)


@triton.jit
def _parameter(p_w, o_d, m_d):
    """A block of a weight or bias, fp32 [1, BLOCK]."""
    return tl.load(p_w + o_d, mask=m_d, other=0.0, eviction_policy="evict_last").to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["n_rows"])
def norm_fwd_kernel(
    p_x, p_res, p_w, p_b, p_y, p_h, p_stats, n_rows, stride_x, stride_res, eps, offset,
    D: tl.constexpr, CENTER: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    KEEP: tl.constexpr, REPACK: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """y, h and the statistics of ROWS rows. p_stats: rstd of all rows, their means if CENTER, then COUNTERS zeros."""
    p_row = p_x
    stride_row = stride_x
    if p_res is not None:
        p_row = p_h
        stride_row = D
    if tl.program_id(0) == 0:
        o_c = tl.cast(n_rows, tl.int64) * (1 + CENTER) + tl.arange(0, COUNTERS)
        tl.store(p_stats + o_c, tl.zeros([COUNTERS], tl.float32))
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < n_rows
    o_r = o_r.to(tl.int64)
    b_rows = ()
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(CHUNKS):
        o_d, _, m = _columns(i, m_r, D, BLOCK)
        b_h = _load(p_x, o_r, stride_x, o_d, m)
        if p_res is not None:
            b_h = (b_h.to(tl.float32) + _load(p_res, o_r, stride_res, o_d, m).to(tl.float32)).to(b_h.dtype)
            _store(p_h, o_r, D, o_d, b_h, m)
        if KEEP:
            b_rows += (b_h,)
        b_x = b_h.to(tl.float32)
        b_sum += b_x if CENTER else b_x * b_x
    b_mean = (tl.sum(b_sum, 1) / D)[:, None]
    if p_res is not None and not KEEP:
        # h is loaded again, possibly by threads other than those that stored it.
        tl.debug_barrier()
    if CENTER:
        tl.store(p_stats + n_rows + o_r[:, None], b_mean, mask=m_r[:, None])
        b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            o_d, _, m = _columns(i, m_r, D, BLOCK)
            b_x = tl.where(m, _again(b_rows, i, p_row, o_r, stride_row, o_d, m, KEEP, REPACK) - b_mean, 0.0)
            b_sum += b_x * b_x
        b_square = (tl.sum(b_sum, 1) / D)[:, None]
    else:
        b_square = b_mean
        b_mean = 0.0
    b_rstd = tl.rsqrt(b_square + eps)
    tl.store(p_stats + o_r[:, None], b_rstd, mask=m_r[:, None])
    if CAST == "none":
        b_rstd = b_rstd.to(p_x.dtype.element_ty).to(tl.float32)
    for i in tl.static_range(CHUNKS):
        o_d, m_d, m = _columns(i, m_r, D, BLOCK)
        b_y = (_again(b_rows, i, p_row, o_r, stride_row, o_d, m, KEEP, REPACK) - b_mean) * b_rstd
        if CAST != "gemma":
            b_y = b_y.to(p_x.dtype.element_ty).to(tl.float32)
        if p_w is not None:
            b_y *= _parameter(p_w, o_d, m_d) + offset
        if p_b is not None:
            b_y += _parameter(p_b, o_d, m_d)
        _store(p_y, o_r, D, o_d, b_y, m)


@triton.jit
def _add_rows(p_from, n_rows, stride, p_to, i_d, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """p_to[d] = Σ_r p_from[r, d] for BLOCK columns starting at i_d; fp32, fixed order, rounded once."""
    o_d = i_d + tl.arange(0, BLOCK)
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for i_r in range(0, n_rows, ROWS):
        o_r = i_r + tl.arange(0, ROWS)
        m = (o_r < n_rows)[:, None] & (o_d < D)[None, :]
        # Bypass L1, which is not coherent with stores of other multiprocessors.
        b_sum += tl.load(p_from + o_r[:, None] * stride + o_d[None, :], mask=m, other=0.0, cache_modifier=".cg")
    tl.store(p_to + o_d, tl.sum(b_sum, 0).to(p_to.dtype.element_ty), mask=o_d < D)


@triton.jit(do_not_specialize=["n_rows"])
def add_rows_kernel(
    p_partial, p_dw, p_db, n_rows, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK features of dw and db: sums over the rows of p_partial [n_rows, WIDTH], which holds dw, then db."""
    i_d = tl.program_id(0) * BLOCK
    if p_dw is not None:
        _add_rows(p_partial, n_rows, WIDTH, p_dw, i_d, D, ROWS, BLOCK)
    if p_db is not None:
        _add_rows(p_partial + WIDTH - D, n_rows, WIDTH, p_db, i_d, D, ROWS, BLOCK)


@triton.jit
def _arrive_last(p_counter, n):
    """Whether this program is the last of n to arrive; if so, it sees all earlier stores of the others."""
    # All threads of this program finish their stores before one of them increments the counter.
    tl.debug_barrier()
    last = tl.atomic_add(p_counter, 1.0, sem="acq_rel") == n - 1
    if last:
        tl.store(p_counter, 0.0)
    return last


@triton.jit
def _add_by_the_last(
    p_partial, p_dw, p_db, p_counters, D: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`add_rows_kernel` inside the backward kernel. Program p belongs to group p % GROUPS."""
    i_g = tl.program_id(0) % GROUPS
    n_members = tl.cdiv(tl.num_programs(0) - i_g, GROUPS)
    if _arrive_last(p_counters + 1 + i_g, n_members):
        p_group = p_partial + i_g * WIDTH
        for i_d in range(0, WIDTH, BLOCK):
            _add_rows(p_group, n_members, GROUPS * WIDTH, p_group, i_d, WIDTH, ROWS, BLOCK)
        n_groups = tl.minimum(tl.num_programs(0), GROUPS)
        if _arrive_last(p_counters, n_groups):
            for i_d in range(0, D, BLOCK):
                if p_dw is not None:
                    _add_rows(p_partial, n_groups, WIDTH, p_dw, i_d, D, ROWS, BLOCK)
                if p_db is not None:
                    _add_rows(p_partial + WIDTH - D, n_groups, WIDTH, p_db, i_d, D, ROWS, BLOCK)


@triton.jit
def _kept(p_w, D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, KEEP: tl.constexpr):
    """If KEEP, the blocks of the weight in its dtype, in registers for all tiles; else an empty tuple."""
    b_w = ()
    if KEEP and p_w is not None:
        for i in tl.static_range(CHUNKS):
            o_d = i * BLOCK + tl.arange(0, BLOCK)
            b_w += (tl.load(p_w + o_d, mask=o_d < D, other=0.0),)
    return b_w


@triton.jit
def _scale(b_w, i: tl.constexpr, p_w, o_d, m_d, KEEP: tl.constexpr, REPACK: tl.constexpr):
    """Block i of the weight, fp32 [1, BLOCK]."""
    return _widen(b_w[i], REPACK)[None, :] if KEEP else _parameter(p_w, o_d, m_d)


@triton.jit
def _zeros(ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    b_sums = ()
    for _ in tl.static_range(CHUNKS):
        b_sums += (tl.zeros([ROWS, BLOCK], tl.float32),)
    return b_sums


@triton.jit
def _store_sums(p_to, b_sums, n_cols, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Store the column sums of all blocks contiguously, n_cols columns in all."""
    for i in tl.static_range(CHUNKS):
        o_d = i * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_to + o_d, tl.sum(b_sums[i], 0), mask=o_d < n_cols)


@triton.jit(do_not_specialize=["n_rows", "fused"])
def norm_bwd_kernel(
    p_dy, p_dh, p_x, p_w, p_stats, p_dx, p_partial, p_dw, p_db, n_rows, stride_dy, stride_dh, stride_x, offset, fused,
    D: tl.constexpr, CENTER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    KEEP: tl.constexpr, REPACK: tl.constexpr, GROUPS: tl.constexpr, ADD_ROWS: tl.constexpr, ADD_BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of tiles of ROWS rows, and this program's row of p_partial: dw and db summed over its tiles.

    SPLIT consecutive programs share the same tiles: each of them reduces the rows, and stores its own columns.
    If GROUPS > 0 and `fused` is 1, the last programs to finish add the rows of p_partial into dw and db.
    """
    WIDTH: tl.constexpr = (D if p_dw is not None else 0) + (D if p_db is not None else 0)
    OWN: tl.constexpr = CHUNKS // SPLIT
    i_p = tl.program_id(0) // SPLIT
    i_own = tl.program_id(0) % SPLIT * OWN
    b_w = _kept(p_w, D, BLOCK, CHUNKS, KEEP)
    # Accumulate [ROWS, BLOCK] and reduce over ROWS once after the loop, not once per tile.
    b_dw = _zeros(ROWS, BLOCK, OWN if p_dw is not None else 0)
    b_db = _zeros(ROWS, BLOCK, OWN if p_db is not None else 0)
    for i_t in tl.range(i_p, tl.cdiv(n_rows, ROWS), tl.num_programs(0) // SPLIT, num_stages=STAGES):
        o_r = i_t * ROWS + tl.arange(0, ROWS)
        m_r = o_r < n_rows
        o_r = o_r.to(tl.int64)
        b_rstd = tl.load(p_stats + o_r, mask=m_r, other=0.0)[:, None]
        b_mean = tl.load(p_stats + n_rows + o_r, mask=m_r, other=0.0)[:, None] if CENTER else 0.0
        b_x = ()
        b_dy = ()
        b_dh = ()
        b_gx = tl.zeros([ROWS, BLOCK], tl.float32)
        b_g = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(CHUNKS):
            o_d, m_d, m = _columns(i, m_r, D, BLOCK)
            b_xi = _load(p_x, o_r, stride_x, o_d, m)
            b_dyi = _load(p_dy, o_r, stride_dy, o_d, m)
            if KEEP:
                b_x += (b_xi,)
                b_dy += (b_dyi,)
                if p_dh is not None:
                    b_dh += (_load(p_dh, o_r, stride_dh, o_d, m),)
            b_gi = b_dyi.to(tl.float32)
            if p_w is not None:
                b_gi *= _scale(b_w, i, p_w, o_d, m_d, KEEP, False) + offset
            b_gx += b_gi * (b_xi.to(tl.float32) - b_mean)
            if CENTER:
                b_g += b_gi
        b_slope = tl.sum(b_gx, 1)[:, None] * b_rstd / D * b_rstd
        b_shift = (tl.sum(b_g, 1) / D)[:, None] if CENTER else 0.0
        b_dw_next = ()
        b_db_next = ()
        for i in tl.static_range(OWN):
            o_d, m_d, m = _columns(i_own + i, m_r, D, BLOCK)
            b_xi = _again(b_x, i, p_x, o_r, stride_x, o_d, m, KEEP, REPACK) - b_mean
            b_dyi = _again(b_dy, i, p_dy, o_r, stride_dy, o_d, m, KEEP, REPACK)
            b_gi = b_dyi
            if p_w is not None:
                b_gi *= _scale(b_w, i, p_w, o_d, m_d, KEEP, REPACK) + offset
            b_dx = (b_gi - b_shift - b_xi * b_slope) * b_rstd
            if p_dh is not None:
                b_dx += _again(b_dh, i, p_dh, o_r, stride_dh, o_d, m, KEEP, False)
            _store(p_dx, o_r, D, o_d, b_dx, m)
            if p_dw is not None:
                b_dw_next += (b_dw[i] + b_dyi * (b_xi * b_rstd),)
            if p_db is not None:
                b_db_next += (b_db[i] + b_dyi,)
        b_dw = b_dw_next
        b_db = b_db_next
    p_own = p_partial + i_p * WIDTH + i_own * BLOCK
    _store_sums(p_own, b_dw, D - i_own * BLOCK, BLOCK, OWN if p_dw is not None else 0)
    _store_sums(p_own + WIDTH - D, b_db, D - i_own * BLOCK, BLOCK, OWN if p_db is not None else 0)
    if GROUPS > 0 and WIDTH > 0:
        p_counters = p_stats + tl.cast(n_rows, tl.int64) * (1 + CENTER)
        if fused:
            _add_by_the_last(p_partial, p_dw, p_db, p_counters, D, WIDTH, GROUPS, ADD_ROWS, ADD_BLOCK)
