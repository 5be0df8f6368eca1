"""The optimizer recipe: which parameters decay, how fast they learn at each step, how gradients are clipped."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strata_platform.spec import RunSpec
from tasks.runtime.optim.adamw_8bit import BLOCK, AdamW8bit, has_eight_bits
from tasks.runtime.optim.state_tensors import new_slot

log = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    """What `optimizer.type` names, over the parameters that learn; biases and norms do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _BUILDERS[spec.optimizer.type](model, trained, spec)
    if spec.optimizer.in_backward:
        step_in_backward(optimizer)
    return optimizer


def _adamw(model: nn.Module, trained: list[nn.Parameter], spec: RunSpec) -> torch.optim.Optimizer:
    # Of one dimension, but for the biases of experts, which are in one parameter.
    biases = _biases(model)
    matrices = {id(p) for p in trained if p.ndim > 1 and id(p) not in biases}
    # Fused operators take tensors of one mesh.
    groups = [
        {
            "params": [p for p in alike if (id(p) in matrices) == decays],
            "weight_decay": spec.optimizer.weight_decay * decays,
        }
        for decays in (True, False)
        for alike in by_mesh(trained)
    ]
    kind = PagedAdamW if spec.optimizer.paged else torch.optim.AdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=spec.peak_lr,
        betas=spec.optimizer.betas,
        eps=spec.optimizer.eps,
        fused=True,
    )


def _muon(model: nn.Module, trained: list[nn.Parameter], spec: RunSpec) -> torch.optim.Optimizer:
    """Muon over the matrices between embeddings and head, AdamW over the rest.

    Steps of both are of one size, so they share the learning rate and the weight decay. The rest has also the matrices
    of experts that are in one parameter, of three dimensions.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    outer = _embeddings(model) | ({id(head.weight)} if head is not None else set())
    # What else has two dimensions, such as biases of experts or the decay of a state, multiplies nothing.
    weights = {id(p) for name, p in model.named_parameters() if name.endswith("weight")} - outer
    hidden = {id(p): p.numel() for p in trained if p.ndim == 2 and id(p) in weights}
    _tell_share("matrices whose steps are orthogonalized have", hidden, trained)
    muon = torch.optim.Muon(
        [p for p in trained if id(p) in hidden],
        lr=spec.peak_lr,
        weight_decay=spec.optimizer.weight_decay,
        momentum=spec.optimizer.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return Several([muon, _adamw(model, [p for p in trained if id(p) not in hidden], spec)])


def _adamw_8bit(model: nn.Module, trained: list[nn.Parameter], spec: RunSpec) -> torch.optim.Optimizer:
    """AdamW, with the moments of most matrices in eight bits."""
    embeddings = _embeddings(model)
    small = {id(p): p.numel() for p in trained if has_eight_bits(p) and id(p) not in embeddings}
    if not small:
        raise ValueError(
            f"optimizer.type 'adamw_8bit': no matrix that learns has rows whose length is a multiple of {BLOCK}, which "
            "moments of eight bits need; set optimizer.type to 'adamw'"
        )
    _tell_share("eight bits for each moment of", small, trained)
    eight_bits = AdamW8bit(
        [{"params": [p for p in trained if id(p) in small]}],
        lr=spec.peak_lr,
        betas=spec.optimizer.betas,
        eps=spec.optimizer.eps,
        weight_decay=spec.optimizer.weight_decay,
        paged=spec.optimizer.paged,
    )
    others = [p for p in trained if id(p) not in small]
    return Several([eight_bits, *([_adamw(model, others, spec)] if others else [])])


def _embeddings(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _biases(model: nn.Module) -> set[int]:
    return {id(parameter) for name, parameter in model.named_parameters() if name.endswith("bias")}


def _tell_share(what: str, sizes: dict[int, int], trained: list[nn.Parameter]) -> None:
    total = sum(parameter.numel() for parameter in trained)
    log.info("optimizer: %s %.1f %% of the weights", what, 100 * sum(sizes.values()) / total)


_BUILDERS: dict[str, Callable[[nn.Module, list[nn.Parameter], RunSpec], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "muon": _muon,
}


class PagedAdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW, whose moments are in memory that gives way; see `tasks.runtime.optim.managed_memory`."""

    paged = True

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        # PyTorch makes the state of parameters that have none: the same that they get here.
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                dtypes = {"step": torch.float32, "exp_avg": parameter.dtype, "exp_avg_sq": parameter.dtype}
                self.state[parameter] = {
                    name: new_slot(parameter, torch.Size() if name == "step" else parameter.shape, dtype, paged=True)
                    for name, dtype in dtypes.items()
                }
        return super()._init_group(group, *lists)


class Several(torch.optim.Optimizer):
    """Several optimizers, each for parameters of its own, as one: with one list of groups, and one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self.paged = any(getattr(part, "paged", False) for part in parts)
        groups = [{**group, "part": number} for number, part in enumerate(parts) for group in part.param_groups]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of every one."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for number, part in enumerate(self._parts):
            # Groups and state are replaced by whoever loads them, or has the step of one parameter taken.
            part.param_groups = [group for group in self.param_groups if group["part"] == number]
            part.state = self.state
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; each tensor keeps its type, where PyTorch's would give it the weights'."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.update({parameters[number]: dict(slots) for number, slots in state_dict["state"].items()})


def step_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Let the backward pass take each parameter's step as soon as it has its gradient, and free that.

    The optimizer's `step` has nothing left to do afterwards; the learning rate must be set before the backward pass.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(partial(_step_alone, optimizer, number))


def _step_alone(optimizer: torch.optim.Optimizer, number: int, parameter: Tensor) -> None:
    """A step of one parameter, which is in the group of this `number`."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
    parameter.grad = None


def learning_rate_factor(spec: RunSpec, steps: int) -> Callable[[int], float]:
    """Share of the peak learning rate that the step after `done` of `steps` steps takes: a pure function of `done`.

    It is 0 for no step: one would read its data without learning it.
    """
    warmup = math.ceil(spec.schedule.warmup_ratio * steps)
    begin = max(warmup, steps - math.ceil(spec.schedule.falling * steps)) if spec.schedule.falling else warmup
    shape = _SHAPES[spec.schedule.type]

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        return shape(max(0, done - begin) / max(1, steps - begin))

    return factor


# From the share of the steps after the warm-up, or of those in which the rate falls, that are done, 0 to 1.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "wsd": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """What the next step takes."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def withhold(optimizer: torch.optim.Optimizer, verdict: Tensor) -> None:
    """Have the next step change nothing where `verdict`, a scalar of fp32, is 1.

    The device decides where the optimizer's own kernels can, which is how PyTorch scales losses; else the host waits
    for the verdict and drops the gradients, without which no parameter takes a step.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # There now: of a copy that is still under way a step on the host would not know.
        optimizer.found_inf = verdict.to(optimizer.param_groups[0]["params"][0].device)  # type: ignore[attr-defined]
    elif verdict.item():
        optimizer.zero_grad()


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients down to a global norm of `max_norm`, 0 for any, and return that before. A collective if split."""
    learned = by_mesh([parameter for parameter in model.parameters() if parameter.grad is not None])
    gradients = [[p.grad for p in alike if p.grad is not None] for alike in learned]
    norms = [nn.utils.get_total_norm(alike) for alike in gradients]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for alike in learned if max_norm else ():
        nn.utils.clip_grads_with_norm_(alike, max_norm, total)
    return total


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """`parameters` in lists of those that the same processes hold, or that are no DTensors."""
    lists: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(lists.values())
