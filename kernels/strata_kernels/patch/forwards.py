"""Forward functions of patched modules: the family's forward with one step replaced."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ..ops.activation.geglu import geglu, geglu_packed
from ..ops.activation.gelu import gelu
from ..ops.activation.relu_squared import relu_squared
from ..ops.activation.silu import silu
from ..ops.activation.swiglu import swiglu, swiglu_packed
from ..ops.head.vocabulary_parallel import is_dtensor
from ..ops.linear_cross_entropy import linear_cross_entropy
from ..ops.norm.layer_norm import layer_norm
from ..ops.norm.rms_norm import rms_norm
from ..ops.rotary.heads import Layout
from ..ops.rotary.rope import rope
from .structure import activate_and_project, activation_options, is_hooked, linear_head, reason_to_call
from .table import GATED, Head, Mlp, Norm, Rope

Forward = Callable[..., Any]
# Keyword arguments of forward that are only for the loss.
LOSS_ARGUMENTS = ("num_items_in_batch", "max_targets", "ignore_index", "shift_labels")
# (hidden states [B, T, H], weight and bias of the head, softcap) → the output's loss
HeadLoss = Callable[[Tensor, Tensor, Tensor | None, float | None], Any]


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "relu_squared": relu_squared,
    "gelu": gelu,
    "silu": silu,
}
_PACKED: dict[str, Callable[..., Tensor]] = {"swiglu": swiglu_packed, "geglu": geglu_packed}


def norm_forward(norm: Norm) -> Forward:
    """The family's RMSNorm or LayerNorm; without a weight or bias if the module has none."""
    offset, cast = norm.offset, norm.cast

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = getattr(self, "weight", None)
        return rms_norm(hidden_states, weight, norm.eps_of(self), offset=offset, cast=cast)

    def centered(self: Any, hidden_states: Tensor) -> Tensor:
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        return layer_norm(hidden_states, weight, bias, norm.eps_of(self))

    return centered if norm.center else forward


def mlp_forward(mlp: Mlp) -> Forward:
    """The feed-forward layer with a fused activation, and a fused projection if that is a plain linear layer."""
    operator = (_PACKED if mlp.packed else _ACTIVATIONS)[mlp.operator]
    names = (mlp.gate,) if mlp.packed else (mlp.gate, mlp.up) if mlp.operator in GATED else (mlp.up,)

    def activate(self: Any, x: Tensor, **projection: Any) -> Tensor:
        options: dict[str, Any] | None = {}
        if mlp.activation is not None:
            options = activation_options(mlp.operator, getattr(self, mlp.activation))
        assert options is not None
        if mlp.gate_multiplier:
            options = {**options, "gate_multiplier": getattr(self, mlp.gate_multiplier)}
        return operator(*(getattr(self, name)(x) for name in names), **options, **projection)

    def forward(self: Any, x: Tensor) -> Tensor:
        y = activate_and_project(partial(activate, self, x), getattr(self, mlp.down))
        # After the projection, because it may have a bias.
        return y * getattr(self, mlp.multiplier) if mlp.multiplier else y

    return forward


def unless_activation_changed(original: Forward, fused: Forward, mlp: Mlp) -> Forward:
    """`fused`; `original` while the activation has hooks, which it would not call, or was replaced after patching."""
    name = mlp.activation
    if name is None:
        return fused

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        activation = getattr(self, name)
        changed = is_hooked(activation) or activation_options(mlp.operator, activation) is None
        y: Tensor = (original if changed else fused)(self, *args, **kwargs)
        return y

    return forward


def with_parameters_of(original: Forward, forward: Forward) -> Forward:
    """`forward` with the parameter names of `original`, because families may pass arguments by keyword."""
    names, ours = (_names_of(inspect.unwrap(f))[1:] for f in (original, forward))
    if names == ours:
        return forward

    def renamed(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        given = {own: kwargs.pop(name) for name, own in zip(names, ours, strict=True) if name in kwargs}
        y: Tensor = forward(self, *args, **given, **kwargs)
        return y

    return renamed


def _names_of(function: Forward) -> tuple[str, ...]:
    """Names of the parameters, except keyword-only ones."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY)


def with_rope(original: Forward, rotation: Rope) -> Forward:
    """The attention's forward, with the rotations replaced by the fused operator.

    Code and globals are the family's; only the names of the rotations in the code are replaced by new global names, so
    that other models are not affected.
    """
    function = inspect.unwrap(original)
    assert has_known_decorators(original), original
    fused = {name: f"_strata_{kind}_{name}" for name, kind in rotation.functions}
    assert fused.keys() <= set(function.__code__.co_names), original
    for name, kind in rotation.functions:
        function.__globals__[fused[name]] = ROTATIONS[kind]
    names = tuple(fused.get(name, name) for name in function.__code__.co_names)
    forward = FunctionType(
        function.__code__.replace(co_names=names),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    forward.__kwdefaults__ = function.__kwdefaults__
    wraps(function, assigned=("__module__", "__doc__", "__qualname__", "__annotations__"))(forward)
    return _inside_decorators(original, forward)


def has_known_decorators(function: Forward) -> bool:
    """Whether each decorator of `function` refers to the decorated function only by one closure cell."""
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        if (
            not isinstance(function, FunctionType)
            or sum(_holds(cell, wrapped) for cell in function.__closure__ or ()) != 1
        ):
            return False
        function = wrapped
    return isinstance(function, FunctionType)


def _holds(cell: CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:
        # An empty cell.
        return False


def _inside_decorators(original: Any, forward: Forward) -> Forward:
    """`forward` inside copies of the decorators of `original`.

    From 5.24 on, transformers decorates an attention's forward to rename an argument.
    """
    wrapped = getattr(original, "__wrapped__", None)
    if wrapped is None:
        return forward
    inside = _inside_decorators(wrapped, forward)
    cells = tuple(CellType(inside) if _holds(cell, wrapped) else cell for cell in original.__closure__)
    decorator = FunctionType(original.__code__, original.__globals__, original.__name__, original.__defaults__, cells)
    decorator.__kwdefaults__ = original.__kwdefaults__
    decorated: Forward = wraps(inside)(decorator)
    return decorated


def _halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, cos, sin, layout=_layout(q, cos, unsqueeze_dim))


def _halves_once(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As `_halves`; cos and sin have one value per pair."""
    return _rotate(q, k, cos, sin, layout=_layout(q, cos, unsqueeze_dim), rotary_dim=2 * cos.shape[-1])


def _halves_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """As `_halves`, for one tensor, queries or keys."""
    return _rotate_one(x, cos, sin, layout=_layout(x, cos, unsqueeze_dim))


def _halves_of_patches(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `_halves`; heads after positions, with or without a batch axis (vision towers)."""
    return _rotate(q, k, cos, sin, layout=_layout(q, cos, -2))


def _halves_by_axis(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, unsqueeze_dim: int = 2) -> Tensor:
    """`_halves` on equal parts of a head [B, S, H, D], one per image axis (Gemma 4's vision tower).

    The parts form the batch axis of one launch; no copy if batch and position axes of x collapse.
    """
    assert unsqueeze_dim == 2, unsqueeze_dim
    batch, n_s, heads, features = x.shape
    n_axes = position_ids.shape[-1]
    parts = x.reshape(batch * n_s, heads, n_axes, features // n_axes).permute(2, 0, 1, 3)
    cos, sin = (table.reshape(-1, n_axes, table.shape[-1] // n_axes).transpose(0, 1) for table in (cos, sin))
    return _rotate_one(parts, cos, sin, layout="bshd").permute(1, 2, 0, 3).reshape(x.shape)


def _neighbors(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Pairs are adjacent features; both halves of cos and sin hold all angles."""
    width, layout = cos.shape[-1], _layout(q, cos, unsqueeze_dim)
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    return _rotate(q, k, cos, sin, layout=layout, rotary_dim=width, interleaved=True)


def _neighbors_repeated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Pairs are adjacent features; cos and sin hold each angle twice in succession."""
    return _rotate(q, k, cos, sin, layout=_layout(q, cos, unsqueeze_dim), interleaved=True)


def _complex(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs are adjacent features; angles are complex numbers."""
    return _rotate(xq, xk, freqs_cis, layout="bshd", interleaved=True)


def _complex_of_patches(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """As `_complex`, with angles [S, 1, P] for the whole batch (Llama 4's vision tower).

    Angles are a buffer, of which `model.to(torch.bfloat16)` keeps only the real part; it is used as in transformers.
    """
    table = freqs_ci if freqs_ci.is_complex() else freqs_ci.to(torch.complex64)
    return _complex(query, key, table.flatten(1).to(query.device))


def _rotate(q: Tensor, k: Tensor, *angles: Tensor, layout: Layout, **options: Any) -> tuple[Tensor, Tensor]:
    if q.dtype == k.dtype:
        return rope(q, k, *angles, layout=layout, **options)
    # Under autocast, results of a norm and of a projection may have different dtypes.
    y_q, y_k = (_rotate_one(x, *angles, layout=layout, **options) for x in (q, k))
    return y_q, y_k


def _rotate_one(x: Tensor, *angles: Tensor, layout: Layout, **options: Any) -> Tensor:
    no_heads = x[:, :0] if layout == "bhsd" else x[..., :0, :]
    return rope(x, no_heads, *angles, layout=layout, **options)[0]


def _layout(x: Tensor, cos: Tensor, unsqueeze_dim: int) -> Layout:
    """The layout of queries x: their head axis is where cos [B, S, R] or [S, R] is unsqueezed at `unsqueeze_dim`.

    Axes of the unsqueezed cos and of x are aligned from the last.
    """
    axes = cos.dim() + 1
    place = axes - unsqueeze_dim % axes
    if place == 2:
        return "bshd" if x.dim() == 4 else "thd"
    # place == 4: the batch axis of angles, of size 1, is aligned with the heads.
    assert place == 3 or cos.shape[0] == 1, (cos.shape, unsqueeze_dim)
    return "bhsd"


# Rotations of transformers' families, with the families' signatures.
ROTATIONS: dict[str, Callable[..., Any]] = {
    "halves": _halves,
    "halves_once": _halves_once,
    "halves_single": _halves_single,
    "halves_of_patches": _halves_of_patches,
    "halves_by_axis": _halves_by_axis,
    "neighbors": _neighbors,
    "neighbors_repeated": _neighbors_repeated,
    "complex": _complex,
    "complex_of_patches": _complex_of_patches,
}


def causal_lm_forward(original: Forward, recipe: Head) -> Forward:
    """The model's forward. With labels and `skip_logits`, the loss is computed from hidden states, without logits.

    With `head_loss`, the loss is its result. It is called inside forward, where FSDP has gathered the head's weight.
    """
    names = tuple(inspect.signature(original).parameters)[1:]
    output = recipe.output or import_module("transformers.modeling_outputs").CausalLMOutputWithPast
    fields = {field.name for field in dataclasses.fields(output)} - {"loss", "logits", "aux_loss"}
    can_return_tuple = import_module("transformers.utils").can_return_tuple
    balance = getattr(inspect.unwrap(original), "__globals__", {}).get("load_balancing_loss_func")

    def forward(
        self: Any, *args: Any, skip_logits: bool | None = None, head_loss: HeadLoss | None = None, **kwargs: Any
    ) -> Any:
        kwargs |= dict(zip(names, args, strict=False))
        labels = kwargs.get("labels")
        skip_logits = self.training if skip_logits is None else skip_logits
        config = self.config.get_text_config()
        routed = kwargs.get("output_router_logits")
        routed = head_loss is None and (getattr(config, "output_router_logits", False) if routed is None else routed)
        # A loss function set on the model after patching takes precedence.
        keeps_loss = labels is None or not skip_logits or hasattr(self, "_loss_function")
        changed = None if keeps_loss else reason_to_call(getattr(self, recipe.head))
        if head_loss is None and changed is not None:
            # Only its own call runs its hooks, or multiplies by its quantized weight.
            warnings.warn(
                f"{type(self).__name__}.{recipe.head} was changed after patching, and the loss takes the memory of "
                f"logits: {changed}",
                stacklevel=2,
            )
        if head_loss is None and (keeps_loss or changed is not None or (routed and not recipe.balanced)):
            return original(self, **kwargs)
        kwargs.pop("labels", None)
        of_loss = {name: kwargs.pop(name) for name in LOSS_ARGUMENTS if name in kwargs}
        logits_to_keep = kwargs.pop("logits_to_keep", 0)
        if routed or "output_router_logits" in kwargs:
            kwargs["output_router_logits"] = routed
        if recipe.labelled and labels is not None:
            kwargs["labels"] = labels
        outputs = getattr(self, recipe.body)(**kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = outputs.last_hidden_state[:, kept, :]
        head, softcap = linear_head(getattr(self, recipe.head)), getattr(config, recipe.softcap or "", None)
        if hidden.dtype.itemsize > head.weight.dtype.itemsize:
            # Families with fp32 residuals cast before the head (Mamba).
            hidden = hidden.to(head.weight.dtype)
        # Logits are linear in hidden states and bias, so scaling both scales the logits.
        hidden = _scaled(hidden, config, recipe)
        bias = None if head.bias is None else _scaled(head.bias, config, recipe)
        sharded = is_dtensor(head.weight) and not is_dtensor(hidden)
        if sharded:
            hidden = _on_mesh_of(head.weight, hidden)
        loss: Any
        if head_loss is None:
            loss = _causal_lm_loss(hidden, head.weight, bias, labels, softcap=softcap, **of_loss)
        else:
            loss = head_loss(hidden, head.weight, bias, softcap)
        computed = {}
        if routed:
            assert balance is not None
            routers, mask = outputs.router_logits, kwargs.get("attention_mask")
            computed["aux_loss"] = balance(routers, self.num_experts, self.num_experts_per_tok, mask)
            loss = loss + self.router_aux_loss_coef * computed["aux_loss"].to(loss.device)
        # A clone, because FSDP registers hooks on outputs and warns about views.
        computed["loss"] = loss.to_local().clone() if sharded else loss
        return output(**computed, **{name: getattr(outputs, name, None) for name in fields})

    patched: Forward = wraps(original)(_as_decorated(original, can_return_tuple(forward)))
    return patched


def _as_decorated(original: Forward, forward: Forward) -> Forward:
    """`forward`, with the decorator that reads arguments from the configuration if `original` has it.

    These arguments select the layers whose results vision towers return (LLaVA).
    """
    decorate = import_module("transformers.utils.generic").merge_with_config_defaults
    # Each use of the decorator creates a new function with the same code object.
    code = decorate(forward).__code__
    function: Any = original
    while function is not None:
        if getattr(function, "__code__", None) is code:
            decorated: Forward = decorate(forward)
            return decorated
        function = getattr(function, "__wrapped__", None)
    return forward


def _scaled(x: Tensor, config: Any, recipe: Head) -> Tensor:
    """x, scaled by the family's divisor and multiplier of logits."""
    if recipe.divisor:
        x = x / getattr(config, recipe.divisor)
    if recipe.multiplier:
        x = x * getattr(config, recipe.multiplier)
    return x


def _on_mesh_of(weight: Any, hidden: Tensor) -> Tensor:
    """Hidden states, equal on all ranks of the head's mesh, as a replicated DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    return DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor | None,
    *,
    softcap: float | None,
    num_items_in_batch: int | Tensor | None = None,
    max_targets: int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """transformers' `ForCausalLMLoss` from hidden states: position t predicts label t + 1.

    max_targets: upper bound of the number of positions whose label is not ignored. Other positions are dropped before
    the head.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    return linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        shift_labels.reshape(-1).to(hidden.device),
        bias=bias,
        ignore_index=ignore_index,
        softcap=softcap,
        num_items=num_items_in_batch,
        max_targets=max_targets,
    )
