"""Sorts slots by expert on the device: a stable counting sort without atomics.

A slot is an entry of index: slot s = t · K + j is expert j of token t. Rows are slots sorted by expert.

    counts[b, e]    number of slots of block b with expert e; after the scan, of all blocks before b
    starts[e]       first row of expert e; starts[E] is the number of rows
    positions[s]    row of slot s; -1 if its index is not an expert, or the slot is dropped for lack of rows
    rows[r]         slot of row r
    tiles[i]        (expert, first row) of tile i of BM rows; expert -1 for unused tiles

A tile has rows of one expert only. So there are at most S // BM + min(E, S) tiles for S slots, a function of shapes:
the host does not need the number of tokens per expert.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _hits(p_index, n_slots, n_experts, BLOCK: tl.constexpr, BE: tl.constexpr):
    """(slots [BLOCK] of this program, one-hot experts of the slots [BLOCK, BE])."""
    o_s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_e = tl.load(p_index + o_s, mask=o_s < n_slots, other=-1)
    o_e = tl.arange(0, BE)
    return o_s, ((b_e[:, None] == o_e[None, :]) & (o_e < n_experts)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["n_slots"])
def count_kernel(p_index, p_counts, n_slots, n_experts, BLOCK: tl.constexpr, BE: tl.constexpr):
    """counts of one block."""
    _, b_hits = _hits(p_index, n_slots, n_experts, BLOCK, BE)
    o_e = tl.arange(0, BE)
    tl.store(p_counts + tl.program_id(0) * n_experts + o_e, tl.sum(b_hits, 0), mask=o_e < n_experts)


@triton.jit(do_not_specialize=["n_blocks"])
def scan_kernel(p_counts, p_totals, n_blocks, n_experts, BLOCK: tl.constexpr):
    """Exclusive scan over the blocks of counts of one expert, in place, and its total."""
    i_e = tl.program_id(0)
    total = 0
    for i in range(0, n_blocks, BLOCK):
        o_b = i + tl.arange(0, BLOCK)
        b_count = tl.load(p_counts + o_b * n_experts + i_e, mask=o_b < n_blocks, other=0)
        tl.store(p_counts + o_b * n_experts + i_e, total + tl.cumsum(b_count, 0) - b_count, mask=o_b < n_blocks)
        total += tl.sum(b_count, 0)
    tl.store(p_totals + i_e, total)


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def tile_kernel(p_totals, p_starts, p_tiles, n_rows, n_tiles, n_experts, BM: tl.constexpr, BLOCK: tl.constexpr,
                BE: tl.constexpr):  # fmt: skip
    """Store BLOCK entries of tiles; the first program also stores starts."""
    o_e, o_t = tl.arange(0, BE), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_total = tl.load(p_totals + o_e, mask=o_e < n_experts, other=0)
    b_end = tl.cumsum(b_total, 0)
    # Slots beyond n_rows are dropped.
    b_begin, b_end = tl.minimum(b_end - b_total, n_rows), tl.minimum(b_end, n_rows)
    b_total = b_end - b_begin
    if tl.program_id(0) == 0:
        tl.store(p_starts + o_e + 1, b_end, mask=o_e < n_experts)
        tl.store(p_starts + o_e, b_begin, mask=o_e == 0)
    b_tiles = (b_total + BM - 1) // BM
    b_last = tl.cumsum(b_tiles, 0)
    b_expert = tl.sum((b_last[None, :] <= o_t[:, None]).to(tl.int32), 1)
    # Offset of the expert's first row from its first tile times BM.
    b_shift = b_begin - (b_last - b_tiles) * BM
    b_row = tl.sum(tl.where(b_expert[:, None] == o_e[None, :], b_shift[None, :], 0), 1) + o_t * BM
    b_expert = tl.where(o_t < tl.sum(b_tiles, 0), b_expert, -1)
    tl.store(p_tiles + 2 * o_t, b_expert, mask=o_t < n_tiles)
    tl.store(p_tiles + 2 * o_t + 1, b_row, mask=o_t < n_tiles)


@triton.jit(do_not_specialize=["n_rows", "n_slots"])
def place_kernel(p_index, p_counts, p_starts, p_positions, p_rows, n_rows, n_slots, n_experts, BLOCK: tl.constexpr,
                 BE: tl.constexpr):  # fmt: skip
    """positions of the slots of one block, and the inverse, rows."""
    o_s, b_hits = _hits(p_index, n_slots, n_experts, BLOCK, BE)
    o_e = tl.arange(0, BE)
    m_e = o_e < n_experts
    b_first = tl.load(p_starts + o_e, mask=m_e, other=0)
    b_first += tl.load(p_counts + tl.program_id(0) * n_experts + o_e, mask=m_e, other=0)
    b_row = tl.sum(b_hits * (tl.cumsum(b_hits, 0) - b_hits + b_first[None, :]), 1)
    m_row = (tl.sum(b_hits, 1) != 0) & (b_row < n_rows)
    tl.store(p_positions + o_s, tl.where(m_row, b_row, -1), mask=o_s < n_slots)
    tl.store(p_rows + b_row, o_s, mask=m_row)
