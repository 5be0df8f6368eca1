"""The kernels of `step_kernels.py` in plain PyTorch, bitwise equal; for devices without Triton."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_NAN = 0x7FC00000
# Constants of the hash; see step_kernels.py.
_MIX_A, _MIX_B, _MIX_C, _GOLDEN = 0x21F0AAAD, 0x735A2D97, 0xD35A2D97, 0x9E3779B9


class Scalars(NamedTuple):
    """A row of the kernels' table of scalars, shared by all elements of a tensor. Words are signed."""

    size: float
    inverse: float
    words: tuple[int, int, int]


def to_fp32(x: float) -> float:
    """x rounded to fp32, as Triton passes it to a kernel."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def to_int32(x: int) -> int:
    """The lowest 32 bits of x as a signed integer."""
    return (x & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _mix(x: int) -> int:
    x &= 0xFFFFFFFF
    x = (x ^ x >> 16) * _MIX_A & 0xFFFFFFFF
    x = (x ^ x >> 15) * _MIX_B & 0xFFFFFFFF
    return x ^ x >> 15


def _random_word(seed: int, key: int, step: int, number: int) -> int:
    x = _mix((seed & 0xFFFFFFFF) + (number + 1) * 0x3C6EF372)
    for part in (seed >> 32, key, key >> 32, step):
        x = _mix(x + _GOLDEN & 0xFFFFFFFF ^ part & 0xFFFFFFFF)
    return to_int32(x)


def _power(base: float, n: int) -> float:
    y = 1.0
    for i in range(24):
        if n >> i & 1:
            y *= base
        base *= base
    return y


def scalars_reference(
    step: int, key: int, seed: int, lr: float, betas: tuple[tuple[float, float], tuple[float, float]]
) -> Scalars:
    """`scalars_kernel` for a step that is not skipped. betas: each as a sum of two fp32."""
    corrections = [1.0 - _power(high + low, step) if step else 1.0 for high, low in betas]
    words = tuple(_random_word(seed, key, step, number) for number in range(3))
    return Scalars(to_fp32(lr / corrections[0]), to_fp32(1.0 / corrections[1]), words)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Constants:
    """The fp32 constants of a step: decay is lr * weight_decay, rest1 and rest2 are 1 - beta1 and 1 - beta2."""

    decay: float
    beta1: float
    rest1: float
    rest2: float
    eps: float


# Elements per CPU thread and iteration, so that fp32 intermediates stay in cache.
_CACHED = 2**15


def step_reference(
    w: Tensor,
    g: Tensor,
    m: Tensor | None,
    v: Tensor | None,
    r: Tensor | None,
    place: tuple[int, int, int],
    scalars: Scalars,
    constants: Constants,
    rounding: str,
    scale: float = 1.0,
) -> None:
    """`step_kernel` for one tensor. Tensors are [elements]; place: `Shard.place()`; scale: gradient scale."""
    rounded = (m, v, w if rounding == "stochastic" else None)
    is_random = rounding != "nearest" and any(x is not None and x.dtype == torch.bfloat16 for x in rounded)
    at_once = _CACHED * torch.get_num_threads() if w.device.type == "cpu" else 2**24
    for start in range(0, w.numel(), at_once):
        part = slice(start, start + at_once)
        w_part = w[part]
        hashed = _hash(start, w_part, place, scalars.words[0]) if is_random else None
        # Always a copy: the code below works in place.
        u = g[part].to(torch.float32, copy=True)
        if scale != 1.0:
            u = u.mul_(scale).to(g.dtype).float()
        if m is not None and v is not None:
            exp_avg = (m[part].float() * constants.beta1).add_(u * constants.rest1)
            exp_avg_sq = v[part].float()
            exp_avg_sq = exp_avg_sq + u.square_().sub_(exp_avg_sq).mul_(constants.rest2)
            bits = None if hashed is None else _noise(hashed, scalars.words[1], _MIX_B)
            _store_rounded(m[part], exp_avg, bits)
            _store_rounded(v[part], exp_avg_sq, None if bits is None else bits >> 16)
            u = exp_avg.div_(_sqrt(exp_avg_sq.mul_(scalars.inverse)).add_(constants.eps))
        value = w_part.float() if r is None else join(w_part, r[part])
        value = value - u.mul_(scalars.size).add_(value * constants.decay)
        if r is not None:
            high, low = split(value)
            w_part.copy_(high)
            r[part].copy_(low)
        else:
            bits = None if hashed is None else _noise(hashed, scalars.words[2], _MIX_C)
            _store_rounded(w_part, value, bits)


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded sqrt of fp32 x, via fp64: PyTorch's CPU sqrt may be off by 1 ulp."""
    return x.double().sqrt_().float()


def _hash(start: int, w: Tensor, place: tuple[int, int, int], word: int) -> Tensor:
    """First half of the hash of each element's index. w[0] is element `start` of the shard."""
    offset, row, whole_row = place
    index = torch.arange(start, start + w.numel(), device=w.device)
    if row != whole_row:
        index += (index // row).mul_(whole_row - row)
    x = (index + offset).int().add_(word)
    return _xorshift(_xorshift(x, 16).mul_(_MIX_A), 15)


def _noise(x: Tensor, word: int, mix: int) -> Tensor:
    """32 random bits from the first half of a hash."""
    return _xorshift((x ^ word).mul_(to_int32(mix)), 15)


def _xorshift(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) of unsigned words, in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << 32 - bits) - 1))


def _store_rounded(stored: Tensor, value: Tensor, noise: Tensor | None) -> None:
    """Store `value`, rounded stochastically with the low 16 bits of `noise`, or to nearest even if None."""
    if noise is not None and stored.dtype == torch.bfloat16:
        bits = (noise & 0xFFFF).add_(value.view(torch.int32)).bitwise_and_(-0x10000)
        value = bits.masked_fill_(value.isnan(), _NAN).view(torch.float32)
    stored.copy_(value)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """(fp32 x rounded to nearest bf16, ties away from zero; its low 16 bits as int16)."""
    bits = x.view(torch.int32)
    # NaN is rare, and on a CPU the test is faster than masked_fill.
    if (is_nan := x.isnan()).any():
        bits = bits.masked_fill(is_nan, _NAN)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The inverse of `split`, except for the payload of a NaN."""
    return (weight.view(torch.int16).int() << 16).add_(remainder).view(torch.float32)
