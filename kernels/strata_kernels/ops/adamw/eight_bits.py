"""AdamW with 8-bit moments; one tensor per call, in place.

    m ← β₁ m̂ s + (1 - β₁) g            v ← v̂ t + (1 - β₂) (g² - v̂ t)
    w ← w - (lr / (1 - β₁ᵗ) · m / (sqrt(v / (1 - β₂ᵗ)) + eps) + lr · weight_decay · w)
    s, t ← max |m|, max v              m̂, v̂ ← the values nearest to m / s, v / t

m̂ and v̂ are stored as 8-bit codes (`eight_bits_codes.py`); s and t are scales of blocks of 256 consecutive elements.
The update uses m and v before they are quantized. All tensors are read and written once: 10 bytes per bf16 weight, 4
more with a master-weight remainder. `rounding` of weights is as in `adamw_step`, with the same random bits.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv:2110.02861). The state is
compatible with bitsandbytes' kernels.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from .._launch import Launched, capture_launches, describe, is_recording, launch, takes_kernel
from .._launch_cache import needs_real_launches
from . import step_reference as reference
from .eight_bits_codes import BLOCK, CELLS, DECADES, LOG2_5, LOG10_2, NINTHS, TINY, values_on
from .eight_bits_kernel import eight_bits_kernel
from .shard import Shard
from .step_plan import Hyperparameters, Rounding, _as_two_fp32, _constants

# Blocks and warps per program.
_BLOCKS, _WARPS = 4, 2
# Blocks that the reference processes at a time.
_AT_ONCE = 2**14
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class EightBitPlan:
    """Caches validation and the compiled kernel between steps of the same tensors.

    Without a plan, a step of a small matrix on a GPU takes several times as much host time. A step rebuilds it if the
    address, size, dtype or layout of a tensor, the gradient's device, or any option except learning rate, weight decay
    and step has changed. It holds no reference to the caller's tensors.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._launched: Launched | None = None

    def step(
        self, tensors: tuple[Tensor | None, ...], gradient: Tensor, step: int, shard: Shard, hyper: Hyperparameters
    ) -> bool:
        """Relaunch the cached kernel and return True; without one for these tensors, return False, and `note` caches.

        tensors: weight, state and remainder.
        """
        weight, address = tensors[0], gradient.data_ptr()
        assert weight is not None
        key = (
            weight.shape, gradient.shape, gradient.dtype, gradient.is_contiguous(), gradient.get_device(), address & 15,
            shard, hyper.betas, hyper.eps, hyper.rounding, hyper.seed,
            *[x if x is None else (x.data_ptr(), x.dtype, x.is_contiguous()) for x in tensors],
        )  # fmt: skip
        if key != self._key:
            self._key, self._launched = key, None
            return False
        launched = self._launched
        if launched is None or step < 1 or is_recording() or needs_real_launches():
            return False
        scalars, constants = _scalars(step, shard, hyper), _constants(hyper)
        changed = {
            "p_g": address, "word0": scalars.words[0], "word2": scalars.words[2], "size": scalars.size,
            "inverse": scalars.inverse, "decay": constants.decay,
        }  # fmt: skip
        with torch.cuda.device(weight.device):
            launched.again(changed)
        return True

    def note(self, launched: list[Launched]) -> None:
        """Cache the launch of a step that `step` did not run; no launch on a CPU."""
        self._launched = launched[0].with_addresses() if len(launched) == 1 else None


@torch.no_grad()
def adamw_8bit_step(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    remainder: Tensor | None,
    step: int,
    shard: Shard,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rounding: Rounding,
    seed: int,
    plan: EightBitPlan | None = None,
) -> None:
    """`torch.optim.AdamW.step()` on one tensor, with 8-bit moments and the rounding modes of `adamw_step`.

    Writes to all tensors except the gradient.

    Args:
        weight: any shape with a multiple of 256 elements, bf16 | fp32, contiguous.
        gradient: shape of the weight, bf16 | fp32; copied unless it is contiguous.
        exp_avg, exp_avg_sq: codes, uint8, shape of the weight, contiguous. Initialize with zeros.
        exp_avg_scale, exp_avg_sq_scale: fp32, weight.numel() / 256 elements, contiguous. Initialize with zeros.
        remainder: int16, shape of the weight, for a bf16 weight with `rounding` "master". Initialize with zeros.
        step: the number of this step, from 1.
        shard: the position of the weight in its unsharded tensor, complete rows only, for the random bits.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        rounding: "master" | "stochastic" | "nearest". fp32 weights are never rounded.
        seed: a 64-bit integer for the random bits.
        plan: pass the same object to each step of this tensor, see `EightBitPlan`.

    Raises:
        ValueError: wrong shapes, strides, dtypes or devices, or a number out of range.

    Example:
        >>> weight, gradient = torch.ones(256), torch.ones(256)
        >>> codes, scales = torch.zeros(2, 256, dtype=torch.uint8), torch.zeros(2, 1)
        >>> state = codes[0], scales[0], codes[1], scales[1], None
        >>> settings = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "seed": 0}
        >>> adamw_8bit_step(weight, gradient, *state, 1, Shard(key=0), **settings, rounding="nearest")
        >>> weight[0], scales
        (tensor(0.9900), tensor([[0.1000],
                [0.0010]]))
    """
    hyper = Hyperparameters(lr, betas, eps, weight_decay, rounding, seed, advance=False)
    state = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    if plan is not None and plan.step((weight, *state, remainder), gradient, step, shard, hyper):
        return
    _check(weight, gradient, state, remainder, step, shard, hyper)
    if not weight.numel():
        return
    m, m_scale, v, v_scale = (x.view(-1) for x in state)
    rest, run = None if remainder is None else remainder.view(-1), _step_by_reference
    if takes_kernel(weight):
        run = _step_by_kernel
    with capture_launches() as launched:
        run(weight.view(-1), gradient.contiguous().view(-1), m, m_scale, v, v_scale, rest, step, shard, hyper)
    if plan is not None and gradient.is_contiguous():
        plan.note(launched)


def _step_by_kernel(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor, remainder: Tensor | None, step: int, shard: Shard, hyper: Hyperparameters,
) -> None:  # fmt: skip
    scalars, constants = _scalars(step, shard, hyper), _constants(hyper)
    blocks = weight.numel() // BLOCK
    launch(
        eight_bits_kernel, (-(-blocks // _BLOCKS),),
        _bits(weight), _bits(gradient), exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, remainder,
        values_on(weight.device), blocks, reference.to_int32(shard.offset), scalars.words[0], scalars.words[2],
        scalars.size, scalars.inverse, constants.decay, constants.beta1, constants.rest1, constants.rest2,
        constants.eps,
        W=_DTYPES[weight.dtype], G=_DTYPES[gradient.dtype], ROUNDING=hyper.rounding, BLOCKS=_BLOCKS,
        MASKED=blocks % _BLOCKS != 0, FAST=weight.device.type != "cpu", num_warps=_WARPS,
    )  # fmt: skip


def _bits(x: Tensor) -> Tensor:
    """bf16 x as int16 bits, as the kernel reads it; x itself if fp32."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _step_by_reference(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor, remainder: Tensor | None, step: int, shard: Shard, hyper: Hyperparameters,
) -> None:  # fmt: skip
    """`_step_by_kernel` in plain PyTorch."""
    if weight.is_meta:
        return
    scalars, constants = _scalars(step, shard, hyper), _constants(hyper)
    first, second = values_on(weight.device)
    for start in range(0, weight.numel() // BLOCK, _AT_ONCE):
        blocks = slice(start, start + _AT_ONCE)
        part = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        codes = exp_avg[part].view(-1, BLOCK), exp_avg_sq[part].view(-1, BLOCK)
        g = gradient[part].float().view(-1, BLOCK)
        m = first[codes[0].int()] * exp_avg_scale[blocks, None] * constants.beta1 + constants.rest1 * g
        v = second[codes[1].int()] * exp_avg_sq_scale[blocks, None]
        v += constants.rest2 * (g * g - v)
        for scale, largest in ((exp_avg_scale, m.abs().amax(1)), (exp_avg_sq_scale, v.amax(1))):
            scale[blocks] = largest
        cell = _cell(m.abs() / exp_avg_scale[blocks, None].clamp(min=TINY), 1)
        codes[0].copy_(torch.where(m < 0, 127 - cell.clamp(max=127), 127 + cell))
        codes[1].copy_(_cell(v / exp_avg_sq_scale[blocks, None].clamp(min=TINY), 2))
        update = (m / ((v * scalars.inverse).sqrt() + constants.eps)).view(-1)
        reference.step_reference(
            weight[part], update, None, None, None if remainder is None else remainder[part],
            (shard.offset + part.start, 1, 1), scalars, constants, hyper.rounding,
        )  # fmt: skip


def _cell(x: Tensor, first: int) -> Tensor:
    """Index of the cell whose midpoint is nearest to x in [0, 1]; the first decade has `first` cells."""
    decade = (x.log2() * LOG10_2 + DECADES).floor_().clamp_(0, DECADES - 1)
    low = first * decade.exp2()
    cell = x * (first * CELLS) * (-LOG2_5 * decade).exp2() + low * NINTHS
    cell = torch.where(cell < low + 0.2, low - 1, torch.minimum(cell.floor(), 2 * low - 1))
    cell = cell.clamp_(min=first) - (first - 1)
    cell[x >= 1 - 0.225 / (64 * first)] = first * 127 + 1.0
    cell[~(x >= 0.5e-7 + 2.25e-7 / first)] = 0.0
    return cell.int()


def _scalars(step: int, shard: Shard, hyper: Hyperparameters) -> reference.Scalars:
    betas = (_as_two_fp32(hyper.betas[0]), _as_two_fp32(hyper.betas[1]))
    return reference.scalars_reference(step, shard.key, hyper.seed, reference.to_fp32(hyper.lr), betas)


def _check(
    weight: Tensor, gradient: Tensor, state: tuple[Tensor, ...], remainder: Tensor | None, step: int, shard: Shard,
    hyper: Hyperparameters,
) -> None:  # fmt: skip
    """Raise ValueError for a wrong argument."""
    if hyper.rounding not in get_args(Rounding):
        raise ValueError(f"rounding must be one of {', '.join(get_args(Rounding))}, got {hyper.rounding!r}")
    betas_fit = all(0.0 <= beta < 1.0 for beta in hyper.betas)
    if not (betas_fit and hyper.eps >= 0.0 and step >= 1 and -(2**63) <= hyper.seed < 2**64):
        raise ValueError(
            "betas must be in [0, 1), eps at least 0, step at least 1 and seed a 64-bit integer, got betas "
            f"{hyper.betas}, eps {hyper.eps}, step {step} and seed {hyper.seed}"
        )
    if weight.dtype not in _DTYPES or weight.numel() % BLOCK or not weight.is_contiguous():
        raise ValueError(f"weight must be bf16 or fp32, contiguous, of a multiple of {BLOCK}, got {describe(weight)}")
    if shard.row != shard.whole_row:
        raise ValueError(f"shard must have complete rows, got {shard}")
    if gradient.shape != weight.shape or gradient.dtype not in _DTYPES or gradient.device != weight.device:
        raise ValueError(f"gradient must be bf16 or fp32 {list(weight.shape)}, got {describe(gradient)}")
    has_remainder = hyper.rounding == "master" and weight.dtype == torch.bfloat16
    if has_remainder != (remainder is not None):
        raise ValueError(
            "remainder must be int16, initially zeros, for a bf16 weight with rounding 'master', and None otherwise"
        )
    blocks = weight.numel() // BLOCK
    names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "remainder")
    dtypes = (torch.uint8, torch.float32, torch.uint8, torch.float32, torch.int16)
    for name, tensor, dtype in zip(names, (*state, remainder), dtypes, strict=True):
        if tensor is None:
            continue
        size = blocks if dtype == torch.float32 else weight.numel()
        fits = tensor.dtype == dtype and tensor.numel() == size and tensor.is_contiguous()
        if not fits or tensor.device != weight.device:
            expected = f"{dtype}, contiguous, of {size} elements on {weight.device}".removeprefix("torch.")
            raise ValueError(f"{name} must be {expected}, got {describe(tensor)} on {tensor.device}")
