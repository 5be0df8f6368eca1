"""Patching a model: one engine for every row of the table.

A module is patched by giving it a subclass of its class that overrides `forward`. Nothing is stored on the module: its
parameters, buffers, hooks and state dict stay as they are, copies are patched like the original, other models never see
it, and giving the class back undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module
from typing import Any

from torch import nn

from .forwards import ROTATION, causal_lm_forward, mlp_forward, norm_forward, with_rope
from .structure import activation_options, activations_of, is_own, linear_head, unwrap
from .table import ACTIVATIONS, OPERATORS, ROWS, Row


@dataclass(frozen=True)
class PatchReport:
    """What `patch_model` did.

    Attributes:
        model_type: the row of the table that was used.
        replaced: operator → paths of the modules that now run it.
        excluded: operators left out because the caller asked for it.
        unsupported: operators that this family has no place for.
    """

    model_type: str
    replaced: dict[str, tuple[str, ...]]
    excluded: tuple[str, ...]
    unsupported: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Operator → number of modules that run it."""
        return {operator: len(paths) for operator, paths in self.replaced.items()}

    def summary(self) -> str:
        """One line for logs: `llama: rms_norm x5, rope x2, swiglu x2, linear_cross_entropy x1`."""
        parts = [f"{operator} x{count}" for operator, count in self.counts.items()]
        parts += [f"{operator} excluded" for operator in self.excluded]
        parts += [f"{operator} has no place in it" for operator in self.unsupported]
        return f"{self.model_type}: {', '.join(parts)}"


def patch_model(model: nn.Module, *, exclude: Iterable[str] = ()) -> PatchReport:
    """Make a transformers model run the fused operators, in place.

    Equivalent in what it computes, up to rounding. With labels in training mode the model's loss comes from
    `linear_cross_entropy` and the output's `logits` is None; pass `skip_logits=False` to the forward call to get logits
    too, `skip_logits=True` to save them in evaluation. For another loss pass `head_loss`, a function of the hidden
    states [B, T, H] as they enter the head, its weight, its bias or None, and the cap on its logits or None: what it
    returns is the output's `loss`, and no logits are computed. Where a family scales its logits, the hidden states and
    the bias that it is given are scaled instead. A model that is patched already is patched anew: the
    result depends on the last call alone.

    Args:
        model: a causal language model of a known family, bare or inside PEFT, `torch.compile` or DDP.
        exclude: operators to leave as the model has them, of "rms_norm", "rope", "swiglu", "geglu", "relu_squared",
            "linear_cross_entropy".

    Raises:
        ValueError: the family or an operator is unknown, an operator found nothing to replace, or something about the
            model makes a replacement wrong. The model is then as it was.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")  # doctest: +SKIP
        >>> print(patch_model(model).summary())                                      # doctest: +SKIP
        llama: rms_norm x65, rope x32, swiglu x32, linear_cross_entropy x1
    """
    excluded = _known_operators(exclude)
    base = unwrap(model)
    row = _row(base)
    wanted = [operator for operator in row.operators if operator not in excluded]
    matches = {operator: _matches(base, row, operator) for operator in wanted}
    for operator, found in matches.items():
        for path, module in found:
            _check(base, row, operator, path, module)

    unpatch_model(base)
    for operator, found in matches.items():
        for _, module in found:
            cls: Any = type(module)
            module.__class__ = _patched(cls, row.model_type, operator)
    return PatchReport(
        model_type=row.model_type,
        replaced={operator: tuple(path or "(model)" for path, _ in found) for operator, found in matches.items()},
        excluded=excluded,
        unsupported=row.unsupported,
    )


def unpatch_model(model: nn.Module) -> None:
    """Give every module of `model` its own class back; a model that is not patched stays as it is.

    Raises:
        ValueError: a patched class was derived from since. Nothing is changed then.
    """
    for module, cls in [(module, original_class(module)) for module in model.modules()]:
        module.__class__ = cls


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that `module` has when it is not patched."""
    cls = type(module)
    if "_strata_original" in vars(cls):
        original: type[nn.Module] = vars(cls)["_strata_original"]
        return original
    if hasattr(cls, "_strata_original"):
        raise ValueError(f"{cls.__name__} was derived from a patched class; undo what derived it before the patch")
    return cls


def _known_operators(names: Iterable[str]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in OPERATORS:
            raise ValueError(_unknown("operator", name, OPERATORS))
    return tuple(operator for operator in OPERATORS if operator in names)


def _row(model: nn.Module) -> Row:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(f"{type(model).__name__} has no config.model_type; patch_model takes transformers models")
    if model_type not in ROWS:
        raise ValueError(_unknown("model type", model_type, ROWS))
    return ROWS[model_type]


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = get_close_matches(name, known, n=1)
    return f"unknown {what} {name!r}{f', did you mean {near[0]!r}?' if near else ';'} known are {', '.join(known)}"


def _matches(model: nn.Module, row: Row, operator: str) -> list[tuple[str, nn.Module]]:
    """Paths and modules that `operator` replaces: of the row's class, and running the forward of that class."""
    suffix = {"rms_norm": "RMSNorm", "rope": "Attention", "linear_cross_entropy": "ForCausalLM"}
    cls = getattr(import_module(row.module), row.prefix + suffix.get(operator, "MLP"))
    found = []
    for path, module in model.named_modules():
        if isinstance(module, cls) and original_class(module).forward is cls.forward:
            found.append((path, module))
    if not found:
        raise ValueError(
            f"{operator} found no {cls.__name__} to replace in {type(model).__name__} ({row.model_type}); "
            f"pass exclude=({operator!r},) to patch the rest"
        )
    return found


def _check(model: nn.Module, row: Row, operator: str, path: str, module: nn.Module) -> None:
    """Raise where replacing the forward of `module` would change what it computes, or not take effect."""
    way_out = f"pass exclude=({operator!r},) to patch the rest"
    if "forward" in vars(module):
        raise ValueError(
            f"{path or type(model).__name__} has a forward of its own, set by hooks or by another patch; "
            f"patch the model before they are added, or {way_out}"
        )
    stood_for = {f"{type(module).__name__}.forward": original_class(module).forward}
    if operator == "rope":
        stood_for[ROTATION] = getattr(import_module(row.module), ROTATION)
    for name, function in stood_for.items():
        if not is_own(function, row.module):
            raise ValueError(
                f"{operator} stands for {name} of {row.module}, which something has replaced by {function}; "
                f"undo that before the model is patched, or {way_out}"
            )
    if operator in ACTIVATIONS:
        assert row.mlp is not None
        activation = getattr(module, row.mlp.activation)
        if activation_options(operator, activation) is None:
            raise ValueError(
                f"{operator} computes {activations_of(operator)}, "
                f"but {path}.{row.mlp.activation} is {activation}; {way_out}"
            )
    if operator == "linear_cross_entropy":
        linear_head(module.lm_head)  # type: ignore[arg-type]
        losses = import_module("transformers.loss.loss_utils")
        if module.loss_function is not losses.ForCausalLMLoss:
            raise ValueError(
                f"linear_cross_entropy stands for the loss ForCausalLMLoss, but the model's is {module.loss_function}; "
                + way_out
            )


@cache
def _patched(cls: Any, model_type: str, operator: str) -> Any:
    """The subclass of `cls` that runs `operator`, under the same name: configs and wrapping policies go by the name."""
    row = ROWS[model_type]
    make: dict[str, Callable[[], Callable[..., Any]]] = {
        "rms_norm": lambda: norm_forward(row.norm),
        "rope": lambda: with_rope(cls.forward, row.interleaved),
        "linear_cross_entropy": lambda: causal_lm_forward(cls.forward, row),
    }
    if row.mlp is not None:
        make[row.mlp.operator] = partial(mlp_forward, row.mlp)
    namespace = {
        "forward": make[operator](),
        "_strata_original": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # Pickles name a class by its module and name, under which the original would be found.
        "__reduce_ex__": lambda self, protocol: _reduce(self, protocol, (cls, model_type, operator)),
    }
    return type(cls)(cls.__name__, (cls,), namespace)


def _reduce(module: nn.Module, protocol: Any, key: tuple[type[nn.Module], str, str]) -> tuple[Any, ...]:
    reduced: Any = object.__reduce_ex__(module, protocol)
    return _new, key, *reduced[2:]


def _new(cls: Any, model_type: str, operator: str) -> Any:
    patched = _patched(cls, model_type, operator)
    return patched.__new__(patched)
