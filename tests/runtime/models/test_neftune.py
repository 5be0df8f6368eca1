"""NEFTune's noise is that of transformers, per document, in training alone."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.neftune import activate_neftune

from tasks.runtime.models.neftune import add_neftune, document_lengths
from tests.runtime.helpers.comparable_runs import SAVED, curve, make_spec
from tests.runtime.helpers.train_only import train_spec

ALPHA = 5.0
TOKENS = torch.arange(3, 27).reshape(2, 12)


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def embeddings(model, positions):
    found = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: found.append(output.detach()))
    torch.manual_seed(1)
    logits = model(input_ids=TOKENS, position_ids=positions).logits
    return found[-1], logits


def positions_of(*lengths):
    return torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)


def test_whole_rows_get_the_noise_of_transformers():
    ours, theirs = make_model(), make_model()
    add_neftune(ours, ALPHA)
    activate_neftune(theirs, ALPHA)
    for found, expected in zip(embeddings(ours, positions_of(12)), embeddings(theirs, positions_of(12)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_noise_of_a_document_is_that_of_its_own_length():
    model = make_model()
    add_neftune(model, ALPHA)
    noise = embeddings(model, positions_of(9, 2, 1))[0] - model.get_input_embeddings().weight[TOKENS]
    for begin, length in ((0, 9), (9, 2), (11, 1)):
        most = noise[:, begin : begin + length].abs().max().item()
        bound = ALPHA / (length * 16) ** 0.5
        assert 0.85 * bound < most <= bound * 1.0001


def test_there_is_no_noise_in_evaluation():
    model = make_model()
    expected = embeddings(make_model().eval(), positions_of(12))[1]
    add_neftune(model, ALPHA)
    assert not torch.equal(embeddings(model, positions_of(12))[1], expected)
    assert torch.equal(embeddings(model.eval(), positions_of(12))[1], expected)


def test_a_row_that_begins_within_a_document_is_counted_from_there():
    assert document_lengths(torch.tensor([[7, 8, 0, 0, 1, 2]])).tolist() == [[2, 2, 1, 3, 3, 3]]


@pytest.mark.usefixtures("narrowed")
def test_a_resumed_run_draws_the_same_noise(output):
    spec = make_spec(output, "noisy", "torch", "single", 1, training={"neftune_noise_alpha": 5.0})
    without = make_spec(output, "quiet", "torch", "single", 1, steps=1)
    train_spec(spec)
    expected = curve(spec)
    train_spec(spec, SAVED)
    assert curve(spec) == expected
    train_spec(without)
    assert curve(without)[0][1] != expected[0][1]
