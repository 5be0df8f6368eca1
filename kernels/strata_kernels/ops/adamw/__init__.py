"""AdamW for bf16 weights that keeps small updates; multi-tensor, in place.

    m ← β₁ m + (1 - β₁) g                           v ← v + (1 - β₂) (g² - v)
    u = m / (sqrt(v / (1 - β₂ᵗ)) + eps)             w ← w - (lr / (1 - β₁ᵗ) · u + lr · weight_decay · w)

`weight_step` is the update of w alone, w ← w - (lr · u + lr · weight_decay · w), for updates u of another optimizer.
All arithmetic is fp32, except β₁ᵗ and β₂ᵗ, which are fp64.

At a learning rate of 1e-5, most updates are smaller than half an ulp of a bf16 weight, so rounding to nearest drops
them. `rounding` selects how to keep them:

- "master": the weight is an fp32 value. Its upper half is stored as the bf16 weight, its lower half as an int16
  `remainder`: 2 bytes instead of 4 for an fp32 copy:

      weight = (bits + 0x8000) >> 16        remainder = the low 16 bits, signed        bits = (weight << 16) + remainder

  The bf16 weight is the fp32 value rounded to nearest (ties away from zero), and the pair is the exact fp32 value. A
  step is bitwise equal to the same step on an fp32 weight. `split_weight` and `join_weight` convert.
- "stochastic": a bf16 weight is rounded up or down at random, unbiased, without additional memory.
- "nearest": to nearest even, which loses small updates, as in ordinary bf16 training.

Moments may be bf16 as well. With nearest rounding they would not change: for β₂ = 0.999, v changes by a thousandth, a
quarter of a bf16 ulp. So "master" and "stochastic" round bf16 moments stochastically. The random
bits are a hash of (seed, step, key of the tensor, index of the element in the unsharded tensor), so they are
reproducible and do not depend on the sharding of the tensor.

`step_plan.py` launches the kernels of `step_kernels.py`, or runs `step_reference.py`; `shard.py` describes shards.

Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017 (arXiv:1711.05101). The split: NVIDIA's
Transformer Engine, `FusedAdam(store_param_remainders=True)`. Stochastic rounding: Gupta et al., "Deep Learning with
Limited Numerical Precision", 2015 (arXiv:1502.02551); Zamirai et al., "Revisiting BFloat16 Training", 2020
(arXiv:2010.06192). Counter-based random numbers: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from .._launch import describe
from . import step_reference as reference
from .shard import Shard
from .step_plan import Given, Hyperparameters, Rounding, StepPlan, Tensors, with_strides_of_weight

_ROUNDINGS = get_args(Rounding)


def adamw_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    remainders: Sequence[Tensor | None] | None,
    steps: Sequence[Tensor],
    shards: Sequence[Shard],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rounding: Rounding,
    seed: int,
    found_inf: Tensor | None = None,
    gradient_scale: Tensor | None = None,
    plan: StepPlan | None = None,
) -> None:
    """`torch.optim.AdamW(fused=True).step()` on these tensors, with the rounding modes of the module's docstring.

    Writes to all tensors except gradients. There is no host synchronization, and a step of any number of tensors has
    two launches per combination of dtypes.

    Args:
        weights: any shapes, bf16 | fp32; contiguous up to a permutation of axes.
        gradients: shapes of the weights, bf16 | fp32; copied if their strides differ from those of the weights.
        exp_avgs, exp_avg_sqs: shapes and strides of the weights, bf16 | fp32.
        remainders: int16, shapes and strides of the weights, only with `rounding` "master". Initialize with zeros; None
            for an fp32 weight.
        steps: fp32 tensors of one element on the weights' device, 0 before the first step; incremented by a step.
        shards: the position of each weight in its unsharded tensor, for the random bits. Elements in memory order.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        rounding: "master" | "stochastic" | "nearest". fp32 tensors are never rounded.
        seed: a 64-bit integer for the random bits.
        found_inf: fp32 tensor of one element, or None. If nonzero, the step is skipped and `steps` do not change.
        gradient_scale: fp32 tensor of one element on the weights' device, or None. The step is bitwise
            equal to one after `gradient.mul_(gradient_scale)`, e.g. for clipping, without a pass over the gradients.
        plan: pass the same object to each step of these tensors to save most of the host time.

    Raises:
        ValueError: wrong lengths, shapes, strides, dtypes or devices, or a number out of range.

    Example:
        >>> weight, gradient = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
        >>> state = [torch.zeros_like(weight)], [torch.zeros_like(weight)], [torch.zeros(2, dtype=torch.int16)]
        >>> settings = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        >>> steps, shards = [torch.zeros(())], [Shard(key=0)]
        >>> adamw_step([weight], [gradient], *state, steps, shards, **settings, rounding="master", seed=0)
        >>> weight, join_weight(weight, state[2][0])
        (tensor([1., 1.], dtype=torch.bfloat16), tensor([1.0000, 1.0000]))
    """
    if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0 and eps >= 0.0):
        raise ValueError(f"betas must be in [0, 1) and eps at least 0, got betas {betas} and eps {eps}")
    _run(
        Tensors(weights, gradients, exp_avgs, exp_avg_sqs, remainders, steps, shards),
        Hyperparameters(lr, betas, eps, weight_decay, rounding, seed, advance=True),
        Given(found_inf, gradient_scale),
        plan,
    )


def weight_step(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    remainders: Sequence[Tensor | None] | None,
    shards: Sequence[Shard],
    *,
    lr: float,
    weight_decay: float,
    rounding: Rounding,
    seed: int,
    steps: Sequence[Tensor] | None = None,
    found_inf: Tensor | None = None,
    plan: StepPlan | None = None,
) -> None:
    """`w.mul_(1 - lr * weight_decay).sub_(lr * u)` on these tensors, with the rounding modes of the module's docstring.

    Args:
        weights, remainders, shards, lr, weight_decay, rounding, seed, found_inf, plan: as in `adamw_step`.
        updates: shapes of the weights, bf16 | fp32; copied if their strides differ from those of the weights.
        steps: as in `adamw_step`, different at each call, not incremented here. Only for the random bits: required with
            `rounding` "stochastic".

    Raises:
        ValueError: as `adamw_step`; missing steps.
    """
    _run(
        Tensors(weights, updates, None, None, remainders, steps, shards),
        Hyperparameters(lr, (0.0, 0.0), 0.0, weight_decay, rounding, seed, advance=False),
        Given(found_inf),
        plan,
    )


def split_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 x of any shape as (bf16 weight, int16 remainder); the weight is x rounded to nearest."""
    if x.dtype != torch.float32:
        raise ValueError(f"x must be fp32, got {describe(x)}")
    return reference.split(x)


def join_weight(weight: Tensor, remainder: Tensor) -> Tensor:
    """The exact inverse of `split_weight`, except for the payload of a NaN."""
    if weight.dtype != torch.bfloat16 or remainder.dtype != torch.int16 or weight.shape != remainder.shape:
        both = f"{describe(weight)} and {describe(remainder)}"
        raise ValueError(f"weight must be bf16 and remainder int16, of the same shape, got {both}")
    return reference.join(weight, remainder)


@torch.no_grad()
def _run(tensors: Tensors, hyper: Hyperparameters, given: Given, plan: StepPlan | None) -> None:
    if not tensors.weights:
        return
    plan = plan or StepPlan()
    plan.update(tensors, hyper, _check)
    for name, scalar in zip(given._fields, given, strict=True):
        _check_scalar(name, scalar, tensors.weights[0])
    plan.run(tensors, hyper, given)


def _check(tensors: Tensors, hyper: Hyperparameters) -> None:
    """Raise ValueError for a wrong length of a list, or a wrong option."""
    if hyper.rounding not in _ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(_ROUNDINGS)}, got {hyper.rounding!r}")
    if not -(2**63) <= hyper.seed < 2**64:
        raise ValueError(f"seed must be a 64-bit integer, got {hyper.seed}")
    lists = {
        "gradients": tensors.gradients, "exp_avgs": tensors.exp_avgs, "exp_avg_sqs": tensors.exp_avg_sqs,
        "remainders": tensors.remainders, "steps": tensors.steps, "shards": tensors.shards,
    }  # fmt: skip
    for name, some in lists.items():
        if some is not None and len(some) != len(tensors.weights):
            raise ValueError(f"{name} must have one entry per weight, {len(tensors.weights)}, got {len(some)}")
    for i, weight in enumerate(tensors.weights):
        _check_tensor(i, weight, tensors, hyper)


def _check_tensor(i: int, weight: Tensor, tensors: Tensors, hyper: Hyperparameters) -> None:
    """Raise ValueError unless the tensors at index i match."""
    if not weight.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(weight):
        raise ValueError(f"weights[{i}] must be dense, got strides {weight.stride()}: make it contiguous")
    needs = tensors.remainders if hyper.rounding == "master" and weight.dtype == torch.bfloat16 else None
    if hyper.rounding == "master" and weight.dtype == torch.bfloat16 and (needs is None or needs[i] is None):
        raise ValueError(f"rounding 'master' needs remainders[{i}]: start with int16 zeros like weights[{i}]")
    if needs is None and tensors.remainders is not None and tensors.remainders[i] is not None:
        raise ValueError(f"remainders[{i}] must be None: only a bf16 weight has one, and only with rounding 'master'")
    if hyper.rounding == "stochastic" and weight.dtype == torch.bfloat16 and tensors.steps is None:
        raise ValueError("rounding 'stochastic' needs steps, because its random bits depend on them")
    floats = (torch.bfloat16, torch.float32)
    expected = (
        ("weights", tensors.weights, floats),
        ("gradients", tensors.gradients, floats),
        ("exp_avgs", tensors.exp_avgs, floats),
        ("exp_avg_sqs", tensors.exp_avg_sqs, floats),
        ("remainders", tensors.remainders, (torch.int16,)),
    )
    for name, some, dtypes in expected:
        if some is None or (tensor := some[i]) is None:
            continue
        if tensor.dtype not in dtypes or tensor.shape != weight.shape:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name}[{i}] must be {allowed} {list(weight.shape)}, got {describe(tensor)}")
        if tensor.device != tensors.weights[0].device:
            raise ValueError(f"{name}[{i}] is on {tensor.device}, weights[0] on {tensors.weights[0].device}: move one")
        if name != "gradients" and with_strides_of_weight(tensor, weight) is not tensor:
            raise ValueError(
                f"{name}[{i}] has strides {tensor.stride()} and its weight {weight.stride()}: give it the same strides"
            )
    if tensors.steps is not None:
        _check_scalar(f"steps[{i}]", tensors.steps[i], weight)


def _check_scalar(name: str, x: Tensor | None, weight: Tensor) -> None:
    if x is not None and (x.dtype != torch.float32 or x.numel() != 1 or x.device != weight.device):
        raise ValueError(f"{name} must be float32 of one element on {weight.device}, got {describe(x)} on {x.device}")
