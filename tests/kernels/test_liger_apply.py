"""Liger's functions that patch models: of a model, of models that are built later, and as trainers call them."""

import copy
import functools
import inspect
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from strata_kernels import unpatch_model
from strata_kernels.compat import liger
from tests.kernels.helpers.liger import batch, build, fused, train

pytestmark = pytest.mark.usefixtures("liger_kernel")

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALL = {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaForCausalLM"}


def apply(name: str = "llama"):
    import liger_kernel.transformers

    return getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{name}")


def same(model: nn.Module, other: nn.Module) -> None:
    """Logits, loss and gradients of the two models are equal."""
    (loss, grads), (expected, expected_grads) = train(model, **batch()), train(other, **batch())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, expected_grads, atol=1e-6, rtol=1e-4)
    tokens = batch()["input_ids"]
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "granite"])
def test_a_model(name) -> None:
    model = build(name, **(EXPERTS if "moe" in name else {}))
    plain = copy.deepcopy(model)
    assert apply(name)(model=model) is None
    kinds = fused(model)
    assert len(kinds) >= 3 and not fused(plain)
    same(model, plain)


def test_models_that_are_built_later() -> None:
    before = build()
    apply()()
    model, other = build(), build("mistral")
    assert fused(model) == ALL and not fused(before) and not fused(other)
    same(model, before)
    assert model(**batch()).logits is None
    liger.uninstall()
    assert not fused(build()) and fused(model) == ALL
    unpatch_model(model)
    assert type(model) is LlamaForCausalLM


def test_models_that_are_loaded_later(tmp_path) -> None:
    plain = build()
    plain.save_pretrained(tmp_path)
    apply()(rope=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert fused(model) == ALL - {"LlamaAttention"}
    same(model, plain)
    model.save_pretrained(tmp_path / "again")
    liger.uninstall()
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "again").train(), plain)


def test_the_last_call_decides_and_transformers_is_left_as_it_was() -> None:
    original = PreTrainedModel.post_init
    apply()()
    apply()(rms_norm=False, swiglu=None)
    apply("mistral")()
    assert PreTrainedModel.post_init is not original
    assert fused(build()) == {"LlamaAttention", "LlamaForCausalLM"}
    liger.uninstall()
    assert PreTrainedModel.post_init is original
    liger.install()
    assert not fused(build())


def test_a_model_inside_of_another_is_patched_as_its_own_type_says() -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **sizes}
    text = {"model_type": "llama", "vocab_size": 67, **sizes}
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision)
    apply()(rope=False)
    inner = AutoModelForImageTextToText.from_config(config)
    assert fused(inner) == {"LlamaRMSNorm", "LlamaMLP"}
    apply("llava")()
    both = AutoModelForImageTextToText.from_config(config)
    assert "LlavaForConditionalGeneration" in fused(both) and "LlamaAttention" not in fused(both)


def test_the_loss_from_logits() -> None:
    model, plain = build(), build()
    apply()(cross_entropy=True, fused_linear_cross_entropy=False, model=model)
    assert (
        fused(model) == ALL - {"LlamaForCausalLM"} and torch.nn.functional.cross_entropy is nn.functional.cross_entropy
    )
    same(model, plain)
    torch.testing.assert_close(model(**batch(), num_items_in_batch=7).loss, plain(**batch(), num_items_in_batch=7).loss)
    assert model(**batch()).loss.grad_fn.name().startswith("strata_cross_entropy")
    apply()(model=model)
    assert fused(model) == ALL and "_loss_function" not in vars(model)
    with pytest.raises(ValueError, match="cannot both be True"):
        apply()(cross_entropy=True)


def test_signatures_are_ligers() -> None:
    parameters = inspect.signature(apply()).parameters
    assert list(parameters) == ["rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu", "model"]
    assert [p.default for p in parameters.values()] == [True, False, True, True, True, None]
    assert inspect.signature(apply("gpt_oss")).parameters["swiglu"].default is False
    assert inspect.signature(apply("llava")).parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    with pytest.raises(TypeError, match="geglu"):
        apply()(geglu=True)


def test_what_liger_has_no_kernel_for_is_fused_unless_it_is_switched_off() -> None:
    # Liger leaves the rotation of GLM-4 off by default.
    on, off = build("glm4"), build("glm4")
    apply("glm4")(model=on)
    apply("glm4")(rope=False, model=off)
    assert "Glm4Attention" in fused(on) and "Glm4Attention" not in fused(off)


def test_by_model_type(caplog) -> None:
    from liger_kernel.transformers import _apply_liger_kernel, _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    assert len(MODEL_TYPE_TO_APPLY_LIGER_FN) == 53
    _apply_liger_kernel("llama", rope=False, geglu=True, dtype="auto")
    assert fused(build()) == ALL - {"LlamaAttention"}
    # A family that Liger has not.
    _apply_liger_kernel("stablelm")
    assert "StableLmForCausalLM" in fused(build("stablelm"))
    model = build("helium")
    with caplog.at_level(logging.WARNING):
        _apply_liger_kernel_to_instance(model, rope=False, rms_nrom=False)
    assert "HeliumRMSNorm" in fused(model) and "HeliumAttention" not in fused(model)
    assert "unknown flag 'rms_nrom' has no effect, did you mean 'rms_norm'?" in caplog.text


def test_auto_model(tmp_path) -> None:
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    plain = build()
    plain.save_pretrained(tmp_path)
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, rope=False, swiglu=True).train()
    assert fused(model) == ALL - {"LlamaAttention"} and not fused(build())
    same(model, plain)
    assert fused(AutoLigerKernelForCausalLM.from_config(plain.config, rms_norm=False)) == ALL - {"LlamaRMSNorm"}


def test_as_llama_factory_calls_it() -> None:
    """`require_logits` there asks for the loss from logits, if the signature has both."""
    function = apply("qwen2")
    assert "fused_linear_cross_entropy" in inspect.signature(function).parameters
    function(fused_linear_cross_entropy=False, cross_entropy=True)
    model, plain = build("qwen2"), copy.deepcopy(build("qwen2"))
    unpatch_model(plain)
    del plain._loss_function
    same(model, plain)
    assert model(**batch()).logits is not None


def test_as_axolotl_calls_it() -> None:
    """Flags that a configuration leaves out are None there."""
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss  # noqa: F401
    from liger_kernel.transformers.functional import liger_cross_entropy  # noqa: F401
    from liger_kernel.transformers.layer_norm import LigerLayerNorm  # noqa: F401
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from liger_kernel.transformers.rope import liger_rotary_pos_emb  # noqa: F401
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP  # noqa: F401

    configured = {"rope": True, "cross_entropy": None, "fused_linear_cross_entropy": True, "rms_norm": True}
    configured |= {"layer_norm": None, "geglu": None, "swiglu": None}
    function = MODEL_TYPE_TO_APPLY_LIGER_FN["llama"]
    known = inspect.signature(function).parameters
    function(**{name: value for name, value in configured.items() if name in known})
    assert fused(build()) == ALL - {"LlamaMLP"}


def test_as_axolotl_calls_it_with_torch_compile_and_token_scaling(caplog) -> None:
    """It replaces functions of Liger's modules; those that would change a model are told of."""
    import liger_kernel.ops.fused_linear_cross_entropy as ops
    from liger_kernel.transformers import functional

    for name in ("fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"):
        setattr(ops, name, torch.compiler.disable(getattr(ops, name)))
    caplog.clear()
    scaled = functools.partial(functional.liger_fused_linear_cross_entropy, use_token_scaling=True)
    functional.liger_fused_linear_cross_entropy = scaled
    assert "functional.liger_fused_linear_cross_entropy was replaced; models that Strata" in caplog.text
    assert functional.liger_fused_linear_cross_entropy is scaled


def test_as_ms_swift_calls_it() -> None:
    """It wraps the loss, and hands the model to transformers' trainer."""
    from liger_kernel.transformers.model import loss_utils

    loss = loss_utils.LigerForCausalLMLoss
    loss_utils.LigerForCausalLMLoss = lambda hidden, *args, **kwargs: loss(hidden.contiguous(), *args, **kwargs)


@pytest.mark.parametrize("items", [None, 9])
def test_the_loss_of_a_forward_of_ones_own(items) -> None:
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    model, given = build(), batch()
    hidden = model.model(given["input_ids"]).last_hidden_state.detach().requires_grad_()
    # A model's forward passes on what it got.
    further = {"num_items_in_batch": items, "cu_seq_lens_q": None}
    loss = LigerForCausalLMLoss(hidden, model.lm_head.weight, given["labels"], hidden.shape[-1], **further)
    expected = ForCausalLMLoss(model.lm_head(hidden), given["labels"], 67, **further)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, hidden) for value in (loss, expected)))
    shifted = {"labels": None, "shift_labels": torch.nn.functional.pad(given["labels"][:, 1:], (0, 1), value=-100)}
    with_accuracy = LigerForCausalLMLoss(
        hidden, model.lm_head.weight, hidden_size=hidden.shape[-1], return_token_accuracy=True, **shifted, **further
    )
    torch.testing.assert_close(with_accuracy.loss, expected)
    assert 0 <= with_accuracy.token_accuracy <= 1


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_functions_around_the_fused_head(with_bias) -> None:
    from liger_kernel.ops import fused_linear_cross_entropy as ops

    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((6, 8), (11, 8), (11,)))
    target = torch.tensor([1, 4, -100, 10, 0, 7])
    given = (x, weight, *([bias] if with_bias else []))
    loss, _, _, tokens, *grads = ops.fused_linear_cross_entropy_forward(
        x, weight, target, bias=bias if with_bias else None, return_predicted_tokens=True
    )
    learning = [t.clone().requires_grad_() for t in given]
    logits = torch.nn.functional.linear(*learning)
    expected = torch.nn.functional.cross_entropy(logits, target)
    expected_grads = torch.autograd.grad(3 * expected, learning)
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(tokens[target >= 0], logits.argmax(-1)[target >= 0])
    found = ops.fused_linear_cross_entropy_backward(torch.tensor(3.0), *grads)
    torch.testing.assert_close(found[: len(given)], expected_grads)
    assert len(found) == 3 and (with_bias or found[2] is None)


@pytest.mark.filterwarnings("ignore")
def test_a_call_inside_of_fsdps_forward() -> None:
    from liger_kernel.transformers.fsdp import _FSDPForwardRedirection
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        head = nn.Linear(4, 3)
        wrapped, x = FullyShardedDataParallel(copy.deepcopy(head), device_id=torch.device("cpu")), torch.ones(2, 4)
        call = _FSDPForwardRedirection()
        torch.testing.assert_close(call(wrapped, lambda y: 2 * wrapped.module(y), x), 2 * head(x))
        with pytest.raises(ZeroDivisionError):
            call(wrapped, lambda y: 1 / 0, x)
        torch.testing.assert_close(wrapped(x), head(x))
    finally:
        torch.distributed.destroy_process_group()


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 67, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def losses_of_trainer(tmp_path, model: nn.Module, **arguments: object) -> tuple[list[float], float, nn.Module]:
    """The losses of six steps, that of an evaluation, and the trained model."""
    settings = TrainingArguments(
        tmp_path, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, **arguments,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return logged, trainer.evaluate()["eval_loss"], model


@pytest.mark.parametrize("flags", [None, {"rope": False, "cross_entropy": True, "fused_linear_cross_entropy": False}])
def test_hugging_faces_trainer(tmp_path, flags) -> None:
    plain, plain_eval, _ = losses_of_trainer(tmp_path, build())
    liger_, liger_eval, model = losses_of_trainer(tmp_path, build(), use_liger_kernel=True, liger_kernel_config=flags)
    assert fused(model) == (ALL if flags is None else {"LlamaRMSNorm", "LlamaMLP"})
    assert len(plain) == 6 and plain[-1] < plain[0]
    assert liger_ == pytest.approx(plain, rel=1e-4) and liger_eval == pytest.approx(plain_eval, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_hugging_faces_trainer_with_an_adapter(tmp_path) -> None:
    def adapted() -> nn.Module:
        torch.manual_seed(0)
        return get_peft_model(build(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))

    plain, plain_eval, _ = losses_of_trainer(tmp_path, adapted())
    liger_, liger_eval, model = losses_of_trainer(tmp_path, adapted(), use_liger_kernel=True)
    assert fused(model) == ALL
    assert liger_ == pytest.approx(plain, rel=1e-4) and liger_eval == pytest.approx(plain_eval, rel=1e-4)
