"""Base classes of objectives of your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORE_INDEX = -100


class TokenObjective(ABC):
    """A loss that is a mean over target tokens, each of which has logits and a label.

    Logits are computed in chunks of rows and never exist as a whole, if the kernel layer computes the loss of the model
    (`kernels: linear_cross_entropy` in the log). The objective sees no difference.
    """

    unit: str = "per token"
    """Unit of the loss in logs and reports. "nats per token" says that its exponential is a perplexity."""

    @abstractmethod
    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token: [N], from logits [N, V], fp32 or fp64, and labels [N], int64 from 0 to V - 1.

        Equivalent for plain cross entropy: `cross_entropy(logits, labels, reduction="none")`.
        """

    def token_metrics(self, logits: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Further values of each token, [N] each, whose means are logged; without gradients."""
        return {}


@dataclass(frozen=True)
class ObjectiveBatch:
    """A micro-batch of B rows of T tokens."""

    inputs: Mapping[str, Tensor]
    """Arguments of the model's forward pass: `input_ids` [B, T], `position_ids` and others."""
    labels: Tensor
    """The token that each position has to predict: [B, T], int64; -100 where there is none."""


class LossSums(NamedTuple):
    """Sums over the items of a micro-batch; the step divides them by its number of items."""

    loss: Tensor
    """A scalar with gradients."""
    metrics: Mapping[str, Tensor] = {}
    """Scalars without gradients, by name."""


class BatchObjective(ABC):
    """A loss that is a mean over items of any kind, from whole forward passes of the model.

    Use it where `TokenObjective` is too narrow. It costs the memory of all logits if it reads `model(...).logits`.
    """

    unit: str = "per item"
    """Unit of the loss in logs and reports."""

    def count(self, batch: ObjectiveBatch) -> Tensor:
        """The number of items in a micro-batch, an integer scalar; by default its target tokens."""
        return (batch.labels != IGNORE_INDEX).sum()

    @abstractmethod
    def loss_sums(self, model: nn.Module, batch: ObjectiveBatch) -> LossSums:
        """Sums over the items of the micro-batch. Call `model(**batch.inputs)` once; its `logits` are [B, T, V].

        Sums over two halves of a batch must add up to the sum over the batch: then neither micro-batches nor processes
        change the loss.
        """
