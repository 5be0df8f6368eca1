"""Splits a small model of each kind of family over two processes: `python -m tests.runtime.helpers.split_families`.

Together they have the loss and the gradients of the whole model on whole rows: with matrices cut, and with rows cut;
under the fused operators and without them.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist

from strata_platform.spec import RunSpec
from tasks.runtime.data.context_shards import shard_batch
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations, compile_layers
from tasks.runtime.models.build import patch_for_training
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.parallel.fsdp import Fsdp
from tasks.runtime.process.ranks import Processes
from tests.kernels.test_patch import VOCABULARY, build
from tests.runtime.helpers.train_forked import run_forked

# Of an odd vocabulary, which two processes have unequal parts of.
assert VOCABULARY % 2 == 1

TENSOR = {"tensor_parallel": 2}
CONTEXT, ULYSSES = ({"context_parallel": 2, "context_parallel_method": method} for method in ("all_gather", "ulysses"))
PLAIN = {"kernels": {"enabled": False}}

CHECKS = (
    # Tied and not; biases, also of what is cut by rows; norms of heads; weights in the activation.
    *((family, TENSOR, {}) for family in ("gemma3_text", "qwen2", "apertus")),
    ("llama", TENSOR, {}, {"attention_bias": True, "mlp_bias": True}),
    # Norms of all heads, and packed projections, which are gathered.
    ("olmo2", TENSOR, {"kernels": {"exclude": ["linear_cross_entropy"]}, "training": {"compile": True}}),
    ("glm4", TENSOR, {}),
    ("phi3", TENSOR, PLAIN),
    *(("qwen3", TENSOR, {"training": {"gradient_checkpointing": "per_op", "compile": on}}) for on in (False, True)),
    # Windows of attention, and scores that are scaled by another number.
    *((family, CONTEXT, {}) for family in ("gemma3_text", "granite")),
    ("qwen3", CONTEXT, PLAIN),
    ("gemma3_text", ULYSSES, {}),
    # Both ranks share one head of keys.
    ("granite", ULYSSES, {}, {"num_key_value_heads": 1}),
    *(
        ("llama", parallel, {"training": {"compile": True, "gradient_checkpointing": "per_op"}})
        for parallel in (CONTEXT, ULYSSES)
    ),
)


def gradients(model, spec, batch, processes):
    """The loss, and all gradients, whole."""
    items = torch.tensor(20)
    loss = NextToken(fused=spec.fused_loss).micro_batch_loss(model, batch, items).loss
    (loss * processes.dp_cp_size).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def check(family, parallel, settings, changes=None):
    """Raise AssertionError with what differs."""
    split = {"parallel": {"type": "fsdp", **parallel}, "topology": {"nproc_per_node": 2}}
    spec = RunSpec.model_validate({**split, "model": {"dtype": "float32"}, **settings})
    processes = Processes.from_environment(
        tp_size=spec.parallel.tensor_parallel, cp_size=spec.parallel.context_parallel
    )
    torch.manual_seed(0)
    model = build(family, use_cache=False, **(changes or {}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    tokens = torch.randint(3, VOCABULARY, (2, 37))
    # Two rows of three documents, of a length that four chunks do not divide.
    positions = torch.cat([torch.arange(length) for length in (5, 21, 11)]).expand(2, -1)
    batch = {"input_ids": tokens, "labels": tokens.where(tokens % 3 > 0, -100), "position_ids": positions}
    patch_for_training(model, spec.kernels)
    checkpoint_activations(model, spec.training)
    expected, whole = gradients(model, spec, batch, Processes())
    model.zero_grad(set_to_none=True)
    compile_layers(model, spec.training)
    Fsdp(spec, processes).wrap(model, weights_loaded_later=False)
    loss, found = gradients(model, spec, shard_batch(batch, processes) if processes.cp_size > 1 else batch, processes)
    dist.all_reduce(loss)
    torch.testing.assert_close(loss / processes.tp_size, expected, msg=lambda text: f"{family} {parallel}: {text}")
    assert found.keys() == whole.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], msg=lambda text, name=name: f"{family} {name}: {text}")


def check_all():
    """In each of two processes."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    processes = Processes.from_environment()
    processes.connect()
    for arguments in CHECKS:
        check(*arguments)
    processes.disconnect()


if __name__ == "__main__":
    sys.exit(run_forked(2, check_all))
