"""Optimizer steps in the backward pass, beside its products, and clipping without all gradients.

The norm of all gradients is known only when the first of them have been used. So each is clipped by an estimate: the
norms of this step's gradients so far, and of the step before's for those that are still to come,

    factor_i = min(1, max_norm / (sqrt(Σ_{j ≤ i} |g_j|² + Σ_{j > i} |g_j of the step before|²) + 1e-6))

in the order of the backward pass. If norms do not change from step to step, that is clipping by the norm of all. If a
step's gradients are far larger, all but the first few are scaled by nearly their own norm: the norm of what is used
never exceeds max_norm · sqrt(1 + ln(Σ |g_j|² / |g_1|²)). The first step estimates by its own gradients alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from tasks.runtime.optim.chained import step_parameter
from tasks.runtime.optim.gradients import clip_factor, local_norms, scale_gradients

# Gradients that wait for their step. A decoder layer has seven or so matrices, and all are stepped long before the
# next layer's are there.
_WAITING = 8
SQUARED_NORM = "squared_norm"
"""State of a parameter: the square of its gradient's norm in its last step, fp32."""


def step_in_backward(optimizer: torch.optim.Optimizer, max_norm: float = 0.0) -> None:
    """Make the backward pass step each matrix as soon as its gradient is complete, and free the gradient.

    The optimizer's own `step`, after it, has vectors alone to step, all at once: one by one they would take the host
    longer than they are worth. With `max_norm` it has none, because every gradient is clipped in the order of the pass.
    Set the learning rate before the backward pass. On a GPU, an optimizer with `steps_on_any_stream` steps on a stream
    of its own, which the backward pass waits for at its end.

    max_norm: clip as the module's docstring says; 0: no limit. Only where a process has whole gradients.
    """
    steps = _Steps(optimizer, max_norm)
    optimizer.steps_in_backward = steps  # type: ignore[attr-defined]
    # A parameter that held the optimizer, which holds the parameter, would never be freed.
    take = WeakMethod(steps.take)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.ndim < 2 and not max_norm:
                continue
            parameter.register_post_accumulate_grad_hook(partial(_call, take, number))


def norm_in_backward(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The norm of all gradients of the last backward pass, fp32; None unless `step_in_backward` clips."""
    norm: Tensor | None = getattr(optimizer, "norm_in_backward", None)
    return norm


def _call(take: WeakMethod[Callable[..., None]], number: int, parameter: nn.Parameter) -> None:
    function = take()
    if function is not None:
        function(number, parameter)


class _Steps:
    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self._optimizer, self._max_norm = optimizer, max_norm
        self._stream: torch.cuda.Stream | None = None
        self._waiting: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        # The number of the backward pass; one that an error ended has not told so.
        self._pass = -1
        # Of this pass: Σ |g|² of what has come, Σ |g|² of the step before of what has not.
        self._seen = self._rest = torch.zeros(())

    def take(self, number: int, parameter: nn.Parameter) -> None:
        """Step a parameter, of the group with this number, and let its gradient go."""
        assert parameter.grad is not None
        number_of_pass = torch._C._current_graph_task_id()
        if self._pass != number_of_pass:
            self._pass = number_of_pass
            self._begin(parameter.device)
        if self._stream is None:
            self._step(number, parameter)
            parameter.grad = None
            return
        current = torch.cuda.current_stream(parameter.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step(number, parameter)
            self._waiting.append((parameter.grad, self._stream.record_event()))
        parameter.grad = None
        while len(self._waiting) > _WAITING:
            # Its memory is for what comes later on the current stream.
            current.wait_event(self._waiting[0][1])
            self._waiting.popleft()

    def _begin(self, device: torch.device) -> None:
        Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
        if self._max_norm:
            self._seen = torch.zeros((), dtype=torch.float64, device=device)
            self._rest = self._sum_before()
        if device.type == "cuda" and self._stream is None and getattr(self._optimizer, "steps_on_any_stream", False):
            self._stream = torch.cuda.Stream(device)

    def _end(self) -> None:
        """Called when the backward pass is done, with the stream that has called it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._waiting.clear()
        if self._max_norm:
            self._optimizer.norm_in_backward = self._seen.sqrt().float()  # type: ignore[attr-defined]

    @torch.no_grad()
    def _step(self, number: int, parameter: nn.Parameter) -> None:
        optimizer = self._optimizer
        squared = self._clip(parameter) if self._max_norm else None
        step_parameter(optimizer, parameter, optimizer.param_groups[number])
        if squared is not None:
            # Only now: optimizers take a parameter that has a state for one that they have stepped before.
            state = optimizer.state[parameter]
            if SQUARED_NORM in state:
                # In place: memory that was allocated for another stream, as in a resume, must not be freed meanwhile.
                state[SQUARED_NORM].copy_(squared)
            else:
                state[SQUARED_NORM] = squared

    def _sum_before(self) -> Tensor:
        """Σ |g|² of the step before, in an order that a resumed run repeats."""
        state = self._optimizer.state
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        known = [state[parameter][SQUARED_NORM] for parameter in parameters if SQUARED_NORM in state.get(parameter, ())]
        return torch.stack(known).double().sum() if known else torch.zeros_like(self._seen)

    def _clip(self, parameter: nn.Parameter) -> Tensor:
        """Scale the gradient, now or in the step; returns the square of its norm before."""
        optimizer = self._optimizer
        assert parameter.grad is not None
        squared = torch.stack(local_norms([parameter.grad])).square().sum()
        self._seen += squared
        if SQUARED_NORM in (state := optimizer.state.get(parameter, {})):
            self._rest -= state[SQUARED_NORM]
        factor = clip_factor((self._seen + self._rest.clamp(min=0)).sqrt(), self._max_norm)
        if hasattr(optimizer, "gradient_scale"):
            optimizer.gradient_scale = factor
        else:
            scale_gradients([parameter], factor)
        return squared
