"""What is exported is what was trained, as a process finds that has nothing else."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.export.check_folder import TOKENS, difference, expected_of, verify


@pytest.fixture
def folder(tmp_path):
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=4096, **shape)).save_pretrained(tmp_path)
    save_tokenizer(train_tokenizer(["2 + 2 = 4"]), tmp_path)
    return tmp_path


def test_a_folder_that_was_changed_is_not_the_trained_model(folder):
    """One that was not is read in every run that ends."""
    expected = expected_of(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    assert 0 < expected["input_ids"].shape[1] <= TOKENS
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is not the trained one: logits differ by .*Start the run again to export"):
        verify(folder, expected, torch.device("cpu"), "sdpa")


def changed(**tensors):
    return lambda expected: {**expected, **{name: change(expected[name]) for name, change in tensors.items()}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(), None),
        (changed(logits=lambda logits: logits * (1 + 1e-6)), None),
        (changed(logits=lambda logits: logits * 1.01), "logits differ by"),
        (changed(logits=lambda logits: logits.fill_(torch.nan).clone()), "logits differ by nan"),
        (changed(logits=lambda logits: logits.bfloat16()), r"bfloat16, not .* float32"),
        (changed(input_ids=lambda ids: ids + 1), "other tokens of a text"),
        (changed(input_ids=lambda ids: ids[:, 1:]), r"input_ids are \[1, 6\] int64, not \[1, 7\] int64"),
    ],
)
def test_what_is_different_is_told(change, words):
    torch.manual_seed(0)
    expected = {"input_ids": torch.arange(7)[None], "logits": torch.randn(1, 7, 11)}
    said = difference(expected, change({name: tensor.clone() for name, tensor in expected.items()}))
    assert (said is None) == (words is None)
    assert words is None or re.search(words, said)
