"""Casts to FP8: launch table, operators, and the same in plain PyTorch.

Formulas and kernels: `cast_kernels.py`. Scales and values are bitwise equal to those of torchao's recipes `tensorwise`
and `rowwise` (`torchao.float8.float8_scaling_utils.hp_tensor_to_float8_dynamic`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._launch import describe, is_recording, launch, runs_triton, takes_kernel
from .._operator import Operator, operator
from .cast_kernels import (
    float8_amax_both_kernel,
    float8_amax_kernel,
    float8_cast_kernel,
    float8_scale_kernel,
    float8_transpose_kernel,
)
from .largest import PARTS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The reduction dimension of an FP8 product must be a multiple of this.
ALIGNMENT = 16
_SMALLEST = 1e-12


@dataclass(frozen=True)
class Launch:
    """Launch parameters: rows and columns of a tile, elements of a block, programs, warps."""

    rows: int = 0
    columns: int = 0
    block: int = 0
    programs: int = 0
    warps: int = 8


_AMAX = Launch(block=8192, programs=PARTS)
_CAST = Launch(rows=128, columns=128)
_SCALE = Launch(block=256, warps=4)
# Counted in 4-byte words.
_TRANSPOSE = Launch(rows=32, columns=32, warps=4)


def _dtype(e5m2: bool) -> torch.dtype:
    return E5M2 if e5m2 else E4M3


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _padded(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _unfilled(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Uninitialized x8 and x8ᵀ; empty if not requested."""
    r, c = x.shape
    y = x.new_empty((r, c) if rows else (0, c), dtype=dtype)
    return y, x.new_empty((c, _padded(r)) if columns else (0, _padded(r)), dtype=dtype)


def _bits(x: Tensor) -> Tensor:
    return x.float().abs().view(torch.int32)


def _scale(amax: Tensor, dtype: torch.dtype, power: bool) -> Tensor:
    scale = (_largest(dtype) / amax.double().clamp(min=_SMALLEST)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if power else scale


def _pad(yt: Tensor) -> Tensor:
    """[C, R] → [C, R padded with zeros], contiguous."""
    rest = _padded(yt.shape[1]) - yt.shape[1]
    return yt.contiguous() if not rest else torch.cat([yt, yt.new_zeros(yt.shape[0], rest)], dim=1)


def _to(x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    # Pad before the cast: not every device can concatenate FP8 tensors.
    y = x.float() * scale
    return (_pad(y.t()) if transposed else y).to(dtype)


@operator("float8_amax(Tensor x) -> Tensor")
class _Amax(Operator):
    """[512], int32: bits of max |x| of parts of a contiguous x."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        amax = _Amax.fake(x)
        if takes_kernel(x):
            launch(
                float8_amax_kernel, (_AMAX.programs,), x, amax, x.numel(),
                BLOCK=_AMAX.block, PROGRAMS=_AMAX.programs, num_warps=_AMAX.warps,
            )  # fmt: skip
            return amax
        largest = x.abs().max() if x.numel() else x.new_zeros(())
        return amax.copy_(_bits(largest))

    @staticmethod
    def fake(x: Tensor) -> Tensor:
        return x.new_empty(_AMAX.programs, dtype=torch.int32)


@operator("float8_cast(Tensor x, Tensor amax, bool e5m2, bool rows, bool columns) -> (Tensor, Tensor, Tensor)")
class _Cast(Operator):
    """x8 [R, C], x8ᵀ [C, R padded], inverse scale [1]; x8 and x8ᵀ are empty if not requested."""

    @staticmethod
    def forward(x: Tensor, amax: Tensor, e5m2: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
        y, yt, inverse = _Cast.fake(x, amax, e5m2, rows, columns)
        dtype = y.dtype
        if not takes_kernel(x):
            scale = _scale(amax.max().view(torch.float32), dtype, False)
            inverse.copy_(scale.reciprocal())
            y = _to(x, scale, dtype, False) if rows else y
            return y, _to(x, scale, dtype, True) if columns else yt, inverse
        _launch_cast(x, y if rows else None, yt if columns else None, amax, None, inverse, amax.numel(), dtype)
        return y, yt, inverse

    @staticmethod
    def fake(x: Tensor, amax: Tensor, e5m2: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
        return *_unfilled(x, _dtype(e5m2), rows, columns), x.new_empty(1, dtype=torch.float32)


@operator("float8_cast_rowwise(Tensor x, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)")
class _CastRowwise(Operator):
    """x8 [R, C], x8ᵀ [C, R padded], inverse scales of rows [R, 1] and of columns [1, C]."""

    @staticmethod
    def forward(x: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, yt, row, column = _CastRowwise.fake(x, rows, columns)
        if not takes_kernel(x):
            if rows:
                scale = _scale(x.abs().amax(1, keepdim=True), E4M3, True)
                y, row = _to(x, scale, E4M3, False), scale.reciprocal()
            if columns:
                scale = _scale(x.abs().amax(0, keepdim=True), E4M3, True)
                yt, column = _to(x, scale, E4M3, True), scale.reciprocal()
            return y, yt, row, column
        n_rows, n_cols = x.shape
        down, across = -(-n_rows // _CAST.rows), -(-n_cols // _CAST.columns)
        of_rows = x.new_empty(across, n_rows if rows else 0, dtype=torch.int32)
        of_columns = x.new_empty(down, n_cols if columns else 0, dtype=torch.int32)
        launch(
            float8_amax_both_kernel, (down, across), x, of_rows, of_columns, n_rows, n_cols,
            ROWS=rows, COLUMNS=columns, BR=_CAST.rows, BC=_CAST.columns, num_warps=_CAST.warps,
        )  # fmt: skip
        scales: list[Tensor | None] = [None, None]
        for i, (wanted, parts, inverse) in enumerate(((rows, of_rows, row), (columns, of_columns, column))):
            if wanted:
                scale = torch.empty_like(inverse)
                launch(
                    float8_scale_kernel, (-(-inverse.numel() // _SCALE.block),), parts, scale, inverse,
                    inverse.numel(), parts.shape[0],
                    LARGEST=_largest(E4M3), BLOCK=_SCALE.block, num_warps=_SCALE.warps,
                )  # fmt: skip
                scales[i] = scale
        _launch_cast(x, y if rows else None, yt if columns else None, scales[0], scales[1], None, 0, E4M3)
        return y, yt, row, column

    @staticmethod
    def fake(x: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        row = x.new_empty(x.shape[0] if rows else 0, 1, dtype=torch.float32)
        column = x.new_empty(1, x.shape[1] if columns else 0, dtype=torch.float32)
        return *_unfilled(x, E4M3, rows, columns), row, column


@operator("float8_transpose(Tensor y) -> Tensor")
class _Transpose(Operator):
    """The contiguous transpose of an FP8 matrix, with columns padded to a multiple of 16."""

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        # The kernel needs both sizes divisible by 16, as weights have; PyTorch transposes other matrices.
        if not (runs_triton(y) or is_recording()) or any(size % ALIGNMENT for size in y.shape) or y.numel() == 0:
            return _pad(y.view(torch.uint8).t()).view(y.dtype)
        yt = _Transpose.fake(y)
        rows, columns = y.shape[0] // 4, y.shape[1] // 4
        launch(
            float8_transpose_kernel, (-(-columns // _TRANSPOSE.columns), -(-rows // _TRANSPOSE.rows)),
            y.view(torch.int32), yt.view(torch.int32), rows, columns,
            BR=_TRANSPOSE.rows, BC=_TRANSPOSE.columns, num_warps=_TRANSPOSE.warps,
        )  # fmt: skip
        return yt

    @staticmethod
    def fake(y: Tensor) -> Tensor:
        return y.new_empty(y.shape[1], _padded(y.shape[0]))


def _launch_cast(
    x: Tensor,
    y: Tensor | None,
    yt: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    inverse: Tensor | None,
    parts: int,
    dtype: torch.dtype,
) -> None:
    n_rows, n_cols = x.shape
    padded = _padded(n_rows)
    if yt is not None and x.element_size() > 2:
        # Triton 3.6 transposes FP8 values incorrectly; 16-bit values are transposed before the cast.
        if y is not None:
            _launch_cast(x, y, None, row, None, inverse, parts, dtype)
        flipped = x.new_zeros(n_cols, padded)
        flipped[:, :n_rows] = x.t()
        _launch_cast(flipped, yt, None, row if parts else column, None, inverse, parts, dtype)
        return
    grid = (-(-n_cols // _CAST.columns), -(-padded // _CAST.rows))
    launch(
        float8_cast_kernel, grid, x, y, yt, row, column, inverse, n_rows, padded, n_cols,
        LARGEST=_largest(dtype), PARTS=parts, BR=_CAST.rows, BC=_CAST.columns, num_warps=_CAST.warps,
    )  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """A matrix x [R, C] in FP8, for products that reduce over C (`rows`) and over R (`transposed`).

    rows, row_inverse: x8 [R, C] and its inverse scale, [1] or [R, 1].
    transposed, column_inverse: x8ᵀ [C, R rounded up to 16] and its inverse scale, [1] or [C, 1].
    """

    rows: Tensor
    row_inverse: Tensor
    transposed: Tensor
    column_inverse: Tensor
    amax: Tensor | None


def cast(x: Tensor, scaling: str, *, rows: bool, columns: bool, e5m2: bool = False, amax: Tensor | None = None) -> Cast:
    """Cast a matrix to FP8 with a dynamic scale.

    Args:
        x: [R, C], bf16 | fp16 | fp32.
        scaling: "tensorwise", one scale, or "rowwise", one per row of x8 and one per column of x for x8ᵀ.
        rows, columns: whether to compute x8 and x8ᵀ.
        e5m2: use E5M2 instead of E4M3, for gradients; only with "tensorwise".
        amax: `amax` of an earlier result for the same x, to save its computation.
    """
    x = x.contiguous()
    if scaling == "tensorwise":
        amax = _Amax.apply(x) if amax is None else amax
        y, yt, inverse = _Cast.apply(x, amax, e5m2, rows, columns)
        return Cast(y, inverse, yt, inverse, amax)
    y, yt, row, column = _CastRowwise.apply(x, rows, columns)
    return Cast(y, row, yt, column.view(-1, 1), None)


def inverse_of(amax: Tensor) -> Tensor:
    """Inverse E4M3 scales of tensors, bitwise equal to `cast(...).row_inverse`.

    amax: [N], int32, bits of each tensor's max |x| as fp32. Returns [N], fp32.
    """
    return _scale(amax.view(torch.float32), E4M3, False).reciprocal()


def transpose(y: Tensor) -> Tensor:
    """`y.t().contiguous()` of an FP8 matrix."""
    yt: Tensor = _Transpose.apply(y)
    return yt


def require_matrix(x: Tensor, name: str) -> None:
    """Raise ValueError unless x is a matrix with sizes that FP8 products support."""
    if x.dim() != 2 or any(size % ALIGNMENT for size in x.shape):
        raise ValueError(f"{name} must be a matrix with sizes divisible by {ALIGNMENT}, got {describe(x)}")
