"""The router loss of rows that two processes share, `python -m tests.runtime.helpers.split_router_loss`.

Loss, router loss and gradients are those that transformers computes from whole rows.
"""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from strata_platform.spec import RunSpec
from tasks.runtime.data import collate
from tasks.runtime.data.context_shards import shard_collate
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.parallel.fsdp import Fsdp
from tasks.runtime.process.ranks import Processes
from tests.runtime.helpers.split_experts import VOCABULARY, build
from tests.runtime.helpers.train_forked import run_forked

COEFFICIENT = 0.5
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
# Of each row: where its documents end, and how many tokens at its end have a label.
ROWS = (((5, 13), 13), ((9,), 2), ((4, 8), 1), ((13,), 5))
# What the loss counts over, rows of each micro-batch, method of attention.
CHECKS = (("step", (2, 1, 1), "all_gather"), ("step", (4,), "ulysses"), ("running", (4,), "all_gather"))


def rows():
    """Rows of unequal lengths, which do not divide into the chunks; texts may begin and end with id 0."""
    random = torch.Generator().manual_seed(1)
    made = []
    for ends, labelled in ROWS:
        tokens = torch.randint(3, VOCABULARY, (ends[-1],), generator=random)
        tokens[ends[-1] - 1] = 0
        positions = torch.cat([torch.arange(end - begin) for begin, end in zip((0, *ends), ends, strict=False)])
        labels = tokens.where(torch.arange(ends[-1]) >= ends[-1] - labelled, -100)
        made.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
    return made


def expected(model):
    """Loss, router loss and gradients of all rows at once, by transformers."""
    whole = collate(rows())
    mask = torch.stack([torch.arange(whole["input_ids"].shape[1]) < ends[-1] for ends, _ in ROWS]).long()
    output = model(**whole, use_cache=False)
    balance = load_balancing_loss_func(output.router_logits, 8, 3, mask)
    # Its own balance counts padding.
    loss = output.loss + COEFFICIENT * (balance - output.aux_loss)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), balance.detach(), gradients


def step_of(model, spec, split, processes):
    """Loss and router loss of a step, summed over processes, and its gradients."""
    objective, left = NextToken(fused=False, routed=True), iter(rows())
    objective.prepare(SimpleNamespace(model=model, spec=spec, processes=processes, data=None))
    shards = shard_collate(collate, processes)
    batches = [shards([next(left) for _ in range(size)]) for size in split]
    items = sum(objective.count(batch) for batch in batches)
    dist.all_reduce(items)
    objective.before_step(model, batches, processes)
    sums = torch.zeros(2)
    for batch in batches:
        share = objective.micro_batch_loss(model, batch, items)
        (share.loss * processes.dp_cp_size).backward()
        sums += torch.stack([share.loss.detach(), share.metrics["router_loss"]])
    dist.all_reduce(sums)
    return *sums, [parameter.grad.full_tensor() for parameter in model.parameters()]


def check(over, split, method):
    """Raise AssertionError with what differs."""
    spec = RunSpec.model_validate({
        "model": {"name": "a-mixture", "dtype": "float32"}, "kernels": {"enabled": False},
        "parallel": {"type": "fsdp", "context_parallel": 2, "context_parallel_method": method},
        "training": {"gradient_accumulation_steps": len(split), "router_loss": over},
        "topology": {"nproc_per_node": 2},
    })  # fmt: skip
    processes = Processes.from_environment(cp_size=2)
    model = build("qwen3_moe", BALANCED)
    loss, balance, gradients = expected(model)
    Fsdp(spec, processes).wrap(model, weights_loaded_later=False)
    found = step_of(model, spec, split, processes)
    torch.testing.assert_close(found[:2], (loss, balance), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[2], list(gradients), rtol=1e-4, atol=1e-6)


def check_all():
    """In each of the processes."""
    Processes.from_environment().connect()
    for arguments in CHECKS:
        check(*arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_forked(2, check_all))
