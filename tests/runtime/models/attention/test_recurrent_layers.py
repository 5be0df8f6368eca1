"""A sequence of a packed row trains as it does in a row of its own, whatever state the layers of the model carry."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec.sections.training import Training
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.attention.packing_support import supports_packing
from tasks.runtime.models.attention.recurrent_layers import (
    _similar,
    describe_recurrent_layers,
    isolate_sequences,
    missing_fast_paths,
    recurrent_layers,
)
from tasks.runtime.models.build import support_packed_rows
from tests.runtime.helpers.hybrid_families import (
    POSITIONS,
    RECURRENT,
    TOKENS,
    assert_same,
    build_family,
    run_alone,
    run_packed,
)


@pytest.mark.parametrize("family", RECURRENT)
def test_packed_sequences_train_as_they_do_alone(family):
    model = build_family(family)
    expected = run_alone(model)
    assert not supports_packing(model)
    support_packed_rows(model)
    assert_same(run_packed(model), expected)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_recomputation_finds_the_sequences_again(family):
    model = build_family(family)
    expected = run_alone(model)
    support_packed_rows(model)
    checkpoint_activations(model, Training(gradient_checkpointing="full"))
    # The second batch has other sequences.
    run_packed(model)
    model(input_ids=TOKENS[:, :7], position_ids=torch.arange(7).expand(2, 7)).logits.sum().backward()
    assert_same(run_packed(model), expected)


def test_a_copy_of_the_model_has_sequences_of_its_own():
    model = build_family("qwen3_5_text")
    expected = run_alone(model)
    isolate_sequences(model)
    other = copy.deepcopy(model)
    run_packed(model)
    assert_same(run_packed(other), expected)
    for own, first in zip(recurrent_layers(other).values(), recurrent_layers(model).values(), strict=True):
        assert own.forward.args[0] is not first.forward.args[0]


def test_a_call_without_positions_is_one_sequence_a_row():
    model = build_family("falcon_h1").eval()
    expected = model(input_ids=TOKENS).logits
    isolate_sequences(model)
    model(input_ids=TOKENS, position_ids=POSITIONS)
    assert torch.equal(model(input_ids=TOKENS).logits, expected)
    # The base model alone, as heads of other objectives call it.
    packed = model.model(input_ids=TOKENS, position_ids=POSITIONS)[0]
    assert torch.equal(model.lm_head(packed) * model.model.lm_head_multiplier, model(TOKENS, position_ids=POSITIONS)[0])
    whole = model.model(input_ids=TOKENS)[0]
    assert torch.equal(model.lm_head(whole) * model.model.lm_head_multiplier, expected)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_generation_with_a_cache_is_unchanged(family):
    model = build_family(family).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    expected = model.generate(TOKENS[:, :9], **options)
    isolate_sequences(model)
    assert torch.equal(model.generate(TOKENS[:, :9], **options), expected)


def test_a_model_of_attention_alone_has_no_hooks():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    isolate_sequences(model)
    assert not recurrent_layers(model) and not model._forward_pre_hooks and not model.model._forward_pre_hooks


def test_padding_adds_at_most_a_third():
    lengths = torch.randint(1, 4096, (500,), generator=torch.Generator().manual_seed(0))
    groups = _similar(lengths)
    assert sorted(torch.cat(groups).tolist()) == list(range(500))
    computed = sum(int(lengths[group].max()) * len(group) for group in groups)
    assert computed <= 4 / 3 * int(lengths.sum()) + 64 * 500 and len(groups) < 20


def test_packages_with_fast_kernels_are_named_by_what_a_family_calls():
    packages = {
        "qwen3_next": ["causal-conv1d", "flash-linear-attention"],
        "kimi_linear": ["causal-conv1d", "flash-linear-attention"],
        "nemotron_h": ["causal-conv1d", "mamba-ssm"],
        "jamba": ["causal-conv1d", "mamba-ssm"],
        "lfm2": ["causal-conv1d"],
        "recurrent_gemma": [],
    }
    assert {family: list(missing_fast_paths(build_family(family))) for family in packages} == packages
    assert describe_recurrent_layers(build_family("jamba")) == (
        "1 JambaMambaMixer; causal-conv1d and mamba-ssm not installed, so transformers' slower PyTorch code runs: "
        "PyTorch's convolution and a loop over tokens"
    )
    assert describe_recurrent_layers(build_family("recurrent_gemma")) == "1 RecurrentGemmaRecurrentBlock"
