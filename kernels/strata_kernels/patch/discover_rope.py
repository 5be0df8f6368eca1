"""Whether the functions by which an attention rotates queries and keys are a rotation that `rope` computes."""

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

from .forwards import ROTATIONS
from .small_copy import WIDTH, NotEqual, is_equal, seeded
from .structure import is_own, original_class
from .table import Rope


@dataclass(frozen=True)
class _Call:
    """How a rotation is called: its parameters, and the layout in which its angles come.

    layout: "twice" for cos and sin of `cat((angle, angle), -1)`, "repeated" for `angle.repeat_interleave(2, -1)`,
        "once" for one number per pair, "complex" for exp(i · angle).
    """

    parameters: tuple[str, ...]
    layout: str


_PAIR, _SINGLE = ("q", "k", "cos", "sin", "unsqueeze_dim"), ("x", "cos", "sin", "unsqueeze_dim")
_CALLS = {
    "halves": _Call(_PAIR, "twice"),
    "halves_once": _Call(_PAIR, "once"),
    "halves_single": _Call(_SINGLE, "twice"),
    "neighbors": _Call(_PAIR, "twice"),
    "neighbors_repeated": _Call(_PAIR, "repeated"),
    "complex": _Call(("xq", "xk", "freqs_cis"), "complex"),
}
_FEATURES = 8


def rotations_of(cls: type[nn.Module]) -> tuple[str, ...]:
    """The functions of its modeling file by which the forward of `cls` rotates queries and keys."""
    function = inspect.unwrap(cls.forward)
    if not isinstance(function, FunctionType):
        return ()
    names = (name for name in function.__code__.co_names if name.startswith("apply_") and "rotary" in name)
    return tuple(name for name in names if callable(function.__globals__.get(name)))


def prove_rope(module: nn.Module, names: tuple[str, ...], model: Any) -> Rope:
    """How the functions `names`, which the forward of `module` calls, rotate.

    Raises:
        NotEqual: one of them rotates otherwise, or the model's angles come in another layout.
    """
    cls: Any = original_class(module)
    function: Any = inspect.unwrap(cls.forward)
    # Others, such as the indexers of sparse attention and towers for images, rotate tensors of other shapes.
    if "Attention" not in cls.__name__ or type(getattr(module, "config", None)) is not _text_config(model):
        raise NotEqual("is no attention of the text model")
    if function is not cls.forward:
        raise NotEqual("has a forward inside of a decorator")
    if any(i.argval in names and i.opname != "LOAD_GLOBAL" for i in dis.get_instructions(function)):
        raise NotEqual(f"uses {' and '.join(names)} for something else than calls")
    layouts = _layouts(model)
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
    """Whether `original` is the rotation `kind`: in both orders of axes, and of a part of a head if it takes one."""
    call, ours = _CALLS[kind], ROTATIONS[kind]
    signature = inspect.signature(original).parameters
    parameters = tuple(signature)
    ordered = "unsqueeze_dim" in parameters
    if parameters not in (call.parameters, call.parameters[:-1]) or (
        ordered and signature["unsqueeze_dim"].default != 1
    ):
        return False
    random = seeded()
    axes = (1, 2) if ordered else (2,) if call.layout == "complex" else (1,)
    for axis, rotated in product(axes, (_FEATURES, _FEATURES // 2)):
        shapes = [(2, n, 5, _FEATURES) if axis == 1 else (2, 5, n, _FEATURES) for n in (4, 2)]
        tensors = [torch.randn(shape, generator=random) for shape in shapes[: 1 if "x" in parameters else 2]]
        rest = (*_angles(call.layout, rotated, random), *([axis] if ordered else []))
        if not _gives_shapes_of(original, tensors, rest):
            if rotated == _FEATURES:
                return False
            continue  # It takes whole heads alone, and will be called with nothing else.
        if not is_equal(_with(original, rest), _with(ours, rest), *tensors):
            return False
        if not _is_equal_in_bf16(_with(original, rest), _with(ours, rest), tensors):
            return False
    return True


def _is_equal_in_bf16(original: Callable[..., Any], ours: Callable[..., Any], tensors: list[Tensor]) -> bool:
    """Whether results in bf16 by angles in fp32 have the same values up to rounding; their dtype may be wider."""
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


def _angles(layout: str, width: int, random: torch.Generator) -> tuple[Tensor, ...]:
    """cos and sin for `width` features of [2, 5] tokens, or one complex tensor."""
    angle = torch.randn(2, 5, width // 2, generator=random)
    if layout == "complex":
        return (torch.polar(torch.ones_like(angle), angle),)
    if layout == "twice":
        angle = torch.cat((angle, angle), -1)
    if layout == "repeated":
        angle = angle.repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


def _text_config(model: Any) -> type:
    """The configuration's class of the part that makes text, by which its modules are told from those of towers."""
    return type(model.config.get_text_config())


def _layouts(model: nn.Module) -> set[str]:
    """The layouts in which the model's rotary modules give angles, of which `rope` reads one where they come twice.

    A module that is made anew from its configuration says so without the buffers of the model, which may be on meta.
    """
    layouts: set[str] = set()
    for module in model.modules():
        cls: Any = original_class(module)
        if "Rotary" not in cls.__name__ or type(getattr(module, "config", None)) is not _text_config(model):
            continue
        if any(True for _ in module.parameters()):
            return set()  # The operator has no gradient for angles.
        kinds = getattr(module, "layer_types", None) or getattr(module.config, "layer_types", None) or ()
        by_kind = "layer_type" in inspect.signature(cls.forward).parameters
        for named in [{"layer_type": kind} for kind in dict.fromkeys(kinds)] if by_kind else [{}]:
            try:
                angles = cls(config=module.config)(torch.zeros(1, 3, WIDTH), torch.arange(3)[None], **named)
            except Exception:
                # Foreign code, on input that it may not expect: then the layout is not known.
                return set()
            layouts.add(_layout_of(angles))
    return layouts


def _layout_of(angles: Any) -> str:
    if isinstance(angles, Tensor) and angles.is_complex():
        return "complex"
    if not (isinstance(angles, tuple) and len(angles) == 2):
        return "unknown"
    if all(torch.equal(*table.chunk(2, -1)) for table in angles):
        return "twice"
    if all(torch.equal(table[..., ::2], table[..., 1::2]) for table in angles):
        return "repeated"
    return "once"
