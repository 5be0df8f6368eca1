"""What the log says of a run before its first step."""

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime.training.run_summary import _log_gradient_sums


@pytest.mark.parametrize(
    ("training", "dtype", "line"),
    [
        ({"gradient_accumulation_steps": 16}, "bfloat16", None),
        ({"gradient_accumulation_steps": 17}, "bfloat16", "gradients of the 17 micro-batches of a step are added in f"),
        ({"gradient_accumulation_steps": 17}, "float32", None),
        ({"gradient_accumulation_steps": 17, "gradient_accumulation_dtype": "bfloat16"}, "bfloat16", None),
        ({"gradient_accumulation_steps": 2, "gradient_accumulation_dtype": "float32"}, "bfloat16", "the 2 micro-bat"),
        ({"gradient_accumulation_dtype": "float32"}, "bfloat16", "has no effect: a step has one micro-batch"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_dtype": "float32"}, "float32",
            "has no effect: no trainable weight is bfloat16",
        ),
        ({"gradient_accumulation_steps": 17, "gradient_accumulation_dtype": "bfloat16"}, "float32", "effect: no"),
        ({"tokens_per_step": 40960, "micro_batch_size": 1}, "bfloat16", "gradients of the 20 micro-batches"),
    ],
)  # fmt: skip
def test_it_says_in_which_dtype_gradients_are_added(training, dtype, line, caplog):
    spec = RunSpec.model_validate({"training": training, "data": {"sequence_length": 2048}})
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, dtype=dtype, **small)).to(getattr(torch, dtype))
    with caplog.at_level(logging.INFO):
        _log_gradient_sums(spec.training, model)
    assert (line in caplog.text) if line else not caplog.text
