"""transformers runs `experts` where its own setting asks for it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strata_kernels import patch_model, register_experts
from strata_kernels.patch import experts_forward, experts_interface

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
         "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2,
         "tie_word_embeddings": False}  # fmt: skip
TOKENS = torch.arange(20).view(2, 10)


def build(kind, implementation):
    register_experts()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES)
    config.eos_token_id = config.pad_token_id = config.bos_token_id = None
    return AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation, attn_implementation="eager", dtype=torch.float32
    )


def results(model):
    output = model(TOKENS, labels=TOKENS)
    return [output.logits.detach(), *torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)]


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_it_equals_transformers_own(kind, monkeypatch):
    calls = []
    monkeypatch.setattr(
        experts_forward,
        "experts",
        lambda *args, _own=experts_forward.experts, **kw: calls.append(1) or _own(*args, **kw),
    )
    model = build(kind, "strata")
    own = [each for each in results(build(kind, "eager")) if each is not None]
    ours = [each for each in results(model) if each is not None]
    # Once a layer, after the proofs of the first call.
    proofs = len(calls) - 2
    results(model)
    assert len(calls) - 4 == proofs > 0
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    # What is kept on the modules is no part of the model, and a patch goes over it.
    assert model.state_dict().keys() == build(kind, "eager").state_dict().keys()
    assert patch_model(model).counts["experts"] == 2
    torch.testing.assert_close([each for each in results(model.eval()) if each is not None], own, rtol=1e-4, atol=1e-5)


def test_what_it_cannot_stand_for_is_refused(monkeypatch):
    model = build("qwen3_moe", "strata")
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = torch.nn.Tanh()
    with pytest.raises(ValueError, match=r"'strata' cannot stand for Qwen3MoeExperts, which has another activation"):
        results(model)
    assert experts_interface.NAME in str(model.config._experts_implementation)
