"""Optimizers of other libraries step as they do there with fp32 weights, whatever the weights' own type."""

from collections import Counter

import bitsandbytes
import pytest
import schedulefree
import torch
from safetensors.torch import load_file
from torch import nn

from strata_kernels import join_weight
from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.optim.library_optimizers import averaged_weights
from tasks.runtime.optim.lr_schedule import set_learning_rate
from tasks.runtime.optim.optimizer import build_optimizer
from tasks.runtime.parallel import require_packages
from tasks.runtime.run_folder.folder import RunFolder
from tests.runtime.helpers.comparable_runs import SAVED, approx, curve, file_of, make_spec
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

KINDS = ("adafactor", "lion", "schedule_free")
BETAS, DECAY, EPS = (0.9, 0.98), 0.1, 1e-8
RATES = (1e-3, 2e-3, 5e-4, 5e-4)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 12), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).to(dtype)


def spec_of(kind, **optimizer):
    own = {"adafactor": {}, "lion": {"betas": BETAS}, "schedule_free": {"betas": BETAS}}[kind]
    return RunSpec(
        optimizer={"type": kind, "lr": 1e-3, "weight_decay": DECAY, **own, **optimizer},
        schedule={"type": "constant"},
    )


def peer_of(kind, model):
    """The library's own optimizer, as its users build it."""
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY}
    groups = [matrices, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    if kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-3)
    if kind == "lion":
        return bitsandbytes.optim.Lion(groups, lr=1e-3, betas=BETAS)
    optimizer = schedulefree.AdamWScheduleFree(groups, lr=1e-3, betas=BETAS, eps=EPS, foreach=False)
    optimizer.train()
    return optimizer


def gradients(model, number, dtype):
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype).to(parameter.dtype)


def train_both(kind, dtype, **optimizer):
    """Ours with weights in `dtype`, and the library's with the same weights and gradients in fp32."""
    ours, theirs = make_model(dtype), make_model(dtype).float()
    optimizer, peer = build_optimizer(ours, spec_of(kind, **optimizer)), peer_of(kind, theirs)
    for number, rate in enumerate(RATES):
        for model, stepped in ((ours, optimizer), (theirs, peer)):
            set_learning_rate(stepped, rate)
            gradients(model, number, dtype)
            stepped.step()
            stepped.zero_grad()
    return ours, optimizer, theirs, peer


def exact(optimizer, parameter):
    state = optimizer.state[parameter]
    return join_weight(parameter.detach(), state["remainder"]) if "remainder" in state else parameter.detach()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_steps_are_those_of_the_library_in_fp32(kind, dtype):
    ours, optimizer, theirs, peer = train_both(kind, dtype)
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(exact(optimizer, parameter), expected.detach())
        state = optimizer.state[parameter].items()
        kept = [tensor.dtype for name, tensor in state if name != "remainder" and tensor.ndim]
        assert set(kept) == {torch.float32}
    if kind == "schedule_free":
        own = [p.detach().clone() for p in ours.parameters()]
        peer.eval()
        with averaged_weights(optimizer):
            for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(parameter, expected.to(dtype))
        assert all(torch.equal(a, b) for a, b in zip(own, ours.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_is_right_on_average_and_repeats(kind):
    """An update of a fraction of a rounding step: to nearest it is lost."""
    rate = {"adafactor": 2e-4, "lion": 1e-4, "schedule_free": 1e-4}[kind]
    found = {}
    for precision in ("stochastic_rounding", "nearest", "again"):
        model = nn.Linear(64, 256, bias=False)
        nn.init.constant_(model.weight, 1.0)
        model.bfloat16()
        name = "stochastic_rounding" if precision == "again" else precision
        optimizer = build_optimizer(model, spec_of(kind, lr=rate, weight_decay=0.0, precision=name))
        for _ in range(5):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        found[precision] = model.weight.detach().float()
    exact_model = nn.Linear(64, 256, bias=False)
    nn.init.constant_(exact_model.weight, 1.0)
    optimizer = build_optimizer(exact_model, spec_of(kind, lr=rate, weight_decay=0.0))
    for _ in range(5):
        exact_model.weight.grad = torch.ones_like(exact_model.weight)
        optimizer.step()
    moved = float((1 - exact_model.weight.detach()).mean())
    assert moved > 0 and float((1 - found["stochastic_rounding"]).mean()) == pytest.approx(moved, rel=0.15)
    assert torch.equal(found["stochastic_rounding"], found["again"])
    assert bool((found["nearest"] == 1).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_the_backward_pass_is_the_same_step(kind):
    found = []
    for options in ({}, {"in_backward": True}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
        optimizer = build_optimizer(model, spec_of(kind, max_grad_norm=0, **options))
        for _ in range(3):
            model(torch.ones(3, 4).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def run_spec(output, name, kind, strategy="single", processes=1, dtype="float32", **evaluation):
    spec = make_spec(output, name, "hf" if strategy == "ddp" else "torch", strategy, processes)
    values = spec.model_dump()
    values["optimizer"] |= {"type": kind}
    values["schedule"] |= {"type": "constant", "warmup_ratio": 0.5}
    values["model"] |= {"dtype": dtype}
    values["evaluation"] |= evaluation
    return RunSpec.model_validate(values)


@pytest.fixture(scope="module")
def runs(output, narrowed):
    """A finished run of each kind in one process, and its curve."""
    found = {}
    for kind in KINDS:
        spec = run_spec(output, kind.replace("_", "-"), kind)
        train_spec(spec)
        found[kind] = spec, curve(spec)
    return found


def test_a_resumed_run_computes_the_same_bits(runs):
    spec, expected = runs["adafactor"]
    train_spec(spec, SAVED)
    assert curve(spec) == expected


def test_strategies_train_the_same(runs, output):
    specs = [
        run_spec(output, f"{kind}-{strategy}".replace("_", "-"), kind, strategy, 2)
        for kind, strategy in (("adafactor", "ddp"), ("lion", "ddp"), ("lion", "fsdp"), ("schedule_free", "ddp"))
    ]
    # Evaluation leaves the weights of training as they were.
    specs.append(run_spec(output, "free-fsdp", "schedule_free", "fsdp", 2, every=2, max_batches=1))
    launch(2, "--narrow", *(file_of(output, spec) for spec in specs))
    for spec in specs:
        assert curve(spec) == approx(runs[spec.optimizer.type][1]), spec.name


def test_weights_to_evaluate_and_export_are_the_averaged_ones(output, narrowed):
    evaluated = run_spec(output, "evaluated", "schedule_free", dtype="bfloat16", every=2, max_batches=1)
    record = train_spec(evaluated)
    expected = curve(evaluated)
    train_spec(evaluated, SAVED)
    assert curve(evaluated) == expected
    folder = RunFolder.of(evaluated)
    index = Index(checkpoint.latest(folder.checkpoints))

    def read(key):
        tensor = index.empty(key)
        index.read({key: tensor})
        return tensor

    found = load_file(collect_weights(folder, evaluated.adapter, record) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    y = join_weight(read(f"model.{name}"), read(f"optimizer.remainder.{name}")).double()
    x = (y - 0.1 * read(f"optimizer.z.{name}").double()) / 0.9
    torch.testing.assert_close(found[name].double(), x.bfloat16().double(), rtol=1e-2, atol=1e-6)
    assert not torch.equal(found[name], read(f"model.{name}"))
    assert Counter(name.split(".")[1] for name in index if name.startswith("optimizer."))["weight_sum"] == 20


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("tasks.runtime.parallel.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"optimizer\.type 'lion' needs the package bitsandbytes.*strata\[bits"):
        require_packages(RunSpec.model_validate({"optimizer": {"type": "lion"}}))
