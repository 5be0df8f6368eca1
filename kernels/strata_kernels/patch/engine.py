"""Patches a model as the table or `discover` says.

A module is patched by setting its class to a subclass that overrides `forward`. Nothing is stored on the module:
parameters, buffers, hooks and state dict do not change, copies are patched too, and other models are not affected.
Unpatching restores the original class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from .discover import Found, discover
from .experts_forward import experts_adapter_forward, experts_forward
from .forwards import (
    causal_lm_forward,
    mlp_forward,
    norm_forward,
    unless_activation_changed,
    with_parameters_of,
    with_rope,
)
from .structure import activation_options, activations_of, is_hooked, is_own, linear_head, original_class, unwrap
from .table import OPERATORS, ROWS, Experts, ExpertsAdapter, Head, Mlp, Norm, Recipe, Rope, Row


@dataclass(frozen=True)
class PatchReport:
    """Result of `patch_model`.

    Attributes:
        model_type: `config.model_type` of the model.
        replaced: operator → paths of the modules that now run it.
        excluded: operators in `exclude`.
        unsupported: the activation operators, if the family's feed-forward layer has no operator.
        kept: operator → reasons why candidate modules keep their own code.
        by_structure: whether `discover` found the modules, because the table has no row for the family.
        proofs: (number of new proofs of equality, number of cached proofs) of `discover`.
    """

    model_type: str
    replaced: dict[str, tuple[str, ...]]
    excluded: tuple[str, ...]
    unsupported: tuple[str, ...]
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by_structure: bool = False
    # Whether proofs were cached does not affect equality of reports.
    proofs: tuple[int, int] = field(default=(0, 0), compare=False)

    @property
    def counts(self) -> dict[str, int]:
        """Operator → number of modules that run it."""
        return {operator: len(paths) for operator, paths in self.replaced.items()}

    def proof_summary(self) -> str:
        """One line for logs: `proofs of equality: 2 made now, 5 from an earlier start`."""
        made, recalled = self.proofs
        return f"proofs of equality: {made} made now, {recalled} from an earlier start"

    def summary(self) -> str:
        """One line for logs: `llama: rms_norm x5, rope x2, swiglu x2, linear_cross_entropy x1`."""
        parts = [f"{operator} x{count}" for operator, count in self.counts.items()] or ["nothing is fused"]
        parts += [f"{operator} excluded" for operator in self.excluded]
        parts += [f"{operator} has no place in it" for operator in self.unsupported]
        for operator, reasons in self.kept.items():
            parts.append(
                f"{operator} {'not everywhere' if operator in self.replaced else 'left out'}: {'; '.join(reasons)}"
            )
        return f"{self.model_type}{' (by structure)' * self.by_structure}: {', '.join(parts)}"


def patch_model(model: nn.Module, *, exclude: Iterable[str] = (), require_all: bool = False) -> PatchReport:
    """Replace the forward of modules of a transformers model with fused operators, in place.

    Results are equal up to rounding. A family with a table row is patched by that row. In other families, modules are
    found by structure, and each class is compared with the operator on random input before its modules are replaced
    (`discover`). Modules that cannot be replaced keep their own code; the report has the reasons.

    With labels, in training mode, `linear_cross_entropy` computes the loss and the output's `logits` is None. Pass
    `skip_logits=False` to the forward call to also get logits, or `skip_logits=True` to avoid them in evaluation. For
    another loss, pass `head_loss`: a function of the hidden states [B, T, H] before the head, the head's weight, its
    bias or None, and the softcap or None. Its result becomes the output's `loss`, without logits. If a family scales
    its logits, the function receives scaled hidden states and a scaled bias. Patching a patched model is allowed: only
    the last call counts.

    Args:
        model: a causal language model, bare or inside PEFT, `torch.compile` or DDP.
        exclude: operators not to use, of "rms_norm", "layer_norm", "rope", "swiglu", "geglu",
            "relu_squared", "gelu", "silu", "experts", "linear_cross_entropy".
        require_all: raise if an operator that the model could use cannot be applied.

    Raises:
        ValueError: not a transformers model; an unknown operator in `exclude`; with `require_all`, an operator that
            replaced no module or could not replace a candidate. The model is then unchanged.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")  # doctest: +SKIP
        >>> print(patch_model(model).summary())                                      # doctest: +SKIP
        llama: rms_norm x65, rope x32, swiglu x32, linear_cross_entropy x1
    """
    excluded = _known_operators(exclude)
    base = unwrap(model)
    model_type = _model_type(base)
    wanted = [operator for operator in OPERATORS if operator not in excluded]
    row = ROWS.get(model_type)
    found = discover(base, wanted) if row is None else _find_by_row(base, row, wanted)
    kept = {name: list(reasons) for name, reasons in found.kept.items()}
    replacements: dict[str, list[tuple[str, nn.Module, Recipe]]] = {}
    for operator, modules in found.replacements.items():
        try:
            for path, module, recipe in modules:
                _check(module, path or type(module).__name__, operator, recipe)
            replacements[operator] = modules
        except ValueError as error:
            kept.setdefault(operator, []).append(str(error))
    if require_all and kept:
        reasons = "; ".join(f"{name}: {reason}" for name, several in kept.items() for reason in several)
        raise ValueError(f"{reasons}; pass exclude={tuple(kept)} to patch the rest")

    unpatch_model(base)
    for modules in replacements.values():
        for _, module, recipe in modules:
            cls: Any = type(module)
            module.__class__ = _patched(cls, recipe)
    _patch_adapters(base, {id(module): recipe for _, module, recipe in replacements.get("experts", [])})
    return PatchReport(
        model_type=model_type,
        replaced={name: tuple(path or "(model)" for path, *_ in modules) for name, modules in replacements.items()},
        excluded=excluded,
        unsupported=row.unsupported if row else (),
        kept={name: tuple(reasons) for name, reasons in kept.items()},
        by_structure=row is None,
        proofs=found.proofs,
    )


def _patch_adapters(model: nn.Module, experts: dict[int, Recipe]) -> None:
    """Patch PEFT's wrappers of weights of patched `experts` (id → recipe) to pass their low-rank factors on."""
    for module in model.modules():
        if not type(module).__module__.startswith("peft.") or not hasattr(module, "parameter_name"):
            continue
        wrapper: Any = module
        recipe = experts.get(id(wrapper.get_base_layer()))
        if isinstance(recipe, Experts) and wrapper.parameter_name in (recipe.gate_up, recipe.down):
            cls: Any = type(module)
            module.__class__ = _patched(cls, ExpertsAdapter())


def unpatch_model(model: nn.Module) -> None:
    """Restore the original class of every module of `model`; no-op for a model that is not patched.

    Raises:
        ValueError: another class was derived from a patched class. The model is then unchanged.
    """
    for module, cls in [(module, original_class(module)) for module in model.modules()]:
        module.__class__ = cls


def _known_operators(names: Iterable[str]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in OPERATORS:
            raise ValueError(_unknown("operator", name, OPERATORS))
    return tuple(operator for operator in OPERATORS if operator in names)


def _model_type(model: nn.Module) -> str:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model_type, str):
        raise ValueError(f"{type(model).__name__} has no config.model_type; patch_model takes transformers models")
    return model_type


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = get_close_matches(name, known, n=1)
    return f"unknown {what} {name!r}{f', did you mean {near[0]!r}?' if near else ';'} known are {', '.join(known)}"


def _find_by_row(model: nn.Module, row: Row, operators: Iterable[str]) -> Found:
    """The modules of the row's classes that the operators replace."""
    suffix = {"rms_norm": "RMSNorm", "rope": "Attention", "linear_cross_entropy": "ForCausalLM"}
    replacements: dict[str, list[tuple[str, nn.Module, Recipe]]] = {}
    kept: dict[str, tuple[str, ...]] = {}
    for operator in operators:
        if operator not in row.operators:
            continue
        cls = getattr(import_module(row.module), row.prefix + suffix.get(operator, "MLP"))
        found = [
            (path, module, row.recipe(operator))
            for path, module in model.named_modules()
            if isinstance(module, cls) and original_class(module).forward is cls.forward
        ]
        if found:
            replacements[operator] = found
        else:
            kept[operator] = (f"no {cls.__name__} is in {type(model).__name__}",)
    return Found(replacements, kept)


def _check(module: nn.Module, path: str, operator: str, recipe: Recipe) -> None:
    """Raise if replacing the forward of `module` would change its results or have no effect."""
    cls: Any = original_class(module)
    if "forward" in vars(module):
        raise ValueError(
            f"{path} has a forward of its own, set by hooks or by another patch; patch the model before they are added"
        )
    home = _home(cls)
    replaced = {f"{cls.__name__}.forward": cls.forward}
    if isinstance(recipe, Rope):
        replaced |= {name: getattr(sys.modules.get(home), name, None) for name, _ in recipe.functions}
    for name, function in replaced.items():
        if not is_own(function, home):
            raise ValueError(
                f"{operator} stands for {name} of {home}, which something has replaced by {function}; "
                "undo that before the model is patched"
            )
    if isinstance(recipe, Mlp) and recipe.activation is not None:
        function = getattr(module, recipe.activation)
        if activation_options(operator, function) is None:
            raise ValueError(
                f"{operator} computes {activations_of(operator)}, but {path}.{recipe.activation} is {function}"
            )
    activation = recipe.activation if isinstance(recipe, Mlp | Experts) else None
    if activation is not None and is_hooked(getattr(module, activation)):
        raise ValueError(f"{operator} does not call {path}.{activation}, which has hooks; remove those")
    if isinstance(recipe, Head):
        linear_head(getattr(module, recipe.head))
        losses = import_module("transformers.loss.loss_utils")
        if module.loss_function is not losses.ForCausalLMLoss:
            raise ValueError(
                f"linear_cross_entropy stands for the loss ForCausalLMLoss, but the model's is {module.loss_function}"
            )


def _home(cls: type[nn.Module]) -> str:
    """`__module__` of the class that defines the forward of `cls`."""
    return next(base.__module__ for base in cls.__mro__ if "forward" in vars(base))


@cache
def _patched(cls: Any, recipe: Recipe) -> Any:
    """The subclass of `cls` that computes `recipe`; keeps the name, which configs and wrapping policies look up."""
    namespace = {
        "forward": _forward(cls, recipe),
        "_strata_original": cls,
        "_strata_recipe": recipe,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # By module and name, pickle would find the original class.
        "__reduce_ex__": lambda self, protocol: _reduce(self, protocol, (cls, recipe)),
    }
    return type(cls)(cls.__name__, (cls,), namespace)


def _forward(cls: Any, recipe: Recipe) -> Callable[..., Any]:
    match recipe:
        case Norm():
            return with_parameters_of(cls.forward, norm_forward(recipe))
        case Mlp():
            fused = with_parameters_of(cls.forward, mlp_forward(recipe))
            return unless_activation_changed(cls.forward, fused, recipe)
        case Experts():
            return with_parameters_of(cls.forward, experts_forward(cls.forward, recipe))
        case ExpertsAdapter():
            return experts_adapter_forward(cls.forward)
        case Rope():
            return with_rope(cls.forward, recipe)
        case Head():
            return causal_lm_forward(cls.forward, recipe)


def _reduce(module: nn.Module, protocol: Any, key: tuple[type[nn.Module], Recipe]) -> tuple[Any, ...]:
    reduced: Any = object.__reduce_ex__(module, protocol)
    return _new, key, *reduced[2:]


def _new(cls: Any, recipe: Recipe) -> Any:
    patched = _patched(cls, recipe)
    return patched.__new__(patched)
