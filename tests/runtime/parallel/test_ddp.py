"""DistributedDataParallel's buckets of gradients, whose order is settled before the first step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tasks.runtime.parallel.ddp import fix_bucket_order


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("moved", [True, False])
def test_settling_leaves_the_model_as_it_was(group, moved):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if moved:
        # As where it is given a GPU: it moves what it is called with there.
        wrapped.device_ids, wrapped.device_type = [0], "cpu"
    before = [parameter.clone() for parameter in model.parameters()]
    fix_bucket_order(wrapped)
    assert wrapped._has_rebuilt_buckets
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    x = torch.ones(3, 4)
    assert torch.equal(wrapped(x), model[1](model[0](x)))
