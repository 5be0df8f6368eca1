"""What stochastic rounding and remainders are for: nothing is lost, or nothing in the mean; and the random bits.

The kernel has the bits of the reference (test_adamw.py), which is what runs here.
"""

from collections.abc import Iterable, Iterator
from itertools import combinations

import pytest
import torch
from torch import Tensor

from strata_kernels import Shard, StepPlan, adamw_step, join_weight, weight_step
from strata_kernels.ops.adamw import step_reference as reference

BF16 = torch.bfloat16
N = 2**17


def words(step: int = 3, key: int = 5, seed: int = 7, offset: int = 0) -> dict[str, Tensor]:
    """The three numbers of 16 bits that each of N elements is rounded by, as fp64 in [-0.5, 0.5)."""
    scalars = reference.scalars_reference(step, key, seed, 1.0, ((0.9, 0.0), (0.999, 0.0)))
    hashed = reference._hash(0, torch.empty(N), (offset, 1, 1), scalars.words[0])
    moments = reference._noise(hashed, scalars.words[1], reference._MIX_B)
    weight = reference._noise(hashed, scalars.words[2], reference._MIX_C)
    return {
        name: (bits & 0xFFFF).double() / 2**16 + 2.0**-17 - 0.5
        for name, bits in (("exp_avg", moments), ("exp_avg_sq", moments >> 16), ("weight", weight))
    }


def deviations(x: Tensor, y: Tensor) -> float:
    """The correlation of uniform numbers in standard deviations of that of independent ones."""
    return float((x * y).mean() * 12 * len(x) ** 0.5)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "weight"])
def test_random_numbers_are_uniform(name) -> None:
    for step in range(1, 9):
        x = words(step)[name]
        assert abs(float(x.mean())) * (12 * N) ** 0.5 < 4.5
        for places in (2**8, 2**16):
            # The upper and the lower byte: chi square of 255 degrees of freedom, 8 x 2 times three names.
            counts = torch.histc((((x + 0.5) * places) % 256).floor(), 256, 0, 256)
            assert 150 < float(((counts - N / 256) ** 2 / (N / 256)).sum()) < 380


def test_random_numbers_are_independent() -> None:
    base = words()
    for one, other in combinations(base, 2):
        assert abs(deviations(base[one], base[other])) < 4.5
    for name, x in base.items():
        # Of neighbors, in rows and in columns of usual widths.
        for apart in (1, 2, 3, 4, 8, 64, 1000, 1024, 4096, 14336):
            assert abs(deviations(x[:-apart], x[apart:])) < 4.5, apart
        # Of the same element in other steps and tensors, and under other seeds.
        for change in (
            {"step": 4},
            {"step": 2},
            {"step": 35},
            {"key": 4},
            {"key": 2**33 + 5},
            {"seed": 6},
            {"seed": -7},
        ):
            assert abs(deviations(x, words(**change)[name])) < 4.5, change


def test_shards_take_their_part_of_the_random_numbers() -> None:
    assert words(offset=1000)["weight"][:-1000].equal(words()["weight"][1000:])


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    """Between 1 and the next bf16, at 0 to 15 sixteenths of the way, below and above zero."""
    way = torch.arange(N) % 16 / 16
    for sign in (1.0, -1.0):
        weight = torch.full((N,), sign, dtype=BF16)
        settings = {"lr": 1.0, "weight_decay": 0.0, "rounding": "stochastic", "seed": 1}
        weight_step([weight], [-sign * way / 128], None, [Shard(0)], steps=[torch.ones(())], **settings)
        mean = ((weight.float() * sign - 1) * 128).view(-1, 16).mean(0)
        assert mean[0] == 0 and (mean - torch.arange(16) / 16).abs().max() < 4.5 * 0.5 * (16 / N) ** 0.5


SETTINGS = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def gradients(steps: int, size: int) -> Iterator[Tensor]:
    """One direction, plus noise of its own in each step."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(size, generator=generator)
    for _ in range(steps):
        yield mean * (1 + 0.5 * torch.randn(size, generator=generator))


def train(weight: Tensor, rounding: str, moment: torch.dtype, gradients: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """(the weight after a step with each gradient, in fp32 with what its remainder has, its second moment)."""
    weight, plan, step = weight.clone(), StepPlan(), torch.zeros(())
    exp_avg, exp_avg_sq = (torch.zeros_like(weight, dtype=moment) for _ in range(2))
    remainder = torch.zeros_like(weight, dtype=torch.int16) if rounding == "master" else None
    for gradient in gradients:
        lists = [weight], [gradient], [exp_avg], [exp_avg_sq], [remainder], [step], [Shard(0)]
        adamw_step(*lists, **SETTINGS, rounding=rounding, seed=1, plan=plan)
    return weight.float() if remainder is None else join_weight(weight, remainder), exp_avg_sq


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return 1 + torch.rand(2000, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(scope="module")
def exact(weight: Tensor) -> Tensor:
    """After a thousand steps of torch.optim.AdamW in fp32."""
    parameter = torch.nn.Parameter(weight.float())
    optimizer = torch.optim.AdamW([parameter], **SETTINGS)
    for parameter.grad in gradients(1000, 2000):
        optimizer.step()
    return parameter.detach()


def test_nearest_rounding_never_moves_weights_near_one(weight, exact) -> None:
    assert train(weight, "nearest", BF16, gradients(1000, 2000))[0].equal(weight.float())
    assert (exact - weight).abs().min() > 5e-3


def test_remainders_follow_pytorch_in_fp32(weight, exact) -> None:
    ours, _ = train(weight, "master", torch.float32, gradients(1000, 2000))
    assert ((ours - exact) / exact).abs().max() < 1e-6


# A weight moves by about one of its last places, at random: the mean of 2,000 has a standard deviation of 2 %.
@pytest.mark.parametrize(("rounding", "allowed"), [("master", 0.02), ("stochastic", 0.09)])
def test_moments_in_bf16_follow_pytorch_in_the_mean(rounding, allowed, weight, exact) -> None:
    ours, _ = train(weight, rounding, BF16, gradients(1000, 2000))
    moved = exact - weight
    assert abs(float(((ours - weight) * moved.sign()).mean() / moved.abs().mean()) - 1) < allowed


def test_second_moments_in_bf16_grow_where_nearest_rounding_stops_them() -> None:
    """A gradient of 1 has them approach 1; to nearest, a thousandth of what is missing is lost from about 1/2 on."""
    weight, ones = torch.ones(1000, dtype=BF16), torch.ones(1000)
    master, nearest = (train(weight, mode, BF16, [ones] * 2000)[1].float() for mode in ("master", "nearest"))
    assert abs(float(master.mean()) / (1 - 0.999**2000) - 1) < 0.01
    assert nearest.max() < 0.6
