"""Muon for bfloat16 weights: PyTorch computes the update, and the kernel layer adds it without rounding loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from strata_kernels import StepPlan, weight_step
from tasks.runtime.optim.rounding import WeightRounding, local
from tasks.runtime.optim.typed_state import TypedStateOptimizer


class ExactMuon(TypedStateOptimizer):
    """`torch.optim.Muon` that adds updates to weights according to `optimizer.precision`.

    State of a parameter: `momentum_buffer`, of its shape and dtype; `step`, fp32 scalar; with fp32 master weights
    `remainder`, int16, of its shape. To get the update alone, PyTorch's optimizer steps a matrix of zeros at a learning
    rate of 1. The update comes from bfloat16 products of five Newton-Schulz iterations: bfloat16 keeps all its digits.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        rounding: WeightRounding,
    ) -> None:
        """`groups`: as in PyTorch."""
        self._rounding, self.keeps_remainder = rounding, rounding.mode == "master"
        self._plans: dict[nn.Parameter, StepPlan] = {}
        options = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._muon = torch.optim.Muon(parameters, lr=1.0, weight_decay=0.0, **options)  # type: ignore[arg-type]
        self._options = {name: value for name, value in self._muon.param_groups[0].items() if name != "params"}
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state: dict[str, Tensor] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=local(parameter).device)
        state["step"] += 1
        remainder = self._rounding.remainder_of(parameter, state)
        weight_step(
            [local(parameter)],
            [local(self._negative_update(parameter, state))],
            [None if remainder is None else local(remainder)],
            [self._rounding.shard_of(parameter)],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            rounding=self._rounding.mode,
            seed=self._rounding.seed,
            steps=[state["step"]],
            plan=self._plans.setdefault(parameter, StepPlan()),
        )

    def _negative_update(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        """The negative update at a learning rate of 1."""
        update = torch.zeros_like(parameter, requires_grad=False)
        update.grad = parameter.grad
        self._muon.param_groups = [{**self._options, "params": [update]}]
        kept = {name: tensor for name, tensor in state.items() if name == "momentum_buffer"}
        self._muon.state[update] = kept
        self._muon.step()
        state.update(kept)
        self._muon.state.clear()
        return update.neg_()
