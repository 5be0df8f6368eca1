"""Cuts a small model of each kind of family over two processes: `python -m tests.runtime.tensor_families`.

It then has the loss and the gradients of the whole model, under the fused operators and without them.
"""

import sys

import torch

from strata_platform.spec import RunSpec
from tasks.runtime.model import prepare_for_training
from tasks.runtime.parallel.fsdp import Fsdp
from tasks.runtime.processes import Processes
from tests.kernels.test_patch import VOCABULARY, build
from tests.runtime.forked import run_forked

# Tied and not; biases; norms of heads, and of all of them; weights in the activation; packed projections.
FAMILIES = ("gemma3_text", "qwen2", "olmo2", "apertus", "glm4")
# Of an odd vocabulary, which two processes have unequal parts of.
assert VOCABULARY % 2 == 1

SETTINGS = (
    (FAMILIES, {}),
    (("phi3",), {"kernels": {"enabled": False}}),
    (("qwen3",), {"training": {"gradient_checkpointing": "full"}}),
)


def gradients(model, batch):
    """The loss, and all gradients, whole."""
    loss = model(**batch, num_items_in_batch=torch.tensor(20)).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def check(family, settings, processes):
    """Raise AssertionError with what differs."""
    split = {"parallel": {"type": "fsdp", "tensor_parallel": 2}, "topology": {"nproc_per_node": 2}}
    spec = RunSpec.model_validate({**split, "model": {"dtype": "float32"}, **settings})
    torch.manual_seed(0)
    model = build(family)
    tokens = torch.randint(3, VOCABULARY, (2, 13))
    batch = {"input_ids": tokens, "labels": tokens.where(tokens % 3 > 0, -100)}
    prepare_for_training(model, spec)
    expected, whole = gradients(model, batch)
    model.zero_grad(set_to_none=True)
    Fsdp(spec, processes).wrap(model, weights_follow=False)
    loss, found = gradients(model, batch)
    torch.testing.assert_close(loss, expected)
    assert found.keys() == whole.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], msg=lambda text, name=name: f"{family} {name}: {text}")


def check_all():
    """In each of two processes."""
    processes = Processes.from_environment(sharers=2)
    processes.connect()
    for families, settings in SETTINGS:
        for family in families:
            check(family, settings, processes)
    processes.disconnect()


if __name__ == "__main__":
    sys.exit(run_forked(2, check_all))
