"""What is minimized: from a batch to a loss, the same under every framework and strategy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.runtime.processes import Processes


def count_targets(batches: Iterable[dict[str, Tensor]], processes: Processes) -> Tensor:
    """Tokens that carry loss in a step, over its micro-batches and all processes; on this process's device.

    A collective. The first token of a row has nothing before it to be predicted from.
    """
    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
    total = torch.stack(counts).sum().to(processes.device, non_blocking=True)
    if processes.world_size > 1:
        dist.all_reduce(total)
    return total


def next_token_loss(model: nn.Module, batch: dict[str, Tensor], targets: Tensor, processes: Processes) -> Tensor:
    """This micro-batch's share of the mean loss of the step's `targets`; labels say which tokens count.

    Multiplied by the number of processes, because every strategy averages gradients over them: the average over
    processes of the sum over micro-batches is the mean over the step's target tokens, however uneven their shares.
    """
    output: Any = model(**batch, num_items_in_batch=targets)
    loss: Tensor = output.loss * processes.world_size
    return loss
