"""cos and sin of a rotation: validation, layout for kernels, and the rotation itself.

`read_cos_sin` checks the caller's arguments and converts them to a `CosSin`. Kernels load it with `load_angles` and
rotate with `rotate`; `CosSin.per_pair` and `rotate_reference` are the same in plain PyTorch. The package's docstring
defines rotations and pairs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import accumulator, describe
from .heads import alignment

# Bytes of the widest vectorized load of a thread.
_VECTOR = 16

# The fields of CosSin in the schema of an operator.
SCHEMA = (
    "Tensor cos, Tensor? sin, Tensor? positions, int rotary_dim, bool interleaved, int time, int height, int width,"
    " bool mrope_interleaved"
)


class CosSin(NamedTuple):
    """Validated cos and sin, independent of the layout of q and k.

    cos, sin: [3 or 1, B or 1, S, W]; S is the number of rows for a table. W is P, or R if each angle is stored twice.
        For complex angles, sin is None and cos holds (cos, sin) of each pair, W = R.
    positions: [B or 1, S], rows of the table; None without a table.
    rotary_dim: R.
    time, height, width: numbers of pairs in the sections of M-RoPE; zeros without M-RoPE.
    mrope_interleaved: whether the sections of M-RoPE alternate.
    """

    cos: Tensor
    sin: Tensor | None
    positions: Tensor | None
    rotary_dim: int
    interleaved: bool
    time: int
    height: int
    width: int
    mrope_interleaved: bool

    @property
    def form(self) -> str:
        """Storage of the angles, FORM of `load_angles`: "complex", "pairs" (once) or "twice"."""
        if self.sin is None:
            return "complex"
        return "pairs" if self.cos.shape[-1] == self.rotary_dim // 2 else "twice"

    def for_kernel(self, q: Tensor, *others: Tensor) -> tuple[tuple[Any, ...], tuple[int, ...], dict[str, Any]]:
        """Kernel arguments, in three groups, in the order of the kernel's parameters.

        Args:
            q: [B, H, S, D].
            others: other tensors that the kernel accesses in vectors of VEC elements.

        Returns:
            (cos, sin, positions); (n_angles, strides of cos for batch, M-RoPE axis and position, strides of positions
            for batch and position); constexprs by name.
        """
        batch, _, _, features = q.shape
        cos, sin, positions = self.cos, self.sin, self.positions
        if cos.stride(-1) != 1 or (sin is not None and sin.stride() != cos.stride()):
            cos, sin = cos.contiguous(), None if sin is None else sin.contiguous()
        strides = tuple(cos.expand(-1, batch, -1, -1).stride(axis) for axis in (1, 0, 2))
        strides += (0, 0) if positions is None else positions.expand(batch, -1).stride()
        pairs = self.rotary_dim // 2
        rest = features // 2 - pairs
        constexprs = {
            "PAIRS": pairs,
            "REST": rest,
            "VEC": math.gcd(_VECTOR // q.element_size(), pairs, rest, *map(alignment, (q, *others))),
            "INTERLEAVED": self.interleaved,
            "FORM": self.form,
            "TIME": self.time,
            "HEIGHT": self.height,
            "WIDTH": self.width,
            "WOVEN": self.mrope_interleaved,
        }
        return (cos, sin, positions), (cos.shape[2], *strides), constexprs

    def per_pair(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of each pair, [B or 1, 1, S, P], in plain PyTorch."""
        return self._select(self.cos, 0, dtype), self._select(self.cos if self.sin is None else self.sin, 1, dtype)

    def _select(self, x: Tensor, which: int, dtype: torch.dtype) -> Tensor:
        if self.form != "pairs":
            x = x[..., which if self.sin is None else 0 :: 2]
        if self.time:
            o_p = torch.arange(x.shape[-1], device=x.device)
            x = x[self._sections(o_p), :, :, o_p].movedim(0, -1)
        else:
            x = x[0]
        if self.positions is not None:
            rows = x.shape[1]
            missing = (self.positions < 0) | (self.positions >= rows)
            x = x[0, self.positions.clamp(0, rows - 1)].masked_fill(missing[..., None], float("nan"))
        return x[:, None].to(dtype)

    def _sections(self, o_p: Tensor) -> Tensor:
        """`_section` in plain PyTorch."""
        if not self.mrope_interleaved:
            return (o_p >= self.time).long() + (o_p >= self.time + self.height).long()
        o_a = o_p % 3
        return torch.where(o_p < 3 * torch.where(o_a == 1, self.height, self.width), o_a, 0)


@triton.jit
def _section(o_p, TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr):
    """M-RoPE axis (0 to 2) of pair o_p: sections are consecutive, or interleaved if WOVEN: t h w t h w … t t t."""
    if WOVEN:
        o_a = o_p % 3
        o_a = tl.where(o_p < 3 * tl.where(o_a == 1, HEIGHT, WIDTH), o_a, 0)
    else:
        o_a = (o_p >= TIME).to(tl.int32) + (o_p >= TIME + HEIGHT).to(tl.int32)
    return o_a


@triton.jit
def load_angles(
    p_cos, p_sin, p_pos, i_b, o_s, o_p, m, n_angles, stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
    N: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr,
    TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr,
):  # fmt: skip
    """fp32 cos and sin of W pairs starting at o_p, at positions o_s; 0 if not m, and for pairs >= PAIRS.

    NaN for positions outside the table.
    """
    m_a = m
    if p_pos is not None:
        o_s = tl.load(p_pos + i_b * stride_pb + o_s * stride_ps, mask=m, other=0).to(tl.int64)
        m_a = m & (o_s >= 0) & (o_s < n_angles)
    if FORM == "pairs":
        o = o_p + tl.arange(0, W)[None, :]
        o_pair = o
    else:
        o = 2 * o_p + tl.arange(0, 2 * W)[None, :]
        o_pair = o // 2
    o += i_b * stride_cb + o_s * stride_cs
    if TIME > 0:
        o += _section(o_pair, TIME, HEIGHT, WIDTH, WOVEN).to(tl.int64) * stride_ca
    # If W divides PAIRS, a chunk of W pairs does not cross PAIRS: a mask [N, 1] is enough.
    if PAIRS % W == 0:
        o_pair = o_p
    m_l = m_a & (o_pair < PAIRS)
    b_cos = tl.load(p_cos + o, mask=m_l, other=0.0)
    if FORM == "complex":
        b_cos, b_sin = tl.split(tl.reshape(b_cos, N, W, 2))
    elif FORM == "twice":
        b_cos, _ = tl.split(tl.reshape(b_cos, N, W, 2))
        b_sin, _ = tl.split(tl.reshape(tl.load(p_sin + o, mask=m_l, other=0.0), N, W, 2))
    else:
        b_sin = tl.load(p_sin + o, mask=m_l, other=0.0)
    b_cos = b_cos.to(tl.float32)
    if p_pos is not None:
        b_cos = tl.where(m & (m_a == 0), float("nan"), b_cos)
    return b_cos, b_sin.to(tl.float32)


@triton.jit
def rotate(
    b_x1, b_x2, b_cos, b_sin, o_p, W: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INVERSE: tl.constexpr
):
    """Rotate W pairs starting at o_p, by the opposite angle if INVERSE; pairs >= PAIRS are unchanged."""
    if INVERSE:
        b_sin = -b_sin
    b_y1 = b_x1 * b_cos - b_x2 * b_sin
    b_y2 = b_x2 * b_cos + b_x1 * b_sin
    if REST > 0:
        m = o_p + tl.arange(0, W)[None, :] < PAIRS
        b_y1 = tl.where(m, b_y1, b_x1)
        b_y2 = tl.where(m, b_y2, b_x2)
    return b_y1, b_y2


def rotate_reference(x: Tensor, cos_sin: CosSin, inverse: bool) -> Tensor:
    """x: [B, H, S, D] rotated in plain PyTorch, in fp32 (or fp64) and rounded once; differentiable."""
    cos, sin = cos_sin.per_pair(accumulator(x.dtype))
    if inverse:
        sin = -sin
    rotated, rest = x[..., : cos_sin.rotary_dim].to(cos.dtype), x[..., cos_sin.rotary_dim :]
    x1, x2 = (rotated[..., ::2], rotated[..., 1::2]) if cos_sin.interleaved else rotated.chunk(2, dim=-1)
    y = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    rotated = torch.stack(y, dim=-1).flatten(-2) if cos_sin.interleaved else torch.cat(y, dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def read_cos_sin(
    q: Tensor,
    cos: Tensor,
    sin: Tensor | None,
    *,
    positions: Tensor | None,
    rotary_dim: int | None,
    interleaved: bool,
    mrope_section: Sequence[int] | None,
    mrope_interleaved: bool,
) -> CosSin:
    """The arguments of `rope` as a `CosSin`, for q: [B, H, S, D]. Raises ValueError as `rope`."""
    if cos.requires_grad or (sin is not None and sin.requires_grad):
        raise ValueError(
            "cos or sin requires a gradient, which this operator does not compute: detach it, or use plain PyTorch"
        )
    if (sin is None) != cos.is_complex():
        raise ValueError("pass cos and sin, or a complex tensor as cos without sin")
    if sin is not None and sin.shape != cos.shape:
        raise ValueError(f"cos and sin must have the same shape, got {describe(cos)} and {describe(sin)}")
    for name, x in {"cos": cos, "sin": sin, "positions": positions}.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}: move one of them")
    if mrope_interleaved and mrope_section is None:
        raise ValueError("mrope_interleaved needs mrope_section: pass both")
    width = _rotary_dim(q.shape[3], cos, rotary_dim)
    sections = _checked_sections(width // 2, mrope_section)
    cos = _with_axes(cos, q, positions, sections is not None)
    sin = None if sin is None else _with_axes(sin, q, positions, sections is not None)
    if sin is None:
        cos = torch.view_as_real(cos.resolve_conj()).flatten(-2)
    elif cos.shape[-1] == width and not interleaved:
        # Both halves hold the same angles: use the first.
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    if positions is not None:
        positions = _checked_positions(positions, q)
    return CosSin(cos, sin, positions, width, interleaved, *(sections or (0, 0, 0)), mrope_interleaved)


def _rotary_dim(features: int, cos: Tensor, rotary_dim: int | None) -> int:
    """R: the given `rotary_dim`, or the width of cos."""
    width = cos.shape[-1] if cos.dim() else 0
    if cos.is_complex():
        width *= 2
    if rotary_dim is None:
        rotary_dim = width
    if rotary_dim % 2 or not 0 < rotary_dim <= features:
        raise ValueError(f"rotary_dim must be even and from 2 to {features}, got {rotary_dim}, cos: {describe(cos)}")
    allowed = (rotary_dim,) if cos.is_complex() else (rotary_dim // 2, rotary_dim)
    if width not in allowed:
        raise ValueError(
            f"with rotary_dim {rotary_dim} cos and sin must be {rotary_dim // 2} wide, or {rotary_dim} if each angle"
            f" is stored twice, got {describe(cos)}"
        )
    return rotary_dim


def _checked_sections(pairs: int, mrope_section: Sequence[int] | None) -> tuple[int, int, int] | None:
    if mrope_section is None:
        return None
    if len(mrope_section) != 3 or min(mrope_section) < 1 or sum(mrope_section) != pairs:
        raise ValueError(f"mrope_section must be three positive sizes with the sum {pairs}, got {list(mrope_section)}")
    time, height, width = mrope_section
    return time, height, width


def _with_axes(x: Tensor, q: Tensor, positions: Tensor | None, mrope: bool) -> Tensor:
    """cos or sin as [3 or 1, B or 1, S or rows, W]."""
    batch, _, n_s, _ = q.shape
    if positions is not None:
        if mrope or x.dim() != 2:
            raise ValueError(f"positions index a table [rows, R] (not of M-RoPE), got {describe(x)}")
        return x[None, None]
    y = x if mrope else x[None]
    if y.dim() == 3:
        y = y[:, None]
    if y.dim() != 4 or y.shape[0] != (3 if mrope else 1) or y.shape[1] not in (1, batch) or y.shape[2] != n_s:
        front = "3, " if mrope else ""
        raise ValueError(f"cos and sin must both be [{front}{n_s}, R] or [{front}{batch}, {n_s}, R], got {describe(x)}")
    return y


def _checked_positions(positions: Tensor, q: Tensor) -> Tensor:
    batch, _, n_s, _ = q.shape
    rows = positions[None] if positions.dim() == 1 else positions
    fits = rows.dim() == 2 and rows.shape[0] in (1, batch) and rows.shape[1] == n_s
    if positions.dtype not in (torch.int32, torch.int64) or not fits:
        raise ValueError(f"positions must be int32 or int64 [{n_s}] or [{batch}, {n_s}], got {describe(positions)}")
    return rows
