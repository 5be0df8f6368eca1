"""The output head of families without a row: what a loss by `linear_cross_entropy` must not change."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from strata_kernels import patch_model
from tests.kernels.helpers.tiny_models import build_tiny
from tests.kernels.test_discover import build_other, other_family
from tests.kernels.test_patch import VOCABULARY

Llama = modeling_llama.LlamaForCausalLM
Output = modeling_llama.CausalLMOutputWithPast


class OwnForCausalLM(Llama):
    """Llama's, in the parts that a family may write in another way."""

    def body(self, **inputs):
        return self.model(**inputs)

    def logits(self, hidden):
        return self.lm_head(hidden)

    def criterion(self, logits, labels, mask, **kwargs):
        return self.loss_function(logits, labels, self.config.vocab_size, **kwargs)

    def output(self, outputs, **fields):
        return Output(past_key_values=outputs.past_key_values, **fields)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, **kwargs):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        outputs = self.body(**inputs, **kwargs)
        logits, loss = self.logits(outputs.last_hidden_state), None
        if labels is not None:
            loss = self.criterion(logits, labels, attention_mask, **kwargs)
        return self.output(outputs, loss=loss, logits=logits)


class ScaledForCausalLM(OwnForCausalLM):
    def logits(self, hidden):
        return 1.0001 * super().logits(hidden)


class CappedForCausalLM(OwnForCausalLM):
    def logits(self, hidden):
        return 300 * torch.tanh(super().logits(hidden) / 300)


class MaskedForCausalLM(OwnForCausalLM):
    def criterion(self, logits, labels, mask, **kwargs):
        labels = labels if mask is None else labels.masked_fill(mask == 0, -100)
        return super().criterion(logits, labels, mask, **kwargs)


class UncountedForCausalLM(OwnForCausalLM):
    def criterion(self, logits, labels, mask, **kwargs):
        return super().criterion(logits, labels, mask)


class UnmaskedForCausalLM(OwnForCausalLM):
    def body(self, attention_mask, **inputs):
        return super().body(**inputs)


class RicherForCausalLM(OwnForCausalLM):
    def output(self, outputs, **fields):
        output = super().output(outputs, **fields)
        output["perplexity"] = 1.0
        return output


ANOTHER_LOSS = "computes its loss from the hidden states in another way"


def test_the_same_head_in_other_words() -> None:
    assert "linear_cross_entropy" in patch_model(other_family(LlamaForCausalLM=OwnForCausalLM)).replaced


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (ScaledForCausalLM, ANOTHER_LOSS),
        (CappedForCausalLM, ANOTHER_LOSS),
        (MaskedForCausalLM, ANOTHER_LOSS),
        (UncountedForCausalLM, ANOTHER_LOSS),
        (UnmaskedForCausalLM, "passes other arguments to its body"),
        (RicherForCausalLM, "returns other things than its loss and what its body returns"),
    ],
)
def test_what_is_not_equal_keeps_its_own_code(cls, reason) -> None:
    report = patch_model(other_family(LlamaForCausalLM=cls))
    assert "linear_cross_entropy" not in report.replaced and reason in report.kept["linear_cross_entropy"][0]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "openai-gpt", "gpt2", "bloom"])
def test_returns_what_the_family_returns(model_type) -> None:
    routed = {"output_router_logits": True} if model_type == "qwen3_moe" else {}
    model, tokens = build_other(model_type), torch.randint(3, VOCABULARY, (2, 9))
    inputs = {"input_ids": tokens, "labels": tokens, "output_hidden_states": True, **routed}
    expected = model(**inputs)
    assert "linear_cross_entropy" in patch_model(model).replaced
    output = model(**inputs)
    assert type(output) is type(expected) and output.logits is None
    assert output.keys() == expected.keys() - {"logits"}
    torch.testing.assert_close(output.hidden_states, expected.hidden_states, atol=1e-5, rtol=1e-4)
    if routed:
        torch.testing.assert_close(output.aux_loss, expected.aux_loss)
        torch.testing.assert_close(output.router_logits, expected.router_logits, atol=1e-5, rtol=1e-4)
    assert len(model(**inputs, return_dict=False)) == len(model.eval()(**inputs, return_dict=False)) - 1


def test_residuals_in_fp32() -> None:
    """Mamba's hidden states are in fp32 where its head is in bf16."""
    model, tokens = build_other("mamba").bfloat16(), torch.randint(3, VOCABULARY, (2, 9))
    expected = model(input_ids=tokens, labels=tokens).loss
    assert "linear_cross_entropy" in patch_model(model).replaced
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss, expected.float(), atol=0.02, rtol=0.02)


class OuterForConditionalGeneration(modeling_llama.LlamaPreTrainedModel):
    """As Llama 4's for images: what is inside is a causal model too, and its logits are needed."""

    def __init__(self, inner):
        super().__init__(inner.config)
        self.language_model = inner

    def forward(self, input_ids, labels=None):
        return self.language_model(input_ids=input_ids, labels=labels).logits


def test_a_causal_model_inside_of_another_one() -> None:
    model, tokens = OuterForConditionalGeneration(other_family()), torch.randint(3, VOCABULARY, (2, 9))
    report = patch_model(model)
    assert "linear_cross_entropy" not in report.replaced
    assert "has a forward without" in report.kept["linear_cross_entropy"][0]
    assert model.train()(tokens, labels=tokens).shape == (2, 9, VOCABULARY)


@pytest.mark.parametrize("model_type", ["mistral3", "llava_onevision"])
def test_which_layers_of_a_tower_to_take_is_in_the_configuration(model_type) -> None:
    """A decorator of the family's forward passes it on to the body; one way to select the layers is allowed by name."""
    model = build_tiny(model_type)
    given = []
    model.model.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    tokens = torch.randint(3, VOCABULARY, (1, 5))
    expected = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert patch_model(model).counts["linear_cross_entropy"] == 1
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens, use_cache=False).loss, expected)
    plain, ours = ({name: value for name, value in one.items() if name.startswith("vision_")} for one in given)
    assert "vision_feature_layer" in plain and ours == plain
