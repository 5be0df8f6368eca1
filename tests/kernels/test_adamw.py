"""adamw_step and weight_step against torch.optim.AdamW, fp64, themselves in fp32, and kernel against reference."""

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_kernels import Shard, adamw_step, join_weight, split_weight, weight_step
from strata_kernels.ops import _adamw_plan

# What only the host does, or takes too many steps for the interpreter.
host = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="has been tested without the interpreter")
BF16, FP32 = torch.bfloat16, torch.float32
ROUNDINGS = ["master", "stochastic", "nearest"]
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
# Whole blocks and chunks, a part of one, one element, none.
SIZES = [256, 300, 1, 0, 515]
SEED = 2**40 + 12345


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch) -> None:
    """Several programs and blocks for a tensor of some hundred elements, and scalars of two programs."""
    monkeypatch.setattr(_adamw_plan, "_STEP", _adamw_plan.Launch(block=128, chunk=256, warps=4))
    monkeypatch.setattr(_adamw_plan, "_SCALARS", _adamw_plan.Launch(block=4, chunk=4, warps=1))


@dataclass
class State:
    """Everything that a step of adamw_step works on."""

    weights: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    remainders: list[Tensor | None]
    steps: list[Tensor]
    shards: list[Shard]
    rounding: str

    def step(self, gradients: list[Tensor], **changes: Any) -> None:
        settings = {**SETTINGS, "rounding": self.rounding, "seed": SEED, **changes}
        states = (self.exp_avgs, self.exp_avg_sqs, self.remainders, self.steps, self.shards)
        adamw_step(self.weights, gradients, *states, **settings)

    def tensors(self) -> list[Tensor | None]:
        return [*self.weights, *self.exp_avgs, *self.exp_avg_sqs, *self.remainders, *self.steps]

    def copy(self) -> "State":
        lists = ("weights", "exp_avgs", "exp_avg_sqs", "remainders", "steps")
        return replace(self, **{name: [x if x is None else x.clone() for x in getattr(self, name)] for name in lists})


def start(weights: list[Tensor], rounding: str, moment: torch.dtype = BF16, second: torch.dtype | None = None) -> State:
    pairs = [(w, rounding == "master" and w.dtype == BF16) for w in weights]
    return State(
        weights=weights,
        exp_avgs=[torch.zeros_like(w, dtype=moment) for w in weights],
        exp_avg_sqs=[torch.zeros_like(w, dtype=second or moment) for w in weights],
        remainders=[torch.zeros_like(w, dtype=torch.int16) if is_split else None for w, is_split in pairs],
        steps=[torch.zeros((), device=w.device) for w in weights],
        shards=[Shard(key) for key in range(len(weights))],
        rounding=rounding,
    )


def noise(sizes: list[int], device: torch.device, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def assert_same(one: State, other: State) -> None:
    for x, y in zip(one.tensors(), other.tensors(), strict=True):
        assert (x is None and y is None) or bits(x).equal(bits(y))


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


DTYPES = [(BF16, BF16, BF16, BF16), (FP32, FP32, FP32, FP32), (BF16, FP32, FP32, BF16), (FP32, BF16, BF16, FP32)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "misaligned"])
def test_the_kernel_has_the_bits_of_the_reference(dtypes, rounding, misaligned, path, device, monkeypatch) -> None:
    if path == "reference":
        pytest.skip("compares with it")
    weight, gradient, *moments = dtypes
    weights = [torch.randn(size + 1, device=device).to(weight)[misaligned:][:size] for size in SIZES]
    # The last one is in columns of a wider tensor, beyond 2^32 elements.
    ours = start(weights, rounding, *moments)
    ours.shards[-1] = Shard(2**63 - 1, offset=2**32 - 700, row=103, whole_row=309)
    reference = ours.copy()
    for _ in range(2):
        gradients = noise(SIZES, device, gradient)
        ours.step(gradients)
        with monkeypatch.context() as patched:
            patched.setattr(_adamw_plan, "takes_kernel", lambda x: False)
            reference.step(gradients)
    assert_same(ours, reference)


@pytest.mark.parametrize("moment", [BF16, FP32], ids=str)
def test_weight_and_remainder_have_the_bits_of_an_fp32_weight(moment, device) -> None:
    weights = noise(SIZES, device)
    master, whole = start(weights, "master", moment), start([w.float() for w in weights], "master", moment)
    for _ in range(3):
        gradients = noise(SIZES, device)
        master.step(gradients)
        whole.step(gradients)
    for weight, remainder, exact in zip(master.weights, master.remainders, whole.weights, strict=True):
        assert bits(join_weight(weight, remainder)).equal(bits(exact))
        assert not exact.numel() or (weight.float() - exact).abs().max() <= (exact.bfloat16() - exact).abs().max()
    for one, other in zip(master.exp_avgs + master.exp_avg_sqs, whole.exp_avgs + whole.exp_avg_sqs, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)], ids=str)
def test_matches_fp64_as_pytorch_does(betas, device, within_bar) -> None:
    settings = {**SETTINGS, "betas": betas, "lr": 1e-2}
    first = torch.randn(300, device=device)
    torchs, exact = (torch.nn.Parameter(first.to(dtype)) for dtype in (FP32, torch.float64))
    optimizers = [torch.optim.AdamW([x], **settings) for x in (torchs, exact)]
    ours = start([first.clone()], "master", FP32)
    for _ in range(5):
        gradient = torch.randn(300, device=device)
        torchs.grad, exact.grad = gradient, gradient.double()
        for optimizer in optimizers:
            optimizer.step()
        ours.step([gradient], **settings)
    within_bar(ours.weights[0], torchs.detach(), exact.detach())
    for mine, name in ((ours.exp_avgs, "exp_avg"), (ours.exp_avg_sqs, "exp_avg_sq")):
        within_bar(mine[0], optimizers[0].state[torchs][name], optimizers[1].state[exact][name])
    assert ours.steps[0] == 5


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_weight_step_is_sgd_with_decoupled_decay(rounding, device) -> None:
    weight, update = torch.randn(300, device=device), torch.randn(300, device=device)
    exact = weight.double() * (1 - 1e-2 * 0.1) - 1e-2 * update.double()
    settings = {"lr": 1e-2, "weight_decay": 0.1, "rounding": rounding, "seed": SEED}
    whole, low = weight.clone(), weight.bfloat16()
    remainder = split_weight(weight)[1] if rounding == "master" else None
    steps = [torch.ones((), device=device)] if rounding == "stochastic" else None
    weight_step([whole], [update], None, [Shard(0)], **settings)
    weight_step([low], [update], [remainder], [Shard(0)], steps=steps, **settings)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-6, atol=1e-7)
    if rounding == "master":
        # Of ties bf16 rounds some to even, which the pair does not: the weights differ there.
        joined = join_weight(low, remainder)
        torch.testing.assert_close(joined[joined.bfloat16() == low], whole[joined.bfloat16() == low])
    torch.testing.assert_close(low.double(), exact, rtol=2 ** (-7), atol=1e-3)
    assert steps is None or steps[0] == 1
