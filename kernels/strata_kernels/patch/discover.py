"""Patching a family without a table row: finds modules that compute the same as an operator, by tests on random input.

For each class of modules that could be a norm, a feed-forward layer, experts, an attention with RoPE, or a causal model
with a plain LM head, `discover` builds a small copy of one module, with the class's code and random weights, and
compares it with the operator, forward and backward in fp32: a proof. Norms and feed-forward layers are compared in
training and evaluation mode, on inputs of several shapes and magnitudes, and forward in 16 bits, where rounding decides
which variant of a norm it is. Modules that are not equal keep their own code, and the report has the reason.

The copies are on the CPU, so the result does not depend on the model's device, which may be meta. The number of proofs
is the number of distinct modules, not of layers: two to ten in the tested families, about one CPU second in all.
`proofs` caches them for later calls and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from .discover_experts import has_experts, prove_experts
from .discover_head import prove_head
from .discover_rope import prove_rope, rotations_of
from .forwards import mlp_forward, norm_forward
from .proofs import PLACES, digest_of, keep, recall
from .small_copy import (
    INTERNALS,
    SHAPE,
    WIDTH,
    NotEqual,
    copy_of,
    draws_random_numbers,
    is_equal_module,
    random_linear,
    seeded,
    takes_one_tensor,
)
from .structure import activation_options, original_class
from .table import GATED, OPERATORS, UNGATED, Mlp, Norm, Recipe

# Hidden size of a small feed-forward layer; differs from WIDTH, to detect swapped dimensions.
_INNER = 24
# Fraction of bf16 values that may round differently, because of summation order; another `cast` changes a tenth.
_MOST_ROUNDED_OTHERWISE = 0.02
_NORMS = ("rms_norm", "layer_norm")
# Input scales: small ones reveal a norm's epsilon, large ones clamps such as DeepSeek-V4's at 10.
_NORM_SCALES = (0.03, 0.001, 1000.0)
_MLP_SCALES = (1.0, 300.0)


@dataclass(frozen=True)
class Found:
    """Result of `discover`.

    Attributes:
        replacements: operator → (path, module, recipe of its new forward).
        kept: operator → reasons why candidates keep their own code, one sentence per class.
        proofs: (number of new proofs, number of cached proofs).
    """

    replacements: dict[str, list[tuple[str, nn.Module, Recipe]]]
    kept: dict[str, tuple[str, ...]]
    proofs: tuple[int, int] = (0, 0)


def discover(model: nn.Module, operators: Iterable[str]) -> Found:
    """Find the modules of `model` that `operators` can replace, with a proof per class. Does not change the model."""
    replacements: dict[str, list[tuple[str, nn.Module, Recipe]]] = {}
    kept: dict[str, dict[str, None]] = {}
    wanted = set(operators)
    proofs: dict[Any, Recipe | NotEqual] = {}
    recalled = 0
    with plain_pytorch():
        for path, module in model.named_modules():
            for operator, prove in _candidates(module, model):
                # The class name only tells that it is a norm; the proof tells which.
                looked_for = wanted.intersection(_NORMS if operator in _NORMS else (operator,))
                if not looked_for:
                    continue
                key = operator, _looks(module)
                if key not in proofs:
                    digest = digest_of(operator, module, model)
                    known = recall(digest) if digest else None
                    recalled += known is not None
                    proofs[key] = known or _proof(prove, digest)
                found = proofs[key]
                if isinstance(found, NotEqual):
                    # A class named LayerNorm that is not equal is not reported as an RMSNorm.
                    if operator in looked_for:
                        kept.setdefault(operator, {})[f"{original_class(module).__name__} {found}"] = None
                else:
                    replacements.setdefault(_operator_of(found, operator), []).append((path, module, found))
    return Found(
        {name: replacements[name] for name in OPERATORS if name in replacements and name in wanted},
        {name: tuple(kept[name]) for name in OPERATORS if name in kept},
        (len(proofs) - recalled, recalled),
    )


@contextmanager
def plain_pytorch() -> Iterator[None]:
    """Reset the caller's default device, default dtype, grad mode and autocast for the copies."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _proof(prove: Callable[[], Recipe], digest: str | None) -> Recipe | NotEqual:
    """The result of `prove`, cached under `digest`."""
    result: Recipe | NotEqual
    try:
        result = prove()
    except NotEqual as reason:
        result = reason
    except Exception as error:
        # Third-party code outside its model may fail, perhaps only this time: not cached.
        return NotEqual(f"cannot run outside of its model: {' '.join(str(error).split())}")
    if digest:
        keep(digest, result)
    return result


def _operator_of(recipe: Recipe, looked_for: str) -> str:
    if isinstance(recipe, Norm):
        return "layer_norm" if recipe.center else "rms_norm"
    return looked_for


def _looks(module: nn.Module) -> Any:
    """In-process key of a proof: the module's class, attributes, weight sizes and children."""
    attributes = {name: _as_text(value) for name, value in vars(module).items() if name not in INTERNALS | PLACES}
    tensors = {
        name: tuple(p.shape) for name, p in (*module._parameters.items(), *module._buffers.items()) if p is not None
    }
    return original_class(module), repr((sorted(attributes.items()), sorted(tensors.items()), module._modules))


def _as_text(value: Any) -> str:
    """A plain value as text; for other objects, such as functions and configurations, their identity."""
    plain = isinstance(value, bool | int | float | str | tuple | list | None)
    return repr(value) if plain else f"{type(value).__name__} at {id(value)}"


def _candidates(module: nn.Module, model: nn.Module) -> Iterator[tuple[str, Callable[[], Recipe]]]:
    """(operator, function that proves it) for each operator that `module`, part of `model`, may be equal to."""
    cls = original_class(module)
    name = cls.__name__
    if "Norm" in name and takes_one_tensor(cls) and not any(module.children()):
        yield "layer_norm" if "LayerNorm" in name else "rms_norm", lambda: _prove_norm(module)
    if takes_one_tensor(cls) and (variants := list(_mlp_variants(module))):
        yield variants[0].operator, lambda: _prove_mlp(module, variants)
    if has_experts(module):
        yield "experts", lambda: prove_experts(module)
    if names := rotations_of(cls):
        yield "rope", lambda: prove_rope(module, names, model)
    # Only the outermost causal model: an outer model may need the logits of an inner one.
    causal = module is model and name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    if causal and hasattr(module, "loss_function"):
        yield "linear_cross_entropy", lambda: prove_head(module)


# -- norms


def _prove_norm(module: nn.Module) -> Norm:
    """The variant of RMSNorm or LayerNorm that `module` computes."""
    shapes = {name: p.shape for name, p in module.named_parameters(recurse=False)}
    if not shapes.keys() <= {"weight", "bias"} or any(len(shape) != 1 for shape in shapes.values()):
        found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise NotEqual(f"has other parameters than one weight and one bias of its width: {found}")
    if any(True for _ in module.buffers(recurse=False)):
        raise NotEqual("has buffers")
    sizes = [*shapes.values(), tuple(getattr(module, "normalized_shape", ()))]
    width = next((size[0] for size in sizes if size), WIDTH)
    small = copy_of(module, {width: WIDTH})
    random = seeded()
    for name in shapes:
        setattr(small, name, nn.Parameter(1.5 + torch.rand(WIDTH, generator=random)))
    x = torch.randn(SHAPE, generator=random)
    same = [v for v in _norm_variants(module) if is_equal_module(small, norm_forward(v), x, scales=_NORM_SCALES)]
    if not same:
        raise NotEqual("computes another norm than RMSNorm or LayerNorm over its last axis")
    # These variants are equal in exact arithmetic; bf16 distinguishes where they round.
    otherwise = {variant: _rounded_otherwise(small, variant, 0.03 * x) for variant in same}
    best = min(same, key=lambda variant: otherwise[variant])
    if otherwise[best] > _MOST_ROUNDED_OTHERWISE:
        raise NotEqual(f"rounds differently in bfloat16, in {otherwise[best]:.0%} of the values")
    return best


def _norm_variants(module: nn.Module) -> Iterator[Norm]:
    named: list[str | float] = [k for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
    for eps in named or [1e-5, 1e-6, 1e-8, 1e-12]:
        for offset in (0.0, 1.0):
            for cast in ("llama", "gemma", "none"):
                yield Norm(eps, offset, cast)
        yield Norm(eps, center=True)


def _rounded_otherwise(small: nn.Module, variant: Norm, x: Tensor) -> float:
    """Fraction of values that `variant` rounds to another 16-bit value; 1 if result dtypes differ.

    Dtypes of weights and input: all 16-bit, mixed precision, and fp32 residuals.
    """
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    worst = 0.0
    for weight_dtype, dtype in ((bf16, bf16), (fp16, fp16), (fp32, bf16), (bf16, fp32)):
        cast = copy(small)
        # copy() shares the parameter dict.
        cast._parameters = dict(small._parameters)
        for name, parameter in small.named_parameters(recurse=False):
            setattr(cast, name, nn.Parameter(parameter.detach().to(weight_dtype)))
        with torch.no_grad():
            try:
                expected = cast(x.to(dtype))
            except RuntimeError:
                if weight_dtype is dtype:
                    raise
                continue  # nn.LayerNorm does not support mixed dtypes, so no model uses them.
            y = norm_forward(variant)(cast, x.to(dtype))
        rounded = bf16 if dtype is fp32 else dtype
        otherwise = (y.to(rounded) != expected.to(rounded)).float().mean().item()
        worst = max(worst, otherwise if y.dtype == expected.dtype else 1.0)
    return worst


# -- feed-forward layers


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    """The children that are linear layers, or replacements of one (adapters, quantized layers)."""
    sized = ((name, child) for name, child in module.named_children() if hasattr(child, "in_features"))
    return {name: child for name, child in sized if isinstance(getattr(child, "out_features", None), int)}


def _activation(module: nn.Module) -> str | None:
    """The name of the child that is an activation function, or None."""
    homes = ("transformers.activations", "torch.nn.modules.activation")
    return next((name for name, child in module.named_children() if type(child).__module__ in homes), None)


def _mlp_variants(module: nn.Module) -> Iterator[Mlp]:
    """Candidate variants for a module with these children: operator, and roles of the linear layers."""
    linears, activation = _linears(module), _activation(module)
    if isinstance(module, nn.Sequential):
        return  # Its slices are Sequentials too, and lack the projection.
    dropouts = [name for name, child in module.named_children() if isinstance(child, nn.Dropout)]
    # Two linear layers next to a norm or a convolution are not a feed-forward layer (e.g. a patch merger).
    alone = len(linears) == 2 and {*linears, activation, *dropouts} >= dict(module.named_children()).keys()

    def computes(operator: str) -> bool:
        if activation is None:
            return operator == "swiglu"  # Some forwards call SiLU as a function.
        return activation_options(operator, getattr(module, activation)) is not None

    shape: dict[str, tuple[int, int]] = {n: (m.in_features, m.out_features) for n, m in linears.items()}  # type: ignore[misc]
    for operator in filter(computes, GATED):
        if len(linears) == 3:
            for gate, up, down in permutations(linears):
                if shape[gate] == shape[up] == shape[down][::-1]:
                    yield Mlp(operator, activation=activation, gate=gate, up=up, down=down)
        elif len(linears) == 2:
            # Only in this order: the reverse could match the sizes of a two-layer projector.
            gate, down = linears
            if shape[gate] == (shape[down][1], 2 * shape[down][0]):
                yield Mlp(operator, packed=True, activation=activation, gate=gate, down=down)
    for operator in filter(computes, UNGATED) if alone else ():
        up, down = linears
        if shape[up][1] == shape[down][0]:
            yield Mlp(operator, activation=activation, up=up, down=down)


def _prove_mlp(module: nn.Module, variants: Sequence[Mlp]) -> Mlp:
    """The variant that `module` computes."""
    linears, activation = _linears(module), variants[0].activation
    others = [
        name
        for name, child in module.named_children()
        if name not in linears and name != activation and not (isinstance(child, nn.Dropout) and child.p == 0.0)
    ]
    if others or any(True for _ in module.parameters(recurse=False)):
        raise NotEqual(f"has more parts than a feed-forward layer: {', '.join(others) or 'direct parameters'}")
    for variant in variants:
        down: Any = linears[variant.down]
        small = copy_of(module, {down.in_features: _INNER, down.out_features: WIDTH})
        random = seeded()
        for name, linear in linears.items():
            sizes = (_INNER, WIDTH) if name == variant.down else (WIDTH, _INNER * (1 + variant.packed))
            setattr(small, name, random_linear(*sizes, linear, random))
        for name, child in module.named_children():
            if name not in linears:
                setattr(small, name, copy(child))
        x = torch.randn(SHAPE, generator=random)
        if draws_random_numbers(small, x):
            raise NotEqual("has dropout between its layers")
        if is_equal_module(small, mlp_forward(variant), x, scales=_MLP_SCALES) and _has_dtype_of(small, variant, x):
            return variant
    raise NotEqual(f"computes something else than {variants[0].operator} between its linear layers")


def _has_dtype_of(small: nn.Module, variant: Mlp, x: Tensor) -> bool:
    """Whether bf16 results have the same dtype and differ only by rounding."""
    small.bfloat16()
    with torch.no_grad():
        expected, y = small(x.bfloat16()), mlp_forward(variant)(small, x.bfloat16())
    largest = expected.abs().max().item()
    return y.dtype == expected.dtype and torch.allclose(y.float(), expected.float(), rtol=0.0, atol=0.02 * largest)
