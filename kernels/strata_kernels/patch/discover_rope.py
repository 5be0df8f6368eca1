"""Proof that the functions that rotate queries and keys in an attention are rotations that `rope` computes."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .forwards import ROTATIONS, has_known_decorators
from .small_copy import WIDTH, NotEqual, is_equal, seeded
from .structure import is_own, original_class
from .table import Rope


@dataclass(frozen=True)
class _Call:
    """Signature of a rotation and layout of its angles.

    layout: "twice" for cos and sin of `cat((angle, angle), -1)`, "by axis" for that of each image axis in turn,
        "repeated" for `angle.repeat_interleave(2, -1)`, "once" for one value per pair, "complex" for exp(i · angle).
    cases: calls in modeling files: (shape of queries without features, shape of angles, further arguments).
    """

    parameters: tuple[str, ...]
    layout: str
    cases: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]], ...]


_FEATURES = 8
# Query heads, key heads, batch size and positions of a case.
_H, _K, _B, _S = 4, 2, 2, 5
_BY_HEAD, _BY_POSITION = (_B, _H, _S), (_B, _S, _H)
# In vision towers, angles, or angles and queries, have no batch axis.
_ORDERED = (
    (_BY_HEAD, (_B, _S), (1,)),
    (_BY_POSITION, (_B, _S), (2,)),
    (_BY_HEAD, (_S,), (0,)),
    (_BY_POSITION, (_S,), (1,)),
    ((_S, _H), (_S,), (1,)),
)
_UNORDERED = ((_BY_HEAD, (_B, _S), ()),)
_PAIR, _SINGLE = ("q", "k", "cos", "sin", "unsqueeze_dim"), ("x", "cos", "sin", "unsqueeze_dim")
_CALLS = {
    "halves": _Call(_PAIR, "twice", _ORDERED),
    "halves_once": _Call(_PAIR, "once", _ORDERED),
    "halves_single": _Call(_SINGLE, "twice", _ORDERED),
    "neighbors": _Call(_PAIR, "twice", _ORDERED),
    "neighbors_repeated": _Call(_PAIR, "repeated", _ORDERED),
    "complex": _Call(("xq", "xk", "freqs_cis"), "complex", ((_BY_POSITION, (_B, _S), ()),)),
    "halves_of_patches": _Call(
        ("q", "k", "cos", "sin"),
        "twice",
        (((_S, _H), (_S,), ()), (_BY_POSITION, (_B, _S), ()), (_BY_POSITION, (_S,), ())),
    ),
    "halves_by_axis": _Call(
        ("x", "cos", "sin", "position_ids", "unsqueeze_dim"),
        "by axis",
        ((_BY_POSITION, (_B, _S), (torch.zeros(_B, _S, 2, dtype=torch.long),)),),
    ),
    "complex_of_patches": _Call(("query", "key", "freqs_ci"), "complex", ((_BY_POSITION, (_S, 1), ()),)),
}


def rotations_of(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the functions of the modeling file with which the forward of `cls` rotates queries and keys."""
    function = inspect.unwrap(cls.forward)
    if not isinstance(function, FunctionType):
        return ()
    names = (name for name in function.__code__.co_names if "apply_" in name and ("rotary" in name or "rope" in name))
    return tuple(name for name in names if callable(function.__globals__.get(name)))


def prove_rope(module: nn.Module, names: tuple[str, ...], model: Any) -> Rope:
    """The recipe for the rotations `names`, which the forward of `module` calls.

    Raises:
        NotEqual: `rope` does not support one of them, or the model's angles have another layout.
    """
    cls: Any = original_class(module)
    function: Any = inspect.unwrap(cls.forward)
    config = getattr(module, "config", None)
    # Other modules, such as indexers of sparse attention, rotate tensors of other shapes.
    if "Attention" not in cls.__name__ or config is None:
        raise NotEqual("is not an attention module with a configuration")
    if not has_known_decorators(cls.forward):
        raise NotEqual("has a forward inside of a decorator that calls it in an unknown way")
    if any(i.argval in names and i.opname != "LOAD_GLOBAL" for i in dis.get_instructions(function)):
        raise NotEqual(f"uses {' and '.join(names)} for something else than calls")
    layouts = _layouts(model, type(config))
    rotations = []
    for name in names:
        original = function.__globals__[name]
        if not is_own(original, function.__globals__["__name__"]):
            raise NotEqual(f"calls {name}, which something has replaced by {original}")
        kind = next((kind for kind in _CALLS if _rotates_as(original, kind)), None)
        if kind is None:
            raise NotEqual(f"calls {name}{inspect.signature(original)}, which rotates in a way that rope does not know")
        if layouts != {_CALLS[kind].layout}:
            found = ", ".join(sorted(layouts)) or "unknown"
            raise NotEqual(f"calls {name} with angles in another layout than it is proven for: {found}")
        rotations.append((name, kind))
    return Rope(tuple(rotations))


def _rotates_as(original: Callable[..., Any], kind: str) -> bool:
    """Whether `original` equals the rotation `kind` in all cases, and with partial rotary dims if it supports them."""
    call, ours = _CALLS[kind], ROTATIONS[kind]
    signature = inspect.signature(original).parameters
    parameters = tuple(signature)
    if parameters not in (call.parameters, call.parameters[:-1]):
        return False
    cases = call.cases
    if cases is _ORDERED and parameters != call.parameters:
        cases = _UNORDERED
    elif cases is _ORDERED and signature["unsqueeze_dim"].default != 1:
        return False
    random = seeded()
    for (shape, angles, more), rotated in product(cases, (_FEATURES, _FEATURES // 2)):
        keys = tuple(_K if size == _H else size for size in shape)
        shapes = [(*shape, _FEATURES)] if parameters[0] == "x" else [(*shape, _FEATURES), (*keys, _FEATURES)]
        tensors = [torch.randn(shape, generator=random) for shape in shapes]
        rest = (*_angles(call.layout, angles, rotated, random), *more)
        if not _gives_shapes_of(original, tensors, rest):
            if rotated == _FEATURES:
                return False
            continue  # It only supports complete heads, so it is only called with them.
        if not is_equal(_with(original, rest), _with(ours, rest), *tensors):
            return False
        if not _is_equal_in_bf16(_with(original, rest), _with(ours, rest), tensors):
            return False
    return True


def _is_equal_in_bf16(original: Callable[..., Any], ours: Callable[..., Any], tensors: list[Tensor]) -> bool:
    """Whether bf16 results with fp32 angles are equal up to rounding; their dtype may be wider."""
    results = [function(*(x.bfloat16() for x in tensors)) for function in (original, ours)]
    expected, given = (y if isinstance(y, tuple) else (y,) for y in results)
    return all(torch.allclose(e.float(), y.float(), rtol=0.0, atol=0.05) for e, y in zip(expected, given, strict=True))


def _with(function: Callable[..., Any], rest: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda *tensors: function(*tensors, *rest)


def _gives_shapes_of(original: Callable[..., Any], tensors: list[Tensor], rest: tuple[Any, ...]) -> bool:
    try:
        outputs = original(*tensors, *rest)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [y.shape for y in outputs] == [x.shape for x in tensors]


def _angles(layout: str, shape: tuple[int, ...], width: int, random: torch.Generator) -> tuple[Tensor, ...]:
    """cos and sin for `width` features of tokens of the given shape, or one complex tensor."""
    angle = torch.randn(*shape, width // 2, generator=random)
    if layout == "complex":
        return (torch.polar(torch.ones_like(angle), angle),)
    if layout == "twice":
        angle = torch.cat((angle, angle), -1)
    if layout == "by axis":
        angle = torch.cat([torch.cat((part, part), -1) for part in angle.chunk(2, -1)], -1)
    if layout == "repeated":
        angle = angle.repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


def _layouts(model: nn.Module, config: type) -> set[str]:
    """Layouts of the angles of all rotary modules with a configuration of class `config`.

    `rope` reads only one of two copies of an angle. A module built from the configuration is inspected, because buffers
    of the model may be on meta.
    """
    layouts: set[str] = set()
    for module in model.modules():
        cls: Any = original_class(module)
        if "Rotary" not in cls.__name__ or type(getattr(module, "config", None)) is not config:
            continue
        if any(True for _ in module.parameters()):
            return set()  # `rope` computes no gradient of angles.
        parameters = inspect.signature(cls.forward).parameters
        kinds = getattr(module, "layer_types", None) or getattr(module.config, "layer_types", None) or ()
        by_kind = "layer_type" in parameters
        for named in [{"layer_type": kind} for kind in dict.fromkeys(kinds)] if by_kind else [{}]:
            try:
                layouts.add(_layout_of(_angles_given(cls(config=module.config), len(parameters) > 2, named)))
            except Exception:
                # Third-party code may fail on this input: the layout is unknown.
                return set()
    return layouts


def _angles_given(rotary: Any, by_positions: bool, named: dict[str, str]) -> Any:
    """The result of a rotary module for three tokens, or for three image patches."""
    x = torch.zeros(1, 3, WIDTH)
    if not by_positions:
        return rotary(x, **named)
    if getattr(rotary, "rope_type", None) != "axial":
        places = torch.arange(3)[None]
        try:
            return rotary(x, places, **named)
        except (IndexError, RuntimeError):
            # Some M-RoPE modules require positions of three axes.
            return rotary(x, places.expand(3, 1, 3), **named)
    # (row, column) of patches. Some towers have a batch axis; others misinterpret one.
    patches = torch.tensor([[0, 2], [1, 0], [3, 1]])
    given = rotary(x, patches[None], **named)
    return given if given[0].shape[:-1] == (1, 3) else rotary(x, patches, **named)


def _layout_of(angles: Any) -> str:
    if isinstance(angles, Tensor) and angles.is_complex():
        return "complex"
    if not (isinstance(angles, tuple) and len(angles) == 2):
        return "unknown"
    if all(_comes_twice(table) for table in angles):
        return "twice"
    if all(torch.equal(table[..., ::2], table[..., 1::2]) for table in angles):
        return "repeated"
    if all(table.shape[-1] % 4 == 0 and all(map(_comes_twice, table.chunk(2, -1))) for table in angles):
        return "by axis"
    return "once"


def _comes_twice(table: Tensor) -> bool:
    return torch.equal(*table.chunk(2, -1))
