"""`pretrain` and `sft`: the next token, of all text or of what the model is to say; the labels tell which."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tasks.runtime.objectives.objective import Batch, Share, target_tokens


class NextToken:
    """Cross entropy, averaged over the target tokens."""

    def count(self, batch: Batch) -> Tensor:
        """Target tokens."""
        return target_tokens(batch)

    def share(self, model: nn.Module, batch: Batch, items: Tensor) -> Share:
        """The loss that the model itself computes, divided by the targets of the whole step."""
        output: Any = model(**batch, num_items_in_batch=items)
        return Share(output.loss, {})
