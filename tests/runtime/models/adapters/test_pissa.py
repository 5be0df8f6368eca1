"""PiSSA's matrices are PEFT's, the model begins as it was, and what is written fits the original weights."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from strata_platform.spec.sections.model import Lora, Model
from tasks.runtime.models.adapters.adapter_folder import load_initial_adapter, write_adapter
from tasks.runtime.models.adapters.lora import add_adapter, base_fingerprint
from tasks.runtime.models.adapters.pissa import principal_matrices, set_initial_matrices
from tasks.runtime.models.build import build_model, build_model_on_meta

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")
TOKENS = torch.arange(5, 37)[None]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def begun(folder, dtype="float32", **adapter):
    """A model with PiSSA, its initial matrices, and the fingerprint of the weights before."""
    settings = Lora(**{"r": 4, "lora_alpha": 12, "init_lora_weights": "pissa"} | adapter)
    model = build_model(Model(name=str(folder), dtype=dtype), 0)
    add_adapter(model, settings, 0)
    before = base_fingerprint(model)
    initial = principal_matrices(model, settings, 0, CPU)
    assert base_fingerprint(model) == before
    set_initial_matrices(model, initial)
    return model, settings, initial, before


def logits(model):
    with torch.inference_mode():
        return model.eval()(input_ids=TOKENS).logits.float()


@pytest.mark.parametrize("use_rslora", [False, True])
def test_matrices_and_the_rest_are_those_of_peft(folder, use_rslora):
    model, *_ = begun(folder, use_rslora=use_rslora)
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules="all-linear", init_lora_weights="pissa", use_rslora=use_rslora
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).base_model.model
    for name, parameter in model.named_parameters():
        found, wanted = parameter.detach(), theirs.get_parameter(name).detach()
        if "lora_" in name:
            # A singular vector may have either sign.
            dim = 1 if "lora_A" in name else 0
            found = found * (found * wanted).sum(dim, keepdim=True).sign()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["pissa", "pissa_niter_4"])
def test_the_model_begins_as_it_was(folder, how, dtype):
    exact = build_model(Model(name=str(folder), dtype=dtype), 0)
    model, *_ = begun(folder, dtype, init_lora_weights=how)
    assert {parameter.dtype for parameter in model.parameters()} == {exact.dtype}
    # Two roundings of a weight to bfloat16, at most.
    largest = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    assert float((logits(model) - logits(exact)).abs().max() / logits(exact).abs().max()) < largest
    # Most of a weight is in the adapter.
    path = "model.layers.0.mlp.up_proj"
    rest, whole = model.get_parameter(f"{path}.base_layer.weight"), exact.get_parameter(f"{path}.weight")
    assert rest.float().norm() < 0.9 * whole.float().norm()


@pytest.mark.parametrize("adapter", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_what_is_written_fits_the_original_weights(folder, tmp_path, adapter):
    model, settings, initial, fingerprint = begun(folder, **adapter)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    base = Model(name=str(folder), dtype="float32")
    write_adapter(model, settings, base, tmp_path, fingerprint=fingerprint, initial=initial)
    exact = AutoModelForCausalLM.from_pretrained(folder)
    before = logits(exact)
    theirs = PeftModel.from_pretrained(exact, tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)
    assert (logits(theirs) - before).abs().max() > 0.1
    # A run starts from it, as from any adapter.
    scale = 2**0.5 if settings.use_rslora else 2
    again = settings.model_copy(
        update={"r": 8, "lora_alpha": 12 * scale, "init_lora_weights": "default", "init_from": str(tmp_path)}
    )
    other = build_model(base, 0)
    add_adapter(other, again, 0)
    load_initial_adapter(other, again, base)
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_that_peft_has_not_converted_is_refused(folder, tmp_path):
    """It fits weights that are not those of its base model."""
    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", init_lora_weights="pissa")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path)
    settings = Lora(r=4, lora_alpha=12, init_from=str(tmp_path))
    model = build_model(Model(name=str(folder)), 0)
    add_adapter(model, settings, 0)
    with pytest.raises(ValueError, match=r'init_lora_weights "pissa" is not supported'):
        load_initial_adapter(model, settings, Model(name=str(folder)))


def test_a_rank_beyond_the_singular_values_is_refused(folder):
    with pytest.raises(ValueError, match=r"adapter\.r is 17, but model\.layers\.0\.self_attn\.k_proj has 16 singular"):
        begun(folder, r=17)


def test_an_empty_model_stays_empty(folder):
    """Ranks whose weights come from rank 0."""
    _, settings, initial, _ = begun(folder)
    model = build_model_on_meta(Model(name=str(folder)))
    add_adapter(model, settings, 0)
    set_initial_matrices(model, initial)
    assert all(parameter.is_meta for parameter in model.parameters())
