"""The recipe that every framework follows."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    get_scheduler,
)
from transformers.pytorch_utils import Conv1D

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.training import Schedule
from tasks.runtime.models.build import build_model
from tasks.runtime.models.config import PRESETS
from tasks.runtime.optim import gradients
from tasks.runtime.optim.gradients import clip_gradients
from tasks.runtime.optim.lr_schedule import learning_rate_factor, set_learning_rate
from tasks.runtime.optim.optimizer import build_optimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


@pytest.mark.parametrize(
    ("schedule", "name", "own"),
    [
        ({"type": "cosine", "min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"type": "cosine_with_restarts", "num_cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        ({"type": "linear"}, "linear", {}),
        ({"type": "constant"}, "constant_with_warmup", {}),
        (
            {"type": "wsd", "min_lr_ratio": 0.2, "decay_ratio": 0.4},
            "warmup_stable_decay",
            {"min_lr_ratio": 0.2, "decay_type": "linear", "num_decay_steps": 18},
        ),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_after_the_warm_up_schedules_are_those_of_transformers(schedule, name, own, warmup):
    steps, optimizer = 45, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=own)
    factor = learning_rate_factor(Schedule(**schedule, warmup_steps=warmup), steps)
    for done in range(steps):
        if done >= warmup:
            assert factor(done) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_restarts_with_a_least_rate_are_those_of_pytorch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = CosineAnnealingWarmRestarts(optimizer, T_0=10, eta_min=0.25)
    factor = learning_rate_factor(
        Schedule(type="cosine_with_restarts", num_cycles=4, min_lr_ratio=0.25, warmup_steps=0), 40
    )
    for done in range(40):
        assert factor(done) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("length", range(2, 60, 3))
def test_every_cycle_begins_at_the_peak(length):
    factor = learning_rate_factor(Schedule(type="cosine_with_restarts", num_cycles=7, warmup_steps=0), 7 * length)
    rates = [factor(done) for done in range(7 * length)]
    assert [done for done, rate in enumerate(rates) if rate == 1.0] == list(range(0, 7 * length, length))
    assert min(rates) > 0


def test_the_warm_up_takes_so_many_steps():
    factor = learning_rate_factor(Schedule(type="constant", warmup_steps=3), 100)
    assert [factor(done) for done in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    factor = learning_rate_factor(Schedule(type="linear", warmup_steps=0, min_lr_ratio=0.5), 4)
    assert [factor(done) for done in range(4)] == [1, 0.875, 0.75, 0.625]
    with pytest.raises(ValueError, match=r"schedule\.warmup_steps 100 is more than the 30 steps of the run"):
        learning_rate_factor(Schedule(warmup_steps=100), 30)
    with pytest.raises(ValueError, match=r"schedule\.num_cycles 30 is more than the 20 steps after the warm-up"):
        learning_rate_factor(Schedule(type="cosine_with_restarts", warmup_steps=10, num_cycles=30), 30)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "cosine_with_restarts", "wsd"])
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


GROUPS = [
    {"match": "embed_tokens", "lr": 5e-4, "weight_decay": 0.0},
    {"match": "layers.0", "lr": 4e-3},
    {"match": "mlp", "weight_decay": 0.3},
    {"match": "layers.*.*norm", "weight_decay": 0.2},
]


@pytest.mark.parametrize("type", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_have_their_own_rate_and_decay(type, dtype):
    spec = RunSpec(model={"dtype": dtype}, optimizer={"type": type, "lr": 2e-3, "weight_decay": 0.1, "groups": GROUPS})
    model = build_model(spec.model, 0)
    optimizer = build_optimizer(model, spec)
    set_learning_rate(optimizer, 1e-3)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = {name: (groups[id(p)]["lr"], groups[id(p)]["weight_decay"]) for name, p in model.named_parameters()}
    assert len(groups) == len(found)
    # Of several groups the first, a weight decay of all of its weights, and half of every rate.
    for name, (rate, decay) in found.items():
        first = "embed_tokens" in name, "layers.0." in name, "mlp" in name, ".layers" in name and "norm" in name
        wanted = [(2.5e-4, 0.0), (2e-3, 0.1 * ("norm" not in name)), (1e-3, 0.3), (1e-3, 0.2), (1e-3, 0.1), (1e-3, 0)]
        kind = first.index(True) if any(first) else 5 if "norm" in name else 4
        assert (rate, decay) == pytest.approx(wanted[kind]), name


def test_groups_step_as_pytorch_s_own():
    spec = RunSpec(
        model={"dtype": "float32"}, optimizer={"lr": 2e-3, "groups": [{"match": "embed_tokens", "lr": 1e-4}]}
    )
    ours, theirs = build_model(spec.model, 0), build_model(spec.model, 0)
    optimizer = build_optimizer(ours, spec)
    matrices = [p for n, p in theirs.named_parameters() if p.ndim > 1 and "embed" not in n]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    peer = torch.optim.AdamW(
        [
            {"params": [theirs.model.embed_tokens.weight], "lr": 1e-4},
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True,
    )  # fmt: skip
    for number in range(2):
        for model in (ours, theirs):
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        peer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("type", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_setting_of_a_step_is_left_at_its_default(type, dtype):
    """Beside PyTorch's optimizers over fp32 weights, but for half the last bit of a weight in bfloat16."""
    momentum = {"momentum": 0.6} if type == "muon" else {}
    own = {"lr": 1e-2, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 5.0}
    spec = RunSpec(model={"dtype": dtype}, optimizer={"type": type, **own, **momentum})
    # Muon's products in bfloat16 are slow where a CPU has none; moments of 8 bits need no less than 256.
    width = 64 if type == "muon" else 256
    sizes = {"num_hidden_layers": 1, "hidden_size": width, "intermediate_size": width}
    with mock.patch.dict(PRESETS["tiny-llama"], sizes):
        model = build_model(spec.model, 0)
    optimizer = build_optimizer(model, spec)
    theirs = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    begun = {name: p.detach().clone() for name, p in theirs.items()}
    matrices = [n for n, p in theirs.items() if type == "muon" and p.ndim == 2 and "embed_tokens" not in n]
    others = [n for n in theirs if n not in matrices]
    decays = [(theirs[name], own["weight_decay"] * (theirs[name].ndim > 1)) for name in others]
    peers = [torch.optim.AdamW([{"params": [p], "weight_decay": decay} for p, decay in decays], **own)]
    if matrices:
        common = {name: own[name] for name in ("lr", "weight_decay")} | momentum
        peers.append(torch.optim.Muon([theirs[n] for n in matrices], adjust_lr_fn="match_rms_adamw", **common))
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        for name, parameter in model.named_parameters():
            parameter.grad = (0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
            theirs[name].grad = parameter.grad.float()
        for one in (optimizer, *peers):
            one.step()
    for name, parameter in model.named_parameters():
        wanted = theirs[name].detach()
        rounding = 2**-8 * wanted.abs() if parameter.dtype is torch.bfloat16 else 0.0
        error = ((parameter.detach().float() - wanted).abs() - rounding).clamp(min=0).norm()
        # Roundings of states to 8 bits are far smaller than a default would be.
        assert error <= 0.05 * (wanted - begun[name]).norm(), name


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (["embed_token"], "'embed_token' matches no weight of the model; did you mean 'embed_tokens'?"),
        (["*norm"], "'[*]norm' matches only weights that are frozen; remove it"),
        (["layers", "mlp"], "'mlp' matches only weights that groups before it match; move it up"),
    ],
)
def test_a_group_without_weights_is_refused(groups, said):
    spec = RunSpec(optimizer={"groups": [{"match": match, "lr": 1e-3} for match in groups]})
    model = build_model(spec.model, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    with pytest.raises(ValueError, match=rf"optimizer\.groups: {said}"):
        build_optimizer(model, spec)


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


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_not_rounded_to_the_type_of_the_gradients(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 7)).to(DEVICE, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    exact = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
    norm = clip_gradients(model, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.any_device
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_the_norm_of_many_gradients_is_exact(device):
    """On a CPU, too, where FSDP offloads them: PyTorch's `vector_norm` is off by 5e-4 here, and by 1e-2 at ten times
    the size.
    """
    weight = nn.Parameter(torch.empty(12_000_000, device=device))
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(device)
    exact = weight.grad.double().norm().item()
    assert clip_gradients(nn.ParameterList([weight]), 0).item() == pytest.approx(exact, rel=3e-5)


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipped_gradients_are_rounded_once(dtype):
    """Against products in fp64. On a GPU, PyTorch rounds the factor of bf16 gradients to bf16."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48).to(DEVICE, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = [parameter.grad.double() for parameter in model.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in before]).norm()
    clip_gradients(model, 0.7)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        expected = gradient * (0.7 / (norm + 1e-6))
        if dtype == torch.bfloat16:
            # Of 3,000 products a few may lie between two bf16 numbers.
            assert (parameter.grad != expected.bfloat16()).sum() <= 3
        torch.testing.assert_close(
            parameter.grad.double(), expected, rtol=4e-3 if dtype == torch.bfloat16 else 1e-6, atol=0
        )


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1e-6, 0.4, 0.6, 0.99, 1.01, 1e6])
@pytest.mark.parametrize("in_step", [False, True], ids=["gradients", "in the step"])
def test_gradients_are_scaled_down_only(share, dtype, in_step):
    """As by PyTorch, whose product is rounded to the type of the gradients. AdamW hides a factor of all gradients."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48).to(DEVICE, dtype)
    theirs = nn.Linear(64, 48).to(DEVICE)
    for parameter, other in zip(model.parameters(), theirs.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        other.grad = parameter.grad.float().clone()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    limit = gradients._total_norm(before).item() / share
    # One that scales them itself.
    optimizer = SimpleNamespace(gradient_scale=None, param_groups=[{"params": [*model.parameters()]}])
    clip_gradients(model, limit, optimizer if in_step else None)
    nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    for parameter, other, gradient in zip(model.parameters(), theirs.parameters(), before, strict=True):
        used = gradients.used_gradient(parameter, optimizer)
        torch.testing.assert_close(used.float(), other.grad, rtol=4e-3 if dtype == torch.bfloat16 else 1e-6, atol=0)
        if share < 1:
            assert torch.equal(used, gradient)


@pytest.mark.any_device
@pytest.mark.parametrize("shape", [(), (5,), (7, 30), (0, 4), (300, 2)])
def test_gradients_are_scaled_in_parts(shape, monkeypatch):
    monkeypatch.setattr(gradients, "_SCALED_PART", 40)
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE))
    # Strided, too.
    parameter.grad = torch.randn(shape[::-1]).to(parameter).permute(tuple(reversed(range(len(shape)))))
    expected = (parameter.grad.double() * 0.3337).bfloat16()
    gradients.scale_gradients([parameter], torch.tensor(0.3337, device=DEVICE))
    assert torch.equal(parameter.grad, expected)


@pytest.mark.any_device
@pytest.mark.parametrize("precision", ["fp32_master", "stochastic_rounding"])
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_clipping_in_the_step_has_the_bits_of_clipped_gradients(precision, limit):
    def train(clip):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2)).to(DEVICE, torch.bfloat16)
        optimizer = build_optimizer(model, RunSpec(optimizer={"precision": precision, "lr": 1e-2}))
        for number in range(3):
            model(torch.full((3, 16), 1.0 + number, dtype=torch.bfloat16, device=DEVICE)).square().sum().backward()
            norm = clip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return [*(p.detach() for p in model.parameters()), norm]

    theirs = train(lambda model, _: clip_gradients(model, limit))
    ours = train(lambda model, optimizer: clip_gradients(model, limit, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_muon_has_the_matrices_between_embeddings_and_head():
    spec = RunSpec(optimizer={"type": "muon", "weight_decay": 0.1})
    model = build_model(spec.model, spec.seed)
    optimizer = build_optimizer(model, spec)
    parts = {id(p): group["part"] for group in optimizer.param_groups for p in group["params"]}
    by_muon = {name for name, p in model.named_parameters() if parts[id(p)] == 0}
    assert len(by_muon) == 4 * 7
    assert all(name.endswith("_proj.weight") for name in by_muon)


WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize(
    ("model_type", "auto", "fields", "others"),
    [
        # Its norms of queries and keys have a row of weights for each head.
        ("cohere", AutoModelForCausalLM, {"use_qk_norm": True}, {"q_norm", "k_norm", "norm", "input_layernorm"}),
        ("llama", AutoModelForSequenceClassification, {"num_labels": 1}, {"score"}),
        ("mixtral", AutoModelForCausalLM, {"num_local_experts": 2}, {"gate_up_proj", "down_proj"}),
        ("mamba", AutoModelForCausalLM, {"state_size": 4}, {"conv1d", "A_log", "D"}),
        ("gpt2", AutoModelForCausalLM, {"n_embd": 32, "n_layer": 1, "n_head": 4}, {"wte", "wpe"}),
    ],
)
def test_muon_has_none_but_hidden_matrices(model_type, auto, fields, others):
    """https://kellerjordan.github.io/posts/muon: embeddings, heads, norms, and what is no matrix are AdamW's."""
    model = auto.from_config(CONFIG_MAPPING[model_type](**WIDTH, pad_token_id=0, **fields))
    optimizer = build_optimizer(model, RunSpec(optimizer={"type": "muon"}))
    parts = {id(p): group["part"] for group in optimizer.param_groups for p in group["params"]}
    by_muon = {name for name, p in model.named_parameters() if parts[id(p)] == 0}
    linear = (nn.Linear, Conv1D)
    outer = (model.get_output_embeddings(), getattr(model, "score", None))
    matrices = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, linear) and module not in outer
    }
    # Mixtral's router is a matrix, but no module of PyTorch's.
    assert by_muon - {"model.layers.0.mlp.gate.weight"} == matrices
    left = {name.removesuffix(".weight").rpartition(".")[2] for name, p in model.named_parameters() if parts[id(p)]}
    assert others <= left
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_muon_alone_and_muon_without_a_matrix():
    model = Experts()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "router.weight")
    optimizer = build_optimizer(model, RunSpec(optimizer={"type": "muon"}))
    model.router.weight.grad = torch.ones_like(model.router.weight)
    before = model.router.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.router.weight, before)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "up_proj")
    with pytest.raises(ValueError, match=r"optimizer\.type 'muon': no trainable .* set optimizer\.type to 'adamw'"):
        build_optimizer(model, RunSpec(optimizer={"type": "muon"}))


def test_muon_steps_are_orthogonal_and_as_large_as_adamw_s():
    spec = RunSpec(model={"dtype": "float32"}, optimizer={"type": "muon", "weight_decay": 0, "lr": 0.01})
    with mock.patch.dict(PRESETS["tiny-llama"], {"num_hidden_layers": 1}):
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
