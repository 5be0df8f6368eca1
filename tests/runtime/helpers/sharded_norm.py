"""The norm of bf16 gradients, sharded in every way over a mesh of 2 x 2 processes, against fp64.

python -m tests.runtime.helpers.sharded_norm
"""

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tasks.runtime.optim.gradients import clip_gradients
from tasks.runtime.process.ranks import Processes
from tests.runtime.helpers.train_forked import run_forked

# A row on one of two processes, unevenly divided rows, both dimensions, none.
SHARDED = [
    ((1, 5), (Shard(0), Replicate())),
    ((65, 7), (Replicate(), Shard(0))),
    ((64, 8), (Shard(0), Shard(1))),
    ((9,), (Replicate(), Replicate())),
]


def check():
    """In each of the processes."""
    processes = Processes.from_environment()
    processes.connect()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    whole = [torch.randn(shape).bfloat16() for shape, _ in SHARDED] + [torch.randn(3).bfloat16()]
    model = nn.ParameterList([torch.zeros_like(gradient) for gradient in whole])
    for number, (_, placements) in enumerate(SHARDED):
        model[number] = nn.Parameter(distribute_tensor(model[number].data, mesh, placements))
        model[number].grad = distribute_tensor(whole[number], mesh, placements)
    model[-1].grad = whole[-1]
    exact = torch.cat([gradient.double().flatten() for gradient in whole]).norm().float()
    norm = clip_gradients(model, 0)
    torch.testing.assert_close(norm, exact, rtol=1e-6, atol=0)
    processes.disconnect()


if __name__ == "__main__":
    sys.exit(run_forked(4, check))
