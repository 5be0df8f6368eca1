"""AdamW with moments of eight bits, by bitsandbytes; the weights take its updates as `optimizer.precision` says.

Both moments of 256 weights that follow each other share a scale, and are numbers in a table of 256 values. A matrix
whose rows are multiples of 256 long has its scales by rows, too: one that is split between rows is split with them. So
the state depends on the shape of the whole matrix alone; it is computed, saved and continued alike by any number of
processes. Weights of other shapes are left to AdamW, and so are embeddings, as the library advises: the sizes of their
gradients differ most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strata_kernels import StepPlan, weight_step
from tasks.runtime.optim.rounding import WeightRounding
from tasks.runtime.optim.state_tensors import new_slot
from tasks.runtime.optim.typed_state import TypedStateOptimizer

BLOCK = 256
"""Weights that share a scale: what the library's kernels are made for."""

SMALLEST = 4096
"""Weights of the smallest matrix that is worth it, by the library's own measure."""


def has_eight_bits(parameter: Tensor) -> bool:
    """Whether the moments of a parameter of this shape are kept in eight bits."""
    return parameter.numel() >= SMALLEST and parameter.shape[1:].numel() % BLOCK == 0


class AdamW8bit(TypedStateOptimizer):
    """Steps of AdamW, of which moments come from eight bits and go into eight bits; computed in fp32.

    State of a parameter [rows, ...]: `exp_avg` and `exp_avg_sq`, uint8, of its shape; `exp_avg_scale` and
    `exp_avg_sq_scale`, fp32, [rows, weights of a row / 256]; `step`. All that has rows is split as the parameter is.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        rounding: WeightRounding,
        paged: bool = False,
    ) -> None:
        """`groups` are as PyTorch's, of parameters that are whole or split between rows; see `has_eight_bits`.

        With `paged` the state is in memory that gives way; see `tasks.runtime.optim.managed_memory`.
        """
        from bitsandbytes import functional

        self._update, self._table = functional.optimizer_update_8bit_blockwise, functional.create_dynamic_map
        self.paged = paged
        self._rounding, self.keeps_remainder = rounding, rounding.mode == "master"
        self._plans: dict[nn.Parameter, StepPlan] = {}
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """A step of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            scales = torch.Size((parameter.shape[0], parameter.shape[1:].numel() // BLOCK))
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = new_slot(parameter, parameter.shape, torch.uint8, paged=self.paged)
                state[f"{moment}_scale"] = new_slot(parameter, scales, torch.float32, paged=self.paged)
            state["step"] = torch.zeros(())
        # The kernel wants a number. A count that was loaded is on the device: it is waited for once.
        state["step"] = state["step"].cpu() + 1
        weights = _here(parameter)
        if not weights.numel():
            return
        remainder = self._rounding.remainder_of(parameter, state, paged=self.paged)
        # Random bits alone need the count, on the device.
        count = [state["step"].to(weights.device, non_blocking=True)] if self._rounding.mode == "stochastic" else None
        weight_step(
            [weights],
            [self._negative_update(parameter, state, group)],
            [None if remainder is None else _here(remainder)],
            [self._rounding.shard_of(parameter)],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            rounding=self._rounding.mode,
            seed=self._rounding.seed,
            steps=count,
            plan=self._plans.setdefault(parameter, StepPlan()),
        )

    def _negative_update(self, parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        """What is subtracted from the weights at a learning rate of 1, without weight decay."""
        assert parameter.grad is not None
        gradient = _here(parameter.grad)
        update = torch.zeros_like(gradient)
        signed, unsigned = self._tables_on(gradient.device)
        self._update(
            "adam",
            gradient,
            update,
            _here(state["exp_avg"]),
            _here(state["exp_avg_sq"]),
            *group["betas"],
            # Of other optimizers that the kernel knows.
            0.0,
            0.0,
            group["eps"],
            int(state["step"]),
            1.0,
            signed,
            unsigned,
            _here(state["exp_avg_scale"]).view(-1),
            _here(state["exp_avg_sq_scale"]).view(-1),
        )
        return update.neg_()

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The values that eight bits stand for: of first moments, and of second ones, which have no sign."""
        if device not in self._tables:
            self._tables[device] = (self._table(signed=True).to(device), self._table(signed=False).to(device))
        return self._tables[device]


def _here(tensor: Tensor) -> Tensor:
    """What this process has of it, in one piece."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    assert local.is_contiguous()
    return local
