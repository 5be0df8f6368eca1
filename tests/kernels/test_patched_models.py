"""Small models with and without the operators: through the kernels, with the gradients that real attention hands over.

`test_patch.py` holds what else patching promises.
"""

import pytest
import torch

from strata_kernels import patch_model
from strata_kernels.patch.table import ROWS
from tests.kernels.test_patch import SIZES, VOCABULARY, build, train

HEADS = SIZES["num_attention_heads"]
# In eager attention k's gradient is the transpose of a product, unless key heads are repeated before it.
ATTENTION = [("eager", HEADS), ("eager", HEADS // 2), ("sdpa", HEADS), ("sdpa", HEADS // 2)]
# One of each kind of norm, feed-forward layer and rotation; the others take the way that has been wrong.
WAYS = dict.fromkeys(("llama", "qwen3", "gemma3_text", "olmo2", "phi3", "glm", "arcee"), ATTENTION)
# Capped scores are for eager attention alone.
WAYS["gemma2"] = ATTENTION[:2]
CASES = [(row, *way) for row in ROWS for way in WAYS.get(row, ATTENTION[:1])]


@pytest.mark.parametrize(("model_type", "attention", "key_heads"), CASES)
def test_trains_as_without_the_operators(model_type, attention, key_heads, device) -> None:
    model = build(model_type, attn_implementation=attention, num_key_value_heads=key_heads, num_hidden_layers=1)
    model.to(device)
    tokens = torch.randint(3, VOCABULARY, (1, 5), device=device)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    expected, expected_logits = train(model, **batch), model(tokens, use_cache=False).logits
    patch_model(model)
    assert model.config._attn_implementation == attention
    (loss, gradients), (expected_loss, expected_gradients) = train(model, **batch), expected
    torch.testing.assert_close(loss, expected_loss)
    for (name, _), given, wanted in zip(model.named_parameters(), gradients, expected_gradients, strict=True):
        torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected_logits, atol=1e-5, rtol=1e-4)
