"""Activations as operators: launch parameters, host functions, and the layouts of gate and up."""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype, launch, takes_kernel
from .._operator import Operator, is_observed, operator
from ..float8.largest import PARTS, is_finding_largest, note_largest
from .activation_kernels import activation_bwd_kernel, activation_fwd_kernel
from .activation_reference import backward_reference, forward_reference

# Elements per vectorized load: 16 bytes of a 16-bit dtype.
_VECTOR = 8


@dataclass(frozen=True)
class Launch:
    """Launch parameters: elements and warps per program."""

    block: int
    warps: int


_FORWARD = Launch(block=1024, warps=4)
_BACKWARD = Launch(block=1024, warps=4)


def _launch_forward(
    function: str, y: Tensor, amax: Tensor | None, gate: Tensor, up: Tensor | None, *multipliers: float
) -> None:
    n_rows, n_cols, (g, u), strides = _rows(gate, up)
    launch(
        activation_fwd_kernel, (_programs(n_rows, n_cols, _FORWARD),),
        g, u, y, amax, n_rows, n_cols, *strides, *multipliers,
        ACTIVATION=function, PRECISE=gate.dtype == torch.float32,
        BLOCK=_FORWARD.block, VECTOR=_VECTOR, PARTS=PARTS, num_warps=_FORWARD.warps,
    )  # fmt: skip


def _launch_backward(
    function: str,
    d_gate: Tensor,
    d_up: Tensor | None,
    y: Tensor | None,
    amax: tuple[Tensor | None, Tensor | None],
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    *multipliers: float,
) -> None:
    n_rows, n_cols, rows, strides = _rows(dy, gate, up, d_gate, d_up)
    launch(
        activation_bwd_kernel, (_programs(n_rows, n_cols, _BACKWARD),),
        *rows, y, *amax, n_rows, n_cols, *strides, *multipliers,
        ACTIVATION=function, PRECISE=gate.dtype == torch.float32,
        BLOCK=_BACKWARD.block, VECTOR=_VECTOR, PARTS=PARTS, num_warps=_BACKWARD.warps,
    )  # fmt: skip


def _rows(first: Tensor, *others: Tensor | None) -> tuple[int, int, list[Tensor | None], list[int]]:
    """(R, D, the tensors with stride 1 along features, their row strides).

    If all tensors are contiguous and D is not a multiple of the vector size, they are treated as one row. A tensor is
    copied only if its feature stride is not 1 or its leading axes have no common stride; outputs are never copied.
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
    """The row stride of x; None if its feature stride is not 1 or its leading axes have no common stride."""
    shape, strides = x.shape, x.stride()
    apart = any(strides[i] != shape[i + 1] * strides[i + 1] for i in range(x.dim() - 2))
    return None if apart or strides[-1] != 1 else strides[-2]


def _programs(n_rows: int, n_cols: int, settings: Launch) -> int:
    vectors = n_rows * -(-n_cols // _VECTOR)
    if vectors > 2**31 - settings.block:
        raise ValueError(f"an activation supports at most 2^34 elements at once, got {n_rows * n_cols}: split the rows")
    return -(-vectors * _VECTOR // settings.block)


@dataclass(frozen=True)
class Form:
    """The layout of gate and up in an operator's inputs: ungated, separate or packed.

    schema: the inputs, tensors first; if there are other inputs, the last two are the multipliers.
    tensors: number of tensors.
    split: inputs → gate and up, as views; also applied to gradients in place of the tensors.
    join: the inverse, with copies.
    """

    schema: str
    tensors: int
    split: Callable[..., tuple[Tensor, Tensor | None]]
    join: Callable[..., tuple[Tensor, ...]]

    def multipliers(self, inputs: tuple[Any, ...]) -> tuple[float, float]:
        """(gate_multiplier, multiplier)."""
        return inputs[-2:] if len(inputs) > self.tensors else (1.0, 1.0)


def _halves(x: Tensor, gate_first: bool, *_: float) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def _joined(gate: Tensor, up: Tensor, gate_first: bool, *_: float) -> tuple[Tensor]:
    return (torch.cat((gate, up) if gate_first else (up, gate), dim=-1),)


UNGATED = Form("Tensor x", 1, lambda x: (x, None), lambda dx, _: (dx,))
GATED = Form(
    "Tensor gate, Tensor up, float gate_multiplier, float multiplier",
    2,
    lambda gate, up, *_: (gate, up),
    lambda d_gate, d_up, *_: (d_gate, d_up),
)
PACKED = Form("Tensor x, bool gate_first, float gate_multiplier, float multiplier", 1, _halves, _joined)


def _note_largest(amax: Tensor | None, x: Tensor) -> None:
    """Store the bits of max |x| in amax[0], in plain PyTorch."""
    if amax is not None and x.numel():
        amax[0] = x.detach().abs().max().float().view(torch.int32)


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _HostFunctions:
    """Host functions of an activation; `inputs` as in the schema of the form."""

    function: str
    form: Form

    def empty(self, inputs: tuple[Any, ...]) -> Tensor:
        """An uninitialized y."""
        return _contiguous_like(self.form.split(*inputs)[0])

    def reference(self, *inputs: Any) -> Tensor:
        """y in plain PyTorch."""
        return forward_reference(self.function, *self.form.split(*inputs), *self.form.multipliers(inputs))

    def forward(self, *inputs: Any, amax: Tensor | None = None) -> Tensor:
        """y. If `amax` (int32 [PARTS], zeros) is given, also fills it with the bits of partial maxima of |y|."""
        if not takes_kernel(inputs[0]):
            y = self.reference(*inputs)
            _note_largest(amax, y)
            return y
        y = self.empty(inputs)
        if y.numel() != 0:
            _launch_forward(self.function, y, amax, *self.form.split(*inputs), *self.form.multipliers(inputs))
        return y

    def empty_gradients(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Uninitialized gradients of the tensors."""
        return tuple(map(_contiguous_like, inputs[: self.form.tensors]))

    def gradients(
        self, dy: Tensor, inputs: tuple[Any, ...], y: Tensor | None = None, amax: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The gradients of the tensors. The kernel also fills y, if given. If `amax` (int32 [tensors, PARTS], zeros)
        is given, it is filled with the bits of partial maxima of each |gradient|.
        """
        settings = inputs[self.form.tensors :]
        gate, up = self.form.split(*inputs)
        if not takes_kernel(dy):
            halves = backward_reference(self.function, dy, gate, up, *self.form.multipliers(inputs))
            gradients = self.form.join(*halves, *settings)
            for i, gradient in enumerate(gradients):
                _note_largest(None if amax is None else amax[i], gradient)
            return gradients
        gradients = self.empty_gradients(inputs)
        if dy.numel() != 0:
            d_gate, d_up = self.form.split(*gradients, *settings)
            # The two halves of a packed gradient are one tensor with one amax.
            noted = (None, None) if amax is None else (amax[0], amax[-1])
            _launch_backward(self.function, d_gate, d_up, y, noted, dy, gate, up, *self.form.multipliers(inputs))
        return gradients

    def gradients_and_output(self, dy: Tensor, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The gradients of the tensors, then y."""
        if not takes_kernel(dy):
            return *self.gradients(dy, inputs), self.reference(*inputs)
        y = self.empty(inputs)
        return *self.gradients(dy, inputs, y), y


class _Elementwise(Operator):
    """An elementwise operator: under vmap it runs once on tensors with one more leading axis."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        def lead(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        results = cls.apply(*map(lead, inputs, in_dims))
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)


class _Differentiable(_Elementwise):
    """Saves its tensors in `ctx.saved_tensors` and its other inputs in `ctx.settings`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.settings = inputs[len(tensors) :]


@dataclass(frozen=True)
class Activation:
    """The operators of an activation; `inputs` as in the schema of its form.

    forward: y, differentiable any number of times.
    backward: (dy, *inputs) → the gradients of the tensors.
    backward_and_output: (dy, *inputs) → the gradients, then y, bitwise equal to forward's. Not differentiable.
    """

    name: str
    form: Form
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    backward_and_output: Callable[..., tuple[Tensor, ...]]


# By operator name, filled by `define`.
ACTIVATIONS: dict[str, Activation] = {}


def define(name: str, function: str, form: Form) -> Activation:
    """Define `strata::<name>`, `strata::<name>_bwd` and `strata::<name>_bwd_and_output`."""
    host = _HostFunctions(function, form)
    gradients = ", ".join(["Tensor"] * form.tensors)
    is_one = form.tensors == 1

    @operator(f"{name}_bwd(Tensor dy, {form.schema}) -> {gradients if is_one else f'({gradients})'}")
    class Backward(_Differentiable):
        @staticmethod
        def forward(dy: Tensor, *inputs: Any) -> Any:
            found = host.gradients(dy, inputs)
            return found[0] if is_one else found

        @staticmethod
        def fake(dy: Tensor, *inputs: Any) -> Any:
            found = host.empty_gradients(inputs)
            return found[0] if is_one else found

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
            # The second derivative, rarely needed in training, in plain PyTorch.
            def once(dy: Tensor, *tensors: Tensor) -> Any:
                return torch.func.vjp(lambda *tensors: host.reference(*tensors, *ctx.settings), *tensors)[1](dy)

            return *torch.func.vjp(once, *ctx.saved_tensors)[1](cotangents), *(None for _ in ctx.settings)

    @operator(f"{name}_bwd_and_output(Tensor dy, {form.schema}) -> ({gradients}, Tensor)")
    class BackwardAndOutput(_Elementwise):
        @staticmethod
        def forward(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
            return host.gradients_and_output(dy, inputs)

        @staticmethod
        def fake(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
            return *host.empty_gradients(inputs), host.empty(inputs)

    def backward(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        found = Backward.apply(dy, *inputs)
        return (found,) if is_one else found

    @operator(f"{name}_bwd_and_largest(Tensor dy, {form.schema}) -> ({gradients}, Tensor)")
    class BackwardAndLargest(Operator):
        @staticmethod
        def forward(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
            amax = dy.new_zeros(form.tensors, PARTS, dtype=torch.int32)
            return *host.gradients(dy, inputs, amax=amax), amax

        @staticmethod
        def fake(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
            return *host.empty_gradients(inputs), dy.new_empty(form.tensors, PARTS, dtype=torch.int32)

    @operator(f"{name}_and_largest({form.schema}) -> (Tensor, Tensor)")
    class ForwardAndLargest(_Differentiable):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
            amax = inputs[0].new_zeros(PARTS, dtype=torch.int32)
            return host.forward(*inputs, amax=amax), amax

        @staticmethod
        def fake(*inputs: Any) -> tuple[Tensor, Tensor]:
            return host.empty(inputs), inputs[0].new_empty(PARTS, dtype=torch.int32)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _Differentiable.setup_context(ctx, inputs, output)
            ctx.mark_non_differentiable(output[1])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Any, ...]:
            rest = tuple(None for _ in ctx.settings)
            if dy is None:
                return *(None for _ in ctx.saved_tensors), *rest
            if torch.is_grad_enabled():
                return *backward(dy, *ctx.saved_tensors, *ctx.settings), *rest
            *found, amax = BackwardAndLargest.apply(dy, *ctx.saved_tensors, *ctx.settings)
            return *(note_largest(gradient, amax[i]) for i, gradient in enumerate(found)), *rest

    @operator(f"{name}({form.schema}) -> Tensor")
    class Forward(_Differentiable):
        forward = staticmethod(host.forward)

        @staticmethod
        def fake(*inputs: Any) -> Tensor:
            return host.empty(inputs)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
            return *backward(dy, *ctx.saved_tensors, *ctx.settings), *(None for _ in ctx.settings)

    def forward(*inputs: Any) -> Any:
        if is_finding_largest() and not is_observed():
            y, amax = ForwardAndLargest.apply(*inputs)
            return note_largest(y, amax)
        return host.reference(*inputs) if _is_pushed_forward() else Forward.apply(*inputs)

    defined = Activation(name, form, forward, backward, BackwardAndOutput.apply)
    ACTIVATIONS[name] = defined
    return defined


def _is_pushed_forward() -> bool:
    """Whether `torch.func.jvp`, or a transform on it (jacfwd, hessian), is active: operators have no jvp rule."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in levels)


def check_ungated(x: Tensor) -> None:
    """Raise ValueError unless x is [..., D] of a supported dtype."""
    if not has_dtype(x) or x.dim() == 0:
        raise ValueError(f"x must be {DTYPES} of shape [..., D], got {describe(x)}")


def check_gated(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError unless gate and up have the same shape, a supported dtype, and the same device."""
    if gate.shape != up.shape or gate.dtype != up.dtype or not has_dtype(gate) or gate.dim() == 0:
        shapes = f"{describe(gate)} and {describe(up)}"
        raise ValueError(f"gate and up must have one shape [..., D] and one dtype of {DTYPES}, got {shapes}")
    if gate.device != up.device:
        raise ValueError(f"gate is on {gate.device} and up on {up.device}: move one of them")


def check_packed(x: Tensor) -> None:
    """Raise ValueError unless x is [..., 2 * D] of a supported dtype."""
    if not has_dtype(x) or x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x must be {DTYPES} of shape [..., 2 * D], got {describe(x)}")
