"""Optimizers of other libraries, which step weights in fp32: Adafactor, Lion, schedule-free AdamW.

Each weight is stepped alone. A bfloat16 weight is first joined with its remainder to an fp32 weight, and rounded after
the step as `optimizer.precision` says. State is fp32. With the default precision a step is thus exactly that of the
library with fp32 weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from strata_kernels import StepPlan, join_weight, split_weight, weight_step
from tasks.runtime.optim.rounding import WeightRounding, local
from tasks.runtime.optim.state_tensors import REMAINDER, new_state_tensor
from tasks.runtime.optim.typed_state import TypedStateOptimizer

Group = dict[str, Any]


class LibraryOptimizer(TypedStateOptimizer):
    """Steps one fp32 weight at a time, and rounds it."""

    moments: ClassVar[tuple[str, ...]] = ()
    """State of a weight's shape, fp32, zeros at first; sharded like the weight."""

    def __init__(self, groups: list[Group], *, rounding: WeightRounding, **defaults: Any) -> None:
        """`groups`, `defaults`: as in PyTorch."""
        self._rounding, self.keeps_remainder = rounding, rounding.mode == "master"
        self._plans: dict[nn.Parameter, StepPlan] = {}
        super().__init__(groups, {"weight_decay": 0.0, **defaults})

    @abstractmethod
    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Group) -> None:
        """Step `weight` in place. `weight` and `gradient` are fp32, and plain tensors; so are those of `state`."""

    def begin(self, weight: Tensor, state: dict[str, Tensor]) -> None:
        """Fill in the state of a weight before its first step."""

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

    def _step(self, parameter: nn.Parameter, group: Group) -> None:
        assert parameter.grad is not None
        state: dict[str, Tensor] = self.state[parameter]
        weight = local(parameter)
        exact = self.exact_weight(parameter)
        first = "step" not in state
        # On the host, where it is read. Only a loaded count is on the device.
        state["step"] = torch.zeros(()) if first else state["step"].cpu()
        for name in self.moments:
            if name not in state:
                state[name] = new_state_tensor(parameter, parameter.shape, torch.float32, paged=False)
        plain = {name: local(tensor) for name, tensor in state.items() if name != REMAINDER}
        if first:
            self.begin(exact, plain)
        before = exact.clone() if self._rounding.mode == "stochastic" and exact is not weight else exact
        # A shard may be empty.
        if weight.numel():
            self.update(exact, local(parameter.grad).to(torch.float32), plain, group)
        plain["step"] += 1
        state.update({name: tensor for name, tensor in plain.items() if name not in self.moments})
        if exact is not weight:
            self._round(parameter, weight, exact, before, state)

    def exact_weight(self, parameter: nn.Parameter) -> Tensor:
        """This process's shard of the weight in fp32: the weight itself, or a copy that includes its remainder."""
        weight, state = local(parameter), self.state[parameter]
        if weight.dtype == torch.float32:
            return weight
        remainder = self._rounding.remainder_of(parameter, state)
        return weight.float() if remainder is None else join_weight(weight, local(remainder))

    def _round(
        self, parameter: nn.Parameter, weight: Tensor, exact: Tensor, before: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Write the fp32 weight back to the bfloat16 one."""
        remainder = self._rounding.remainder_of(parameter, state)
        if remainder is not None:
            rounded, low = split_weight(exact)
            weight.copy_(rounded)
            local(remainder).copy_(low)
        elif self._rounding.mode == "stochastic":
            weight_step(
                [weight],
                [before - exact],
                None,
                [self._rounding.shard_of(parameter)],
                lr=1.0,
                weight_decay=0.0,
                rounding="stochastic",
                seed=self._rounding.seed,
                steps=[state["step"].to(weight.device)],
                plan=self._plans.setdefault(parameter, StepPlan()),
            )
        else:
            weight.copy_(exact)


class ExactLion(LibraryOptimizer):
    """Lion, by bitsandbytes. State of a parameter: `exp_avg`, fp32, of its shape; `step`."""

    moments = ("exp_avg",)

    def __init__(self, groups: list[Group], **options: Any) -> None:
        from bitsandbytes.functional import optimizer_update_32bit

        self._library = optimizer_update_32bit
        super().__init__(groups, **options)

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Group) -> None:
        """bitsandbytes' `Lion` with 32-bit state."""
        beta1, beta2 = group["betas"]
        self._library(
            "lion",
            gradient.contiguous(),
            weight,
            state["exp_avg"],
            beta1,
            0.0,
            int(state["step"]) + 1,
            group["lr"],
            None,
            beta2,
            weight_decay=group["weight_decay"],
        )


class WrappedOptimizer(LibraryOptimizer):
    """Lets an optimizer class of PyTorch's interface step each weight."""

    def __init__(self, library: torch.optim.Optimizer, groups: list[Group], **options: Any) -> None:
        """`library`: an optimizer of any parameter, which gives its default settings."""
        self._library = library
        self._settings = {name: value for name, value in library.param_groups[0].items() if name != "params"}
        super().__init__(groups, **options)

    def step_library(
        self, weight: Tensor, gradient: Tensor, kept: dict[str, Tensor], settings: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One step of the library. Returns the new state of the weight and the group's settings."""
        weight.grad = gradient
        group = {**self._settings, **settings, "params": [weight]}
        self._library.param_groups = [group]
        if kept:
            self._library.state[weight] = kept
        self._library.step()
        found = dict(self._library.state[weight])
        self._library.state.clear()
        weight.grad = None
        return found, group


class ExactAdafactor(WrappedOptimizer):
    """`torch.optim.Adafactor`. State of a matrix: `row_var`, `col_var`; of others: `variance`; fp32; and `step`."""

    def __init__(self, groups: list[Group], **options: Any) -> None:
        super().__init__(torch.optim.Adafactor([torch.zeros(1)]), groups, **options)

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Group) -> None:
        """PyTorch's step, which creates the state."""
        kept = {name: tensor for name, tensor in state.items() if name != "step"}
        settings = {name: group[name] for name in ("lr", "weight_decay")}
        found, _ = self.step_library(weight, gradient, kept and {**kept, "step": state["step"].clone()}, settings)
        state.update({name: tensor for name, tensor in found.items() if name != "step"})


class ExactScheduleFree(WrappedOptimizer):
    """Schedule-free AdamW, by Meta's `schedulefree`.

    Weights are those that gradients are computed at (y); `averaged_weights` gives those to evaluate and export (x).
    State of a parameter: `z` and `exp_avg_sq`, fp32, of its shape; `step`; `weight_sum` and `lr_max`, fp64 scalars,
    which the library keeps in groups.
    """

    moments = ("exp_avg_sq", "z")

    def __init__(self, groups: list[Group], **options: Any) -> None:
        from schedulefree import AdamWScheduleFree

        library = AdamWScheduleFree([torch.zeros(1)], foreach=False)
        library.train()
        super().__init__(library, groups, **options)

    def begin(self, weight: Tensor, state: dict[str, Tensor]) -> None:
        """The library starts z from the weight."""
        state["z"].copy_(weight)
        state["weight_sum"] = torch.zeros((), dtype=torch.float64)
        state["lr_max"] = torch.full((), -1.0, dtype=torch.float64)

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Group) -> None:
        """The library's step, with its numbers of the group."""
        settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        counts = {"k": int(state["step"]), **{name: float(state[name]) for name in ("weight_sum", "lr_max")}}
        kept = {name: state[name] for name in self.moments}
        # The library uses the gradient's memory.
        _, after = self.step_library(weight, gradient.clone(), kept, settings | counts)
        for name in ("weight_sum", "lr_max"):
            state[name] = torch.tensor(after[name], dtype=torch.float64)

    def averaged(self, parameter: nn.Parameter) -> Tensor:
        """This process's shard of the averaged weight (x) in fp32, a copy."""
        (beta1,) = {group["betas"][0] for group in self.param_groups}
        exact = self.exact_weight(parameter).clone()
        z = self.state[parameter].get("z")
        return exact if z is None else average(exact, local(z), beta1)


def average(weight: Tensor, z: Tensor, beta1: float) -> Tensor:
    """The averaged weight of schedule-free AdamW, in place of `weight`: y = beta1 x + (1 - beta1) z, solved for x."""
    return weight.lerp_(z, 1 - 1 / beta1)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block, the model has the weights to evaluate: those of schedule-free AdamW are averaged.

    Afterwards it has its own again, bit for bit. The copy takes the memory of the weights.
    """
    if not isinstance(optimizer, ExactScheduleFree):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = [local(parameter).clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            local(parameter).copy_(optimizer.averaged(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(parameters, own, strict=True):
                local(parameter).copy_(weight)
