"""The steps of `step_kernels.py` in plain PyTorch, equal bit for bit; they serve CPUs and devices without Triton."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_NAN = 0x7FC00000
# Of the hash of 32-bit words; see the kernels.
_MIX_A, _MIX_B, _MIX_C, _GOLDEN = 0x21F0AAAD, 0x735A2D97, 0xD35A2D97, 0x9E3779B9


class Scalars(NamedTuple):
    """What all elements of a tensor share: a row of the table of scalars, as numbers; words are signed."""

    size: float
    inverse: float
    words: tuple[int, int, int]


def to_fp32(x: float) -> float:
    """x rounded to fp32, as kernels take numbers."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def signed(x: int) -> int:
    """The 32-bit signed integer with the lowest 32 bits of x."""
    return (x & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _mixed(x: int) -> int:
    x &= 0xFFFFFFFF
    x = (x ^ x >> 16) * _MIX_A & 0xFFFFFFFF
    x = (x ^ x >> 15) * _MIX_B & 0xFFFFFFFF
    return x ^ x >> 15


def _worded(seed: int, key: int, step: int, number: int) -> int:
    x = _mixed((seed & 0xFFFFFFFF) + (number + 1) * 0x3C6EF372)
    for part in (seed >> 32, key, key >> 32, step):
        x = _mixed(x + _GOLDEN & 0xFFFFFFFF ^ part & 0xFFFFFFFF)
    return signed(x)


def _powered(base: float, n: int) -> float:
    y = 1.0
    for i in range(24):
        if n >> i & 1:
            y *= base
        base *= base
    return y


def scalars_reference(
    step: int, key: int, seed: int, lr: float, betas: tuple[tuple[float, float], tuple[float, float]]
) -> Scalars:
    """As `scalars_kernel`, for a step that is taken. betas: each as the two fp32 whose sum it is."""
    corrections = [1.0 - _powered(high + low, step) if step else 1.0 for high, low in betas]
    words = tuple(_worded(seed, key, step, number) for number in range(3))
    return Scalars(to_fp32(lr / corrections[0]), to_fp32(1.0 / corrections[1]), words)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Shares:
    """What all tensors of a step share, in fp32: decay is lr * weight_decay, rest1 and rest2 are 1 - beta."""

    decay: float
    beta1: float
    rest1: float
    rest2: float
    eps: float


# Elements that a thread of the CPU computes at a time: their fp32 stay in its cache.
_CACHED = 2**15


def step_reference(
    w: Tensor,
    g: Tensor,
    m: Tensor | None,
    v: Tensor | None,
    r: Tensor | None,
    place: tuple[int, int, int],
    scalars: Scalars,
    shares: Shares,
    rounding: str,
) -> None:
    """As `step_kernel`, for one tensor. All are [elements]; place: the offset, row and whole row of the elements."""
    rounded = (m, v, w if rounding == "stochastic" else None)
    is_random = rounding != "nearest" and any(x is not None and x.dtype == torch.bfloat16 for x in rounded)
    at_once = _CACHED * torch.get_num_threads() if w.device.type == "cpu" else 2**24
    for start in range(0, w.numel(), at_once):
        part = slice(start, start + at_once)
        w_part = w[part]
        hashed = _hash(start, w_part, place, scalars.words[0]) if is_random else None
        # A copy, also of fp32: it is computed with in place.
        u = g[part].to(torch.float32, copy=True)
        if m is not None and v is not None:
            exp_avg = (m[part].float() * shares.beta1).add_(u * shares.rest1)
            exp_avg_sq = v[part].float()
            exp_avg_sq = exp_avg_sq + u.square_().sub_(exp_avg_sq).mul_(shares.rest2)
            bits = None if hashed is None else _noise(hashed, scalars.words[1], _MIX_B)
            _store_rounded(m[part], exp_avg, bits)
            _store_rounded(v[part], exp_avg_sq, None if bits is None else bits >> 16)
            u = exp_avg.div_(_root(exp_avg_sq.mul_(scalars.inverse)).add_(shares.eps))
        value = w_part.float() if r is None else join(w_part, r[part])
        value = value - u.mul_(scalars.size).add_(value * shares.decay)
        if r is not None:
            high, low = split(value)
            w_part.copy_(high)
            r[part].copy_(low)
        else:
            bits = None if hashed is None else _noise(hashed, scalars.words[2], _MIX_C)
            _store_rounded(w_part, value, bits)


def _root(x: Tensor) -> Tensor:
    """sqrt(x) rounded correctly, as PyTorch's for fp32 on CPUs is not; fp64's last place may be wrong."""
    return x.double().sqrt_().float()


def _hash(start: int, w: Tensor, place: tuple[int, int, int], word: int) -> Tensor:
    """The first half of the hash of each element's index; the first element of w is number `start` of the shard."""
    offset, row, whole_row = place
    index = torch.arange(start, start + w.numel(), device=w.device)
    if row != whole_row:
        index += (index // row).mul_(whole_row - row)
    x = (index + offset).int().add_(word)
    return _fold(_fold(x, 16).mul_(_MIX_A), 15)


def _noise(x: Tensor, word: int, mix: int) -> Tensor:
    """32 random bits out of the first half of a hash."""
    return _fold((x ^ word).mul_(signed(mix)), 15)


def _fold(x: Tensor, bits: int) -> Tensor:
    """x ^ x >> bits, of unsigned words."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << 32 - bits) - 1))


def _store_rounded(stored: Tensor, value: Tensor, noise: Tensor | None) -> None:
    """Round `value` by the lowest 16 bits of the noise, or to nearest even without."""
    if noise is not None and stored.dtype == torch.bfloat16:
        bits = (noise & 0xFFFF).add_(value.view(torch.int32)).bitwise_and_(-0x10000)
        value = bits.masked_fill_(value.isnan(), _NAN).view(torch.float32)
    stored.copy_(value)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 x as bf16, rounded to nearest with ties away from zero, and the int16 that is left of its bits."""
    bits = x.view(torch.int32)
    # Rare, and on a CPU slower to fill in than to look for.
    if (missing := x.isnan()).any():
        bits = bits.masked_fill(missing, _NAN)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The inverse of `split`, but for the payload of a NaN."""
    return (weight.view(torch.int16).int() << 16).add_(remainder).view(torch.float32)
