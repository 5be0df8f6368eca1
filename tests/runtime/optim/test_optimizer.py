"""The recipe that every framework follows."""

import pytest
import torch
from torch import nn

from strata_platform.spec import RunSpec
from strata_platform.spec.training import Schedule
from tasks.runtime.models.build import build_model
from tasks.runtime.optim.gradients import clip_gradients
from tasks.runtime.optim.lr_schedule import learning_rate_factor, set_learning_rate
from tasks.runtime.optim.optimizer import build_optimizer


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"type": "constant", "warmup_ratio": 0}, [1, 1, 1, 1]),
        ({"type": "linear", "warmup_ratio": 0}, [1, 0.75, 0.5, 0.25]),
        ({"type": "cosine", "warmup_ratio": 0.5}, [1 / 3, 2 / 3, 1, 0.5]),
        ({"type": "constant", "warmup_ratio": 1}, [0.2, 0.4, 0.6, 0.8]),
        ({"type": "wsd", "warmup_ratio": 0.25, "decay_ratio": 0.5}, [0.5, 1, 1, 0.5]),
        ({"type": "wsd", "warmup_ratio": 0}, [1, 1, 1, 1]),
        ({"type": "wsd", "warmup_ratio": 0, "decay_ratio": 1}, [1, 0.75, 0.5, 0.25]),
        # Both rounded up they would overlap: the peak is reached all the same.
        ({"type": "wsd", "warmup_ratio": 0.6, "decay_ratio": 0.4}, [0.25, 0.5, 0.75, 1]),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else None,
)
def test_schedules(schedule, expected):
    factor = learning_rate_factor(Schedule(**schedule), 4)
    assert [factor(done) for done in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_every_step_learns(shape, steps):
    factor = learning_rate_factor(Schedule(type=shape), steps)
    assert min(factor(done) for done in range(steps)) > 0


def test_biases_and_norms_do_not_decay_and_what_is_frozen_is_left_out():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(model, RunSpec(optimizer={"weight_decay": 0.1}))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: decays.get(id(p)) for name, p in model.named_parameters()}
    assert names == {
        "0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": None, "2.bias": 0.0,
    }  # fmt: skip


class Experts(nn.Module):
    """Two experts in one parameter each of weights and biases, as those of GPT-OSS; and a state's decay, as Jamba's."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.up_proj = nn.Parameter(torch.zeros(2, 4, 3))
        self.up_proj_bias = nn.Parameter(torch.zeros(2, 3))
        self.A_log = nn.Parameter(torch.zeros(2, 5))

    def get_output_embeddings(self):
        return None


@pytest.mark.parametrize("type", ["adamw", "muon"])
def test_biases_of_experts_are_biases(type, caplog):
    model = Experts()
    with caplog.at_level("INFO", "tasks"):
        optimizer = build_optimizer(model, RunSpec(optimizer={"type": type, "weight_decay": 0.1}))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    decays = {name: groups[id(p)]["weight_decay"] for name, p in model.named_parameters()}
    assert decays == {"router.weight": 0.1, "router.bias": 0.0, "up_proj": 0.1, "up_proj_bias": 0.0, "A_log": 0.1}
    by_muon = {name for name, p in model.named_parameters() if groups[id(p)].get("part") == 0}
    assert by_muon == ({"router.weight"} if type == "muon" else set())
    # 8 of 50 weights; of what is left to AdamW a run is told.
    assert ("Muon steps 16.0 % of the weights" in caplog.text) == (type == "muon")


def test_clipping_returns_the_norm_before_and_can_be_off():
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0]])
    assert clip_gradients(model, 1.0) == 3
    assert model.weight.grad.item() == pytest.approx(1)


def test_a_step_in_the_backward_pass_is_the_same_step_and_leaves_no_gradient():
    def train(**optimizer):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = build_optimizer(model, RunSpec(optimizer={"max_grad_norm": 0, **optimizer}))
        for rate in (0.1, 0.01):
            set_learning_rate(optimizer, rate)
            model(torch.ones(3, 4)).square().sum().backward()
            left = [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], len(left)

    usual, gradients = train()
    in_backward, left = train(in_backward=True)
    assert (gradients, left) == (4, 0)
    assert all(torch.equal(a, b) for a, b in zip(usual, in_backward, strict=True))


def test_muon_has_the_matrices_between_embeddings_and_head():
    spec = RunSpec(optimizer={"type": "muon", "weight_decay": 0.1})
    model = build_model(spec.model, spec.seed)
    optimizer = build_optimizer(model, spec)
    parts = {id(p): group["part"] for group in optimizer.param_groups for p in group["params"]}
    by_muon = {name for name, p in model.named_parameters() if parts[id(p)] == 0}
    assert len(by_muon) == 4 * 7
    assert all(name.endswith("_proj.weight") for name in by_muon)


def test_muon_steps_are_orthogonal_and_as_large_as_adamw_s():
    spec = RunSpec(model={"dtype": "float32"}, optimizer={"type": "muon", "weight_decay": 0, "lr": 0.01})
    model = build_model(spec.model, spec.seed)
    optimizer = build_optimizer(model, spec)
    weight = model.model.layers[0].self_attn.k_proj.weight
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    step = before - weight.detach()
    # Muon's five iterations bring singular values near to each other, not to one number.
    values = torch.linalg.svdvals(step)
    assert values.max() < 2.5 * values.min()
    assert step.square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.3)
