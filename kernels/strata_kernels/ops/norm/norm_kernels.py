"""Normalization over the last axis: one forward and one backward kernel for RMSNorm, add and RMSNorm, and LayerNorm.

    h    = x + residual, rounded to the dtype of x; without a residual h is x
    x̂    = (h - mean) · rstd                   mean of h, or 0 where rows are not centered
    rstd = 1 / sqrt(mean((h - mean)²) + eps)
    y    = x̂ · (offset + w) + b                absent weights are 1, absent biases 0

    g    = dy · (offset + w)
    dx   = rstd · (g - mean(g) - x̂ · mean(g · x̂)) + dh           mean(g) where rows are centered, dh where h is used
    dw   = Σ_rows dy · x̂                       db = Σ_rows dy

Axes: R rows (all leading axes), D features. A row is cut in CHUNKS blocks of BLOCK features, so that a width between
two powers of two is not padded to the next one. Up to a width the blocks stay in registers, in the dtype in which they
were read, while the row is reduced; wider rows are walked over again, out of L2.

Forward, a program takes one tile of rows. Backward, it walks over tiles, while the next ones are on their way to shared
memory; dw and db are summed in registers, and every program leaves one fp32 row of them. A second kernel adds these
rows; or, where starting it costs more, the last program of each group to finish, and then the last group. Either order
is fixed, so results repeat bit for bit. Rows whose dw does not fit into one program's registers are shared by several.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _columns(i, m_r, D: tl.constexpr, BLOCK: tl.constexpr):
    """Block i of the features: offsets, which of them there are, and the mask of a block of rows."""
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
    """The block in fp32. REPACK hides its origin: the compiler would keep an earlier fp32 copy of it in registers."""
    if REPACK and b_x.dtype.primitive_bitwidth == 16:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2)
    return b_x.to(tl.float32)


@triton.jit
def _again(b_x, i: tl.constexpr, p_x, o_r, stride, o_d, m, KEEP: tl.constexpr, REPACK: tl.constexpr):
    """Block i of the rows in fp32, kept in b_x or read once more."""
    return _widen(b_x[i], REPACK) if KEEP else _load(p_x, o_r, stride, o_d, m).to(tl.float32)


@triton.jit
def _parameter(p_w, o_d, m_d):
    """A block of a weight or bias as a row in fp32."""
    return tl.load(p_w + o_d, mask=m_d, other=0.0, eviction_policy="evict_last").to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["n_rows"])
def norm_fwd_kernel(
    p_x, p_res, p_w, p_b, p_y, p_h, p_stats, n_rows, stride_x, stride_res, eps, offset,
    D: tl.constexpr, CENTER: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    KEEP: tl.constexpr, REPACK: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """y, h and the statistics of ROWS rows: rstd of every row, the mean of every row, then COUNTERS zeros."""
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
        # h is read again, perhaps by other threads than wrote it.
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
    """to[d] = Σ_r from[r, d] for BLOCK columns from i_d on: fp32, in a fixed order, rounded once."""
    o_d = i_d + tl.arange(0, BLOCK)
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for i_r in range(0, n_rows, ROWS):
        o_r = i_r + tl.arange(0, ROWS)
        m = (o_r < n_rows)[:, None] & (o_d < D)[None, :]
        # Past L1, which does not see what other multiprocessors write.
        b_sum += tl.load(p_from + o_r[:, None] * stride + o_d[None, :], mask=m, other=0.0, cache_modifier=".cg")
    tl.store(p_to + o_d, tl.sum(b_sum, 0).to(p_to.dtype.element_ty), mask=o_d < D)


@triton.jit(do_not_specialize=["n_rows"])
def add_rows_kernel(
    p_partial, p_dw, p_db, n_rows, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK features of dw and db from the n_rows rows of p_partial: dw first, of WIDTH in all."""
    i_d = tl.program_id(0) * BLOCK
    if p_dw is not None:
        _add_rows(p_partial, n_rows, WIDTH, p_dw, i_d, D, ROWS, BLOCK)
    if p_db is not None:
        _add_rows(p_partial + WIDTH - D, n_rows, WIDTH, p_db, i_d, D, ROWS, BLOCK)


@triton.jit
def _arrive_last(p_counter, n):
    """Whether this program is the last of n to come here; what the others wrote before is visible to it then."""
    # All threads of this program have written before one of them counts.
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
    """As `add_rows_kernel`, by the programs that wrote the rows. Program p belongs to group p modulo GROUPS."""
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
    """The blocks of the weight in its dtype, where they stay in registers over all tiles; otherwise none."""
    b_w = ()
    if KEEP and p_w is not None:
        for i in tl.static_range(CHUNKS):
            o_d = i * BLOCK + tl.arange(0, BLOCK)
            b_w += (tl.load(p_w + o_d, mask=o_d < D, other=0.0),)
    return b_w


@triton.jit
def _scale(b_w, i: tl.constexpr, p_w, o_d, m_d, KEEP: tl.constexpr, REPACK: tl.constexpr):
    """Block i of the weight as a row in fp32."""
    return _widen(b_w[i], REPACK)[None, :] if KEEP else _parameter(p_w, o_d, m_d)


@triton.jit
def _zeros(ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    b_sums = ()
    for _ in tl.static_range(CHUNKS):
        b_sums += (tl.zeros([ROWS, BLOCK], tl.float32),)
    return b_sums


@triton.jit
def _store_sums(p_to, b_sums, n_cols, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """The column sums of all blocks, next to each other, of which n_cols columns exist."""
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
    """dx of tiles of ROWS rows, and this program's row of p_partial: its sums of dw and db over all of its tiles.

    SPLIT programs, next to each other, share their tiles: all of them reduce the rows, each writes its own columns.
    Where GROUPS is not 0 and `fused` is 1, the last programs add the rows of p_partial up to dw and db.
    """
    WIDTH: tl.constexpr = (D if p_dw is not None else 0) + (D if p_db is not None else 0)
    OWN: tl.constexpr = CHUNKS // SPLIT
    i_p = tl.program_id(0) // SPLIT
    i_own = tl.program_id(0) % SPLIT * OWN
    b_w = _kept(p_w, D, BLOCK, CHUNKS, KEEP)
    # The sums over rows stay elementwise until the end: one reduction in all instead of one per tile.
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
