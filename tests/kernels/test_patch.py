"""Patching: every row of the table trains and generates like the model it was, and gives it back untouched."""

import copy
import functools
import inspect
import pickle
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from strata_kernels import PatchReport, patch_model, unpatch_model
from strata_kernels.ops._launch import recording
from strata_kernels.patch.table import ACTIVATIONS, ROWS

VOCABULARY, LAYERS = 67, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Where the defaults are not small, or would not show a factor that is left out.
OWN_SIZES = {
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "mlp_multipliers": [0.5, 0.7],
        "lm_head_multiplier": 0.3,
    },
    "granite": {"logits_scaling": 3.0},
    "gemma3_text": {"final_logit_softcapping": 20.0, "sliding_window": 8},
}


def build(model_type: str = "llama", **changes: object) -> nn.Module:
    config = AutoConfig.for_model(model_type, **{**SIZES, **OWN_SIZES.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Weights other than one, so that a wrong offset or a wrong cast shows.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 0.5, 0.2)
    return model.train()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, 13))
    labels = tokens.clone()
    labels[:, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def train(model: nn.Module, **inputs: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def snapshot(model: nn.Module) -> list[tuple[object, ...]]:
    return [(path, type(m), m.forward.__func__, sorted(vars(m))) for path, m in model.named_modules()]


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied head"])
@pytest.mark.parametrize("model_type", ROWS)
def test_every_row(model_type, tied, batch) -> None:
    model = build(model_type, tie_word_embeddings=tied)
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    expected_loss, expected_gradients = train(model, **batch)
    expected_logits = model(batch["input_ids"]).logits
    signature = inspect.signature(model.forward)

    report = patch_model(model)
    activations = set(ACTIVATIONS) & set(report.replaced)
    assert set(report.replaced) == {"rms_norm", "rope", "linear_cross_entropy"} | activations
    assert report.excluded == () and report.kept == {} and not report.by_structure
    assert [report.counts[name] for name in activations] == ([] if report.unsupported else [LAYERS])
    assert report.counts["linear_cross_entropy"] == 1 and report.counts["rope"] == LAYERS
    assert report.counts["rms_norm"] == sum(type(m).__name__.endswith("RMSNorm") for m in model.modules())
    assert inspect.signature(model.forward) == signature
    loss, gradients = train(model, **batch)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(model(batch["input_ids"]).logits, expected_logits, atol=1e-5, rtol=1e-4)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    unpatch_model(model)
    assert snapshot(model) == before
    assert torch.equal(model(batch["input_ids"]).logits, expected_logits)


@pytest.mark.parametrize("model_type", ROWS)
def test_generates_with_a_cache(model_type, batch) -> None:
    model = build(model_type).eval()
    prompt = {"input_ids": batch["input_ids"][:, :5], "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    expected = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    patch_model(model)
    assert torch.equal(model.generate(**prompt, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "gelu_new"])
def test_every_gelu(activation, batch) -> None:
    model = build("gemma2", hidden_activation=activation)
    expected = train(model, **batch)
    patch_model(model)
    torch.testing.assert_close(train(model, **batch), expected, atol=1e-6, rtol=1e-4)


# One with norms of its own, in the attention too, and a cap; one with packed halves and paired features.
@pytest.mark.parametrize("model_type", ["gemma3_text", "glm"])
def test_compiles_whole(model_type, batch) -> None:
    model = build(model_type, num_hidden_layers=1)
    patch_model(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (loss, gradients), (expected_loss, expected_gradients) = train(compiled, **batch), train(model, **batch)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": -7},
        {"shift_labels": torch.randint(VOCABULARY, (2, 13))},
        {"return_dict": False},
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 1]] * 2)},
        {"output_hidden_states": True},
        {"use_cache": False},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_arguments_mean_what_they_meant(extra, batch) -> None:
    model = build()
    batch["labels"][batch["labels"] == -100] = extra.get("ignore_index", -100)
    expected = model(**batch, **extra)
    patch_model(model)
    given = model(**batch, **extra)
    torch.testing.assert_close(given[0], expected[0])
    if extra.get("return_dict", True):
        assert given.logits is None and type(given) is type(expected)
        assert given.keys() == expected.keys() - {"logits"}
        torch.testing.assert_close(given.hidden_states, expected.hidden_states)


def test_logits_to_keep(batch) -> None:
    model = build()
    inputs = {"input_ids": batch["input_ids"], "labels": batch["labels"][:, -5:], "logits_to_keep": 5}
    expected = model(**inputs).loss
    patch_model(model)
    torch.testing.assert_close(model(**inputs).loss, expected)


def test_logits_are_there_when_asked_for(batch) -> None:
    model = build()
    expected = model(**batch)
    patch_model(model, exclude=["rms_norm", "rope", "swiglu"])
    with_logits = model(**batch, skip_logits=False)
    assert torch.equal(with_logits.logits, expected.logits) and torch.equal(with_logits.loss, expected.loss)
    model.eval()
    assert model(**batch).logits is not None
    assert model(**batch, skip_logits=True).logits is None


@pytest.mark.parametrize("model_type", ["granite", "falcon_h1"])
def test_bias_on_a_head_whose_logits_are_scaled(model_type, batch) -> None:
    model = build(model_type)
    model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    expected, logits = train(model, **batch), model(**batch).logits
    patch_model(model)
    torch.testing.assert_close(train(model, **batch), expected, atol=1e-6, rtol=1e-4)
    given = model(**batch, head_loss=lambda hidden, weight, bias, _: nn.functional.linear(hidden, weight, bias)).loss
    torch.testing.assert_close(given, logits, atol=1e-5, rtol=1e-4)


def test_loss_function_set_later_counts(batch) -> None:
    model = build()
    patch_model(model)
    model.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 3
    assert model(**batch).loss == 3


def test_gradient_checkpointing(batch) -> None:
    model = build()
    patch_model(model)
    expected = train(model, **batch, use_cache=False)
    model.model.gradient_checkpointing = True
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda f, *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False)
    torch.testing.assert_close(train(model, **batch, use_cache=False), expected, atol=0, rtol=0)


def test_bfloat16_and_autocast(batch) -> None:
    model = build()
    expected = train(model, **batch)[0]
    patch_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(train(model, **batch)[0], expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(train(model.bfloat16(), **batch)[0], expected, atol=2e-2, rtol=0)


def test_other_models_are_not_touched(batch) -> None:
    model, other = build(), build()
    before = snapshot(other)
    modeling = transformers.models.llama.modeling_llama
    rope = modeling.apply_rotary_pos_emb
    patch_model(model)
    assert snapshot(other) == before and modeling.apply_rotary_pos_emb is rope
    assert transformers.LlamaForCausalLM.forward is type(other).forward


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_patched_and_can_be_undone(duplicate, batch) -> None:
    model = build()
    patch_model(model)
    twin = duplicate(model)
    assert torch.equal(train(twin, **batch)[0], train(model, **batch)[0])
    unpatch_model(twin)
    assert (
        twin(**batch).logits is not None
        and type(twin.model.norm) is transformers.models.llama.modeling_llama.LlamaRMSNorm
    )
    assert model(**batch).logits is None


def test_patching_again_follows_the_last_call(batch) -> None:
    model = build()
    before = snapshot(model)
    first = patch_model(model)
    assert patch_model(model) == first
    assert patch_model(model, exclude=["linear_cross_entropy"]).excluded == ("linear_cross_entropy",)
    assert model(**batch).logits is not None
    unpatch_model(model)
    unpatch_model(model)
    assert snapshot(model) == before


def test_report() -> None:
    report = patch_model(build(), exclude=["rope"])
    assert report == PatchReport(
        model_type="llama",
        replaced={
            "rms_norm": (
                "model.layers.0.input_layernorm",
                "model.layers.0.post_attention_layernorm",
                "model.layers.1.input_layernorm",
                "model.layers.1.post_attention_layernorm",
                "model.norm",
            ),
            "swiglu": ("model.layers.0.mlp", "model.layers.1.mlp"),
            "linear_cross_entropy": ("(model)",),
        },
        excluded=("rope",),
        unsupported=(),
    )
    assert report.summary() == "llama: rms_norm x5, swiglu x2, linear_cross_entropy x1, rope excluded"
    assert patch_model(build("gemma")).summary().endswith("geglu x2, linear_cross_entropy x1")
    assert (
        patch_model(build("apertus"))
        .summary()
        .endswith("relu_squared has no place in it, gelu has no place in it, silu has no place in it")
    )


def test_inside_wrappers(batch) -> None:
    model = build()
    wrapped = torch.compile(model, backend="eager")
    patch_model(wrapped)
    assert wrapped(**batch).logits is None
    unpatch_model(wrapped)
    assert type(model) is transformers.LlamaForCausalLM


def test_inside_ddp(batch, tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = build()
        expected = train(model, **batch)
        wrapped = nn.parallel.DistributedDataParallel(model)
        patch_model(wrapped)
        torch.testing.assert_close(train(wrapped, **batch), expected, atol=1e-6, rtol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


def test_hooks_on_the_projection_are_called(batch) -> None:
    """The feed-forward layer's last projection is fused with its activation where nobody would notice."""
    model, seen = build(), []
    expected = train(model, **batch)
    patch_model(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    torch.testing.assert_close(train(model, **batch), expected, atol=1e-6, rtol=1e-4)
    assert len(seen) == LAYERS


def of_changed_head():
    """Expects the warning that the loss takes the memory of logits."""
    return pytest.warns(UserWarning, match="LlamaForCausalLM.lm_head was changed after patching, .* memory of logits")


HOOKS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("path", ["model.layers.0.mlp.act_fn", "lm_head"])
def test_hooks_that_were_added_after_patching(path, kind, batch) -> None:
    """They are called as often as those of the plain model, whose loss and gradients stay the same."""
    model, seen = build(), []
    getattr(model.get_submodule(path), f"register_{kind}_hook")(lambda *_: seen.append(kind))
    expected, calls = train(model, **batch), len(seen)
    model.get_submodule(path).__dict__.update(
        {name: type(hooks)() for name, hooks in vars(model.get_submodule(path)).items() if name.endswith("_hooks")}
    )
    patch_model(model)
    getattr(model.get_submodule(path), f"register_{kind}_hook")(lambda *_: seen.append(kind))
    with of_changed_head() if path == "lm_head" else nullcontext():
        given = train(model, **batch)
    torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-4)
    assert calls == 1 and len(seen) == 2


def test_activation_that_was_replaced_after_patching(batch) -> None:
    model = build()
    patch_model(model)
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    given = train(model, **batch)
    unpatch_model(model)
    torch.testing.assert_close(given, train(model, **batch), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("change", ["hook", "replaced"])
def test_activation_of_experts_that_was_changed_after_patching(change, batch) -> None:
    model, seen = build("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), []
    assert "experts" in patch_model(model).replaced
    experts = model.model.layers[0].mlp.experts
    if change == "hook":
        experts.act_fn.register_forward_hook(lambda *_: seen.append(1))
    else:
        experts.act_fn = nn.Tanh()
    given, called = train(model, **batch), len(seen)
    assert bool(called) == (change == "hook")
    unpatch_model(model)
    torch.testing.assert_close(given, train(model, **batch), atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of what peft calls
def test_inside_peft(batch) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(build(), config)
    model.add_adapter("headless", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)

    def losses() -> list[torch.Tensor]:
        """Of the adapter with a head of its own, with it switched off, and of the adapter without one."""
        found = [model(**batch).loss]
        with model.disable_adapter():
            found.append(model(**batch).loss)
        model.set_adapter("headless")
        found.append(model(**batch).loss)
        model.set_adapter("default")
        return found

    expected = losses()
    assert abs(expected[0] - expected[1]) > 1
    assert patch_model(model).counts == {"rms_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}
    torch.testing.assert_close(losses(), expected)
    model(**batch).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("lm_head" in name for name in trained)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of what peft calls
@pytest.mark.parametrize("part", ["", "original_module", "modules_to_save.default"])
def test_hooks_on_a_head_inside_peft(part, batch) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.base_model.model.lm_head.get_submodule(part).register_forward_hook(lambda *_: None)
    if part == "original_module":  # which is not called
        patch_model(model)
    else:
        with pytest.raises(ValueError, match="does not call the output head"):
            patch_model(model, require_all=True)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of what peft calls
def test_head_inside_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"needs an output head that is a plain nn\.Linear, not Linear"):
        patch_model(model, require_all=True)
    assert snapshot(model) == before
    patch_model(model, exclude=["linear_cross_entropy"])


def test_on_meta_launches_are_recorded() -> None:
    with torch.device("meta"):
        model = build(tie_word_embeddings=True).bfloat16()
        patch_model(model)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        with recording() as calls:
            model(input_ids=tokens, position_ids=torch.arange(16)[None], labels=tokens).loss.backward()
    names = {call.kernel.fn.__name__ for call in calls}
    assert {"cross_entropy_kernel", "multiply_kernel"} < names and len(names) > 5


@pytest.mark.parametrize(
    ("make", "exclude", "message"),
    [
        (
            build,
            ["rmsnorm"],
            "unknown operator 'rmsnorm', did you mean 'rms_norm'\\? known are rms_norm, layer_norm, rope",
        ),
        (build, "flash", "unknown operator 'flash'; known are"),
        (lambda: nn.Linear(2, 2), [], "Linear has no config.model_type"),
        (lambda: build().model, [], "linear_cross_entropy: no LlamaForCausalLM is in LlamaModel"),
        (
            lambda: build(hidden_act="gelu"),
            [],
            r"swiglu computes SiLUActivation, SiLU, but model.layers.0.mlp.act_fn is GELU.*pass exclude=\('swiglu',\)",
        ),
    ],
    ids=["misspelled", "unknown", "no config", "no head", "another activation"],
)
def test_what_cannot_be_patched_raises(make, exclude, message) -> None:
    model = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        patch_model(model, exclude=exclude, require_all=True)
    assert snapshot(model) == before


def test_what_cannot_be_patched_keeps_its_own_code(batch) -> None:
    model = build(hidden_act="gelu")
    expected = train(model, **batch)
    report = patch_model(model)
    assert report.counts == {"rms_norm": 5, "rope": LAYERS, "linear_cross_entropy": 1}
    assert "swiglu left out: swiglu computes SiLUActivation, SiLU, but model.layers.0.mlp" in report.summary()
    torch.testing.assert_close(train(model, **batch), expected, atol=1e-6, rtol=1e-4)


def test_forward_of_its_own() -> None:
    model = build()
    model.model.norm.forward = model.model.norm.forward
    with pytest.raises(ValueError, match=r"model\.norm has a forward of its own"):
        patch_model(model, require_all=True)
    report = patch_model(model)
    assert "rms_norm" not in report.replaced and "forward of its own" in report.kept["rms_norm"][0]


def replaced(function):
    """Something else of the same name, as patches of other libraries are written."""
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


@pytest.mark.parametrize(
    ("owner", "name", "operator"),
    [
        ("LlamaRMSNorm", "forward", "rms_norm"),
        ("LlamaAttention", "forward", "rope"),
        (None, "apply_rotary_pos_emb", "rope"),
        ("LlamaMLP", "forward", "swiglu"),
        ("LlamaForCausalLM", "forward", "linear_cross_entropy"),
    ],
)
@pytest.mark.parametrize("other", [replaced, lambda _: transformers.models.gemma.modeling_gemma.GemmaMLP.forward])
def test_code_of_the_family_that_was_replaced(owner, name, operator, other, monkeypatch) -> None:
    modeling = transformers.models.llama.modeling_llama
    model, place = build(), getattr(modeling, owner) if owner else modeling
    patch_model(model)
    unpatch_model(model)
    before = snapshot(model)
    with monkeypatch.context() as patched:
        patched.setattr(place, name, other(getattr(place, name)))
        with pytest.raises(ValueError, match=rf"{operator} stands for (\w+\.)?{name} of .*exclude=\('{operator}',\)"):
            patch_model(model, require_all=True)
        assert operator in patch_model(model).kept and operator in patch_model(model, exclude=[operator]).excluded
        unpatch_model(model)
    assert snapshot(model) == before
    patch_model(model)


def test_a_function_that_offers_kernels_is_the_familys_own(batch, monkeypatch) -> None:
    """With the package `kernels` installed, its decorator leaves a module in place of the function."""
    modeling = transformers.models.llama.modeling_llama
    rotate = modeling.apply_rotary_pos_emb
    offering = type(
        "Func", (nn.Module,), {"__module__": "kernels.layer.func", "forward": lambda _, *args: rotate(*args)}
    )
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", offering())
    model = build()
    expected = model(**batch).loss
    assert patch_model(model).counts["rope"] == LAYERS
    torch.testing.assert_close(model(**batch).loss, expected)


def test_what_attention_calls_may_be_replaced_later(batch, monkeypatch) -> None:
    model = build()
    patch_model(model)
    model.config._attn_implementation, seen = "eager", []
    modeling = transformers.models.llama.modeling_llama
    attention = modeling.eager_attention_forward
    monkeypatch.setattr(
        modeling, "eager_attention_forward", lambda *args, **kwargs: seen.append(0) or attention(*args, **kwargs)
    )
    model(**batch)
    assert len(seen) == LAYERS


def test_loss_of_its_own() -> None:
    model = build()
    model.loss_function = lambda **_: None
    with pytest.raises(ValueError, match="stands for the loss ForCausalLMLoss"):
        patch_model(model, require_all=True)


def replace_forward(head: nn.Linear) -> None:
    head.forward = head.forward


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "attach",
    [replace_forward, nn.utils.weight_norm, lambda head: head.register_forward_hook(lambda *_: None)],
    ids=["forward", "weight_norm", "hook"],
)
def test_head_whose_call_does_more(attach, batch) -> None:
    model = build()
    patch_model(model)
    attach(model.lm_head)
    with pytest.raises(ValueError, match="does not call the output head"):
        model(**batch, head_loss=lambda *_: None)
    with of_changed_head():
        given = model(**batch)
    unpatch_model(model)
    torch.testing.assert_close(given.logits, model(**batch).logits)
    with pytest.raises(ValueError, match="does not call the output head"):
        patch_model(model, require_all=True)
    assert "does not call the output head" in patch_model(model).kept["linear_cross_entropy"][0]
    assert model(**batch).logits is not None


@pytest.mark.parametrize("when", ["before", "after"])
def test_head_that_torchao_quantized(when, batch) -> None:
    """The loss is that of the quantized head, in plain transformers."""
    quantization = pytest.importorskip("torchao.quantization")
    model = build()

    def quantize() -> None:
        quantization.quantize_(
            model, quantization.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("lm_head")
        )

    if when == "before":
        quantize()
    report = patch_model(model)
    if when == "after":
        quantize()
    else:
        assert "a plain weight, not Int8Tensor" in report.kept["linear_cross_entropy"][0]
    with of_changed_head() if when == "after" else nullcontext():
        given = model(**batch).loss
    unpatch_model(model)
    torch.testing.assert_close(given, model(**batch).loss, atol=1e-6, rtol=1e-4)


def test_class_derived_from_a_patched_one() -> None:
    model = build()
    patch_model(model)
    model.model.norm.__class__ = type("Sharded", (type(model.model.norm),), {})
    before = snapshot(model)
    with pytest.raises(ValueError, match="Sharded was derived from a patched class"):
        unpatch_model(model)
    assert snapshot(model) == before
