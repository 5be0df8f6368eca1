"""adamw_8bit_step against bitsandbytes, fp64 AdamW and every value, and kernel against reference."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_kernels import EightBitPlan, Shard, adamw_8bit_step, join_weight
from strata_kernels.ops import _launch
from strata_kernels.ops.adamw import eight_bits
from strata_kernels.ops.adamw.eight_bits_codes import BLOCK, values_on

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "seed": 2**40 + 12345}
BLOCKS = 11


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of several blocks, the last of which is not full."""
    monkeypatch.setattr(eight_bits, "_BLOCKS", 4)


class State:
    """A weight and what a step needs beside it."""

    def __init__(self, weight: Tensor, rounding: str = "nearest") -> None:
        self.weight, self.rounding = weight.clone(), rounding
        self.codes = [torch.zeros_like(weight, dtype=torch.uint8) for _ in "mv"]
        self.scales = [torch.zeros(weight.numel() // BLOCK, device=weight.device) for _ in "mv"]
        is_split = rounding == "master" and weight.dtype == BF16
        self.remainder = torch.zeros_like(weight, dtype=torch.int16) if is_split else None

    def step(self, gradient: Tensor, number: int, shard: Shard = Shard(3), **changes: Any) -> None:  # noqa: B008
        (m, v), (m_scale, v_scale) = self.codes, self.scales
        settings = {**SETTINGS, "rounding": self.rounding, **changes}
        adamw_8bit_step(self.weight, gradient, m, m_scale, v, v_scale, self.remainder, number, shard, **settings)

    def tensors(self) -> list[Tensor]:
        return [self.weight, *self.codes, *self.scales, *([] if self.remainder is None else [self.remainder])]

    def moments(self) -> list[Tensor]:
        values = values_on(self.weight.device)
        pairs = zip(values, self.codes, self.scales, strict=True)
        return [(table[codes.int()].view(-1, BLOCK) * scale[:, None]).flatten() for table, codes, scale in pairs]


def noise(device: torch.device, dtype: torch.dtype = FP32, blocks: int = BLOCKS) -> Tensor:
    """Gradients of very different sizes, also within a block."""
    return (torch.randn(blocks * BLOCK, device=device) * torch.randn(blocks * BLOCK, device=device).exp()).to(dtype)


def test_the_values_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    first, second = values_on(torch.device("cpu"))
    assert torch.equal(first, functional.create_dynamic_map(signed=True))
    assert torch.equal(second, functional.create_dynamic_map(signed=False))


@pytest.mark.parametrize("moment", [0, 1], ids=["first", "second"])
def test_a_moment_gets_the_nearest_value(moment: int, device: torch.device) -> None:
    """Of magnitudes around every value and every border, of both signs, by a step that makes of them the moment."""
    values = values_on(device)[moment]
    borders = (values[1:] + values[:-1]) / 2
    wanted = torch.cat([values, borders * 1.001, borders * 0.999, torch.rand(BLOCK * 2, device=device)])
    # The last of each block is the scale.
    blocks = torch.cat([wanted, wanted.new_zeros(-len(wanted) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    target = torch.cat([blocks, torch.ones_like(blocks[:, :1])], 1).flatten()
    state = State(torch.zeros_like(target))
    state.step((target / 0.1 if moment == 0 else (target / 0.001).sqrt()), 1)
    found = state.moments()[moment]
    best = (target[:, None] - values).abs().amin(1)
    assert ((found - target).abs() <= best * 1.01 + 1e-7 * target.abs()).all()


def test_a_step_is_that_of_bitsandbytes(device: torch.device) -> None:
    """Of the same state: the weights, and moments that are at least as near to the exact ones."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if device.type != "cpu":
        pytest.skip("runs bitsandbytes on the CPU")
    weight = torch.randn(BLOCKS * BLOCK)
    ours, theirs = State(weight), State(weight)
    for number in range(1, 4):
        gradient = noise(device)
        before = theirs.moments()
        (m, v), (m_scale, v_scale) = theirs.codes, theirs.scales
        tables = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]
        functional.optimizer_update_8bit_blockwise(
            "adam", gradient, theirs.weight, m, v, 0.9, 0.999, 0.0, 0.0, 1e-8, number, 1e-2, *tables, m_scale, v_scale,
            weight_decay=0.1,
        )  # fmt: skip
        ours.step(gradient, number)
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)
        exact = 0.9 * before[0] + 0.1 * gradient, 0.999 * before[1] + 0.001 * gradient**2
        for mine, other, moment in zip(ours.moments(), theirs.moments(), exact, strict=True):
            assert (mine - moment).abs().mean() <= 1.001 * (other - moment).abs().mean()
        for mine, other in zip(ours.scales, theirs.scales, strict=True):
            torch.testing.assert_close(mine, other)
        ours.codes, ours.scales = ([x.clone() for x in part] for part in (theirs.codes, theirs.scales))
        ours.weight = theirs.weight.clone()


@pytest.mark.parametrize("rounding", ["master", "stochastic", "nearest"])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_the_kernel_is_the_reference(dtypes, rounding, path, device, monkeypatch) -> None:
    """But for the order of sums and for fused multiply-adds: a code may be the next one."""
    if path == "reference":
        pytest.skip("compares with it")
    weight = torch.randn(BLOCKS * BLOCK, device=device).to(dtypes[0])
    ours, reference = State(weight, rounding), State(weight, rounding)
    for number in (1, 2):
        gradient = noise(device, dtypes[1])
        ours.step(gradient, number, Shard(3, offset=2**32 - 300))
        with monkeypatch.context() as patched:
            patched.setattr(eight_bits, "takes_kernel", lambda x: False)
            reference.step(gradient, number, Shard(3, offset=2**32 - 300))
    for mine, other in zip(ours.codes, reference.codes, strict=True):
        distance = (mine.int() - other.int()).abs()
        assert distance.max() <= 1 and distance.count_nonzero() <= 0.005 * distance.numel()
    for mine, other in zip(ours.scales, reference.scales, strict=True):
        torch.testing.assert_close(mine, other)
    unequal = (ours.weight != reference.weight).count_nonzero()
    if dtypes[0] == BF16:
        # Random bits are the same, so few are rounded otherwise.
        assert unequal <= 0.005 * weight.numel()
    torch.testing.assert_close(ours.weight.float(), reference.weight.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_no_update_is_lost(rounding: str, device: torch.device) -> None:
    """At a rate of 1e-4, which bf16 drops: ten steps move a weight by a thousandth."""
    state = State(torch.ones(4 * BLOCK, device=device, dtype=BF16), rounding)
    steps = 10
    for number in range(1, steps + 1):
        state.step(torch.ones_like(state.weight), number, lr=1e-4, weight_decay=0.0)
    weight = state.weight.float() if state.remainder is None else join_weight(state.weight, state.remainder)
    # A mean of random roundings: of 1024 weights, each 1 or 1 - 2^-8.
    tolerance = 1e-6 if rounding == "master" else 4 * 2**-8 * (0.25 * 0.75 / 1024) ** 0.5
    assert abs(float(weight.mean()) - (1 - steps * 1e-4)) < tolerance
    nearest = State(torch.ones(4 * BLOCK, device=device, dtype=BF16))
    nearest.step(torch.ones_like(nearest.weight), 1, lr=1e-4, weight_decay=0.0)
    assert nearest.weight.eq(1).all()


def test_a_sharded_tensor_has_the_bits_of_the_whole(device: torch.device) -> None:
    weight, gradient = torch.randn(8 * BLOCK, device=device).to(BF16), noise(device, BF16, 8)
    whole = State(weight, "stochastic")
    whole.step(gradient, 1)
    parts = [slice(0, 3 * BLOCK), slice(3 * BLOCK, 8 * BLOCK)]
    states = [State(weight[part], "stochastic") for part in parts]
    for state, part in zip(states, parts, strict=True):
        state.step(gradient[part], 1, Shard(3, offset=part.start))
    for one, *others in zip(whole.tensors(), *(state.tensors() for state in states), strict=True):
        assert torch.equal(one, torch.cat(others))


def test_a_gradient_that_is_not_finite_is_seen_in_the_weights(device: torch.device) -> None:
    state, gradient = State(torch.ones(2 * BLOCK, device=device)), torch.ones(2 * BLOCK, device=device)
    gradient[5] = torch.nan
    state.step(gradient, 1)
    assert state.weight[5].isnan() and state.weight[BLOCK:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step at least 1"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"weight": torch.ones(300)}, "weight must be .* multiple of 256"),
        ({"gradient": torch.ones(512)}, r"gradient must be bf16 or fp32 \[256\]"),
        ({"exp_avg": torch.zeros(256)}, "exp_avg must be uint8"),
        ({"exp_avg_sq_scale": torch.zeros(2)}, "exp_avg_sq_scale must be float32, contiguous, of 1 elements"),
        ({"remainder": torch.zeros(256, dtype=torch.int16)}, "remainder must be"),
        ({"shard": Shard(0, 0, 2, 4)}, "shard must have complete rows"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    state = State(torch.ones(256))
    arguments = {
        "weight": state.weight, "gradient": torch.ones(256), "exp_avg": state.codes[0],
        "exp_avg_scale": state.scales[0], "exp_avg_sq": state.codes[1], "exp_avg_sq_scale": state.scales[1],
        "remainder": None, "step": 1, "shard": Shard(0), **SETTINGS, "rounding": "nearest",
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        adamw_8bit_step(**{**arguments, **change})


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_steps_with_a_plan_have_the_bits_of_steps_without(rounding: str, device: torch.device) -> None:
    """Also after a gradient of another dtype, one that is not contiguous, and another rate."""
    weight = torch.randn(BLOCKS, BLOCK, device=device).to(BF16)
    planned, plain, plan = State(weight, rounding), State(weight, rounding), EightBitPlan()
    for number, change in enumerate(({}, {}, {"lr": 1e-3, "weight_decay": 0.0}, {}, {}, {"betas": (0.8, 0.9)}, {}), 1):
        gradient = noise(device, FP32 if number == 4 else BF16).view(BLOCKS, BLOCK)
        if number == 5:
            gradient = gradient.t().contiguous().t()
        planned.step(gradient, number, plan=plan, **change)
        plain.step(gradient, number, **change)
        for mine, other in zip(planned.tensors(), plain.tensors(), strict=True):
            assert torch.equal(mine, other)


def test_a_plan_launches_again_without_triton(device: torch.device, path: str, monkeypatch: Any) -> None:
    if path != "gpu":
        pytest.skip("there is nothing to launch")
    launches, launch = [], eight_bits.launch
    monkeypatch.setattr(eight_bits, "launch", lambda *a, **options: launches.append(a) or launch(*a, **options))
    state, plan, counts = State(torch.randn(BLOCKS * BLOCK, device=device).to(BF16), "stochastic"), EightBitPlan(), []
    for number in range(1, 4):
        state.step(noise(device, BF16), number, plan=plan)
        counts.append(len(launches))
    assert counts == [1, 1, 1]
    with pytest.raises(ValueError, match="step at least 1"):
        state.step(noise(device, BF16), 0, plan=plan)


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_a_plan_launches_with_the_arguments_that_triton_would_get(rounding: str, path: str, monkeypatch: Any) -> None:
    """Without a GPU: a compiled kernel that notes what it is run with."""
    if path != "reference":
        pytest.skip("the kernel runs")
    given: list[list[Any]] = []
    ran: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(function="function", packed_metadata="metadata", run=lambda *args: ran.append(args))

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **keywords: Any) -> None:
        missing = [None] * (len(kernel.params) - len(args))
        given.append([x.data_ptr() if isinstance(x, Tensor) else x for x in args] + missing)
        _launch._capture(compiled, kernel, grid, args, keywords)

    monkeypatch.setattr(eight_bits, "takes_kernel", lambda x: True)
    monkeypatch.setattr(eight_bits, "launch", launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    cpu, shard, plan = torch.device("cpu"), Shard(3, offset=2**33 + 512), EightBitPlan()
    state = State(torch.randn(BLOCKS * BLOCK).to(BF16), rounding)
    state.step(noise(cpu, BF16), 1, shard, plan=plan)
    assert not ran
    for number, rate in ((2, 1e-2), (3, 3e-4)):
        gradient, launches = noise(cpu, BF16), len(given)
        state.step(gradient, number, shard, plan=plan, lr=rate)
        assert len(given) == launches and len(ran) == number - 1
        state.step(gradient, number, shard, lr=rate)
        head = (-(-BLOCKS // eight_bits._BLOCKS), 1, 1, 7, "function", "metadata", None, None, None)
        assert ran[-1] == (*head, *given[-1])
    # At the same address, but otherwise: it is checked as without a plan.
    state.weight = state.weight.as_strided(state.weight.shape, (0,))
    with pytest.raises(ValueError, match="weight must be bf16 or fp32, contiguous"):
        state.step(noise(cpu, BF16), 4, shard, plan=plan)
