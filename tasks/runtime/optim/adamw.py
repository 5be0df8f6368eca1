"""AdamW in two forms: PyTorch's fused one for fp32 weights, the kernel layer's for bfloat16 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from strata_kernels import StepPlan, adamw_step, join_weight, split_weight
from tasks.runtime.optim.gradients import scale_gradients
from tasks.runtime.optim.rounding import WeightRounding, local
from tasks.runtime.optim.state_tensors import new_state_tensor
from tasks.runtime.optim.typed_state import TypedStateOptimizer

# Elements of a parameter that are converted to fp32 at a time on the CPU, so that they stay in its cache.
_PIECE = 1 << 20
# A multiple of the vector size of any CPU and of the chunks of PyTorch's threads, in elements.
_VECTORS = 64


class ExactAdamW(TypedStateOptimizer):
    """AdamW whose bfloat16 weights and moments lose no update, with one kernel launch for all tensors of a group.

    State of a parameter: `step`, fp32 scalar; `exp_avg` and `exp_avg_sq`, of its shape and dtype (fp32 in host memory);
    with fp32 master weights `remainder`, int16, of its shape. Like PyTorch's fused optimizers it takes `found_inf`, a
    scalar on the device. If it is 1, a step changes nothing. The next step uses gradients times `gradient_scale`, an
    fp32 scalar, rounded to their dtype.
    """

    steps_on_any_stream = True
    """Its kernels run on PyTorch's current stream; those of libraries need not. AdamW with moments of 8 bits could, but
    was slower in a build that did: `docs/benchmarks/large-models.md`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        rounding: WeightRounding,
        paged: bool = False,
    ) -> None:
        """`groups`: as in PyTorch. `paged`: the state is in managed memory, see `optim.managed_memory`."""
        self.paged = paged
        self._rounding, self.keeps_remainder = rounding, rounding.mode == "master"
        # PyTorch's gradient scaler and `skip_step` read this attribute.
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        self.gradient_scale: Tensor | None = None
        self._shards: dict[nn.Parameter, Any] = {}
        self._plans: dict[nn.Parameter, StepPlan] = {}
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = tuple(parameter for parameter in group["params"] if parameter.grad is not None)
            if parameters:
                self._step(parameters, group)
        self.gradient_scale = None
        return loss

    def _step(self, parameters: tuple[nn.Parameter, ...], group: dict[str, Any]) -> None:
        host = tuple(parameter for parameter in parameters if self._is_on_host(parameter))
        if host:
            for parameter in host:
                self._step_on_host(parameter, group)
            parameters = tuple(parameter for parameter in parameters if not self._is_on_host(parameter))
            if not parameters:
                return
        states = [self._state_of(parameter) for parameter in parameters]
        remainders = [
            self._rounding.remainder_of(p, s, paged=self.paged) for p, s in zip(parameters, states, strict=True)
        ]
        adamw_step(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [None if remainder is None else local(remainder) for remainder in remainders],
            [state["step"] for state in states],
            [self._shard_of(parameter) for parameter in parameters],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            rounding=self._rounding.mode,
            seed=self._rounding.seed,
            found_inf=self.found_inf,
            gradient_scale=self.gradient_scale,
            # The parameters with gradients may vary from step to step; a plan adapts to its tensors.
            plan=self._plans.setdefault(parameters[0], StepPlan()),
        )

    def _is_on_host(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is stepped on the CPU with fp32 moments, because random bits are slow there."""
        on_cpu = local(parameter).device.type == "cpu"
        return on_cpu and self._rounding.mode == "master" and parameter.dtype == torch.bfloat16

    def _step_on_host(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """PyTorch's fused step on fp32 master weights, which exist for one piece of the parameter at a time."""
        if self.found_inf is not None and float(self.found_inf):
            return
        state = self._state_of(parameter)
        remainder = self._rounding.remainder_of(parameter, state, paged=self.paged)
        assert parameter.grad is not None and remainder is not None
        if self.gradient_scale is not None:
            scale_gradients([parameter], self.gradient_scale)
        weight, gradient = local(parameter), local(parameter.grad)
        if gradient.stride() != weight.stride():
            gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
        tensors = (weight, gradient, local(state["exp_avg"]), local(state["exp_avg_sq"]), local(remainder))
        pieces = zip(*(tensor.as_strided((tensor.numel(),), (1,)).split(_PIECE) for tensor in tensors), strict=True)
        for piece in pieces:
            # PyTorch computes the elements after the last whole vector in another way. Pad them, so that results do
            # not depend on where a shard ends.
            weights, gradients, exp_avgs, exp_avg_sqs, low_bits = padded = [_padded(part) for part in piece]
            masters = join_weight(weights, low_bits)
            adamw(
                [masters], [gradients.float()], [exp_avgs], [exp_avg_sqs], [], [state["step"].clone()],
                fused=True, amsgrad=False, maximize=False, lr=group["lr"], beta1=group["betas"][0],
                beta2=group["betas"][1], eps=group["eps"], weight_decay=group["weight_decay"],
            )  # fmt: skip
            rounded, rest = split_weight(masters)
            weights.copy_(rounded)
            low_bits.copy_(rest)
            for part, computed in zip(piece, padded, strict=True):
                if part is not computed:
                    part.copy_(computed[: part.numel()])
        state["step"] += 1

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        dtype = torch.float32 if self._is_on_host(parameter) else parameter.dtype
        if "step" not in state:
            state["step"] = torch.zeros((), device=local(parameter).device)
        for name in ("exp_avg", "exp_avg_sq"):
            # The checkpoint's run may have kept its moments on another device, in another dtype.
            if name not in state or state[name].dtype != dtype:
                moment = new_state_tensor(parameter, parameter.shape, dtype, paged=self.paged)
                if name in state:
                    local(moment).copy_(local(state[name]))
                state[name] = moment
        return state

    def _shard_of(self, parameter: nn.Parameter) -> Any:
        if parameter not in self._shards:
            self._shards[parameter] = self._rounding.shard_of(parameter)
        return self._shards[parameter]


def _padded(x: Tensor) -> Tensor:
    """`x`, padded with zeros to a whole number of vectors."""
    missing = -x.numel() % _VECTORS
    return torch.cat([x, x.new_zeros(missing)]) if missing else x


class PagedAdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW with its moments in managed memory, see `tasks.runtime.optim.managed_memory`."""

    paged = True

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        # PyTorch creates the state of parameters that have none; here it exists already, in managed memory.
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                dtypes = {"step": torch.float32, "exp_avg": parameter.dtype, "exp_avg_sq": parameter.dtype}
                self.state[parameter] = {
                    name: new_state_tensor(
                        parameter, torch.Size() if name == "step" else parameter.shape, dtype, paged=True
                    )
                    for name, dtype in dtypes.items()
                }
        return super()._init_group(group, *lists)
