"""Each run of a cut mixture trains the same model, whatever computes it."""

import pytest
import torch

from benchmarks.mixture import RUNS, measure
from benchmarks.training import SHAPES

SMALL = {**SHAPES["30b-a3b"], "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
         "num_hidden_layers": 1}  # fmt: skip


@pytest.mark.parametrize("lora", [False, True])
def test_losses_do_not_depend_on_what_computes_them(lora):
    found = [measure(run, SMALL, 2, 16, torch.device("cpu")) for run in RUNS if run.lora == lora]
    first, *others = (each.losses for each in found)
    assert len(others) == 2 and first[0] != first[1]
    # In bfloat16.
    assert all(other == pytest.approx(first, rel=2e-2) for other in others)
