"""Triton's interpreter without what it computes again at each operation, which takes most of its time.

It checks types, spells shapes and wraps constants, in Python, for every sum of two numbers. Here it does so once per
type and shape. Results and errors are those of the interpreter; `test_launch.py` compares their bits.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from triton.language import core, semantic
from triton.runtime import interpreter

patch = pytest.MonkeyPatch()
Function = Callable[..., object]

plain_block_type = core.block_type.__init__
plain_operands = semantic.TritonSemantic.binary_op_type_checking_impl
plain_broadcast = semantic.TritonSemantic.broadcast_impl_value
plain_numpy_type = interpreter._get_np_dtype
NO_SHAPE = core.tuple(()), core.constexpr(1)


def speed_up() -> None:
    """Until `patch.undo()`."""
    # The checks for overflow of integers end in `device_assert`, which returns at once outside of Triton's debug mode.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    assert not options.debug
    patch.setattr(interpreter.interpreter_builder, "options", options)
    patch.setattr(interpreter, "_patch_lang", patch_once(interpreter._patch_lang))
    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    patch.setattr(core.block_type, "__init__", block_type)
    patch.setattr(core.block_type, "__eq__", equal_block_types)
    patch.setattr(core.dtype, "__eq__", equal_types)
    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(semantic.TritonSemantic, "binary_op_type_checking_impl", operands)
    patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", broadcast)


def patch_once(plain: Function) -> Function:
    """Put the interpreter's functions in the place of the language's once per launch.

    Triton does so again at each call of a function within the kernel.
    """
    patched = set[int]()

    def patch_lang(fn: Function) -> object:
        if id(fn.__globals__) in patched:
            return None
        scope = plain(fn)
        if not patched:
            # The launch's own, which is restored at its end; those of the calls within are not.
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        patched.add(id(fn.__globals__))
        return scope

    return patch_lang


@functools.cache
def builtins(namespace: object) -> list[tuple[str, Function]]:
    """The language's functions there, as the interpreter calls them."""

    def interpreted(function: Function) -> Function:
        def call(*arguments: object, **options: object) -> object:
            return function(*arguments, **{**options, "_semantic": interpreter.interpreter_semantic})

        return call

    return [
        (name, interpreted(getattr(member, "__wrapped__", member)))
        for name, member in inspect.getmembers(namespace)
        if core.is_builtin(member)
    ]


def patch_builtin(namespace: object, _builder: object, scope: object) -> None:
    for name, function in builtins(namespace):
        scope.set_attr(namespace, name, function)


numpy_types: dict[str, object] = {}


def numpy_type(kind: core.dtype) -> object:
    if kind.name not in numpy_types:
        numpy_types[kind.name] = plain_numpy_type(kind)
    return numpy_types[kind.name]


# What follows from a type of elements and a shape, the shape and size as tensors have them included.
block_types: dict[object, dict[str, object]] = {}


def block_type(self: core.block_type, element_ty: core.dtype, shape: object) -> None:
    key = element_ty.name, *(size.value if type(size) is core.constexpr else size for size in shape)
    if key not in block_types:
        plain_block_type(self, element_ty, shape)
        of_tensors = core.tuple([core.constexpr(size) for size in self.shape]), core.constexpr(math.prod(self.shape))
        block_types[key] = {**self.__dict__, "of_tensors": of_tensors}
    self.__dict__.update(block_types[key])


def equal_block_types(self: core.block_type, other: object) -> bool:
    return self is other or (type(other) is core.block_type and self.name == other.name)


def equal_types(self: core.dtype, other: object) -> bool:
    if type(other) is core.constexpr:
        other = other.value
    return self is other or (isinstance(other, core.dtype) and self.name == other.name)


def tensor(self: core.tensor, handle: object, kind: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = kind.of_tensors if type(kind) is core.block_type else NO_SHAPE


# Which divisions change no type.
DIVIDED_EXACTLY = {"fp32", "fp64", "int32", "int64"}
# What a number becomes beside a tensor that stays as it is, by the tensor's type.
constants: dict[object, core.tensor] = {}


def operands(
    self: semantic.TritonSemantic,
    lhs: object,
    rhs: object,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[object, object]:
    """Numbers become the tensors that they became before. Tensors of one type of elements, and offsets that are added
    to pointers, need no other type: only a shape. Floats of less than 32 bits are divided in fp32.
    """
    how = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    if type(lhs) is core.tensor:
        if type(rhs) is core.tensor:
            left, right = lhs.dtype, rhs.dtype
            exact = not div_or_mod or left.name in DIVIDED_EXACTLY
            if left.is_ptr() or right.is_ptr():
                fits = (left.is_int() and allow_rhs_ptr) or (right.is_int() and allow_lhs_ptr)
            else:
                fits = exact and left.name == right.name
            return self.broadcast_impl_value(lhs, rhs) if fits else plain_operands(self, lhs, rhs, *how)
        if type(rhs) in (int, float):
            # Zeros of both signs are equal.
            key = lhs.type.name, type(rhs), rhs or str(rhs), allow_lhs_ptr, arithmetic_check, div_or_mod
            if key not in constants:
                same, constant = plain_operands(self, lhs, rhs, *how)
                if same is not lhs:
                    return same, constant
                if len(constants) == 2000:
                    constants.clear()
                constants[key] = constant
            return lhs, constants[key]
    return plain_operands(self, lhs, rhs, *how)


def broadcast(self: semantic.TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
    if type(lhs.type) is type(rhs.type) is core.block_type and lhs.type.shape.values == rhs.type.shape.values:
        return lhs, rhs
    return plain_broadcast(self, lhs, rhs)
