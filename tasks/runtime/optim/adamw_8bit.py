"""AdamW with 8-bit moments. Weights take updates according to `optimizer.precision`.

A moment is an index into a table of 256 values, and 256 adjacent weights share a scale. If the length of a row is a
multiple of 256, no block crosses a row, and a matrix that is sharded by rows has its scales sharded with them. The
state then depends only on the shape of the whole matrix, and any number of processes computes, saves and resumes the
same state. AdamW steps weights of other shapes, and embeddings, as bitsandbytes recommends: the magnitudes of their
gradients vary most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strata_kernels import EightBitPlan, Shard, adamw_8bit_step
from tasks.runtime.optim.rounding import WeightRounding
from tasks.runtime.optim.state_tensors import new_state_tensor
from tasks.runtime.optim.typed_state import TypedStateOptimizer

BLOCK = 256
"""Weights that share a scale, as `adamw_8bit_step` takes them."""

SMALLEST = 4096
"""Weights of the smallest matrix with 8-bit moments, as in bitsandbytes."""


def has_eight_bits(parameter: Tensor) -> bool:
    """Whether a parameter of this shape has 8-bit moments."""
    return parameter.numel() >= SMALLEST and parameter.shape[1:].numel() % BLOCK == 0


class AdamW8bit(TypedStateOptimizer):
    """AdamW that stores moments in 8 bits and computes in fp32.

    State of a parameter [rows, ...]: `exp_avg` and `exp_avg_sq`, uint8, of its shape; `exp_avg_scale` and
    `exp_avg_sq_scale`, fp32, [rows, weights of a row / 256]; `step`. Tensors with rows are sharded like the parameter.
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
        """`groups`: as in PyTorch, with parameters of `has_eight_bits` that are replicated or sharded by rows. `paged`:
        the state is in managed memory, see `tasks.runtime.optim.managed_memory`.
        """
        self.paged = paged
        self._rounding, self.keeps_remainder = rounding, rounding.mode == "master"
        self._plans: dict[nn.Parameter, tuple[EightBitPlan, Shard]] = {}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(parameter, group)

    def step_parameter(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Step one parameter that has a gradient, with the settings of its group. Call it without grad mode."""
        state = self.state[parameter]
        if not state:
            scales = torch.Size((parameter.shape[0], parameter.shape[1:].numel() // BLOCK))
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = new_state_tensor(parameter, parameter.shape, torch.uint8, paged=self.paged)
                state[f"{moment}_scale"] = new_state_tensor(parameter, scales, torch.float32, paged=self.paged)
            state["step"] = torch.zeros(())
        # The kernel takes a Python number. Only a loaded count is on the device, which makes the host wait once.
        state["step"] = state["step"].cpu() + 1
        weights = _here(parameter)
        if not weights.numel():
            return
        assert parameter.grad is not None
        if parameter not in self._plans:
            self._plans[parameter] = EightBitPlan(), self._rounding.shard_of(parameter)
        plan, shard = self._plans[parameter]
        remainder = self._rounding.remainder_of(parameter, state, paged=self.paged)
        adamw_8bit_step(
            weights,
            _here(parameter.grad),
            _here(state["exp_avg"]),
            _here(state["exp_avg_scale"]),
            _here(state["exp_avg_sq"]),
            _here(state["exp_avg_sq_scale"]),
            None if remainder is None else _here(remainder),
            int(state["step"]),
            shard,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            rounding=self._rounding.mode,
            seed=self._rounding.seed,
            plan=plan,
        )


def _here(tensor: Tensor) -> Tensor:
    """This process's shard, contiguous."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert local.is_contiguous()
    return local
