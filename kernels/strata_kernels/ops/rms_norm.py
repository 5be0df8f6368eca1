"""Root-mean-square normalization over the last axis.

    rstd = 1 / sqrt(mean(x²) + eps)         x̂ = x · rstd         y = x̂ · (offset + w)
    g    = dy · (offset + w)
    dx   = rstd · (g - x̂ · mean(g · x̂))                          dw = Σ_rows dy · x̂

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).

Axes: R rows (all leading axes), D features. Programs are persistent: each walks over tiles of rows, so the weight is
read once per program and dw is summed in registers. Every program leaves one fp32 row of dw; a second kernel adds the
rows in a fixed order, so results repeat bit for bit. Bytes moved per element at the least: forward 2·itemsize,
backward 3·itemsize.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._launch import DTYPES, accumulator, describe, has_dtype, launch, multiprocessors, takes_kernel
from ._register import register

Cast = Literal["llama", "gemma", "none"]


@triton.jit
def _load_scale(p_w, o_d, m_d, offset, HAS_WEIGHT: tl.constexpr):
    """The row `offset + w` in fp32, or ones."""
    if HAS_WEIGHT:
        b_w = tl.load(p_w + o_d, mask=m_d, other=0.0).to(tl.float32) + offset
    else:
        b_w = tl.full(o_d.shape, 1.0, tl.float32)
    return b_w


@triton.jit
def _round_xhat(b_x, b_rstd, DTYPE: tl.constexpr, CAST: tl.constexpr):
    """x̂ in fp32, rounded to DTYPE where the cast mode says so."""
    if CAST == "none":
        b_rstd = b_rstd.to(DTYPE).to(tl.float32)
    b_xhat = b_x * b_rstd[:, None]
    if CAST != "gemma":
        b_xhat = b_xhat.to(DTYPE).to(tl.float32)
    return b_xhat


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_fwd_kernel(
    p_x, p_w, p_y, p_rstd, n_rows, stride_x, eps, offset,
    D: tl.constexpr, CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y and rstd of tiles of ROWS whole rows."""
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < D
    b_w = _load_scale(p_w, o_d, m_d, offset, HAS_WEIGHT)
    for i_t in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        o_r = i_t * ROWS + tl.arange(0, ROWS)
        m_r = o_r < n_rows
        m = m_r[:, None] & m_d[None, :]
        o_r = o_r.to(tl.int64)
        b_x = tl.load(p_x + o_r[:, None] * stride_x + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
        b_y = _round_xhat(b_x, b_rstd, p_x.dtype.element_ty, CAST) * b_w[None, :]
        tl.store(p_y + o_r[:, None] * D + o_d[None, :], b_y.to(p_y.dtype.element_ty), mask=m)
        tl.store(p_rstd + o_r, b_rstd, mask=m_r)


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_bwd_kernel(
    p_dy, p_x, p_w, p_rstd, p_dx, p_dw, n_rows, stride_dy, stride_x, offset,
    D: tl.constexpr, CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of tiles of ROWS whole rows, and this program's row of p_dw: its sum over all of its tiles."""
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < D
    b_w = _load_scale(p_w, o_d, m_d, offset, HAS_WEIGHT)
    # The sum over this program's rows stays elementwise until the end: one reduction in all instead of one per tile.
    b_dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for i_t in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        o_r = i_t * ROWS + tl.arange(0, ROWS)
        m_r = o_r < n_rows
        m = m_r[:, None] & m_d[None, :]
        o_r = o_r.to(tl.int64)
        b_x = tl.load(p_x + o_r[:, None] * stride_x + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy + o_r[:, None] * stride_dy + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_rstd = tl.load(p_rstd + o_r, mask=m_r, other=0.0)
        b_xhat = b_x * b_rstd[:, None]
        b_g = b_dy * b_w[None, :]
        b_dx = (b_g - b_xhat * (tl.sum(b_g * b_xhat, 1) / D)[:, None]) * b_rstd[:, None]
        tl.store(p_dx + o_r[:, None] * D + o_d[None, :], b_dx.to(p_dx.dtype.element_ty), mask=m)
        if WEIGHT_GRAD:
            b_dw += b_dy * _round_xhat(b_x, b_rstd, p_x.dtype.element_ty, CAST)
    if WEIGHT_GRAD:
        tl.store(p_dw + tl.program_id(0) * D + o_d, tl.sum(b_dw, 0), mask=m_d)


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_fwd_wide_kernel(
    p_x, p_w, p_y, p_rstd, n_rows, stride_x, eps, offset,
    D: tl.constexpr, CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `rms_norm_fwd_kernel` for rows that do not fit in registers: two walks over a row, the second out of L2."""
    for i_t in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        o_r = i_t * ROWS + tl.arange(0, ROWS)
        m_r = o_r < n_rows
        o_r = o_r.to(tl.int64)
        b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for i_d in tl.range(0, D, BLOCK, num_stages=STAGES):
            o_d = i_d + tl.arange(0, BLOCK)
            m = m_r[:, None] & (o_d < D)[None, :]
            b_x = tl.load(p_x + o_r[:, None] * stride_x + o_d[None, :], mask=m, other=0.0).to(tl.float32)
            b_sum += b_x * b_x
        b_rstd = tl.rsqrt(tl.sum(b_sum, 1) / D + eps)
        tl.store(p_rstd + o_r, b_rstd, mask=m_r)
        for i_d in tl.range(0, D, BLOCK, num_stages=STAGES):
            o_d = i_d + tl.arange(0, BLOCK)
            m_d = o_d < D
            m = m_r[:, None] & m_d[None, :]
            b_w = _load_scale(p_w, o_d, m_d, offset, HAS_WEIGHT)
            b_x = tl.load(p_x + o_r[:, None] * stride_x + o_d[None, :], mask=m, other=0.0).to(tl.float32)
            b_y = _round_xhat(b_x, b_rstd, p_x.dtype.element_ty, CAST) * b_w[None, :]
            tl.store(p_y + o_r[:, None] * D + o_d[None, :], b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_bwd_wide_kernel(
    p_dy, p_x, p_w, p_rstd, p_dx, p_dw, n_rows, stride_dy, stride_x, offset,
    D: tl.constexpr, CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `rms_norm_bwd_kernel` for rows that do not fit in registers; dw is summed in p_dw, zeros at first, in L2."""
    for i_t in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        o_r = i_t * ROWS + tl.arange(0, ROWS)
        m_r = o_r < n_rows
        o_r = o_r.to(tl.int64)
        b_rstd = tl.load(p_rstd + o_r, mask=m_r, other=0.0)
        b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for i_d in tl.range(0, D, BLOCK, num_stages=STAGES):
            o_d = i_d + tl.arange(0, BLOCK)
            m_d = o_d < D
            m = m_r[:, None] & m_d[None, :]
            b_w = _load_scale(p_w, o_d, m_d, offset, HAS_WEIGHT)
            b_x = tl.load(p_x + o_r[:, None] * stride_x + o_d[None, :], mask=m, other=0.0).to(tl.float32)
            b_dy = tl.load(p_dy + o_r[:, None] * stride_dy + o_d[None, :], mask=m, other=0.0).to(tl.float32)
            b_sum += b_dy * b_w[None, :] * (b_x * b_rstd[:, None])
        b_mean = tl.sum(b_sum, 1) / D
        # What other threads of this program stored into p_dw for the previous tile must be visible before it is read.
        tl.debug_barrier()
        for i_d in range(0, D, BLOCK):
            o_d = i_d + tl.arange(0, BLOCK)
            m_d = o_d < D
            m = m_r[:, None] & m_d[None, :]
            b_w = _load_scale(p_w, o_d, m_d, offset, HAS_WEIGHT)
            b_x = tl.load(p_x + o_r[:, None] * stride_x + o_d[None, :], mask=m, other=0.0).to(tl.float32)
            b_dy = tl.load(p_dy + o_r[:, None] * stride_dy + o_d[None, :], mask=m, other=0.0).to(tl.float32)
            b_dx = (b_dy * b_w[None, :] - b_x * b_rstd[:, None] * b_mean[:, None]) * b_rstd[:, None]
            tl.store(p_dx + o_r[:, None] * D + o_d[None, :], b_dx.to(p_dx.dtype.element_ty), mask=m)
            if WEIGHT_GRAD:
                p_dw_row = p_dw + tl.program_id(0) * D + o_d
                b_dw = tl.sum(b_dy * _round_xhat(b_x, b_rstd, p_x.dtype.element_ty, CAST), 0)
                tl.store(p_dw_row, b_dw + tl.load(p_dw_row, mask=m_d, other=0.0), mask=m_d)


@triton.jit(do_not_specialize=["n_rows"])
def sum_rows_kernel(p_x, p_y, n_rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y[d] = Σ_r x[r, d] for a contiguous fp32 x, rounded once to the dtype of y."""
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for i_r in range(0, n_rows, ROWS):
        o_r = i_r + tl.arange(0, ROWS)
        b_sum += tl.load(p_x + o_r[:, None] * D + o_d[None, :], mask=(o_r < n_rows)[:, None] & m_d[None, :], other=0.0)
    tl.store(p_y + o_d, tl.sum(b_sum, 0).to(p_y.dtype.element_ty), mask=m_d)


@dataclass(frozen=True)
class Tile:
    """How rows of up to `width` features are cut: elements in a tile, warps, pipeline stages, programs at a time.

    A tile holds `elements / next_power_of_2(D)` rows, or a part of one row where D is wider than `elements`.
    `occupancy` counts programs per multiprocessor, at most as many as its registers hold; None starts one per tile.
    """

    width: int
    elements: int
    warps: int
    stages: int
    occupancy: int | None


_FORWARD = (
    Tile(width=1024, elements=2048, warps=4, stages=1, occupancy=None),
    Tile(width=4096, elements=4096, warps=8, stages=2, occupancy=4),
    Tile(width=8192, elements=8192, warps=16, stages=2, occupancy=2),
    Tile(width=16384, elements=16384, warps=32, stages=2, occupancy=1),
    Tile(width=2**31, elements=8192, warps=8, stages=2, occupancy=3),
)
_BACKWARD = (
    Tile(width=1024, elements=2048, warps=4, stages=3, occupancy=4),
    Tile(width=4096, elements=4096, warps=8, stages=3, occupancy=2),
    Tile(width=8192, elements=8192, warps=16, stages=3, occupancy=1),
    Tile(width=2**31, elements=8192, warps=8, stages=2, occupancy=2),
)


def _tile(table: tuple[Tile, ...], width: int) -> tuple[Tile, int, int]:
    """The table's row for `width`, with the rows and columns of one tile."""
    tile = next(tile for tile in table if width <= tile.width)
    block = min(triton.next_power_of_2(width), tile.elements)
    return tile, tile.elements // block, block


def _programs(tile: Tile, n_tiles: int, device: torch.device) -> int:
    return n_tiles if tile.occupancy is None else min(n_tiles, tile.occupancy * multiprocessors(device))


def _rows(x: Tensor) -> Tensor:
    """x as [R, D] with adjacent features: a view wherever the strides allow one."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _dense(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _output_dtype(x: Tensor, weight: Tensor | None, cast: str) -> torch.dtype:
    """As eager PyTorch promotes; "gemma" rounds after the weight, so it keeps the dtype of x."""
    return x.dtype if weight is None or cast == "gemma" else torch.promote_types(x.dtype, weight.dtype)


def _forward_fake(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_output_dtype(x, weight, cast))
    return y, x.new_empty(x.numel() // x.shape[-1], dtype=accumulator(x.dtype))


def _forward_triton(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
    y, rstd = _forward_fake(x, weight, eps, offset, cast)
    rows = _rows(x)
    n_rows, width = rows.shape
    tile, tile_rows, block = _tile(_FORWARD, width)
    programs = _programs(tile, triton.cdiv(n_rows, tile_rows), x.device)
    launch(
        rms_norm_fwd_wide_kernel if width > block else rms_norm_fwd_kernel, (programs,),
        rows, _dense(weight), y, rstd, n_rows, rows.stride(0), eps, offset,
        D=width, CAST=cast, HAS_WEIGHT=weight is not None,
        ROWS=tile_rows, BLOCK=block, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return y, rstd


def _forward_reference(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
    wide = x.to(accumulator(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = _normalize(wide, rstd, x.dtype, cast)
    if weight is not None:
        y = y * _scale(weight, offset)
    return y.to(_output_dtype(x, weight, cast)).contiguous(), rstd.reshape(-1)


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, cast: str, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    dw = weight.new_empty(weight.shape) if weight is not None and weight_grad else x.new_empty(0)
    return x.new_empty(x.shape), dw


def _backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, cast: str, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    dx, dw = _backward_fake(dy, x, weight, rstd, offset, cast, weight_grad)
    if x.numel() == 0:
        return dx, dw.zero_()
    rows, d_rows = _rows(x), _rows(dy)
    n_rows, width = rows.shape
    tile, tile_rows, block = _tile(_BACKWARD, width)
    programs = _programs(tile, triton.cdiv(n_rows, tile_rows), x.device)
    wide = width > block
    # The wide kernel adds to its row of dw, the other one writes it once.
    partial = (x.new_zeros if wide else x.new_empty)((programs, width) if weight_grad else (0,), dtype=torch.float32)
    launch(
        rms_norm_bwd_wide_kernel if wide else rms_norm_bwd_kernel, (programs,),
        d_rows, rows, _dense(weight), rstd, dx, partial, n_rows, d_rows.stride(0), rows.stride(0), offset,
        D=width, CAST=cast, HAS_WEIGHT=weight is not None, WEIGHT_GRAD=weight_grad,
        ROWS=tile_rows, BLOCK=block, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if weight_grad:
        launch(
            sum_rows_kernel, (triton.cdiv(width, 32),),
            partial, dw, programs, D=width, ROWS=128, BLOCK=32, num_warps=4,
        )  # fmt: skip
    return dx, dw


def _backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, cast: str, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    wide, rstd = x.to(rstd.dtype), rstd.view(*x.shape[:-1], 1)
    g = dy.to(wide.dtype)
    dw = x.new_empty(0)
    if weight is not None:
        if weight_grad:
            terms = g * _normalize(wide, rstd, x.dtype, cast)
            dw = terms.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        g = g * _scale(weight, offset)
    xhat = wide * rstd
    dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype).contiguous(), dw


def _normalize(wide: Tensor, rstd: Tensor, dtype: torch.dtype, cast: str) -> Tensor:
    if cast == "gemma":
        return wide * rstd
    return (wide * (rstd.to(dtype) if cast == "none" else rstd)).to(dtype)


def _scale(weight: Tensor, offset: float) -> Tensor:
    return weight if offset == 0.0 else weight.to(accumulator(weight.dtype)) + offset


def _forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
    run = _forward_triton if takes_kernel(x) else _forward_reference
    return run(x, weight, eps, offset, cast)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, cast: str, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    run = _backward_triton if takes_kernel(x) else _backward_reference
    return run(dy, x, weight, rstd, offset, cast, weight_grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, ctx.cast = inputs
    rstd = output[1]
    ctx.mark_non_differentiable(rstd)
    # Otherwise the gradient of rstd arrives as a tensor of zeros, at the price of a kernel.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, rstd)


@once_differentiable
def _autograd(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    weight_grad = weight is not None and ctx.needs_input_grad[1]
    dx, dw = _rms_norm_bwd(dy, x, weight, rstd, ctx.offset, ctx.cast, weight_grad)
    return dx, dw if weight_grad else None, None, None, None


_rms_norm_bwd = register(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, str cast, bool weight_grad)"
    " -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_rms_norm = register(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str cast) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, cast: Cast = "llama"
) -> Tensor:
    """`(offset + weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)`, fused.

    The mean is taken in fp32. `cast` says where values are rounded to the dtype of x, as models differ in it:

    - "llama": after the normalization, before the weight (Llama, Qwen, Mistral).
    - "gemma": once, at the end; with the default offset of 0 this is `torch.nn.functional.rms_norm`.
    - "none": rstd, the normalization and the product, as arithmetic without any cast rounds.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, of any strides. fp64 runs in plain PyTorch on every device.
        weight: [D], or None for no weight. Another dtype than that of x is promoted as PyTorch does.
        eps: added to the mean square.
        offset: added to the weight, in fp32.
        cast: see above.

    Returns:
        [..., D], contiguous; the dtype of x, or the promoted one ("llama" and "none" with a wider weight).

    Raises:
        ValueError: x has no axis, a weight of another shape or device, another dtype, or an unknown cast.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), eps=0.0)
        tensor([0.8485, 1.1314])
    """
    if not has_dtype(x) or x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be {DTYPES} of shape [..., D] with D > 0, got {describe(x)}")
    if weight is not None:
        if weight.shape != x.shape[-1:] or not has_dtype(weight):
            raise ValueError(f"weight must be {DTYPES} of shape [{x.shape[-1]}], got {describe(weight)}")
        if weight.device != x.device:
            raise ValueError(f"weight is on {weight.device} and x on {x.device}: move one of them")
    if cast not in get_args(Cast):
        raise ValueError(f"cast must be one of {', '.join(get_args(Cast))}, got {cast!r}")
    y: Tensor = _rms_norm(x, weight, eps, offset, cast)[0]
    return y
