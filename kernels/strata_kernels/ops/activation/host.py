"""Activations of feed-forward layers as operators: given gate and up, alone or as halves, launched and registered.

The formulas and the kernels are in `kernels.py`.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import DTYPES, describe, has_dtype, launch, takes_kernel
from .._operator import _library, register
from .kernels import activation_bwd_kernel, activation_fwd_kernel

# Elements that a thread reads at once: 16 bytes of a 16-bit dtype.
_VECTOR = 8


@dataclass(frozen=True)
class Launch:
    """Elements per program, warps."""

    block: int
    warps: int


_FORWARD = Launch(block=1024, warps=4)
_BACKWARD = Launch(block=1024, warps=4)


def _forward_triton(activation: str, y: Tensor, gate: Tensor, up: Tensor | None, *multipliers: float) -> None:
    n_rows, n_cols, (g, u), strides = _rows(gate, up)
    launch(
        activation_fwd_kernel, (_programs(n_rows, n_cols, _FORWARD),),
        g, u, y, n_rows, n_cols, *strides, *multipliers,
        ACTIVATION=activation, PRECISE=gate.dtype == torch.float32,
        BLOCK=_FORWARD.block, VECTOR=_VECTOR, num_warps=_FORWARD.warps,
    )  # fmt: skip


def _backward_triton(
    activation: str,
    d_gate: Tensor,
    d_up: Tensor | None,
    y: Tensor | None,
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    *multipliers: float,
) -> None:
    n_rows, n_cols, rows, strides = _rows(dy, gate, up, d_gate, d_up)
    launch(
        activation_bwd_kernel, (_programs(n_rows, n_cols, _BACKWARD),),
        *rows, y, n_rows, n_cols, *strides, *multipliers,
        ACTIVATION=activation, PRECISE=gate.dtype == torch.float32,
        BLOCK=_BACKWARD.block, VECTOR=_VECTOR, num_warps=_BACKWARD.warps,
    )  # fmt: skip


def _rows(first: Tensor, *others: Tensor | None) -> tuple[int, int, list[Tensor | None], list[int]]:
    """R, D, the tensors with adjacent features, and how far apart their rows are.

    All is one row where everything is dense and D is not whole vectors. The tensors are copied only where the features
    are not adjacent, or leading axes do not make rows; those that are written to never are.
    """
    tensors = (first, *others)
    width = first.shape[-1]
    if width % _VECTOR and all(x is None or x.is_contiguous() for x in tensors):
        width = first.numel()
    rows: list[Tensor | None] = []
    strides: list[Any] = []
    for x in tensors:
        stride = width if x is None or x.is_contiguous() else _row_stride(x)
        if x is not None and stride is None:
            x, stride = x.reshape(-1, width).contiguous(), width
        rows.append(x)
        strides.append(stride)
    return first.numel() // width, width, rows, strides


def _row_stride(x: Tensor) -> int | None:
    """How far apart the rows of x are; None if its features are not adjacent or its leading axes do not make rows."""
    shape, strides = x.shape, x.stride()
    apart = any(strides[i] != shape[i + 1] * strides[i + 1] for i in range(x.dim() - 2))
    return None if apart or strides[-1] != 1 else strides[-2]


def _programs(n_rows: int, n_cols: int, settings: Launch) -> int:
    vectors = n_rows * -(-n_cols // _VECTOR)
    if vectors > 2**31 - settings.block:
        raise ValueError(f"an activation takes at most 2^34 elements at once, got {n_rows * n_cols}: split the rows")
    return -(-vectors * _VECTOR // settings.block)


# f, and (dy, x) -> dy · f'(x), in plain PyTorch.
_PLAIN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (functional.silu, torch.ops.aten.silu_backward),
    "gelu": (functional.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    "relu2": (lambda x: torch.relu(x).square(), lambda dy, x: dy * (2 * torch.relu(x))),
}


def _forward_reference(
    activation: str, gate: Tensor, up: Tensor | None, gate_multiplier: float, multiplier: float
) -> Tensor:
    y = _PLAIN[activation][0](_times(gate, gate_multiplier))
    return _times(y if up is None else y * up, multiplier).contiguous()


def _backward_reference(
    activation: str, dy: Tensor, gate: Tensor, up: Tensor | None, gate_multiplier: float, multiplier: float
) -> tuple[Tensor, Tensor | None]:
    f, pull = _PLAIN[activation]
    x, dy = _times(gate, gate_multiplier), _times(dy, multiplier)
    d_gate = _times(pull(dy if up is None else dy * up, x), gate_multiplier).contiguous()
    return d_gate, None if up is None else (dy * f(x)).contiguous()


def _times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier


@dataclass(frozen=True)
class Form:
    """How an operator is given gate and up.

    inputs: its parameters as the schema names them, tensors first; the last two, if any but tensors, are multipliers.
    tensors: how many of them are tensors.
    split: the parameters → gate and up, views of the tensors; the same with gradients in the place of the tensors.
    join: the inverse, with copies.
    """

    inputs: str
    tensors: int
    split: Callable[..., tuple[Tensor, Tensor | None]]
    join: Callable[..., tuple[Tensor, ...]]

    def multipliers(self, inputs: tuple[Any, ...]) -> tuple[float, float]:
        """The gate's and the result's."""
        return inputs[-2:] if len(inputs) > self.tensors else (1.0, 1.0)


def _halves(x: Tensor, gate_first: bool, *_: float) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def _joined(gate: Tensor, up: Tensor, gate_first: bool, *_: float) -> tuple[Tensor]:
    return (torch.cat((gate, up) if gate_first else (up, gate), dim=-1),)


SINGLE = Form("Tensor x", 1, lambda x: (x, None), lambda dx, _: (dx,))
GATED = Form(
    "Tensor gate, Tensor up, float gate_multiplier, float multiplier",
    2,
    lambda gate, up, *_: (gate, up),
    lambda d_gate, d_up, *_: (d_gate, d_up),
)
PACKED = Form("Tensor x, bool gate_first, float gate_multiplier, float multiplier", 1, _halves, _joined)


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _one_or_all(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class _Operator:
    """The functions that an operator is registered with; `inputs` are its parameters, tensors first."""

    activation: str
    form: Form

    def fake(self, *inputs: Any) -> Tensor:
        return _dense(self.form.split(*inputs)[0])

    def plain(self, *inputs: Any) -> Tensor:
        return _forward_reference(self.activation, *self.form.split(*inputs), *self.form.multipliers(inputs))

    def run(self, *inputs: Any) -> Tensor:
        if not takes_kernel(inputs[0]):
            return self.plain(*inputs)
        y = self.fake(*inputs)
        if y.numel() != 0:
            _forward_triton(self.activation, y, *self.form.split(*inputs), *self.form.multipliers(inputs))
        return y

    def backward_fake(self, dy: Tensor, *inputs: Any) -> Any:
        return _one_or_all(self._empty_gradients(inputs))

    def backward_run(self, dy: Tensor, *inputs: Any) -> Any:
        return _one_or_all(self._pull(dy, inputs, None))

    def backward_and_output_fake(self, dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return *self._empty_gradients(inputs), self.fake(*inputs)

    def backward_and_output_run(self, dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        if not takes_kernel(dy):
            return *self._pull(dy, inputs, None), self.plain(*inputs)
        y = self.fake(*inputs)
        return *self._pull(dy, inputs, y), y

    def _empty_gradients(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(map(_dense, inputs[: self.form.tensors]))

    def _pull(self, dy: Tensor, inputs: tuple[Any, ...], y: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients; y, if any, is filled as well."""
        settings = inputs[self.form.tensors :]
        gate, up = self.form.split(*inputs)
        if not takes_kernel(dy):
            halves = _backward_reference(self.activation, dy, gate, up, *self.form.multipliers(inputs))
            return self.form.join(*halves, *settings)
        gradients = self._empty_gradients(inputs)
        if dy.numel() != 0:
            d_gate, d_up = self.form.split(*gradients, *settings)
            _backward_triton(self.activation, d_gate, d_up, y, dy, gate, up, *self.form.multipliers(inputs))
        return gradients

    def backward_twice(self, ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        """The second derivative, which training does not ask for, in plain PyTorch."""

        def once(dy: Tensor, *tensors: Tensor) -> Any:
            return torch.func.vjp(lambda *tensors: self.plain(*tensors, *ctx.settings), *tensors)[1](dy)

        return *torch.func.vjp(once, *ctx.saved_tensors)[1](cotangents), *(None for _ in ctx.settings)


@dataclass(frozen=True)
class Activation:
    """An activation's operators, all of which take the parameters of its form.

    forward: y, differentiable any number of times.
    backward: dy before them; the gradients.
    backward_and_output: dy before them; the gradients, then y, of the same bits as forward's. Not differentiable.
    """

    form: Form
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    backward_and_output: Callable[..., Any]


def define(name: str, activation: str, form: Form) -> Activation:
    """Register `strata::<name>` and its backward operators."""
    functions = _Operator(activation, form)
    one = form.tensors == 1

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.settings = inputs[len(tensors) :]

    def pull(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        gradients = backward_operator(dy, *inputs)
        return (gradients,) if one else gradients

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return *pull(dy, *ctx.saved_tensors, *ctx.settings), *(None for _ in ctx.settings)

    backward_operator = _register_batched(
        f"{name}_bwd(Tensor dy, {form.inputs}) -> {'Tensor' if one else '(Tensor, Tensor)'}",
        functions.backward_run,
        functions.backward_fake,
        setup_context=setup_context,
        backward=functions.backward_twice,
    )
    backward_and_output = _register_batched(
        f"{name}_bwd_and_output(Tensor dy, {form.inputs}) -> (Tensor, Tensor{'' if one else ', Tensor'})",
        functions.backward_and_output_run,
        functions.backward_and_output_fake,
    )
    operator = _register_batched(
        f"{name}({form.inputs}) -> Tensor",
        functions.run,
        functions.fake,
        setup_context=setup_context,
        backward=backward,
    )

    def forward(*inputs: Any) -> Any:
        return functions.plain(*inputs) if _is_pushed_forward() else operator(*inputs)

    return Activation(form, forward, pull, backward_and_output)


def _is_pushed_forward() -> bool:
    """Whether `torch.func.jvp` is at work, or what is made of it (jacfwd, hessian): operators have no rule for it."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in levels)


def _register_batched(schema: str, *parts: Any, **links: Any) -> Callable[..., Any]:
    """`register`, and how `torch.func.vmap` runs the operator: elementwise, over one more leading axis."""
    operator = register(schema, *parts, **links)

    def batched(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        def lead(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        results = operator(*map(lead, inputs, in_dims))
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)

    torch.library.register_vmap(f"strata::{schema[: schema.index('(')]}", batched, lib=_library)
    return operator


def check_gated(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError unless gate and up fit together."""
    if gate.shape != up.shape or gate.dtype != up.dtype or not has_dtype(gate) or gate.dim() == 0:
        shapes = f"{describe(gate)} and {describe(up)}"
        raise ValueError(f"gate and up must have one shape [..., D] and one dtype of {DTYPES}, got {shapes}")
    if gate.device != up.device:
        raise ValueError(f"gate is on {gate.device} and up on {up.device}: move one of them")


def check_packed(x: Tensor) -> None:
    """Raise ValueError unless x has two halves."""
    if not has_dtype(x) or x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x must be {DTYPES} of shape [..., 2 * D], got {describe(x)}")
