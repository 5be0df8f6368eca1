"""Activations of feed-forward layers, gated or not: one forward and one backward kernel for all of them.

    y  = m' · f(m · g) · u          m the gate's multiplier, m' the result's; without a gate there is no u
    dg = m' · m · dy · u · f'(m · g)                         du = m' · dy · f(m · g)

    silu        f = g · S(g)        f' = S(g) · (1 + g · (1 - S(g)))             S(x) = 1 / (1 + exp(-x))
    gelu        f = g · Φ(g)        f' = Φ(g) + g · exp(-g²/2) / sqrt(2π)        Φ(x) = (1 + erf(x / sqrt(2))) / 2
    gelu_tanh   f = g · S(2z)       f' = S(2z) · (1 + 2 · g · (1 - S(2z)) · dz/dg)
                                    z  = sqrt(2/π) · (g + 0.044715 · g³)         S(2z) = (1 + tanh(z)) / 2
    relu2       f = max(g, 0)²      f' = 2 · max(g, 0)

Axes: R rows of D features. A program takes BLOCK elements that follow one another, cut into vectors of neighbors in one
row: rows may lie apart, as the halves of a packed projection do, and every lane works at every width. Only gate and up
are kept for the backward pass; f and f' are computed again. Bytes moved per element of y at the least: 3·itemsize
forward and 5·itemsize backward, without a gate 2 and 3.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ._launch import DTYPES, describe, has_dtype, launch, takes_kernel
from ._register import _library, register

# Elements that a thread reads at once: 16 bytes of a 16-bit dtype.
_VECTOR = 8


@triton.jit
def _reciprocal(b_x):
    """1 / x for x >= 1, to 3e-7 of it, in two instructions; a division takes five, and the forward pass is near both
    of the chip's limits, of memory and of instructions."""
    b_r = tl.rsqrt(b_x)
    return b_r * b_r


@triton.jit
def _sigmoid(b_x, PRECISE: tl.constexpr):
    """S(x) and 1 - S(x) of an fp32 block; PRECISE for results that are not rounded to 16 bits afterwards."""
    if PRECISE:
        # exp(-x) as 2^n · 2^f with |f| <= 1/2: the hardware's 2^f is good to one unit in the last place there, and the
        # part of x · log2(e) that fp32 drops is kept in the remainder r. At ±128 the sigmoid is 0 or 1 already.
        b_x = tl.minimum(tl.maximum(b_x, -128.0), 128.0)
        b_n = tl.floor(b_x * -1.4426950408889634 + 0.5)
        b_r = tl.fma(b_n, -0.693145751953125, -b_x)
        b_r = tl.fma(b_n, -1.42860682030941723212e-6, b_r)
        b_exp = tl.exp2(b_r * 1.4426950408889634) * tl.exp2(b_n)
        b_s = tl.div_rn(tl.full(b_x.shape, 1.0, tl.float32), 1.0 + b_exp)
        # Without the cancellation of 1 - S; finite where the exponential is not and S is 0.
        b_rest = tl.minimum(b_exp, 1e38) * b_s
    else:
        b_s = _reciprocal(1.0 + tl.exp(-b_x))
        b_rest = 1.0 - b_s
    return b_s, b_rest


@triton.jit
def _normal(b_x, PRECISE: tl.constexpr):
    """Φ(x) and exp(-x²/2) of an fp32 block."""
    b_exp = tl.exp2(b_x * b_x * -0.7213475204444817)
    if PRECISE:
        b_cdf = 0.5 + 0.5 * tl.erf(b_x * 0.7071067811865476)
    else:
        # Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26 at |x| / sqrt(2), halved: 1 - Φ(|x|) is
        # exp(-x²/2) times a polynomial in t, to 8e-8. It needs no more than the exponential that f' needs anyway.
        b_t = _reciprocal(1.0 + 0.231641888 * tl.abs(b_x))
        b_p = tl.fma(b_t, 0.5307027145, -0.7265760135)
        b_p = tl.fma(b_t, b_p, 0.7107068705)
        b_p = tl.fma(b_t, b_p, -0.142248368)
        b_tail = b_t * tl.fma(b_t, b_p, 0.127414796) * b_exp
        b_cdf = tl.where(b_x < 0, b_tail, 1.0 - b_tail)
    return b_cdf, b_exp


@triton.jit
def _activate(b_x, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr):
    """f(x) and f'(x) of an fp32 block."""
    if ACTIVATION == "silu":
        b_s, b_rest = _sigmoid(b_x, PRECISE)
        b_f = b_x * b_s
        b_df = b_s * (1.0 + b_x * b_rest)
    elif ACTIVATION == "gelu":
        b_cdf, b_exp = _normal(b_x, PRECISE)
        b_f = b_x * b_cdf
        b_df = b_cdf + b_x * b_exp * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        # At ±16 the sigmoid is 0 or 1 already, and the cube of a large x would be infinite.
        b_h = tl.minimum(tl.maximum(b_x, -16.0), 16.0)
        b_h2 = b_h * b_h
        b_s, b_rest = _sigmoid(b_h * (1.5957691216057308 + 0.0713548162726009 * b_h2), PRECISE)
        b_f = b_x * b_s
        b_df = b_s * (1.0 + b_x * b_rest * (1.5957691216057308 + 0.2140644488178027 * b_h2))
    else:
        tl.static_assert(ACTIVATION == "relu2")
        b_relu = tl.where(b_x < 0, 0.0, b_x)
        b_f = b_relu * b_relu
        b_df = 2.0 * b_relu
    return b_f, b_df


@triton.jit
def _offsets(n_rows, n_cols, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Rows [BLOCK / VECTOR, 1], features [BLOCK / VECTOR, VECTOR] and mask of this program's elements."""
    n_vectors = tl.cdiv(n_cols, VECTOR)
    o_v = tl.program_id(0) * (BLOCK // VECTOR) + tl.arange(0, BLOCK // VECTOR)
    o_r = o_v // n_vectors
    o_d = (o_v - o_r * n_vectors).to(tl.int64)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    m = (o_r < n_rows)[:, None] & (o_d < n_cols)
    return o_r.to(tl.int64)[:, None], o_d, m


@triton.jit(do_not_specialize=["n_rows"])
def activation_fwd_kernel(
    p_g, p_u, p_y, n_rows, n_cols, stride_g, stride_u, gate_multiplier, multiplier,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of y; p_u is None where there is no gate."""
    o_r, o_d, m = _offsets(n_rows, n_cols, BLOCK, VECTOR)
    b_g = tl.load(p_g + o_r * stride_g + o_d, mask=m, other=0.0).to(tl.float32)
    b_y, _ = _activate(b_g * gate_multiplier, ACTIVATION, PRECISE)
    if p_u is not None:
        b_y *= tl.load(p_u + o_r * stride_u + o_d, mask=m, other=0.0).to(tl.float32)
    tl.store(p_y + o_r * n_cols + o_d, (b_y * multiplier).to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["n_rows"])
def activation_bwd_kernel(
    p_dy, p_g, p_u, p_dg, p_du, n_rows, n_cols, stride_dy, stride_g, stride_u, stride_dg, stride_du,
    gate_multiplier, multiplier,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of dg and du; p_u and p_du are None where there is no gate."""
    o_r, o_d, m = _offsets(n_rows, n_cols, BLOCK, VECTOR)
    b_dy = tl.load(p_dy + o_r * stride_dy + o_d, mask=m, other=0.0).to(tl.float32) * multiplier
    b_g = tl.load(p_g + o_r * stride_g + o_d, mask=m, other=0.0).to(tl.float32)
    b_f, b_df = _activate(b_g * gate_multiplier, ACTIVATION, PRECISE)
    b_dg = b_dy * (b_df * gate_multiplier)
    if p_u is not None:
        b_dg *= tl.load(p_u + o_r * stride_u + o_d, mask=m, other=0.0).to(tl.float32)
        tl.store(p_du + o_r * stride_du + o_d, (b_dy * b_f).to(p_du.dtype.element_ty), mask=m)
    tl.store(p_dg + o_r * stride_dg + o_d, b_dg.to(p_dg.dtype.element_ty), mask=m)


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
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    *multipliers: float,
) -> None:
    n_rows, n_cols, rows, strides = _rows(dy, gate, up, d_gate, d_up)
    launch(
        activation_bwd_kernel, (_programs(n_rows, n_cols, _BACKWARD),),
        *rows, n_rows, n_cols, *strides, *multipliers,
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
        return _one_or_all(tuple(map(_dense, inputs[: self.form.tensors])))

    def backward_run(self, dy: Tensor, *inputs: Any) -> Any:
        settings = inputs[self.form.tensors :]
        gate, up = self.form.split(*inputs)
        if not takes_kernel(dy):
            halves = _backward_reference(self.activation, dy, gate, up, *self.form.multipliers(inputs))
            return _one_or_all(self.form.join(*halves, *settings))
        gradients = tuple(map(_dense, inputs[: self.form.tensors]))
        if dy.numel() != 0:
            d_gate, d_up = self.form.split(*gradients, *settings)
            _backward_triton(self.activation, d_gate, d_up, dy, gate, up, *self.form.multipliers(inputs))
        return _one_or_all(gradients)

    def backward_twice(self, ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        """The second derivative, which training does not ask for, in plain PyTorch."""

        def once(dy: Tensor, *tensors: Tensor) -> Any:
            return torch.func.vjp(lambda *tensors: self.plain(*tensors, *ctx.settings), *tensors)[1](dy)

        return *torch.func.vjp(once, *ctx.saved_tensors)[1](cotangents), *(None for _ in ctx.settings)


def define(name: str, activation: str, form: Form) -> Callable[..., Any]:
    """Register `strata::<name>` and its backward operator, both differentiable, and return the first."""
    functions = _Operator(activation, form)
    one = form.tensors == 1

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.settings = inputs[len(tensors) :]

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gradients = backward_operator(dy, *ctx.saved_tensors, *ctx.settings)
        return *((gradients,) if one else gradients), *(None for _ in ctx.settings)

    backward_operator = _register_batched(
        f"{name}_bwd(Tensor dy, {form.inputs}) -> {'Tensor' if one else '(Tensor, Tensor)'}",
        functions.backward_run,
        functions.backward_fake,
        setup_context=setup_context,
        backward=functions.backward_twice,
    )
    operator = _register_batched(
        f"{name}({form.inputs}) -> Tensor",
        functions.run,
        functions.fake,
        setup_context=setup_context,
        backward=backward,
    )
    return lambda *inputs: functions.plain(*inputs) if _is_pushed_forward() else operator(*inputs)


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
