"""A small model, and the answers of rows one by one, for objectives that compare answers."""

from itertools import pairwise

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec import DataRecipe
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.run_folder.folder import data_folder


def data_of(spec):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, data_folder(spec.output, recipe), report=print)


def small_model(moved=0.0):
    """The same each time, or `moved` by some training."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, attn_implementation="sdpa",
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += moved * torch.randn(parameter.shape)
    return model


def answers_of(rows):
    """Token ids and labels of each answer, the chosen and the rejected one in turn."""
    found = []
    for row in rows:
        starts = [*torch.nonzero(row["position_ids"] == 0).flatten().tolist(), row["input_ids"].numel()]
        found += [
            (row["input_ids"][begin:end], row["labels"][begin:end])
            for begin, end in pairwise(starts)
            if row["sides"][begin] != 0
        ]
    return found


def log_prob(model, ids, labels):
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return -cross_entropy(logits, labels[1:], reduction="sum")
