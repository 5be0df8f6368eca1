"""adamw_step and weight_step against torch.optim.AdamW, fp64, themselves in fp32, and kernel against reference."""

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_kernels import Shard, StepPlan, adamw_step, join_weight, split_weight, weight_step
from strata_kernels.ops.adamw import step_plan
from strata_kernels.warmup import Plan, record

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
    monkeypatch.setattr(step_plan, "_STEP", step_plan.Launch(block=128, chunk=256, warps=4))
    monkeypatch.setattr(step_plan, "_SCALARS", step_plan.Launch(block=4, chunk=4, warps=1))


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
        copies = {name: [x if x is None else x.clone() for x in getattr(self, name)] for name in lists}
        return replace(self, **copies, shards=list(self.shards))


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
            patched.setattr(step_plan, "takes_kernel", lambda x: False)
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


def test_split_and_join_are_inverse_for_all_bits() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    # Every upper half with several lower ones: zeros, denormals, ties, the largest, infinities, NaN.
    every = torch.cat([(halves << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(FP32)
    weight, remainder = split_weight(every)
    same = join_weight(weight, remainder)
    assert bits(same)[~every.isnan()].equal(bits(every)[~every.isnan()])
    assert weight.isnan().equal(every.isnan()) and same.isnan().equal(every.isnan())
    tie = (bits(every) & 0xFFFF) == 0x8000
    nearest = ~tie & ~every.isnan()
    assert weight[nearest].equal(every.bfloat16()[nearest])
    away = tie & every.isfinite()
    assert bool((weight[away].float().abs() > every[away].abs()).all())


def sharded(whole: Tensor, rows: int, columns: int) -> list[tuple[Tensor, Shard]]:
    """The parts of a matrix that is cut into so many rows and columns, as even as torch.chunk makes them."""
    parts, row = [], 0
    for part in whole.chunk(rows, 0):
        column = 0
        for piece in part.chunk(columns, 1):
            parts.append((piece.contiguous(), Shard.of(3, whole.shape, piece.shape, (row, column))))
            column += piece.shape[1]
        row += part.shape[0]
    return parts


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
@pytest.mark.parametrize("cuts", [(2, 1), (1, 3), (3, 2)], ids=str)
def test_shards_have_the_bits_of_the_whole(cuts, rounding, device) -> None:
    weight, gradients = torch.randn(7, 90, device=device).bfloat16(), torch.randn(2, 7, 90, device=device).bfloat16()
    whole = start([weight.clone()], rounding)
    whole.shards = [Shard(3)]
    parts = sharded(weight, *cuts)
    cut = start([piece for piece, _ in parts], rounding)
    cut.shards = [shard for _, shard in parts]
    for gradient in gradients:
        whole.step([gradient])
        cut.step([piece for piece, _ in sharded(gradient, *cuts)])
    for name in ("weights", "exp_avgs", "exp_avg_sqs", "remainders"):
        (one,), several = getattr(whole, name), getattr(cut, name)
        if one is not None:
            assert all(x.equal(y) for x, (y, _) in zip(several, sharded(one, *cuts), strict=True)), name


def test_a_tensor_is_sharded_along_the_first_axis_and_one_other() -> None:
    assert Shard.of(7, (8, 6), (4, 3), (4, 3)) == Shard(7, 27, 3, 6)
    assert Shard.of(7, (8, 6), (4, 6), (4, 0)) == Shard(7, 24)
    # Experts, cut between processes and within each expert's rows.
    assert Shard.of(7, (8, 6, 5), (2, 3, 5), (4, 3, 0)) == Shard(7, 4 * 30 + 15, 15, 30)
    assert Shard.of(7, (), (), ()) == Shard(7)
    assert Shard.of(7, (8, 6), (0, 3), (8, 0)) == Shard(7, 48)
    with pytest.raises(ValueError, match="sharded along axis 0 and one other"):
        Shard.of(7, (8, 6, 5), (8, 3, 2), (0, 0, 0))


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_the_same_step_has_the_same_bits_and_another_has_others(rounding, device) -> None:
    first, gradients = start([torch.ones(300, device=device).bfloat16()], rounding), noise([300], device)
    first.step(gradients)
    second = first.copy()
    first.step(gradients)
    second.step(gradients)
    assert_same(first, second)
    for change in (
        {"seed": SEED + 1},
        {"seed": SEED + 2**32},
        {"key": 1},
        {"key": 2**32},
        {"step": 1.0},
        {"offset": 1},
    ):
        other = second.copy()
        again = second.copy()
        again.step(gradients)
        other.shards = [Shard(change.get("key", 0), change.get("offset", 0))]
        other.steps[0] += change.get("step", 0.0)
        other.step(gradients, seed=change.get("seed", SEED))
        differ = (other.exp_avgs[0] != again.exp_avgs[0]).float().mean()
        assert 0.1 < differ < 0.9, change


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nothing_changes_where_a_gradient_was_not_finite(rounding, device) -> None:
    state = start(noise(SIZES, device), rounding)
    state.step(noise(SIZES, device))
    before, gradients = state.copy(), [x.fill_(float("nan")) for x in noise(SIZES, device)]
    state.step(gradients, found_inf=torch.ones((), device=device))
    assert_same(state, before)
    gradients = noise(SIZES, device)
    before.step(gradients)
    state.step(gradients, found_inf=torch.zeros((), device=device))
    assert_same(state, before)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("scale", [1.0, 0.3125, 0.0123])
def test_a_scale_has_the_bits_of_scaled_gradients(scale, dtype, device) -> None:
    weights, gradients = noise(SIZES, device), noise(SIZES, device, dtype)
    theirs = start(weights, "master")
    ours = theirs.copy()
    theirs.step([gradient * scale for gradient in gradients])
    ours.step(gradients, gradient_scale=torch.tensor(scale, device=device))
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gradients_that_are_not_finite_are_seen_in_the_weights(rounding, device) -> None:
    for bad in (float("nan"), -float("nan"), float("inf")):
        state = start([torch.ones(200, device=device).bfloat16()], rounding)
        gradient = torch.full((200,), bad, device=device)
        state.step([gradient])
        for x in (state.weights[0], state.exp_avgs[0], state.exp_avg_sqs[0]):
            assert not x.isfinite().any()
        assert state.weights[0].isnan().all()
        # It stays so: a NaN never turns into a number.
        state.step([torch.ones(200, device=device)])
        assert state.weights[0].isnan().all()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, in the interpreter
def test_largest_and_smallest_weights(device) -> None:
    largest = torch.finfo(BF16).max
    weights = torch.tensor([largest, -largest, 1e-40, 0.0, -0.0], device=device).bfloat16()
    state = start([weights.clone()], "master", FP32)
    update = torch.tensor([-0.3 * largest / 128, 0.6 * largest / 128, 1e-42, 0.0, 0.0], device=device)
    settings = {"lr": 1.0, "weight_decay": 0.0, "rounding": "master", "seed": 0}
    weight_step(state.weights, [update], state.remainders, state.shards, **settings)
    exact = weights.float() - update
    assert state.weights[0].equal(exact.bfloat16()) and state.weights[0][1].isneginf()
    assert bits(join_weight(state.weights[0], state.remainders[0])).equal(bits(exact))


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_weights_of_other_layouts(layout, device) -> None:
    dense = torch.randn(4, 6, 3, 5, device=device).bfloat16()
    laid_out = dense.to(memory_format=torch.channels_last) if layout == "channels_last" else dense.permute(3, 1, 0, 2)
    gradient = torch.randn(laid_out.shape, device=device)
    assert gradient.stride() != laid_out.stride()
    ours, plain = start([laid_out], "master", FP32), start([laid_out.contiguous()], "master", FP32)
    ours.step([gradient])
    plain.step([gradient])
    assert ours.weights[0].equal(plain.weights[0]) and ours.remainders[0].equal(plain.remainders[0])
    assert ours.weights[0].stride() == laid_out.stride()


def test_a_plan_follows_its_tensors(device) -> None:
    """One plan, while gradients and states move, change their dtype, or get one more tensor beside them."""
    plan = StepPlan()
    planned = start(noise([300, 20], device), "master")
    plain = planned.copy()

    def both() -> None:
        gradients = noise([x.numel() for x in planned.weights], device)
        planned.step(gradients, plan=plan)
        plain.step(gradients)
        assert_same(planned, plain)

    both()
    buckets = plan._buckets
    both()
    assert plan._buckets is buckets
    for state in (planned, plain):
        state.exp_avgs[0] = state.exp_avgs[0].clone()
    both()
    for state in (planned, plain):
        state.exp_avg_sqs[1] = state.exp_avg_sqs[1].float()
    both()
    more = start(noise([40], device, FP32), "master")
    for state in (planned, plain):
        for name in ("weights", "exp_avgs", "exp_avg_sqs", "remainders", "steps"):
            getattr(state, name).extend(getattr(more.copy(), name))
        state.shards.append(Shard(9))
    both()


@host
def test_any_model_takes_the_same_few_kernels() -> None:
    def planned(sizes: list[int], rounding: str) -> Plan:
        def step() -> None:
            state = start([torch.empty(n, dtype=BF16, device="meta") for n in sizes], rounding)
            state.step([torch.empty_like(x) for x in state.weights])
            settings = {"lr": 1.0, "weight_decay": 0.0, "rounding": rounding, "seed": -1, "steps": state.steps}
            weight_step(state.weights, state.exp_avgs, state.remainders, state.shards, **settings)

        return record(step)

    for rounding in ROUNDINGS:
        plan = planned([300, 16, 1], rounding)
        assert [item.name for item in plan.specializations] == ["scalars_kernel", "step_kernel"] * 2
        assert plan == planned([2**25 + 7], rounding) == Plan.from_json(plan.to_json())


# An error it would be in the middle of the call, which would leave the mode on for all that follows.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_nothing_waits_for_the_device(path, device) -> None:
    if path != "gpu":
        pytest.skip("there is no device to wait for")
    state, plan, found = start(noise(SIZES, device), "master"), StepPlan(), torch.zeros((), device=device)
    gradients = [noise(SIZES, device) for _ in range(2)]
    state.step(gradients[0], plan=plan)
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        state.step(gradients[1], plan=plan, found_inf=found)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_offsets_beyond_32_bits(path, device, monkeypatch) -> None:
    if path != "gpu" or torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB on a GPU")
    monkeypatch.undo()
    n = 2**31 + 12345
    weight, update = (torch.ones(n, dtype=BF16, device=device) for _ in range(2))
    remainder = torch.zeros(n, dtype=torch.int16, device=device)
    weight_step([weight], [update], [remainder], [Shard(0)], lr=2.0, weight_decay=0.0, rounding="master", seed=0)
    assert weight.eq(-1).all() and remainder.eq(0).all()


WRONG = {
    "rounding must be one of": {"rounding": "up"},
    "seed must be a 64-bit integer": {"seed": 2**64},
    "betas must be in": {"betas": (0.9, 1.0)},
    "found_inf must be float32 of one element": {"found_inf": torch.zeros(2)},
    "gradient_scale must be float32 of one element": {"gradient_scale": torch.ones((), dtype=BF16)},
}


@pytest.mark.parametrize("message", WRONG, ids=str)
def test_wrong_numbers(message) -> None:
    state = start([torch.ones(4)], "master")
    with pytest.raises(ValueError, match=message):
        state.step([torch.ones(4)], **WRONG[message])
    assert state.steps[0] == 0


def test_wrong_tensors() -> None:
    def refuses(message: str, gradient: Tensor | None = None, **changes: Any) -> None:
        state = replace(start([torch.ones(4, 2, dtype=BF16)], "master"), **changes)
        with pytest.raises(ValueError, match=message):
            state.step([torch.ones(4, 2) if gradient is None else gradient])

    refuses(r"gradients\[0\] must be bfloat16 or float32 \[4, 2\], got float32 \[8\]", torch.ones(8))
    refuses(r"gradients\[0\] must be bfloat16 or float32", torch.ones(4, 2, dtype=torch.float16))
    refuses(r"weights\[0\] must be dense", weights=[torch.ones(4, 4, dtype=BF16)[:, ::2]])
    refuses(r"exp_avgs\[0\] has strides \(1, 4\) and its weight \(2, 1\)", exp_avgs=[torch.zeros(2, 4).t()])
    refuses(r"rounding 'master' needs remainders\[0\]", remainders=[None])
    refuses(r"remainders\[0\] must be None", rounding="stochastic")
    refuses(r"remainders\[0\] must be int16", remainders=[torch.zeros(4, 2, dtype=torch.int32)])
    refuses("steps must have one entry per weight, 1, got 0", steps=[])
    refuses(r"steps\[0\] must be float32 of one element", steps=[torch.zeros((), dtype=torch.int64)])
    with pytest.raises(ValueError, match="rounding 'stochastic' needs steps"):
        weight_step(
            [torch.ones(2, dtype=BF16)], [torch.ones(2)], None, [Shard(0)],
            lr=1.0, weight_decay=0.0, rounding="stochastic", seed=0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="0 < row <= whole_row"):
        Shard(0, row=3, whole_row=2)
    with pytest.raises(ValueError, match="x must be fp32"):
        split_weight(torch.ones(2, dtype=BF16))
    with pytest.raises(ValueError, match="remainder int16"):
        join_weight(torch.ones(2, dtype=BF16), torch.ones(2))


def test_no_tensors() -> None:
    start([], "master").step([])
