"""LoRA's layers as one operator each, as one for layers that read the same input, and as one for a gated MLP.

Of a decoder layer in the usual form, attention's last product and the MLP add the residual with their adapters, and
the backward pass of the norms adds the residual's gradient.

Only the class of PEFT's layers changes: parameters, hooks and names stay, so checkpoints, optimizers and export know
nothing of it. A layer that does more than a frozen product and a plain adapter keeps PEFT's own forward pass: DoRA, an
adapter that is switched off, hooks that gather weights, `torch.compile`, `per_op`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_kernels.ops._operator import has_mode
from strata_kernels.ops.float8.largest import finding_largest
from strata_kernels.ops.lora.frozen_weight import ExactWeight, Float8Weight, Frozen, PackedWeight
from strata_kernels.ops.lora.gated_layer import lora_gated_layer, takes_gated_layer
from strata_kernels.ops.lora.lora_linear import AdaptedLayer, lora_linear
from strata_kernels.ops.norm.rms_norm import rms_norm_and_input
from strata_kernels.patch.structure import activation_function, is_hooked, original_class, recipe_of
from strata_kernels.patch.table import Mlp, Norm
from tasks.runtime.models.adapters.forward_source import (
    calls_with_one_input,
    ends_with_o_proj,
    has_usual_forward,
)
from tasks.runtime.models.float8 import Float8FrozenLinear

# Where a layer that shares its input keeps its group.
_GROUP = "_strata_group"
# Where a layer finds the residual that it may add to its result.
_RESIDUAL = "_strata_residual"


def fuse_adapters(model: PreTrainedModel) -> int:
    """Make PEFT's linear layers in `model` compute as `lora_linear` does, and gated MLPs of three of them as
    `lora_gated_layer` does. Returns how many layers there are.

    The model is patched by the kernel layer, if it is to be.
    """
    if not hasattr(model, "peft_config"):
        return 0
    count = 0
    for parent in list(model.modules()):
        children = {name: child for name, child in parent.named_children() if _is_linear(child)}
        for child in children.values():
            cls: Any = type(child)
            child.__class__ = _fused(cls)
            count += 1
        owner: Any = original_class(parent)
        for names in calls_with_one_input(owner) if len(children) > 1 else ():
            together = [children[name] for name in names if name in children]
            if len(together) > 1:
                group = _Group(together)
                for child in together:
                    vars(child)[_GROUP] = group
        recipe = recipe_of(parent)
        if isinstance(recipe, Mlp) and _is_gated(recipe) and {recipe.gate, recipe.up, recipe.down} <= children.keys():
            patched: Any = type(parent)
            parent.__class__ = _fused_mlp(patched, recipe)
    for module in model.modules():
        if type(module) is original_class(module) and _is_usual(module):
            plain: Any = type(module)
            module.__class__ = _fused_decoder_layer(plain)
    return count


def _is_gated(recipe: Mlp) -> bool:
    """Whether it is `down(f(gate(x)) * up(x))`, and nothing else."""
    others = (recipe.packed, recipe.gate_multiplier, recipe.multiplier)
    return recipe.operator in ("swiglu", "geglu") and not any(others)


def _is_linear(module: nn.Module) -> bool:
    """Whether it is PEFT's layer around a linear one, exact or of 4 bits."""
    cls = type(module)
    return cls.__module__.startswith("peft.tuners.lora.") and cls.__name__ in ("Linear", "Linear4bit")


@cache
def _fused(cls: Any) -> Any:
    """The subclass of a layer's class."""
    original: Callable[..., Tensor] = cls.forward

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or torch.compiler.is_compiling() or has_mode():
            return original(self, x, *args, **kwargs)
        group: _Group | None = vars(self).get(_GROUP)
        y = _project(self, x) if group is None else group.project(self, x)
        return original(self, x) if y is None else y

    def project_activation(self: Any, activate: Callable[..., Tensor]) -> Tensor:
        """`self(activate())`; where the weight is FP8, the activation notes the scale for the cast of its result."""
        with finding_largest() if type(self.base_layer) is Float8FrozenLinear else nullcontext():
            x = activate()
        y: Tensor = self(x)
        return y

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # A pickle would find the original class by its module and name.
        state: Any = object.__reduce_ex__(self, protocol)
        return _new_fused, (cls,), *state[2:]

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    added = {"forward": forward, "project_activation": project_activation, "__reduce_ex__": reduce}
    return type(cls)(cls.__name__, (cls,), added | names)


def _new_fused(cls: Any) -> Any:
    fused = _fused(cls)
    return fused.__new__(fused)


@cache
def _fused_mlp(cls: Any, recipe: Mlp) -> Any:
    """The subclass of a patched MLP's class."""
    original: Callable[..., Tensor] = cls.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        y = None
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling() and not has_mode():
            y = _compute_mlp(self, recipe, args[0])
        return original(self, *args, **kwargs) if y is None else y

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        new, key, *state = cls.__reduce_ex__(self, protocol)
        return _new_mlp, (recipe, new, key), *state

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    known = {"_strata_original": vars(cls)["_strata_original"], "__reduce_ex__": reduce}
    return type(cls)(cls.__name__, (cls,), {"forward": forward, **known, **names})


def _new_mlp(recipe: Mlp, new: Callable[..., nn.Module], key: tuple[Any, ...]) -> nn.Module:
    mlp = new(*key)
    patched: Any = type(mlp)
    mlp.__class__ = _fused_mlp(patched, recipe)
    return mlp


def _compute_mlp(mlp: nn.Module, recipe: Mlp, x: Tensor) -> Tensor | None:
    """Its result; None if its layers must run their own forward."""
    layers: list[Any] = [getattr(mlp, name) for name in (recipe.gate, recipe.up, recipe.down)]
    gate, up, down = (_adapted(layer, x) for layer in layers)
    if gate is None or up is None or down is None or any(map(_dropout, layers)):
        return None
    if not takes_gated_layer(x, gate, up, down):
        return None
    function = "silu" if recipe.activation is None else activation_function(getattr(mlp, recipe.activation))
    in_fp8 = any(type(layer.base_layer) is Float8FrozenLinear for layer in layers)
    residual = _take_residual(mlp, x, down)
    return lora_gated_layer(x, gate, up, down, function, in_fp8=in_fp8, residual=residual)


def _is_usual(layer: Any) -> bool:
    """Whether it is a decoder layer that computes as `usual_forward` does, and its attention ends with `o_proj`."""
    cls: Any = type(layer)
    if not has_usual_forward(cls):
        return False
    names = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
    if not all(isinstance(getattr(layer, name, None), nn.Module) for name in names):
        return False
    attention: Any = original_class(layer.self_attn)
    return ends_with_o_proj(attention)


@cache
def _fused_decoder_layer(cls: Any) -> Any:
    """The subclass of a decoder layer's class that is written as `usual_forward`."""
    original: Callable[..., Tensor] = cls.forward
    defaults = {name: p.default for name, p in list(inspect.signature(original).parameters.items())[2:-1]}

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or torch.compiler.is_compiling() or has_mode() or not _adds_by_parts(self):
            return original(self, hidden_states, *args, **kwargs)
        y, residual = _norm(self.input_layernorm, hidden_states)
        attention = self.self_attn
        h = _add(residual, attention.o_proj, lambda: attention(hidden_states=y, **{**defaults, **kwargs})[0])
        y, residual = _norm(self.post_attention_layernorm, h)
        return _add(residual, self.mlp, lambda: self.mlp(y))

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # A pickle would find the original class by its module and name.
        state: Any = object.__reduce_ex__(self, protocol)
        return _new_decoder_layer, (cls,), *state[2:]

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    known = {"_strata_original": cls, "__reduce_ex__": reduce}
    return type(cls)(cls.__name__, (cls,), {"forward": forward, **known, **names})


def _new_decoder_layer(cls: Any) -> Any:
    fused = _fused_decoder_layer(cls)
    return fused.__new__(fused)


def _adds_by_parts(layer: Any) -> bool:
    """Whether its parts have no hooks, and its norms are those of the kernel layer."""
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if any(map(is_hooked, (*norms, layer.self_attn, layer.self_attn.o_proj, layer.mlp))):
        return False
    return all(
        isinstance(recipe := recipe_of(norm), Norm)
        and not recipe.center
        # NanoChat's have none.
        and getattr(norm, "weight", None) is not None
        and _is_plain(norm.weight)
        for norm in norms
    )


def _norm(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of x, and x."""
    recipe: Norm = recipe_of(norm)
    return rms_norm_and_input(x, norm.weight, recipe.eps_of(norm), offset=recipe.offset, cast=recipe.cast)


def _add(residual: Tensor, last: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """`residual + compute()`, whose result is that of the module `last`, which adds the residual itself if it can."""
    vars(last)[_RESIDUAL] = residual
    try:
        y = compute()
        return residual + y if _RESIDUAL in vars(last) else y
    finally:
        vars(last).pop(_RESIDUAL, None)


def _take_residual(module: nn.Module, x: Tensor, layer: AdaptedLayer) -> Tensor | None:
    """The residual that `module` adds to the result of its last `layer`; None if shape, dtype or device differ."""
    residual: Tensor | None = vars(module).get(_RESIDUAL)
    if residual is None or (residual.dtype, residual.device) != (x.dtype, x.device):
        return None
    return vars(module).pop(_RESIDUAL) if residual.shape == (*x.shape[:-1], layer.frozen.outputs) else None


def _project(layer: Any, x: Tensor) -> Tensor | None:
    adapted = _adapted(layer, x)
    if adapted is None:
        return None
    return lora_linear(x, [adapted], dropout=_dropout(layer), residual=_take_residual(layer, x, adapted))[0]


def _dropout(layer: Any) -> float:
    """The rate of the adapter's dropout at the moment."""
    module = layer.lora_dropout[layer.active_adapters[0]]
    return float(module.p) if type(module) is nn.Dropout and module.training else 0.0


class _Group:
    """Layers that read one input: the first that is called computes all of them.

    The results wait for their layers, until those are called or another input comes.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = tuple(layers)
        self._drop()

    def _drop(self) -> None:
        self._key: tuple[Any, ...] = (lambda: None,)
        self._waiting: dict[int, Tensor] = {}

    def project(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """The result of `layer`; None if it must run its own forward."""
        if x.is_inference():
            return _project(layer, x)
        state = (x._version, torch.is_grad_enabled())
        if self._key[0]() is x and self._key[1:] == state and id(layer) in self._waiting:
            return self._waiting.pop(id(layer))
        self._drop()
        adapted = [_adapted(other, x) for other in self._layers]
        whole = [one for one in adapted if one is not None]
        rates = {_dropout(other) for other in self._layers} if len(whole) == len(adapted) else set()
        if len(rates) != 1:
            return _project(layer, x)
        ys = lora_linear(x, whole, dropout=rates.pop())
        self._waiting = {id(other): y for other, y in zip(self._layers, ys, strict=True)}
        self._key = (weakref.ref(x), *state)
        return self._waiting.pop(id(layer))

    def __getstate__(self) -> tuple[nn.Module, ...]:
        """Residuals and results that wait for a layer are not copied."""
        return self._layers

    def __setstate__(self, layers: tuple[nn.Module, ...]) -> None:
        """As a new one."""
        self._layers = layers
        self._drop()


def _adapted(layer: Any, x: Tensor) -> AdaptedLayer | None:
    """The arguments of `lora_linear` for `layer`; None if it cannot compute the layer."""
    active = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(active) != 1 or is_hooked(layer):
        return None
    name = active[0]
    if name not in layer.lora_A or name in getattr(layer, "lora_variant", ()):
        return None
    a, b = layer.lora_A[name], layer.lora_B[name]
    weights = (a.weight, b.weight)
    if (
        type(layer.lora_dropout[name]) not in (nn.Identity, nn.Dropout)
        or b.bias is not None
        or is_hooked(a)
        or is_hooked(b)
        or not all(map(_is_plain, weights))
    ):
        return None
    if any(weight.dtype != x.dtype for weight in weights) or _casts(x):
        return None
    base = layer.base_layer
    frozen = None if is_hooked(base) else _frozen(base, x.dtype)
    return None if frozen is None else AdaptedLayer(frozen, base.bias, *weights, float(layer.scaling[name]))


def _is_plain(x: Any) -> bool:
    return type(x) in (nn.Parameter, Tensor)


def _casts(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _frozen(base: nn.Module, dtype: torch.dtype) -> Frozen | None:
    """The frozen product of a layer, for `lora_linear`."""
    if any(parameter.requires_grad for parameter in base.parameters(recurse=False)):
        return None
    if type(base) is nn.Linear:
        return ExactWeight(base.weight) if _is_plain(base.weight) and base.weight.dtype == dtype else None
    if type(base) is Float8FrozenLinear:
        return Float8Weight(base.weight.view(torch.float8_e4m3fn), base.weight_inverse)
    quant_state = getattr(getattr(base, "weight", None), "quant_state", None)
    # bitsandbytes repacks weights for the CPU when it computes with them itself.
    repacked = getattr(quant_state, "packing_format_for_cpu", False)
    if quant_state is not None and not repacked and base.compute_dtype == dtype:
        return PackedWeight(base.out_features, partial(_unpack, base))  # type: ignore[arg-type]
    return None


def _unpack(base: Any) -> Tensor:
    """The weight of a layer of 4 bits, as bitsandbytes restores it for its own products."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(base.weight.data, quant_state=base.weight.quant_state)
    return weight.to(base.compute_dtype)
