"""Families without a row: what is found by structure, what is proven equal, and what keeps its own code."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

from strata_kernels import patch_model, unpatch_model
from strata_kernels.patch.discover import discover
from strata_kernels.patch.engine import _find_by_row
from strata_kernels.patch.table import OPERATORS, ROWS, Mlp, Norm, Rope
from tests.kernels.test_patch import SIZES, VOCABULARY, build, snapshot

EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2,
    "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Sizes whose defaults are large, or would not show a factor that is left out.
OWN = {
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
    },
    "granitemoe": {"logits_scaling": 3.0},
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 16,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "minimax": {"block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "mamba": {"state_size": 4, "use_mambapy": False},
    "stablelm": {"use_qkv_bias": True},
}  # fmt: skip
# Operator → number of modules, counted in the modeling files.
FAMILIES = {
    "qwen3_moe": {"rms_norm": 9, "rope": 2, "experts": 2, "linear_cross_entropy": 1},
    "mixtral": {"rms_norm": 5, "rope": 2, "experts": 2, "linear_cross_entropy": 1},
    "olmoe": {"rms_norm": 9, "rope": 2, "experts": 2, "linear_cross_entropy": 1},
    "glm4_moe": {"rms_norm": 5, "rope": 2, "swiglu": 2, "experts": 1, "linear_cross_entropy": 1},
    "gpt_oss": {"rms_norm": 5, "rope": 2, "experts": 2, "linear_cross_entropy": 1},
    "ernie4_5_moe": {"rms_norm": 5, "rope": 2, "swiglu": 2, "experts": 1, "linear_cross_entropy": 1},
    "hunyuan_v1_moe": {"rms_norm": 9, "rope": 2, "swiglu": 2, "experts": 2, "linear_cross_entropy": 1},
    "granitemoe": {"rms_norm": 5, "rope": 2, "experts": 2, "linear_cross_entropy": 1},
    "phimoe": {"layer_norm": 5, "rope": 2, "experts": 2, "linear_cross_entropy": 1},
    "qwen3_next": {"rms_norm": 7, "rope": 1, "swiglu": 2, "experts": 2, "linear_cross_entropy": 1},
    "qwen2_moe": {"rms_norm": 5, "rope": 2, "swiglu": 2, "experts": 2, "linear_cross_entropy": 1},
    "afmoe": {"rms_norm": 13, "rope": 2, "swiglu": 2, "experts": 1, "linear_cross_entropy": 1},
    "gemma4_text": {"rms_norm": 26, "rope": 2, "geglu": 2, "experts": 2, "linear_cross_entropy": 1},
    "minimax": {"rms_norm": 6, "rope": 1, "experts": 2, "linear_cross_entropy": 1},
    "minimax_m2": {"rms_norm": 9, "rope": 2, "experts": 2, "linear_cross_entropy": 1},
    "jamba": {"rms_norm": 8, "swiglu": 1, "experts": 1, "linear_cross_entropy": 1},
    "llama4_text": {"rms_norm": 7, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1},
    "cohere": {"layer_norm": 3, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1},
    "cohere2": {"layer_norm": 3, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1},
    "lfm2": {"rms_norm": 9, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1},
    "olmo": {"layer_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1},
    "nemotron": {"rope": 2, "relu_squared": 2, "linear_cross_entropy": 1},
    "starcoder2": {"layer_norm": 5, "rope": 2, "gelu": 2, "linear_cross_entropy": 1},
    "stablelm": {"layer_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1},
    "phi": {"layer_norm": 3, "rope": 2, "gelu": 2, "linear_cross_entropy": 1},
    "gpt_neox": {"layer_norm": 5, "rope": 2, "gelu": 2, "linear_cross_entropy": 1},
    "gpt2": {"layer_norm": 5, "linear_cross_entropy": 1},
    "mamba": {"rms_norm": 3, "linear_cross_entropy": 1},
    "openai-gpt": {"layer_norm": 4, "linear_cross_entropy": 1},
}
# One of each kind of norm, layer and rotation that no row has, for the kernels themselves.
KINDS = ("qwen3_moe", "gpt_oss", "llama4_text", "cohere", "nemotron")


def build_other(model_type, **changes):
    """A small model of a family without a row, whose weights are not the ones that hide a wrong variant."""
    known = AutoConfig.for_model(model_type)
    sizes = {**SIZES, **{name: size for name, size in EXPERTS.items() if hasattr(known, name)}}
    config = AutoConfig.for_model(model_type, **{**sizes, **OWN.get(model_type, {}), **changes})
    # Not asked about here, and drawn by a random number on each call.
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "residual_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 0.5 if "norm" in name else 0.0, 0.2)
    return model.train()


def gradients_of(model, tokens):
    """The loss of a batch, and the gradients of all parameters that it reaches."""
    model.zero_grad()
    torch.manual_seed(0)  # Phimoe's routers sample.
    labels = tokens.clone()
    labels[:, :4] = -100
    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_trains_as_its_own_code(model_type) -> None:
    assert model_type not in ROWS
    model, tokens = build_other(model_type), torch.randint(3, VOCABULARY, (2, 13))
    before, (loss, gradients) = snapshot(model), gradients_of(model, tokens)
    logits = model.eval()(tokens, use_cache=False).logits
    report = patch_model(model)
    assert report.counts == FAMILIES[model_type] and report.by_structure
    patched_loss, patched_gradients = gradients_of(model.train(), tokens)
    torch.testing.assert_close(patched_loss, loss)
    torch.testing.assert_close(patched_gradients, gradients, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(model.eval()(tokens, use_cache=False).logits, logits, atol=1e-5, rtol=1e-3)
    unpatch_model(model)
    assert snapshot(model.train()) == before


@pytest.mark.parametrize("model_type", KINDS)
def test_trains_through_the_kernels(model_type, device) -> None:
    model = build_other(model_type, num_hidden_layers=1, num_key_value_heads=4).to(device)
    tokens = torch.randint(3, VOCABULARY, (1, 5), device=device)
    expected = gradients_of(model, tokens)
    patch_model(model)
    torch.testing.assert_close(gradients_of(model, tokens), expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("model_type", sorted(ROWS.keys() - {"falcon_h1"}))
def test_finds_what_the_row_says(model_type) -> None:
    """The table was written by hand: each of its rows is proven here. Falcon H1 scales inside of its layers."""
    model = build(model_type)
    found, by_row = discover(model, OPERATORS), _find_by_row(model, ROWS[model_type], OPERATORS)
    assert found.replacements == by_row.replacements


@pytest.mark.parametrize("counted", [None, 31], ids=["mean", "items of the step"])
def test_the_loss_of_routers_is_added_once(counted) -> None:
    model = build_other("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    tokens = torch.randint(3, VOCABULARY, (2, 9))
    inputs = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": counted, "use_cache": False}

    def step():
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for n, p in model.named_parameters() if "mlp.gate" in n]

    expected = step()
    assert patch_model(model).counts["linear_cross_entropy"] == 1
    torch.testing.assert_close(step(), expected, atol=1e-6, rtol=1e-4)
    assert model(**inputs).logits is None
    without = model(**inputs, output_router_logits=False).loss
    assert without < expected[0] - 0.1


class SquaredBalanceForCausalLM(modeling_qwen3_moe.Qwen3MoeForCausalLM):
    def forward(self, input_ids=None, inputs_embeds=None, labels=None, output_router_logits=None, **others):
        others |= {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "output_router_logits": output_router_logits}
        output = super().forward(labels=labels, **others)
        if labels is not None and output.aux_loss is not None:
            output.loss = output.loss + output.aux_loss**2
        return output


@pytest.mark.parametrize("asked", [False, True])
def test_another_loss_of_routers_is_left_to_the_family_where_it_is_asked_for(asked) -> None:
    model, tokens = build_other("qwen3_moe", output_router_logits=asked), torch.randint(3, VOCABULARY, (2, 9))
    model.__class__ = SquaredBalanceForCausalLM
    expected = gradients_of(model, tokens)
    report = patch_model(model)
    assert ("linear_cross_entropy" in report.counts) is not asked
    assert ("adds the loss of its routers in another way" in report.summary()) is asked
    torch.testing.assert_close(gradients_of(model, tokens), expected, atol=1e-5, rtol=1e-3)


def test_says_the_same_of_a_model_on_meta() -> None:
    expected = patch_model(build_other("cohere"))
    with torch.device("meta"):
        model = build_other("cohere")
        report = patch_model(model)
    assert report == expected


def test_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = build_other("qwen3_moe")
    config, weights = copy.deepcopy(model.config), copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    patch_model(model)
    assert torch.equal(torch.rand(3), expected)
    assert model.config.to_dict() == config.to_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def other_family(**parts):
    """A Llama whose family has no row, with classes of its own in place of some of its parts."""
    model = build()
    model.config.model_type = "not_llama"
    for module in model.modules():
        if type(module).__name__ in parts:
            module.__class__ = parts[type(module).__name__]
    return model


class ClampedRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x.clamp(-0.01, 0.01))


class GroupedRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, x):
        groups = x.view(*x.shape[:-1], 2, -1)
        return self.weight * (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)).view_as(x)


class EarlyRMSNorm(modeling_llama.LlamaRMSNorm):
    """Squares in bfloat16: equal in exact arithmetic."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class FarClampedRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class NarrowRMSNorm(modeling_llama.LlamaRMSNorm):
    """Squares in bfloat16 what comes in float32, as some residual streams do."""

    def forward(self, x):
        return super().forward(x) if self.weight.dtype == x.dtype else super().forward(x.bfloat16()).to(x.dtype)


class ClampedMLP(modeling_llama.LlamaMLP):
    """As DeepSeek-V4's."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10.0)) * self.up_proj(x).clamp(-10.0, 10.0))


class TupleMLP(modeling_llama.LlamaMLP):
    def forward(self, x):
        return (super().forward(x),)


class EvaluatedMLP(modeling_llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x) if self.training else x


class FlatMLP(modeling_llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x) if x.dim() == 3 else x


class WideMLP(modeling_llama.LlamaMLP):
    """Gives a wider dtype than it takes."""

    def forward(self, x):
        return super().forward(x).float()


class NoisyMLP(modeling_llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 1.0001


class ResidualMLP(modeling_llama.LlamaMLP):
    def forward(self, x):
        return x + super().forward(x)


class SwappedMLP(modeling_llama.LlamaMLP):
    """The layers have each other's names."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


@pytest.mark.parametrize(
    ("name", "cls", "operator", "reason"),
    [
        ("LlamaRMSNorm", ClampedRMSNorm, "rms_norm", "ClampedRMSNorm computes another norm"),
        ("LlamaRMSNorm", GroupedRMSNorm, "rms_norm", "GroupedRMSNorm computes another norm"),
        (
            "LlamaRMSNorm",
            EarlyRMSNorm,
            "rms_norm",
            r"EarlyRMSNorm rounds differently in bfloat16, in \d+% of the values",
        ),
        ("LlamaRMSNorm", FarClampedRMSNorm, "rms_norm", "FarClampedRMSNorm computes another norm"),
        (
            "LlamaRMSNorm",
            NarrowRMSNorm,
            "rms_norm",
            r"NarrowRMSNorm rounds differently in bfloat16, in \d+% of the values",
        ),
        ("LlamaMLP", ClampedMLP, "swiglu", "ClampedMLP computes something else than swiglu"),
        ("LlamaMLP", TupleMLP, "swiglu", "TupleMLP computes something else than swiglu"),
        ("LlamaMLP", EvaluatedMLP, "swiglu", "EvaluatedMLP computes something else than swiglu"),
        ("LlamaMLP", FlatMLP, "swiglu", "FlatMLP computes something else than swiglu"),
        ("LlamaMLP", WideMLP, "swiglu", "WideMLP computes something else than swiglu"),
        ("LlamaMLP", NoisyMLP, "swiglu", "NoisyMLP computes something else than swiglu"),
        ("LlamaMLP", ResidualMLP, "swiglu", "ResidualMLP computes something else than swiglu"),
    ],
)
def test_what_is_not_equal_keeps_its_own_code(name, cls, operator, reason) -> None:
    model = other_family(**{name: cls})
    report = patch_model(model)
    assert operator not in report.replaced and len(report.replaced) == 3
    with pytest.raises(ValueError, match=reason):
        patch_model(model, require_all=True)
    assert report.kept[operator] and f"{operator} left out: " in report.summary()


def test_layers_are_known_by_what_they_do_and_not_by_name() -> None:
    model = other_family(LlamaMLP=SwappedMLP)
    (_, _, mlp), *_ = discover(model, ["swiglu"]).replacements["swiglu"]
    assert mlp == Mlp(gate="up_proj", up="gate_proj")


def test_dropout_is_not_left_out() -> None:
    model = other_family()
    for layer in model.model.layers:
        layer.mlp.dropout = nn.Dropout(0.1)
    assert "has more parts than a feed-forward layer: dropout" in patch_model(model).kept["swiglu"][0]


class AdjustedMLP(modeling_llama.LlamaMLP):
    adjust = torch.nn.Identity.forward

    def forward(self, x):
        return self.adjust(super().forward(x))


@pytest.mark.parametrize(
    "differ",
    [
        lambda mlp: setattr(mlp, "adjust", torch.sin),
        lambda mlp: setattr(mlp, "dropout", nn.Dropout(0.1)),
        lambda mlp: setattr(mlp, "offset", nn.Parameter(torch.ones(1))),
    ],
    ids=["function", "child", "weight"],
)
def test_modules_of_a_class_are_told_apart(differ) -> None:
    """A proof of the first layer holds for the second one only where nothing differs."""
    model = other_family(LlamaMLP=AdjustedMLP)
    first, second = (layer.mlp for layer in model.model.layers)
    first.dropout = nn.Dropout(0.0)
    second.dropout = nn.Dropout(0.0)
    differ(second)
    assert patch_model(model).replaced["swiglu"] == ("model.layers.0.mlp",)


class NamedMLP(modeling_llama.LlamaMLP):
    def forward(self, inputs):
        return super().forward(inputs)


class NamedRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, inputs):
        return super().forward(inputs)


def test_takes_its_argument_by_its_name() -> None:
    model, x = other_family(LlamaMLP=NamedMLP, LlamaRMSNorm=NamedRMSNorm), torch.randn(2, 3, 32)
    modules = model.model.layers[0].mlp, model.model.norm
    expected = [module(x) for module in modules]
    assert {"swiglu", "rms_norm"} <= patch_model(model).replaced.keys()
    for given in (lambda module: module(inputs=x), lambda module: module(x)):
        torch.testing.assert_close([given(module) for module in modules], expected)
    for module in modules:
        with pytest.raises(TypeError):
            module(wrong=x)


def test_hooks_on_an_activation_keep_their_module() -> None:
    model = other_family()
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    report = patch_model(model)
    assert "swiglu" not in report.replaced and "act_fn, which has hooks" in report.kept["swiglu"][0]


@contextlib.contextmanager
def saved_numbers():
    """How many numbers autograd keeps beside parameters, once the block has ended."""
    sizes = {}

    def note(tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield lambda: sum(sizes.values())


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "context",
    [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu"), lambda: default_dtype(torch.bfloat16)],
    ids=["inference mode", "no grad", "autocast", "bf16"],
)
def test_the_callers_modes_do_not_count(context) -> None:
    expected, model = patch_model(other_family()), other_family()
    with context():
        assert patch_model(model) == expected


def test_recipes() -> None:
    """The variants that no row has."""

    def found(model_type, operator):
        return discover(build_other(model_type), [operator]).replacements[operator][0][2]

    assert found("cohere", "rope") == Rope((("apply_rotary_pos_emb", "neighbors_repeated"),))
    assert found("gpt_oss", "rope") == Rope((("apply_rotary_pos_emb", "halves_once"),))
    assert found("llama4_text", "rope") == Rope((("apply_rotary_emb", "complex"),))
    assert found("cohere", "layer_norm") == Norm("variance_epsilon", center=True)
    assert found("olmo", "layer_norm") == Norm(1e-5, center=True)
    assert found("cohere", "linear_cross_entropy").multiplier == "logit_scale"


class Projector(nn.Module):
    """LLaVA's, of a tower half as wide as the text model: the second layer has the sizes of a packed gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1, self.act, self.linear_2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16)

    def forward(self, x):
        return self.linear_2(self.act(self.linear_1(x)))


def test_a_projector_is_no_gated_layer() -> None:
    model = other_family()
    model.projector = Projector()
    report = patch_model(model)
    assert report.replaced["gelu"] == ("projector",) and "geglu" not in report.kept


class UngatedMLP(nn.Module):
    """As towers have it."""

    def __init__(self, activation: nn.Module, rate: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = nn.Linear(32, 48), activation, nn.Linear(48, 32)
        self.dropout, self.rate = nn.Dropout(0.0), rate

    def forward(self, hidden_states):
        inner = nn.functional.dropout(self.activation_fn(self.fc1(hidden_states)), self.rate, self.training)
        return self.dropout(self.fc2(inner))


class TwiceActivatedMLP(UngatedMLP):
    """As Llama 4's projector."""

    def forward(self, hidden_states):
        return self.activation_fn(super().forward(hidden_states))


class NormedMLP(UngatedMLP):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__(activation)
        self.norm = nn.LayerNorm(32)

    def forward(self, hidden_states):
        return super().forward(self.norm(hidden_states))


def with_tower(mlp: nn.Module) -> nn.Module:
    """A model that has `mlp` beside its own layers."""
    model = other_family()
    model.tower = mlp
    return model


UNGATED = {
    **{name: (lambda name=name: ACT2FN[name], "gelu") for name in
       ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python", "quick_gelu")},
    "nn.GELU": (nn.GELU, "gelu"),
    "nn.GELU, tanh": (lambda: nn.GELU("tanh"), "gelu"),
    "silu": (lambda: ACT2FN["silu"], "silu"),
    "nn.SiLU": (nn.SiLU, "silu"),
    "relu2": (lambda: ACT2FN["relu2"], "relu_squared"),
}  # fmt: skip


@pytest.mark.parametrize(("activation", "operator"), UNGATED.values(), ids=UNGATED.keys())
def test_a_layer_without_a_gate(activation, operator) -> None:
    mlp, x = UngatedMLP(activation()), torch.randn(2, 3, 32, requires_grad=True)

    def run():
        y = mlp(hidden_states=x)
        return y, torch.autograd.grad(y.square().sum(), (x, *mlp.parameters()))

    expected, before = run(), snapshot(mlp)
    report = patch_model(with_tower(mlp))
    assert report.replaced[operator] == ("tower",) and not report.kept
    torch.testing.assert_close(run(), expected)
    with saved_numbers() as saved:
        mlp(x)
    # What enters a linear layer, and no more of what lies between.
    assert saved() == x.numel() + 2 * 3 * 48
    unpatch_model(mlp)
    assert snapshot(mlp) == before


def test_a_frozen_tower() -> None:
    mlp, x = UngatedMLP(nn.GELU()).requires_grad_(False), torch.randn(2, 3, 32, requires_grad=True)
    expected = torch.autograd.grad(mlp(x).sum(), x)
    patch_model(with_tower(mlp))
    torch.testing.assert_close(torch.autograd.grad(mlp(x).sum(), x), expected)
    assert not mlp(x.detach()).requires_grad


@pytest.mark.parametrize(
    ("mlp", "reason"),
    [
        (lambda: UngatedMLP(nn.GELU(), 0.1), "gelu left out: UngatedMLP has dropout between its layers"),
        # Seen in no result of a few features.
        (lambda: UngatedMLP(nn.GELU(), 1e-9), "gelu left out: UngatedMLP has dropout between its layers"),
        (lambda: TwiceActivatedMLP(nn.GELU()), "TwiceActivatedMLP computes something else than gelu between"),
        (lambda: NormedMLP(nn.GELU()), None),
        (lambda: UngatedMLP(nn.ReLU()), None),
        (lambda: UngatedMLP(nn.Mish()), None),
        (lambda: nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), None),
    ],
    ids=["dropout", "little dropout", "activated twice", "with a norm", "ReLU", "Mish", "sequence"],
)
def test_a_layer_without_a_gate_that_keeps_its_own_code(mlp, reason) -> None:
    torch.manual_seed(5)
    model = with_tower(mlp())
    before = torch.get_rng_state()
    report = patch_model(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert not report.counts.keys() & {"gelu", "silu", "relu_squared"}
    assert reason in report.summary() if reason else not report.kept


@pytest.mark.parametrize("kind", ["hooked", "derived"])
def test_a_projection_that_is_no_plain_layer_is_called(kind) -> None:
    """As adapters, quantized layers and FSDP's are."""
    mlp, x, calls = UngatedMLP(nn.GELU()), torch.randn(2, 3, 32), []
    expected = mlp(x)
    if kind == "hooked":
        mlp.fc2.register_forward_hook(lambda *_: calls.append(1))
    else:
        mlp.fc2.__class__ = type(
            "Noted",
            (nn.Linear,),
            {"forward": lambda self, x: calls.append(1) or nn.functional.linear(x, self.weight, self.bias)},
        )
    assert patch_model(with_tower(mlp)).replaced["gelu"] == ("tower",)
    torch.testing.assert_close(mlp(x), expected)
    assert calls == [1]
