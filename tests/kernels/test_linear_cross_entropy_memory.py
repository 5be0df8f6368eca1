"""Where logits lie, and how exactly the gradient of the weight adds up."""

import functools
import operator
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import linear_cross_entropy
from strata_kernels.ops.cross_entropy.rows import padded_width
from strata_kernels.ops.head import head_pass, memory
from strata_kernels.ops.head.memory import Plan, WeightGradient, logits_view, place_panels, plan_rows
from strata_kernels.warmup import record

MIB = 2**20
pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="what is tested is around the kernels")


@pytest.fixture
def small_panels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that is cut by size is cut at sizes of these tests."""
    monkeypatch.setattr(memory, "_PANEL_COLUMNS", 64)
    monkeypatch.setattr(memory, "_COPIED_ROWS", 16)
    monkeypatch.setattr(head_pass, "_L2_COLUMNS", 32)
    plan_rows.cache_clear()
    yield
    plan_rows.cache_clear()


# (rows, classes, features, itemsize, whether dW is wanted, exact, MiB of logits): in_panels, chunk_rows, fp32_dw
PLANS = {
    "all at once": ((1000, 32000, 4096, 2, True, True, 512), (False, 1000, False)),
    "no dW": ((8192, 128256, 4096, 2, False, True, 512), (False, 2048, False)),
    "as many rows as features": ((4096, 152064, 3584, 2, True, False, 512), (True, 4096, False)),
    "logits for an fp32 copy": ((8192, 128256, 4096, 2, True, True, 512), (True, 8192, False)),
    "whole waves of tiles": ((16384, 151936, 2048, 2, True, True, 640), (False, 2048, True)),
    "lean": ((8192, 128256, 4096, 2, True, False, 512), (False, 2048, False)),
    "lean in little memory": ((8192, 128256, 4096, 2, True, False, 256), (False, 1024, False)),
    "fp32 in between": ((32768, 128256, 4096, 2, True, True, 512), (False, 2048, True)),
    "fp32": ((32768, 128256, 4096, 4, True, True, 512), (False, 1024, False)),
    "few classes": ((131072, 4096, 256, 2, True, True, 512), (False, 65536, True)),
    "no rows": ((0, 100, 8, 2, True, True, 512), (False, 1, False)),
    "one row of a huge vocabulary": ((1, 10**7, 8, 2, True, True, 1), (False, 1, False)),
}


@pytest.mark.parametrize(("arguments", "expected"), PLANS.values(), ids=PLANS.keys())
def test_plans(arguments, expected) -> None:
    *sizes, budget = arguments
    plan = plan_rows(*sizes, budget * MIB)
    assert (plan.in_panels, plan.chunk_rows, plan.fp32_dw) == expected


@pytest.mark.parametrize("n_rows", [32, 96])
@pytest.mark.parametrize("accumulate", ["exact", "lean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_is_as_planned(n_rows, dtype, accumulate, small_panels, monkeypatch) -> None:
    """dW and what lies beside it: all logits at once would be four times the budget."""
    x, weight = torch.randn(n_rows, 32).to(dtype).requires_grad_(), torch.randn(300, 32).to(dtype).requires_grad_()
    budget = n_rows * 320 * x.itemsize // 4
    sizes = []
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *a, **k: sizes.append((y := new_empty(x, *a, **k)).nbytes) or y)
    loss = linear_cross_entropy(x, weight, torch.randint(300, (n_rows,)), accumulate=accumulate, chunk_bytes=budget)
    loss.backward()
    copy = 2 * 300 * 32 * 2 if accumulate == "exact" and x.itemsize == 2 else 0
    dx = n_rows * 32 * (4 + x.itemsize)
    assert sum(sizes) <= weight.nbytes + budget + copy + dx + 100 * n_rows
    assert weight.grad is not None and weight.grad.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize("n_rows", [8, 24, 32, 40, 64, 100])
def test_panels_are_whole_until_they_are_multiplied(n_rows, small_panels) -> None:
    """Each panel holds what was written to it until its turn comes, from the last to the first; none overlap."""
    vocabulary, hidden = 300, 32
    x = torch.ones(n_rows, hidden, dtype=torch.bfloat16)
    panels, beside = place_panels(n_rows, vocabulary, hidden)
    assert any(panel.in_dw for panel in panels) and beside < n_rows * padded_width(vocabulary)
    dw, buffer = WeightGradient(x, torch.Size((vocabulary, hidden)), False), x.new_empty(beside)
    places = []
    for i, panel in enumerate(panels):
        place = (dw.scratch() if panel.in_dw else buffer)[panel.offset :]
        places.append(logits_view(place, n_rows, panel.columns.stop - panel.columns.start).fill_(i + 1))
    for i in reversed(range(len(panels))):
        assert (places[i] == i + 1).all()
        dw.add(places[i], x, panels[i].columns.start, first=True)
    expected = torch.arange(vocabulary).div(64, rounding_mode="floor").add(1).mul(n_rows)
    assert torch.equal(dw.result(), expected[:, None].expand(-1, hidden).bfloat16())


@pytest.mark.parametrize("vocabulary", [5, 127, 128, 300])
def test_fp32_sums_become_16_bits_in_place(vocabulary, small_panels) -> None:
    x, dz = torch.randn(20, 8).bfloat16(), torch.randn(20, vocabulary).bfloat16()
    dw = WeightGradient(x, torch.Size((vocabulary, 8)), True)
    for rows in (slice(0, 7), slice(7, 20)):
        dw.add(dz[rows], x[rows], 0, first=rows.start == 0)
    torch.testing.assert_close(dw.result(), dz.t() @ x, rtol=2**-7, atol=1e-6)
    assert dw.result().untyped_storage().nbytes() == vocabulary * 8 * 2


def weight_error(accumulate: str, dtype: torch.dtype, n_rows: int, budget: int) -> tuple[float, float]:
    """The distance of dW to fp64, ours and that of PyTorch in the same dtype, at the worst element."""
    torch.manual_seed(0)
    x, weight = torch.randn(n_rows, 16).to(dtype), torch.randn(200, 16).to(dtype)
    target = torch.randint(200, (n_rows,))

    def gradient(function, dtype: torch.dtype) -> Tensor:
        leaf = weight.to(dtype).requires_grad_()
        return torch.autograd.grad(function(x.to(dtype), leaf), leaf)[0].double()

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy((x @ weight.t()).to(torch.promote_types(x.dtype, torch.float32)), target)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target, accumulate=accumulate, chunk_bytes=budget, num_items=n_rows)

    exact = gradient(plain, torch.float64)
    mine, theirs = (float((gradient(f, dtype) - exact).abs().max()) for f in (ours, plain))
    return mine, theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_parts_add_up_as_exactly_as_one(dtype, small_panels) -> None:
    budget = 64 * 256 * 2
    assert plan_rows(2048, 200, 16, 2, True, True, budget).fp32_dw
    mine, theirs = weight_error("exact", dtype, 2048, budget)
    assert mine <= 1.5 * theirs
    lean, _ = weight_error("lean", dtype, 2048, budget)
    assert lean > 2 * theirs, "lean is as exact: then it should be the default"


def test_a_plan_is_made_once() -> None:
    arguments = (8192, 128256, 4096, 2, True, True, 512 * MIB)
    assert plan_rows(*arguments) is plan_rows(*arguments) and isinstance(plan_rows(*arguments), Plan)


def test_few_kernels_whatever_the_number_of_rows() -> None:
    """Statistics and gradient of two widths, the row kernel for few rows, the scaling in the backward pass."""

    def step(n_rows: int) -> None:
        x, weight = (
            torch.empty(n, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (n_rows, 128256)
        )
        linear_cross_entropy(x, weight, torch.empty(n_rows, dtype=torch.int64, device="meta")).backward()

    plans = [record(lambda n_rows=n_rows: step(n_rows)) for n_rows in (1, 17, 1000, 2048, 4000, 8192, 9999, 40000)]
    assert len(functools.reduce(operator.add, plans)) <= 6
