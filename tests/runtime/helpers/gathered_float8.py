"""Weights that FSDP gathers in FP8, beside the same gathered as they are: `-m tests.runtime.helpers.gathered_float8`.

Two processes have the same losses, norms and weights either way, bit for bit, and send fewer bytes.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.build import patch_for_training, use_no_cache
from tasks.runtime.models.float8 import use_float8
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.parallel.fsdp import Fsdp
from tasks.runtime.process.ranks import Processes
from tests.runtime.helpers.train_forked import run_forked

VOCABULARY, STEPS = 96, 3
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
# Settings of the run, dtype of the model, whether its weights are frozen but for the norms.
CHECKS = (
    ({"training": {"gradient_checkpointing": "full"}}, torch.bfloat16, False),
    ({"parallel": {"compute_dtype": "bfloat16", "reduce_dtype": "float32", "reshard_after_forward": False}},
     torch.float32, False),
    ({}, torch.float32, True),
)  # fmt: skip


class Bytes:
    """Counts what is gathered."""

    def __init__(self):
        self.count, self._gather = 0, dist.all_gather_single

    def __call__(self, output, *arguments, **options):
        self.count += output.nbytes
        return self._gather(output, *arguments, **options)


def train(settings, dtype, frozen, gathers):
    """Losses, norms and weights of some steps with two batches each, a validation, and the bytes that were gathered."""
    processes = Processes.from_environment()
    spec = RunSpec.model_validate({
        "name": "gathered", "topology": {"nproc_per_node": 2}, **settings,
        "parallel": {"type": "fsdp", **settings.get("parallel", {})},
        "training": {"float8": "tensorwise", **settings.get("training", {})},
    })  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype).train()
    use_no_cache(model)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    patch_for_training(model, spec.kernels)
    checkpoint_activations(model, spec.training)
    use_float8(model, spec.training)
    strategy = Fsdp(spec, processes)
    strategy._gathers_in_float8 &= gathers
    wrapped = strategy.wrap(model, weights_loaded_later=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sent, found = Bytes(), []
    dist.all_gather_single = sent
    objective = NextToken(fused=spec.fused_loss)

    def loss_of(number):
        random = torch.Generator().manual_seed(2 * number + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (2, 24), generator=random)
        batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(24).expand(2, 24)}
        return objective.micro_batch_loss(wrapped, batch, torch.tensor(96)).loss

    for step in range(STEPS):
        for number in (2 * step, 2 * step + 1):
            loss = loss_of(number)
            loss.backward()
            found.append(loss.detach())
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    with strategy.evaluation(wrapped), torch.no_grad():
        found.append(loss_of(100))
    dist.all_gather_single = sent._gather
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    return found, weights, sent.count


def check():
    """Raise AssertionError with what differs."""
    processes = Processes.from_environment()
    processes.connect()
    for check in CHECKS:
        (losses, weights, sent), (expected, exact, before) = (train(*check, gathers) for gathers in (True, False))
        assert len(set(map(float, losses))) > 2 * STEPS, losses
        assert losses == expected, (check, losses, expected)
        assert all(map(torch.equal, weights, exact)), check
        # All but embeddings, head and norms: bytes instead of two or four.
        assert sent < 0.75 * before, (check, sent, before)
    processes.disconnect()


if __name__ == "__main__":
    sys.exit(run_forked(2, check))
