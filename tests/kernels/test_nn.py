"""The modules store and call: each gives what its operator gives, and loads what transformers' modules have saved."""

from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import (
    add_rms_norm,
    cross_entropy,
    experts,
    geglu,
    layer_norm,
    linear_cross_entropy,
    relu_squared,
    rms_norm,
    swiglu,
)
from strata_kernels import nn as strata


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8)


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize(
    "module",
    [
        strata.RMSNorm(8),
        strata.RMSNorm(8, offset=1.0, cast="gemma"),
        strata.RMSNorm(8, weight=False),
        strata.LayerNorm(8),
        strata.LayerNorm(8, weight=False, bias=False),
    ],
    ids=repr,
)
def test_a_new_norm_only_normalizes(module, x) -> None:
    plain = functional.layer_norm if isinstance(module, strata.LayerNorm) else functional.rms_norm
    torch.testing.assert_close(module(x), plain(x, (8,), eps=module.eps))


def test_norms_call_their_operators(x) -> None:
    norm = randomized(strata.RMSNorm(8, 0.1, offset=1.0, cast="gemma"))
    assert torch.equal(norm(x), rms_norm(x, norm.weight, 0.1, offset=1.0, cast="gemma"))
    norm = randomized(strata.AddRMSNorm(8, 0.1, offset=1.0, cast="gemma"))
    given, expected = norm(x, 2 * x), add_rms_norm(x, 2 * x, norm.weight, 0.1, offset=1.0, cast="gemma")
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    norm = randomized(strata.LayerNorm(8, 0.1))
    assert torch.equal(norm(x), layer_norm(x, norm.weight, norm.bias, 0.1))


ACTIVATIONS = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up: geglu(gate, up, "tanh"),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlp(activation, x) -> None:
    mlp = strata.GatedMLP(8, 5, activation=activation, bias=True)
    expected = mlp.down_proj(ACTIVATIONS[activation](mlp.gate_proj(x), mlp.up_proj(x)))
    assert torch.equal(mlp(x), expected)
    packed = strata.GatedMLP(8, 5, activation=activation, bias=True, packed=True)
    packed.down_proj = mlp.down_proj
    for name in ("weight", "bias"):
        halves = [getattr(linear, name).data for linear in (mlp.gate_proj, mlp.up_proj)]
        getattr(packed.gate_up_proj, name).data = torch.cat(halves)
    torch.testing.assert_close(packed(x), expected)


def test_losses(x) -> None:
    options = {"ignore_index": 3, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "reduction": "sum"}
    target, weight, bias = torch.randint(5, (2, 3)), torch.randn(5, 8), torch.randn(5)
    logits = x @ weight.t()
    given, expected = strata.CrossEntropyLoss(**options)(logits, target), cross_entropy(logits, target, **options)
    assert torch.equal(given, expected)
    given = strata.LinearCrossEntropyLoss(**options)(x, weight, target, bias)
    assert torch.equal(given, linear_cross_entropy(x, weight, target, bias=bias, **options))
    assert strata.CrossEntropyLoss()(logits, target, num_items=3) == cross_entropy(logits, target, num_items=3)


def test_relu_squared(x) -> None:
    assert torch.equal(strata.ReLUSquared()(x), relu_squared(x))


def test_modules_say_what_they_store() -> None:
    assert repr(strata.RMSNorm(8, weight=False)) == "RMSNorm(8, eps=1e-06, offset=0.0, cast='llama', weight=False)"
    assert "label_smoothing=0.1" in repr(strata.LinearCrossEntropyLoss(label_smoothing=0.1))


@pytest.mark.parametrize(
    ("family", "ours", "theirs"),
    [
        ("llama", lambda: strata.RMSNorm(8), lambda m, c: m.LlamaRMSNorm(8)),
        ("gemma2", lambda: strata.RMSNorm(8, offset=1.0, cast="gemma"), lambda m, c: m.Gemma2RMSNorm(8)),
        ("llama", lambda: strata.GatedMLP(8, 12), lambda m, c: m.LlamaMLP(c)),
        ("gemma2", lambda: strata.GatedMLP(8, 12, activation="gelu_tanh"), lambda m, c: m.Gemma2MLP(c)),
        ("phi3", lambda: strata.GatedMLP(8, 12, packed=True), lambda m, c: m.Phi3MLP(c)),
    ],
)
def test_state_of_transformers_modules_loads(family, ours, theirs, x) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(family, **sizes)
    original, module = randomized(theirs(modeling, config)), ours()
    module.load_state_dict(original.state_dict())
    torch.testing.assert_close(module(x), original(x))


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, gelu_tanh, got 'relu'"):
        strata.GatedMLP(8, 12, activation="relu")


def test_experts_call_their_operator(x) -> None:
    layer = randomized(strata.Experts(3, 8, 4, gate="interleaved", alpha=1.702, limit=7.0, offset=1.0, bias=True))
    index, router = torch.tensor([[0, 1]] * 6), torch.rand(6, 2)
    expected = experts(
        x.view(6, 8), layer.gate_up_proj, layer.down_proj, index, router, gate_up_bias=layer.gate_up_proj_bias,
        down_bias=layer.down_proj_bias, gate="interleaved", alpha=1.702, limit=7.0, offset=1.0,
    )  # fmt: skip
    assert torch.equal(layer(x.view(6, 8), index, router), expected)


def test_experts_load_what_transformers_saves(x) -> None:
    modeling = import_module("transformers.models.mixtral.modeling_mixtral")
    config = import_module("transformers").MixtralConfig(hidden_size=8, intermediate_size=4, num_local_experts=3)
    config._experts_implementation = "eager"
    theirs = randomized(modeling.MixtralExperts(config))
    ours = strata.Experts(3, 8, 4)
    ours.load_state_dict(theirs.state_dict())
    routing = torch.tensor([[0, 1]] * 6), torch.rand(6, 2)
    torch.testing.assert_close(ours(x.view(6, 8), *routing), theirs(x.view(6, 8), *routing))
