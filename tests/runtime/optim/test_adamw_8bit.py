"""Moments of eight bits: which they are, what their steps are, and where they cannot be."""

import pytest
import torch
from torch import nn

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from tasks.runtime.models.build import build_model
from tasks.runtime.optim.adamw_8bit import has_eight_bits
from tasks.runtime.optim.lr_schedule import set_learning_rate
from tasks.runtime.optim.optimizer import build_optimizer


def spec_of(**optimizer):
    return RunSpec.model_validate({"optimizer": {"type": "adamw_8bit", "max_grad_norm": 0, **optimizer}})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16, 256), True),
        ((2, 8, 3, 512), True),
        # Experts: a row is all that follows the first dimension.
        ((8, 96, 16), True),
        ((15, 256), False),
        ((64, 704), False),
        ((4096,), False),
        ((4096, 1), False),
    ],
)
def test_rows_of_whole_blocks_have_eight_bits(shape, expected):
    assert has_eight_bits(torch.empty(shape)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_adamw(dtype):
    """But for the rounding of moments, to one of 256 values between 0 and the largest of a block."""

    def train(type):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
        optimizer = build_optimizer(model, spec_of(type=type, weight_decay=0.1))
        for rate in (1e-2, 1e-2, 1e-3):
            set_learning_rate(optimizer, rate)
            model(torch.randn(32, 256, dtype=dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (ours, optimizer), (exact, _) = train("adamw_8bit"), train("adamw")
    torch.manual_seed(0)
    moved = exact[0].weight - nn.Linear(256, 64).to(dtype).weight
    assert (ours[0].weight - exact[0].weight).norm() < 0.05 * moved.norm()
    slots = {name: (slot.dtype, tuple(slot.shape)) for name, slot in optimizer.state[ours[0].weight].items()}
    assert slots == {
        "exp_avg": (torch.uint8, (64, 256)),
        "exp_avg_scale": (torch.float32, (64, 1)),
        "exp_avg_sq": (torch.uint8, (64, 256)),
        "exp_avg_sq_scale": (torch.float32, (64, 1)),
        "step": (torch.float32, ()),
        **({"remainder": (torch.int16, (64, 256))} if dtype == torch.bfloat16 else {}),
    }
    # AdamW on a CPU has fp32 moments.
    assert optimizer.state[ours[2].weight]["exp_avg"].dtype == torch.float32


def test_a_step_in_the_backward_pass_is_the_same_step():
    def train(**optimizer):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 8))
        optimizer = build_optimizer(model, spec_of(**optimizer))
        for _ in range(2):
            model(torch.ones(3, 256)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(), train(in_backward=True), strict=True))


def test_state_that_is_handed_over_keeps_its_types():
    """accelerate takes an optimizer's state and gives it back, and PyTorch would make bfloat16 of all of it."""
    model = nn.Linear(256, 16, bias=False, dtype=torch.bfloat16)
    optimizer = build_optimizer(model, spec_of())
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    before = dict(optimizer.state[model.weight])
    optimizer.load_state_dict(optimizer.state_dict())
    after = optimizer.state[model.weight]
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert after["exp_avg"].dtype == torch.uint8 and after["exp_avg_scale"].dtype == torch.float32


def test_embeddings_are_left_to_adamw():
    spec = spec_of()
    model = build_model(spec.model, spec.seed)
    parts = {id(p): group["part"] for group in build_optimizer(model, spec).param_groups for p in group["params"]}
    eight_bits = {name.split(".", 3)[-1] for name, p in model.named_parameters() if parts[id(p)] == 0}
    # Not the rows of mlp.down_proj, which are 704 long.
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert eight_bits == attention | {"mlp.gate_proj.weight", "mlp.up_proj.weight"}


def test_a_model_without_such_rows_is_told():
    with pytest.raises(ValueError, match=r"rows whose length is a multiple of 256.*set optimizer\.type to 'adamw'"):
        build_optimizer(nn.Linear(128, 128), spec_of())


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"type": "deepspeed"}, r"optimizer\.type: 'adamw_8bit' .* parallel\.type 'deepspeed' .* 'fsdp'"),
        ({"type": "fsdp", "cpu_offload": True}, r"optimizer\.type: .* parallel\.cpu_offload"),
        ({"type": "fsdp", "tensor_parallel": 2}, r"parallel\.tensor_parallel: 2 shards the rows .* 'adamw_8bit'"),
    ],
    ids=["deepspeed", "cpu_offload", "tensor_parallel"],
)
def test_what_cannot_be_is_refused(parallel, message):
    with pytest.raises(SpecError, match=message):
        RunSpec.model_validate(
            {"optimizer": {"type": "adamw_8bit"}, "parallel": parallel, "topology": {"nproc_per_node": 2}}
        )
