"""Build the optimizer of the spec: which parameters it steps, at which rate, and which of them decay."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import SCORE, Lora
from strata_platform.spec.sections.training import Optimizer, ParameterGroup
from tasks.runtime.optim.adamw import ExactAdamW, PagedAdamW
from tasks.runtime.optim.adamw_8bit import BLOCK, AdamW8bit, has_eight_bits
from tasks.runtime.optim.chained import ChainedOptimizer
from tasks.runtime.optim.in_backward import step_in_backward
from tasks.runtime.optim.library_optimizers import ExactAdafactor, ExactLion, ExactScheduleFree
from tasks.runtime.optim.muon import ExactMuon
from tasks.runtime.optim.parameter_names import names_of, select
from tasks.runtime.optim.rounding import WeightRounding, has_bfloat16

log = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    """The optimizer of `optimizer.type` over the trainable parameters; biases and norms have no weight decay."""
    settings = spec.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rates = _own_settings(model, settings)
    if isinstance(spec.adapter, Lora) and spec.adapter.loraplus_lr_ratio is not None:
        rates = _loraplus(model, spec.peak_lr * spec.adapter.loraplus_lr_ratio) | rates
    if settings.precision != "fp32_master" and not has_bfloat16(trained):
        log.warning("optimizer.precision %r has no effect: no trainable weight is bfloat16", settings.precision)
    # DeepSpeed's engine lets its optimizer step fp32 master weights of its own.
    rounding = None if spec.parallel.type == "deepspeed" else WeightRounding.of(model, settings, spec.seed)
    builder = _Builder(model, settings, spec.peak_lr, rounding, rates)
    build = {
        "adamw": builder.adamw,
        "adamw_8bit": builder.adamw_8bit,
        "muon": builder.muon,
        "adafactor": builder.adafactor,
        "lion": builder.lion,
        "schedule_free": builder.schedule_free,
    }[settings.type]
    optimizer = build(trained)
    if settings.in_backward:
        step_in_backward(optimizer, settings.max_grad_norm)
    return optimizer


@dataclass(frozen=True)
class _Builder:
    """Builds the optimizers of one model. Each method takes the parameters that its optimizer steps."""

    model: nn.Module
    settings: Optimizer
    lr: float
    rounding: WeightRounding | None
    """How bfloat16 weights are rounded; None if the optimizer gets no bfloat16 weights."""
    own: dict[nn.Parameter, ParameterGroup]
    """The first of `optimizer.groups` that matches a parameter, for those that one matches."""

    def groups(self, trained: list[nn.Parameter]) -> list[dict[str, Any]]:
        """Groups of parameters with one learning rate, weight decay and device mesh; weights of one dimension and
        biases do not decay.

        `lr_scale` is the ratio of a group's learning rate to that of the run; only groups with their own rate have it.
        """
        # The biases of all experts are one parameter of two dimensions.
        biases = _biases(self.model)
        alike: dict[tuple[float, float | None], list[nn.Parameter]] = {}
        for parameter in sorted(trained, key=lambda p: not (p.ndim > 1 and id(p) not in biases)):
            own = self.own.get(parameter)
            decay = self.settings.weight_decay * (parameter.ndim > 1 and id(parameter) not in biases)
            if own is not None and own.weight_decay is not None:
                decay = own.weight_decay
            alike.setdefault((decay, own.lr if own is not None else None), []).append(parameter)
        return [
            {"params": parameters, "weight_decay": decay}
            | ({} if rate is None else {"lr": rate, "lr_scale": rate / self.lr})
            for (decay, rate), members in alike.items()
            # A fused operator takes tensors of one device mesh.
            for parameters in _by_mesh(members)
        ]

    def adamw(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW; weights of one dimension and biases do not decay."""
        groups = self.groups(trained)
        common: dict[str, Any] = {"lr": self.lr, "betas": self.settings.betas, "eps": self.settings.eps}
        if self.rounding is not None and has_bfloat16(trained):
            return ExactAdamW(groups, **common, rounding=self.rounding, paged=self.settings.paged)
        return (PagedAdamW if self.settings.paged else torch.optim.AdamW)(groups, **common, fused=True)

    def muon(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Muon for the matrices between embeddings and head, AdamW for the rest.

        Updates of both have the same size, so they share learning rate and weight decay. AdamW also takes the weights
        of experts that are one parameter of three dimensions.

        Source: Jordan (https://kellerjordan.github.io/posts/muon).
        """
        outer = _embeddings(self.model) | _norms(self.model) | _heads(self.model)
        # Other parameters of two dimensions, such as biases of experts or the decay of a state, are no matrices.
        weights = {id(p) for name, p in self.model.named_parameters() if name.endswith("weight")} - outer
        hidden = {id(p): p.numel() for p in trained if p.ndim == 2 and id(p) in weights}
        if not hidden:
            raise ValueError(
                "optimizer.type 'muon': no trainable weight is a matrix between embeddings and head; set "
                "optimizer.type to 'adamw'"
            )
        _log_share("Muon steps", hidden, trained)
        matrices = [p for p in trained if id(p) in hidden]
        common: dict[str, Any] = {
            "lr": self.lr,
            "weight_decay": self.settings.weight_decay,
            "momentum": self.settings.muon_momentum,
        }
        muon: torch.optim.Optimizer
        if self.rounding is not None and has_bfloat16(matrices):
            muon = ExactMuon(self.groups(matrices), **common, rounding=self.rounding)
        else:
            muon = torch.optim.Muon(self.groups(matrices), **common, adjust_lr_fn="match_rms_adamw")
        others = [p for p in trained if id(p) not in hidden]
        return ChainedOptimizer([muon, *([self.adamw(others)] if others else [])])

    def adamw_8bit(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW with 8-bit moments for most matrices, AdamW for the rest."""
        assert self.rounding is not None, "DeepSpeed has no 8-bit moments"
        embeddings = _embeddings(self.model)
        small = {id(p): p.numel() for p in trained if has_eight_bits(p) and id(p) not in embeddings}
        if not small:
            raise ValueError(
                f"optimizer.type 'adamw_8bit': no trainable matrix has rows whose length is a multiple of {BLOCK}, "
                "which 8-bit moments need; set optimizer.type to 'adamw'"
            )
        _log_share("8-bit moments for", small, trained)
        eight_bits = AdamW8bit(
            self.groups([p for p in trained if id(p) in small]),
            lr=self.lr,
            betas=self.settings.betas,
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
            rounding=self.rounding,
            paged=self.settings.paged,
        )
        others = [p for p in trained if id(p) not in small]
        return ChainedOptimizer([eight_bits, *([self.adamw(others)] if others else [])])

    def adafactor(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Adafactor for all weights."""
        return ExactAdafactor(self.groups(trained), lr=self.lr, rounding=self._exact_rounding)

    def lion(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Lion for all weights."""
        return ExactLion(self.groups(trained), lr=self.lr, betas=self.settings.betas, rounding=self._exact_rounding)

    def schedule_free(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Schedule-free AdamW for all weights."""
        common = {"lr": self.lr, "betas": self.settings.betas, "eps": self.settings.eps}
        return ExactScheduleFree(self.groups(trained), **common, rounding=self._exact_rounding)

    @property
    def _exact_rounding(self) -> WeightRounding:
        assert self.rounding is not None, "DeepSpeed steps weights by AdamW alone"
        return self.rounding


def _own_settings(model: nn.Module, settings: Optimizer) -> dict[nn.Parameter, ParameterGroup]:
    """The first of `optimizer.groups` that matches each parameter.

    Raises ValueError if a group gets no trained parameter.
    """
    names, found = names_of(model), dict[nn.Parameter, ParameterGroup]()
    patterns = [group.match for group in settings.groups]
    selected = select("optimizer.groups", patterns, names)
    for group, parameters in zip(settings.groups, selected, strict=True):
        trained = {parameter for parameter in parameters if parameter.requires_grad}
        added = [parameter for parameter in names if parameter in trained and parameter not in found]
        if not added:
            why = "that groups before it match; move it up" if trained else "that are frozen; remove it"
            raise ValueError(f"optimizer.groups: {group.match!r} matches only weights {why}")
        found |= dict.fromkeys(added, group)
        log.info(
            "optimizer: group %r has %d tensors, %.2f M weights, lr %s, weight decay %s",
            group.match,
            len(added),
            sum(parameter.numel() for parameter in added) / 1e6,
            "as the others" if group.lr is None else f"{group.lr:g}",
            "as the others" if group.weight_decay is None else f"{group.weight_decay:g}",
        )
    return found


def _loraplus(model: nn.Module, rate: float) -> dict[nn.Parameter, ParameterGroup]:
    """A group with the learning rate of LoRA+ for the second matrices of adapters (B) and for vectors.

    Source: Hayou et al. (arXiv:2402.12354), with PEFT's choice of parameters.
    """
    group = ParameterGroup(match="lora_B", lr=rate)
    return {p: group for name, p in model.named_parameters() if p.requires_grad and ("lora_B" in name or p.ndim == 1)}


def _embeddings(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _norms(model: nn.Module) -> set[int]:
    """Weights of norms. Those of queries and keys may have a row for each head."""
    norms = (module for module in model.modules() if "norm" in type(module).__name__.lower())
    return {id(parameter) for module in norms for parameter in module.parameters(recurse=False)}


def _heads(model: nn.Module) -> set[int]:
    """Weights of the heads of tokens and scores; some models of several parts do not name theirs."""
    heads = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("lm_head", SCORE)]
    named = model.get_output_embeddings()  # type: ignore[operator]
    return {id(head.weight) for head in (*heads, named) if hasattr(head, "weight")}


def _biases(model: nn.Module) -> set[int]:
    return {id(parameter) for name, parameter in model.named_parameters() if name.endswith("bias")}


def _log_share(what: str, sizes: dict[int, int], trained: list[nn.Parameter]) -> None:
    total = sum(parameter.numel() for parameter in trained)
    log.info("optimizer: %s %.1f %% of the weights", what, 100 * sum(sizes.values()) / total)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """`parameters` grouped by their device mesh; plain tensors form a group of their own."""
    lists: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(lists.values())
