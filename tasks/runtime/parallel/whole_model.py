"""A model with whole weights on each rank, which generates answers: each rank has others, of other lengths, so that a
forward pass must not be a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.runtime.models.build import materialize


class WholeModel:
    """The model that is trained, where each rank has all of its weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def update(self) -> None:
        """Bring the weights of `model` up to date. A collective."""


class WholeCopy(WholeModel):
    """A copy of a model whose weights are sharded. Its tensors stay where they are, so that CUDA graphs may read them.

    source: before its weights are sharded, on any device. dtype: of forward passes; None for that of each weight.
    gather: the whole of a parameter of `source`, once it is sharded. A collective. reshard: called before.
    """

    def __init__(
        self,
        source: PreTrainedModel,
        device: torch.device,
        dtype: torch.dtype | None,
        gather: Callable[[nn.Parameter], Tensor],
        reshard: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(_on_meta(source, dtype))
        materialize(self.model, device)
        self._source, self._gather, self._reshard = source, gather, reshard
        self._filled = False

    @torch.no_grad()
    def update(self) -> None:
        """Gather the weights that are trained, one at a time; the first time all of them."""
        first, self._filled = not self._filled, True
        self._reshard()
        sources = dict(self._source.named_parameters(remove_duplicate=False))
        for name, whole in self.model.named_parameters():
            if first or sources[name].requires_grad:
                whole.copy_(self._gather(sources[name]))
        buffers = dict(self._source.named_buffers())
        for name, buffer in self.model.named_buffers():
            # Those of rotary embeddings that grow with the longest row are each model's own.
            if buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])


def _on_meta(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """A copy with its parameters on the meta device."""
    made = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta", dtype=dtype if parameter.is_floating_point() else None),
            requires_grad=False,
        )
        for parameter in model.parameters()
    }
    copied = deepcopy(model, made)
    for module in copied.modules():
        # Recomputation and `torch.compile` replace a layer's forward pass by a function, which is still that of the
        # original's layer. Generation needs neither.
        vars(module).pop("forward", None)
    return copied
