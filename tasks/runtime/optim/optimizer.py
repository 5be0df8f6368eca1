"""Build the optimizer that the spec names: which parameters it steps, and which of them decay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from strata_platform.spec import RunSpec
from tasks.runtime.optim.adamw import ExactAdamW, PagedAdamW
from tasks.runtime.optim.adamw_8bit import BLOCK, AdamW8bit, has_eight_bits
from tasks.runtime.optim.chained import ChainedOptimizer
from tasks.runtime.optim.gradients import by_mesh
from tasks.runtime.optim.in_backward import step_in_backward
from tasks.runtime.optim.muon import ExactMuon
from tasks.runtime.optim.rounding import WeightRounding, has_bfloat16

log = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    """What `optimizer.type` names, over the parameters that learn; biases and norms do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if spec.optimizer.precision != "fp32_master" and not has_bfloat16(trained):
        log.warning("optimizer.precision %r has no effect: no bfloat16 weight learns", spec.optimizer.precision)
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
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": spec.peak_lr, "betas": spec.optimizer.betas, "eps": spec.optimizer.eps}
    if _rounds(trained, spec):
        return ExactAdamW(groups, **settings, rounding=WeightRounding.of(model, spec), paged=spec.optimizer.paged)
    return (PagedAdamW if spec.optimizer.paged else torch.optim.AdamW)(groups, **settings, fused=True)


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
    matrices = [p for p in trained if id(p) in hidden]
    settings: dict[str, Any] = {
        "lr": spec.peak_lr,
        "weight_decay": spec.optimizer.weight_decay,
        "momentum": spec.optimizer.muon_momentum,
    }
    muon: torch.optim.Optimizer
    if _rounds(matrices, spec):
        muon = ExactMuon(matrices, **settings, rounding=WeightRounding.of(model, spec))
    else:
        muon = torch.optim.Muon(matrices, **settings, adjust_lr_fn="match_rms_adamw")
    return ChainedOptimizer([muon, _adamw(model, [p for p in trained if id(p) not in hidden], spec)])


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
        rounding=WeightRounding.of(model, spec),
        paged=spec.optimizer.paged,
    )
    others = [p for p in trained if id(p) not in small]
    return ChainedOptimizer([eight_bits, *([_adamw(model, others, spec)] if others else [])])


def _rounds(parameters: list[nn.Parameter], spec: RunSpec) -> bool:
    """Whether steps of these are rounded. DeepSpeed's engine has its optimizer step fp32 master weights of its own."""
    return has_bfloat16(parameters) and spec.parallel.type != "deepspeed"


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
