"""Read the inputs of a batch before a model's forward pass, wherever in the model they are passed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def on_inputs(model: PreTrainedModel, read: Callable[[Mapping[str, Any]], None]) -> None:
    """Call `read` with the arguments by keyword before each forward pass of `model` or of its base model alone.

    Some families do not pass all of them on to their base model, and callers may call that one directly.
    """
    hook = _InputHook(model, read)
    model.register_forward_pre_hook(hook.before, with_kwargs=True)
    if model.base_model is not model:
        model.base_model.register_forward_pre_hook(hook.before, with_kwargs=True)
        model.register_forward_hook(hook.after, always_call=True)


def on_positions(model: PreTrainedModel, read: Callable[[Tensor | None], None]) -> None:
    """Call `read` as `on_inputs` does with the positions [B, T]; with None if the caller passes no `position_ids`."""
    on_inputs(model, partial(_read_positions, read))


def _read_positions(read: Callable[[Tensor | None], None], inputs: Mapping[str, Any]) -> None:
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3:
        # Rotary positions for images: those of text come first.
        positions = positions[0]
    read(positions)


@dataclass
class _InputHook:
    """A hook that a deep copy of the model takes along: bound methods are copied with their object."""

    model: PreTrainedModel
    read: Callable[[Mapping[str, Any]], None]
    inside: bool = False
    """Whether the forward pass of the whole model runs, which has read the inputs."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.inside:
            return
        self.inside = module is self.model and module is not self.model.base_model
        self.read(kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.inside = False
