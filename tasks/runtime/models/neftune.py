"""NEFTune: uniform noise on the embeddings in training. Source: Jain et al. (arXiv:2310.05914).

    embeddings + noise, noise ~ U(-a, a), a = alpha / sqrt(tokens x width)

`tokens` is the length of the token's own document, as in the authors' code, so packing and padding do not change the
noise. For rows of one document without padding it is the Trainer's `neftune_noise_alpha`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def add_neftune(model: PreTrainedModel, alpha: float) -> None:
    """Add noise to the embeddings of `model` while it trains. The noise is drawn from PyTorch's random generator."""
    noise = _Noise(alpha)
    model.register_forward_pre_hook(noise.before_model, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(noise.after_embedding)


class _Noise:
    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._positions: Tensor | None = None

    def before_model(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the positions of the batch, which restart at each document: [B, T]."""
        self._positions = kwargs.get("position_ids")

    def after_embedding(self, module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        """`embedded` [B, T, D] with noise; unchanged in evaluation."""
        if not module.training:
            return embedded
        tokens = document_lengths(self._positions) if self._positions is not None else embedded.shape[1]
        size = self._alpha * torch.rsqrt(torch.as_tensor(tokens, device=embedded.device) * float(embedded.shape[-1]))
        noise = torch.empty_like(embedded).uniform_(-1.0, 1.0)
        return embedded + noise * (size[..., None] if size.ndim else size).to(embedded.dtype)


def document_lengths(positions: Tensor) -> Tensor:
    """The number of tokens of each position's document: [B, T], int64. Positions restart at 0.

    >>> document_lengths(torch.tensor([[0, 1, 2, 0, 1]]))
    tensor([[3, 3, 3, 2, 2]])
    """
    number = (positions == 0).cumsum(dim=1)
    counts = torch.zeros(number.shape[0], number.shape[1] + 1, dtype=torch.int64, device=number.device)
    return counts.scatter_add(1, number, torch.ones_like(number)).gather(1, number)
