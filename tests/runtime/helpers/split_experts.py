"""Splits the experts of small mixtures over processes: `python -m tests.runtime.helpers.split_experts PROCESSES`.

Together they have the loss, the gradients and the gradients' norm of one process with all experts and all rows.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime.data.context_shards import shard_batch
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.build import patch_for_training, use_no_cache
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.optim.gradients import clip_gradients
from tasks.runtime.parallel.fsdp import Fsdp
from tasks.runtime.process.ranks import Processes
from tests.runtime.helpers.train_forked import run_forked

VOCABULARY = 65
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
         "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "initializer_range": 0.3}  # fmt: skip
DEEPSEEK = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 8,
            "qk_rope_head_dim": 8, "head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
            "num_key_value_heads": 2}  # fmt: skip
FULL, PER_OP = ({"training": {"gradient_checkpointing": kind}} for kind in ("full", "per_op"))

# By the number of processes: family, parallelism, other settings, changes of its configuration.
CHECKS = {
    2: (
        ("qwen3_moe", {"expert_parallel": 2}, {}, {}),
        ("qwen3_moe", {"expert_parallel": 2}, FULL, {}),
        ("mixtral", {"expert_parallel": 2}, PER_OP, {}),
        # Biases, weights that are stored the other way around, and a gate that is clamped.
        ("gpt_oss", {"expert_parallel": 2}, FULL, {"layer_types": ["full_attention"] * 2}),
        # A dense layer and shared experts beside the others.
        ("deepseek_v3", {"expert_parallel": 2}, {}, DEEPSEEK),
        ("qwen3_moe", {"expert_parallel": 2, "context_parallel": 2}, {}, {}),
        ("qwen3_moe", {"expert_parallel": 2, "reduce_dtype": "bfloat16"}, {}, {}),
    ),
    4: (
        ("qwen3_moe", {"expert_parallel": 2}, FULL, {}),
        # One expert per rank and group: its features are sharded.
        ("gpt_oss", {"expert_parallel": 2}, {}, {"layer_types": ["full_attention"] * 2, "num_local_experts": 6}),
        ("qwen3_moe", {"expert_parallel": 2, "replicas": 2}, {}, {}),
        ("qwen3_moe", {"expert_parallel": 4, "context_parallel": 2}, {}, {}),
    ),
}


def build(family, changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    use_no_cache(model)
    return model.train()


def gradients(model, spec, batch, processes):
    """The loss, and all gradients, whole."""
    items = torch.tensor(40)
    loss = NextToken(fused=spec.fused_loss).micro_batch_loss(model, batch, items).loss
    (loss * processes.dp_cp_size).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def rows_of(processes):
    """As many rows as processes, of three documents each; those of a rank differ in length from the next one's."""
    random = torch.Generator().manual_seed(1)
    made = []
    for number in range(processes.dp_size if processes.dp_size > 1 else 4):
        length = 37 if processes.cp_size > 1 else 30 + 7 * (number % 2)
        tokens = torch.randint(3, VOCABULARY, (1, length), generator=random)
        positions = torch.cat([torch.arange(size) for size in (5, 21, length - 26)])[None]
        made.append({"input_ids": tokens, "labels": tokens.where(tokens % 3 > 0, -100), "position_ids": positions})
    return made


def check(family, parallel, settings, changes):
    """Raise AssertionError with what differs."""
    world = dist.get_world_size()
    spec = RunSpec.model_validate({
        "parallel": {"type": "fsdp", **parallel}, "topology": {"nproc_per_node": world},
        "model": {"name": "a-mixture", "dtype": "float32"}, **settings,
    })  # fmt: skip
    processes = Processes.from_environment(cp_size=spec.parallel.context_parallel)
    rows = rows_of(processes)
    model = build(family, changes)
    report = patch_for_training(model, spec.kernels)
    checkpoint_activations(model, spec.training)
    assert report.counts["experts"], report.kept
    told = partial("{} {}: {}".format, family, parallel)
    losses, whole = [], {}
    for row in rows:
        loss, whole = gradients(model, spec, row, Processes())
        losses.append(loss)
    norm = torch.stack([gradient.norm() for gradient in whole.values()]).norm()
    model.zero_grad(set_to_none=True)
    Fsdp(spec, processes).wrap(model, weights_loaded_later=False)
    own = rows[processes.dp_rank] if processes.dp_size > 1 else None
    steps = [own] if own is not None else rows
    found, total = {}, torch.zeros(())
    for row in steps:
        loss, found = gradients(model, spec, shard_batch(row, processes) if processes.cp_size > 1 else row, processes)
        total += loss
    dist.all_reduce(total)
    torch.testing.assert_close(total, torch.stack(losses).sum(), msg=told)
    assert found.keys() == whole.keys()
    close = {"rtol": 0.02, "atol": 1e-3} if spec.parallel.reduce_dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-6}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], **close, msg=lambda text, name=name: told(f"{name}: {text}"))
    torch.testing.assert_close(clip_gradients(model, 0.5), norm, rtol=1e-4, atol=0, msg=told)
    clipped = torch.stack([p.grad.full_tensor().norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=1e-4, atol=0, msg=told)


def check_all():
    """In each of the processes."""
    processes = Processes.from_environment()
    processes.connect()
    for arguments in CHECKS[processes.world_size]:
        check(*arguments)
    processes.disconnect()


if __name__ == "__main__":
    sys.exit(run_forked(int(sys.argv[1]), check_all))
