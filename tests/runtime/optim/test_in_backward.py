"""Optimizer steps in the backward pass: the same steps, and clipping by an estimate of the norm."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

from strata_platform.spec import RunSpec
from tasks.runtime.optim.adamw import ExactAdamW
from tasks.runtime.optim.in_backward import norm_in_backward, step_in_backward
from tasks.runtime.optim.lr_schedule import set_learning_rate
from tasks.runtime.optim.optimizer import build_optimizer
from tests.runtime.helpers.comparable_runs import SAVED, curve, make_spec
from tests.runtime.helpers.train_only import train_spec

LIMIT = 0.7


def make_sums(sizes=(5, 7, 3)):
    """A model whose gradients are what its input says; the last part gets its gradient first."""
    model = nn.ParameterList(torch.zeros(size) for size in sizes)

    def loss(scales):
        total = torch.zeros(())
        for part, scale in zip(model, scales, strict=True):
            # Each part's gradient is there before that of the one before.
            total = (total * 1.0) + (part * torch.arange(1.0, part.numel() + 1) * scale).sum()
        return total

    return model, loss


def used_gradients(steps, limit=LIMIT):
    """The gradients with which SGD steps in the backward pass, and the norms it tells."""
    model, loss = make_sums()
    order, found, norms = [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number, part in enumerate(model):
        part.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    step_in_backward(optimizer, limit)
    for scales in steps:
        before = [part.detach().clone() for part in model]
        loss(scales).backward()
        found.append([old - part.detach() for old, part in zip(before, model, strict=True)])
        norms.append(norm_in_backward(optimizer))
    return found, norms, order[:3]


def whole_gradients(scales, sizes=(5, 7, 3)):
    return [torch.arange(1.0, size + 1) * scale for size, scale in zip(sizes, scales, strict=True)]


def test_clipping_in_the_backward_pass_is_by_the_norms_so_far_and_those_of_the_step_before():
    steps = [(1.0, 2.0, 0.5), (0.1, 3.0, 0.02), (0.01, 0.001, 0.02)]
    found, norms, order = used_gradients(steps)
    assert sorted(order) == [0, 1, 2]
    before = [0.0, 0.0, 0.0]
    for scales, used, norm in zip(steps, found, norms, strict=True):
        exact = whole_gradients(scales)
        squares = [float(g.double().square().sum()) for g in exact]
        for place, number in enumerate(order):
            seen = sum(squares[i] for i in order[: place + 1]) + sum(before[i] for i in order[place + 1 :])
            factor = min(1.0, LIMIT / (math.sqrt(seen) + 1e-6))
            torch.testing.assert_close(used[number], exact[number] * factor, rtol=1e-5, atol=1e-6)
        assert float(norm) == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
        before = squares


def test_with_norms_that_stay_it_clips_by_the_norm_of_all():
    scales = (1.0, 2.0, 0.5)
    found, _, _ = used_gradients([scales, scales])
    exact = [nn.Parameter(torch.zeros_like(g)) for g in whole_gradients(scales)]
    for parameter, gradient in zip(exact, whole_gradients(scales), strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(exact, LIMIT)
    for used, parameter in zip(found[1], exact, strict=True):
        torch.testing.assert_close(used, parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [1e-3, 0.4, 0.9])
def test_gradients_below_the_limit_stay_as_they_are(share):
    """The optimizer of these tests is SGD, which hides no factor."""
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in whole_gradients((1.0, 2.0, 0.5))))
    scales = tuple(scale * share * LIMIT / norm for scale in (1.0, 2.0, 0.5))
    for used in used_gradients([scales, scales])[0]:
        torch.testing.assert_close(used, whole_gradients(scales), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("burst", [1.0, 30.0, 1e6])
def test_a_burst_is_clipped_in_its_own_step(burst):
    small = (1e-3, 2e-3, 1e-3)
    found, norms, order = used_gradients([small, tuple(burst * scale for scale in small)])
    norm = math.sqrt(sum(float(used.double().square().sum()) for used in found[1]))
    first = whole_gradients(small)[order[0]].double().norm() * burst
    # That of the module's docstring.
    assert norm <= LIMIT * math.sqrt(1 + 2 * math.log(float(norms[1] / first))) * 1.001


def test_a_resumed_run_clips_by_the_same_estimate():
    def train(steps, state=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = build_optimizer(model, RunSpec(optimizer={"in_backward": True, "max_grad_norm": 0.1}))
        if state is not None:
            model.load_state_dict(state[0])
            # The entries of a checkpoint have another order.
            for name, parameter in reversed([*model.named_parameters()]):
                optimizer.state[parameter] = {key: value.clone() for key, value in state[1][name].items()}
        for number in steps:
            set_learning_rate(optimizer, 0.1)
            model(torch.full((3, 4), 1.0 + number)).square().sum().backward()
        named = dict(model.named_parameters())
        return model.state_dict(), {name: optimizer.state[parameter] for name, parameter in named.items()}

    weights, _ = train(range(6))
    half = copy.deepcopy(train(range(3)))
    resumed, _ = train(range(3, 6), half)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_a_model_that_steps_in_the_backward_pass_can_be_freed():
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, RunSpec(optimizer={"in_backward": True}))
    model(torch.ones(1, 2)).sum().backward()
    left = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert left() is None


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0.0, 0.1])
def test_a_stream_of_its_own_changes_no_bit(monkeypatch, limit):
    def train():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(2048, 2048), nn.Tanh()) for _ in range(8)]
        model = nn.Sequential(*layers).bfloat16().cuda()
        build_optimizer(model, RunSpec(optimizer={"in_backward": True, "max_grad_norm": limit}))
        for _ in range(4):
            model(torch.ones(512, 2048, device="cuda", dtype=torch.bfloat16)).float().square().sum().backward()
        return [p.detach() for p in model.parameters()]

    ours = train()
    monkeypatch.setattr(ExactAdamW, "steps_on_any_stream", False)
    assert all(torch.equal(a, b) for a, b in zip(ours, train(), strict=True))


def test_a_step_in_the_backward_pass_is_the_same_step_and_leaves_gradients_of_vectors_alone():
    def train(**optimizer):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = build_optimizer(model, RunSpec(optimizer={"max_grad_norm": 0, **optimizer}))
        for rate in (0.1, 0.01):
            set_learning_rate(optimizer, rate)
            model(torch.ones(3, 4)).square().sum().backward()
            left = [p.ndim for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], left

    usual, gradients = train()
    in_backward, left = train(in_backward=True)
    assert (gradients, left) == ([2, 1, 2, 1], [1, 1])
    assert all(torch.equal(a, b) for a, b in zip(usual, in_backward, strict=True))


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_a_run_that_clips_tells_its_norms_and_resumes_with_the_same_bits(output, narrowed, framework):
    training = {"micro_batch_size": 4, "gradient_accumulation_steps": 1}
    spec = make_spec(output, f"clipped-{framework}", framework, "single", 1, training=training)
    optimizer = {**spec.optimizer.model_dump(), "in_backward": True, "max_grad_norm": 0.5}
    spec = RunSpec.model_validate({**spec.model_dump(), "optimizer": optimizer})
    train_spec(spec)
    points = curve(spec)
    assert all(norm > 0.5 for _, _, norm, *_ in points)
    train_spec(spec, step=SAVED)
    assert curve(spec) == points
