"""What an objective is; `tasks.runtime.objectives` has one file for each."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn

Batch = dict[str, Tensor]


class Share(NamedTuple):
    """What one micro-batch adds to the means over a step: its sums, divided by the items of the whole step."""

    loss: Tensor
    """With gradients."""
    metrics: dict[str, Tensor]
    """What else is told of the step, by name; without gradients."""


class Objective(Protocol):
    """From a batch to a loss. It knows neither the framework nor the strategy that `model` is wrapped by.

    The loss of a step is a mean over its items, such as target tokens or pairs of answers. They are counted first, over
    all micro-batches and processes; then every micro-batch gives its share. So all items weigh the same, however
    unevenly they are spread.
    """

    def count(self, batch: Batch) -> Tensor:
        """Items of a micro-batch: a whole number, on the device of the batch."""

    def share(self, model: nn.Module, batch: Batch, items: Tensor) -> Share:
        """The share of a micro-batch, which is on the device of `model`, in a step of so many `items`."""


def target_tokens(batch: Batch) -> Tensor:
    """Tokens of a batch that carry loss. The first token of a row has nothing before it to be predicted from."""
    return (batch["labels"][:, 1:] != -100).sum()
