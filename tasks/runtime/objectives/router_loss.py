"""The loss that balances the experts of a mixture, over all tokens of a step.

    loss = coefficient · E · Σ_e f_e · P_e

f_e is how often the routers choose expert e, P_e the mean of its probability, both over the tokens of all layers, as in
transformers' `load_balancing_loss_func` on all rows of the step at once. P is a sum over tokens, so each micro-batch
adds its own part. The product is none: a loss of each micro-batch by itself would punish one that is all about one
subject (Qiu et al., arXiv:2501.11873). So f is counted over all ranks and micro-batches. It has no gradient, so a
forward pass of the later micro-batches without one is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.runtime.data.dataset import Batch, text_tokens
from tasks.runtime.objectives.objective import model_inputs
from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.rng import random_states, restore_random_states

FAMILY_FUNCTION = "load_balancing_loss_func"
"""The function of a modeling file that stands for this loss."""


class RouterLoss:
    """Adds the loss to micro-batches, in the order in which `begin_step` was given them.

    over: "step" counts f over all micro-batches; "running" over those of the step so far, which is exact for the last.
    """

    def __init__(self, causal: nn.Module, over: Literal["step", "running"]) -> None:
        self._causal: Any = causal
        self._over = over
        self._processes = Processes()
        self._waiting = 0
        self._tokens = self._counted = torch.zeros(())
        self._frequency: Tensor | None = None

    @property
    def in_step(self) -> bool:
        """Whether micro-batches of a step are due, so that `share` takes the next one."""
        return self._waiting > 0

    @property
    def coefficient(self) -> float:
        """The weight of the loss."""
        return float(self._causal.router_aux_loss_coef)

    def begin_step(self, model: nn.Module, batches: Sequence[Batch], processes: Processes) -> None:
        """Start a step of these micro-batches. A collective.

        model: as training calls it. batches: on any device.
        """
        self._processes, self._waiting, self._frequency = processes, len(batches), None
        tokens = torch.stack([_tokens(batch).sum() for batch in batches]).sum()
        self._tokens = self._summed(tokens.to(processes.device))
        # Choices of each expert, and tokens in all layers, of which f is made.
        self._counted = torch.zeros(self._causal.num_experts + 1, device=processes.device)
        if self._over == "step":
            for batch in batches[1:]:
                moved = {name: tensor.to(processes.device, non_blocking=True) for name, tensor in batch.items()}
                self._counted += self._choices(self._routed(model, moved), moved)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block, the model's own loss has no part for routers."""
        coefficient = self._causal.router_aux_loss_coef
        self._causal.router_aux_loss_coef = 0.0
        try:
            yield
        finally:
            self._causal.router_aux_loss_coef = coefficient

    def share(self, router_logits: Sequence[Tensor], batch: Batch) -> Tensor:
        """What the next micro-batch adds to the loss of the step, without the coefficient. A collective."""
        self._waiting -= 1
        if self._over == "running":
            # Earlier micro-batches are summed over ranks already.
            self._counted = self._counted + self._summed(self._choices(router_logits, batch))
        elif self._frequency is None:
            self._counted = self._summed(self._counted + self._choices(router_logits, batch))
        if self._over == "running" or self._frequency is None:
            self._frequency = self._counted[:-1] / self._counted[-1].clamp(min=1)
        tokens = _tokens(batch)
        sums = torch.stack([(_probabilities(logits) * tokens[:, None]).sum(0) for logits in router_logits]).sum(0)
        mean = sums / (self._tokens * len(router_logits)).clamp(min=1)
        return self._causal.num_experts * (self._frequency * mean).sum()

    def _summed(self, counts: Tensor) -> Tensor:
        """Over all ranks; those of a tensor-parallel group have counted the same tokens."""
        if self._processes.world_size > 1:
            dist.all_reduce(counts)
            counts = counts / self._processes.tp_size
        return counts

    def _choices(self, router_logits: Sequence[Tensor], batch: Batch) -> Tensor:
        """[E + 1]: how often each expert is chosen, and the tokens of all layers."""
        tokens, experts = _tokens(batch), self._causal.num_experts
        with torch.no_grad():
            counts = torch.zeros(experts, device=tokens.device)
            for logits in router_logits:
                chosen = _probabilities(logits).topk(self._causal.num_experts_per_tok, dim=-1).indices
                for column in chosen.unbind(-1):
                    hits = column[:, None] == torch.arange(experts, device=tokens.device)
                    counts += (hits * tokens[:, None]).sum(0)
            return torch.cat([counts, tokens.sum()[None] * len(router_logits)])

    @torch.no_grad()
    def _routed(self, model: nn.Module, batch: Batch) -> Sequence[Tensor]:
        """The logits of the routers for a batch; draws no random number of training."""
        states = random_states()
        try:
            output: Any = model(**model_inputs(batch), output_router_logits=True, logits_to_keep=1)
        finally:
            restore_random_states(states)
        logits: Sequence[Tensor] = output.router_logits
        return logits


def causal_model(model: nn.Module) -> nn.Module | None:
    """The module in `model` whose loss has a part for routers as this file computes it; None without one."""
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    for module in model.modules():
        own = getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get(FAMILY_FUNCTION)
        if own is not None and all(hasattr(module, name) for name in names):
            return module if _is_equal(own) else None
    return None


def _is_equal(own: Any) -> bool:
    """Whether a family's function is the formula of this file."""
    random = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=random) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 1, 0, 1]])
    kept = torch.cat(logits).softmax(-1)[mask.flatten().repeat(2).bool()]
    counts = torch.zeros(4).index_add_(0, kept.topk(2).indices.flatten(), torch.ones(2 * len(kept)))
    expected = 4 * (counts / len(kept) * kept.mean(0)).sum()
    try:
        return torch.allclose(torch.as_tensor(own(logits, 4, 2, mask)), expected, atol=1e-5)
    except (TypeError, RuntimeError):
        return False


def _probabilities(logits: Tensor) -> Tensor:
    return logits.float().softmax(-1)


def _tokens(batch: Batch) -> Tensor:
    """[B · T], 1 for tokens and 0 for padding."""
    # A slice of a row doesn't show where its documents begin and end.
    found = batch["text_tokens"] if "text_tokens" in batch else text_tokens(batch)
    return found.flatten().float()
