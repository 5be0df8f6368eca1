"""PEFT's layers as fused operators: PEFT's losses and gradients, in all forms of the frozen weight."""

import copy
import pickle
from importlib import import_module

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from strata_kernels import patch_model, unpatch_model
from strata_kernels.patch.table import ROWS
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.training import Training
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.adapters import forward_source, fused_adapters
from tasks.runtime.models.adapters.forward_source import calls_with_one_input
from tasks.runtime.models.adapters.fused_adapters import fuse_adapters
from tasks.runtime.models.adapters.lora import without_adapter
from tasks.runtime.models.adapters.quantization import _linear_4bit
from tasks.runtime.models.float8 import quantize_frozen_weights, use_float8

TOKENS = torch.arange(48).view(2, 24)
LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def small_llama(dtype=torch.float32, quantized=False, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype)
    if quantized:
        for layer in model.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(parent, name, _linear_4bit(child, dtype))
    LoraModel(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LINEAR, **settings}), "default")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            # PEFT begins with zeros, which would hide half of it.
            parameter.data = torch.randn_like(parameter).mul_(0.1).to(dtype)
    patch_model(model)
    return model.train()


def step(model):
    """The loss, and all gradients by their names."""
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch):
    """How many layers each call of the operator computes."""
    counts, plain = [], fused_adapters.lora_linear
    monkeypatch.setattr(
        fused_adapters, "lora_linear", lambda x, layers, **more: counts.append(len(layers)) or plain(x, layers, **more)
    )
    mlp = fused_adapters.lora_gated_layer
    monkeypatch.setattr(fused_adapters, "lora_gated_layer", lambda *a, **more: counts.append("mlp") or mlp(*a, **more))
    return counts


def assert_close(found, expected, bound):
    (loss, gradients), (their_loss, theirs) = found, expected
    assert loss == pytest.approx(their_loss, rel=bound)
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() <= bound * theirs[name].norm(), name


@pytest.mark.parametrize("policy", ["none", "full"])
def test_losses_and_gradients_are_those_of_peft(policy, calls):
    model = small_llama()
    expected = step(model)
    assert fuse_adapters(model) == 14
    checkpoint_activations(model, Training(gradient_checkpointing=policy))
    assert_close(step(model), expected, 1e-5)
    # Queries, keys and values; output; the MLP.
    assert calls == [3, 1, "mlp"] * (2 if policy == "none" else 4)


def test_a_model_is_pickled_and_comes_back_fused(calls):
    model = small_llama()
    fuse_adapters(model)
    expected = step(model)
    del calls[:]
    again = pickle.loads(pickle.dumps(model))
    assert step(again)[0] == expected[0] and calls == [3, 1, "mlp"] * 2


def test_in_bf16_they_are_no_further_from_fp64_than_peft(calls):
    model = small_llama(torch.bfloat16)
    exact = copy.deepcopy(model).double()
    truth = step(exact)[1]
    theirs = step(model)[1]
    fuse_adapters(model)
    for name, gradient in step(model)[1].items():
        ours, peft = ((g.double() - truth[name]).norm() for g in (gradient, theirs[name]))
        assert ours <= 2 * peft + 1e-6, name
    assert calls


def test_micro_batches_accumulate():
    model = small_llama()
    results = []
    for fused in (False, True):
        if fused:
            fuse_adapters(model)
        model.zero_grad()
        for half in TOKENS.split(1):
            model(input_ids=half, labels=half).loss.backward()
        results.append((0.0, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    assert_close(*results[::-1], 1e-5)


def test_weights_of_four_bits(calls):
    pytest.importorskip("bitsandbytes")
    model = small_llama(quantized=True).to("cpu")
    expected = step(model)
    fuse_adapters(model)
    assert_close(step(model), expected, 1e-5)
    assert calls == [3, 1, "mlp"] * 2


def test_weights_of_fp8(calls):
    """Other roundings on the way flip those to FP8: it is as far from exact weights as PEFT's layers are."""
    model = small_llama()
    sections = {"model": {"name": "org/model"}, "adapter": {"type": "lora"}, "training": {"float8": "tensorwise"}}
    spec = RunSpec.model_validate({"name": "float8", **sections})
    use_float8(model, spec.training)
    quantize_frozen_weights(model, spec, torch.device("cpu"))
    exact, expected = step(small_llama())[1], step(model)
    fuse_adapters(model)
    found = step(model)
    assert calls == [3, 1, "mlp"] * 2
    ours, theirs = (distance(gradients, exact) for _, gradients in (found, expected))
    assert ours <= 1.3 * theirs and found[0] == pytest.approx(expected[0], rel=1e-3)


def distance(found, exact):
    """The mean of relative distances of all gradients."""
    return sum(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact) / len(exact)


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"lora_bias": True, "target_modules": LINEAR[:4]}],
    ids=lambda settings: next(iter(settings)),
)
def test_what_it_does_not_compute_is_left_to_peft(settings, calls):
    model = small_llama(**settings)
    torch.manual_seed(1)
    expected = step(model)
    fuse_adapters(model)
    torch.manual_seed(1)
    assert step(model)[0] == expected[0] and not calls


def test_dropout_is_of_training_and_comes_again_when_recomputed():
    plain, model = small_llama(), small_llama(lora_dropout=0.3)
    expected = step(plain)
    fuse_adapters(model)
    results = []
    for policy in ("none", "full"):
        torch.manual_seed(1)
        checkpoint_activations(model, Training(gradient_checkpointing=policy))
        results.append(step(model))
    assert_close(*results, 1e-6)
    assert results[0][0] != pytest.approx(expected[0], rel=1e-4)
    assert model.eval()(input_ids=TOKENS, labels=TOKENS).loss.item() == pytest.approx(expected[0], rel=1e-5)


def test_layers_with_hooks_and_switched_off_adapters_are_left_to_peft(calls):
    model = small_llama()
    fuse_adapters(model)
    with without_adapter(model):
        step_without = model(input_ids=TOKENS, labels=TOKENS).loss
    assert not calls and step_without.grad_fn is None
    seen = []
    model.model.layers[0].self_attn.k_proj.base_layer.register_forward_hook(lambda *_: seen.append(1))
    step(model)
    assert len(seen) == 1 and calls == [1, 1, 1, "mlp", 3, 1, "mlp"]
    calls.clear()
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: seen.append(2))
    step(model)
    assert seen == [1, 1, 2] and calls == [1, 1, 1, "mlp", 3, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_are_peft_s():
    model = small_llama()
    expected = step(model)
    fuse_adapters(model)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    assert_close(step(model), expected, 1e-5)


def test_results_wait_for_the_same_input_alone():
    model = small_llama()
    fuse_adapters(model)
    attention = model.model.layers[0].self_attn
    group = vars(attention.q_proj)["_strata_group"]
    x = torch.randn(1, 3, 64)
    first = attention.q_proj(x)
    assert len(group._waiting) == 2
    x.mul_(2)
    assert torch.allclose(attention.k_proj(x), attention.k_proj(x.clone()))
    assert not torch.equal(first, attention.q_proj(x))
    for layer in (attention.k_proj, attention.v_proj):
        layer(x)
    assert not group._waiting
    copied = copy.deepcopy(attention)
    other = vars(copied.q_proj)["_strata_group"]
    assert other is vars(copied.v_proj)["_strata_group"] and other is not group


@pytest.fixture
def added(monkeypatch):
    """What adds the residual with its adapter, in the order of calls."""
    seen, take = [], fused_adapters._take_residual

    def taken(module, x, layer):
        found = take(module, x, layer)
        if found is not None:
            seen.append(type(module).__name__)
        return found

    monkeypatch.setattr(fused_adapters, "_take_residual", taken)
    return seen


def parts_of(layer):
    norms = {"input_layernorm": layer.input_layernorm, "post_attention_layernorm": layer.post_attention_layernorm}
    return norms | {"self_attn": layer.self_attn, "o_proj": layer.self_attn.o_proj, "mlp": layer.mlp}


@pytest.mark.parametrize("policy", ["none", "full", "per_op", "attention"])
def test_residuals_are_added_with_the_adapters_of_the_last_products(policy, added):
    """What keeps the results of operators watches modules or operators, which then compute by themselves."""
    model = small_llama()
    # A cache would grow when a layer is computed again.
    model.config.use_cache = False
    expected = step(model)
    fuse_adapters(model)
    checkpoint_activations(model, Training(gradient_checkpointing=policy))
    assert_close(step(model), expected, 1e-5)
    assert added == ["Linear", "LlamaMLP"] * {"none": 2, "full": 4, "per_op": 0, "attention": 0}[policy]
    assert not any("_strata_residual" in vars(module) for module in model.modules())


@pytest.mark.parametrize("part", ["input_layernorm", "post_attention_layernorm", "self_attn", "o_proj", "mlp"])
def test_hooks_see_what_a_part_of_the_layer_computes_itself(part, added):
    model, seen = small_llama(), []
    x = torch.randn(2, 24, 64)
    for fused in (False, True):
        if fused:
            fuse_adapters(model)
        handle = parts_of(model.model.layers[0])[part].register_forward_hook(lambda _, __, y: seen.append(y))
        model.model(inputs_embeds=x)
        handle.remove()
    first, second = (y[0] if isinstance(y, tuple) else y for y in seen)
    torch.testing.assert_close(second, first)
    assert added == ["Linear", "LlamaMLP"]
    model.model(inputs_embeds=x)
    assert added == ["Linear", "LlamaMLP"] * 3


@pytest.mark.parametrize(
    ("settings", "adding"),
    [
        ({"target_modules": ["q_proj", "gate_proj"]}, []),
        ({"target_modules": ["o_proj"]}, ["Linear"]),
        ({"target_modules": ["o_proj", "down_proj"]}, ["Linear"]),
        ({"target_modules": r"model\.layers\.\d\.self_attn\.[qkvo]_proj"}, ["Linear"]),
        ({"use_dora": True}, []),
    ],
    ids=str,
)
def test_residuals_are_added_behind_what_adds_none(settings, adding, added):
    model = small_llama(**settings)
    expected = step(model)
    fuse_adapters(model)
    assert_close(step(model), expected, 1e-5)
    assert added == adding * 2


def test_the_backward_pass_of_norms_adds_the_gradients_of_residuals(monkeypatch):
    seen, plain = [], fused_adapters.rms_norm_and_input
    monkeypatch.setattr(fused_adapters, "rms_norm_and_input", lambda *a, **more: seen.append(a) or plain(*a, **more))
    model = small_llama(target_modules=["q_proj"])
    expected = step(model)
    fuse_adapters(model)
    for _ in range(2):
        assert_close(step(model), expected, 1e-5)
    assert len(seen) == 8
    for wrapped in (torch.no_grad, torch.inference_mode):
        with wrapped():
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        assert loss.item() == pytest.approx(expected[0], rel=1e-5)


def test_autocast_and_residuals_of_another_dtype(added):
    model = small_llama()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model)
        fuse_adapters(model)
        assert_close(step(model), expected, 2e-2)
    assert not added
    model = small_llama(torch.bfloat16)
    wide = torch.randn(2, 24, 64)
    layer = model.model.layers[0]
    x = layer.self_attn.o_proj(wide.bfloat16())
    fuse_adapters(model)
    assert (
        fused_adapters._add(wide, layer.self_attn.o_proj, lambda: layer.self_attn.o_proj(wide.bfloat16())).dtype
        == (wide + x).dtype
    )
    assert not added


def test_a_failing_layer_leaves_no_residual_behind():
    model = small_llama()
    fuse_adapters(model)
    layer = model.model.layers[0]
    with pytest.raises(TypeError):
        layer(torch.randn(2, 24, 64))
    assert not any("_strata_residual" in vars(module) for module in layer.modules())


def test_undoing_the_patch_restores_the_layers():
    model = small_llama()
    classes = [type(layer) for layer in model.model.layers]
    fuse_adapters(model)
    assert [type(layer) for layer in model.model.layers] != classes
    assert [type(layer).__name__ for layer in model.model.layers] == ["LlamaDecoderLayer"] * 2
    unpatch_model(model)
    assert [type(layer) for layer in model.model.layers] == classes


def test_layers_of_the_usual_form_are_found_in_the_source():
    usual = set()
    for row in ROWS.values():
        home = import_module(row.module)
        layer, attention = (getattr(home, row.prefix + name) for name in ("DecoderLayer", "Attention"))
        if forward_source.has_usual_forward(layer) and forward_source.ends_with_o_proj(attention):
            usual.add(row.prefix)
    # Others norm what they add (OLMo 2, Gemma 2), scale it (Granite), drop parts of it (Phi-3), or have other names.
    assert usual == {
        *("Llama", "Mistral", "Ministral", "Ministral3", "Qwen2", "Qwen3", "SmolLM3", "Gemma", "Glm", "Helium"),
        *("Ernie4_5", "HunYuanDenseV1", "Cwm", "Arcee"),
    }
    assert not forward_source.has_usual_forward(nn.Linear) and not forward_source.ends_with_o_proj(LlamaMLP)


class Different(nn.Module):
    def forward(self, x, memory):
        y = self.first(x)
        x = self.second(x)
        return self.third(x) + self.fourth(memory) + y


def test_layers_that_read_one_input_are_found_in_the_source():
    for cls in (LlamaAttention, Qwen3Attention, Gemma3Attention):
        assert calls_with_one_input(cls) == (("q_proj", "k_proj", "v_proj"),)
    assert calls_with_one_input(LlamaMLP) == (("gate_proj", "up_proj"),)
    assert calls_with_one_input(Phi3MLP) == ()
    assert calls_with_one_input(Different) == (("first", "second"),)
    assert calls_with_one_input(nn.Linear) == ()
