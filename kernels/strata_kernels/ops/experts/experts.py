"""Feed-forward layers of which each token takes a few: a mixture of experts behind its router.

The formulas and the products are in `product_kernels.py`, sorting in `routing_kernels.py`, how both are launched in
`experts_launch.py`.

Source: Shazeer et al., "Outrageously Large Neural Networks", 2017 (arXiv:1701.06538); Guo et al., "SonicMoE", 2025
(arXiv:2512.14080), for what is kept and what is computed again.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype, takes_kernel
from .._operator import Operator, is_transformed, operator, plain_gradients
from . import experts_launch as kernels
from . import experts_reference as reference
from .experts_launch import Activation, Routing, inner_of

Gate = Literal["halves", "interleaved", "none"]
Function = Literal["silu", "gelu", "gelu_tanh", "relu2"]

_BETWEEN = "str gate, str activation, float alpha, float limit, float offset, str precision"
_ROUTING = "Tensor positions, Tensor rows, Tensor starts, Tensor tiles"


def _steps(x: Tensor) -> Any:
    """The module whose functions take the steps of an operator on x: two modules of equal functions."""
    return kernels if takes_kernel(x) else reference


@operator(f"experts_hidden_bwd(Tensor do, Tensor h, Tensor down, Tensor? down_bias, Tensor index, Tensor router, "
          f"{_ROUTING}, {_BETWEEN}) -> (Tensor, Tensor, Tensor)")  # fmt: skip
class _HiddenBackward(Operator):
    """dh, router · a, and the gradient of the router."""

    @staticmethod
    def forward(do: Tensor, h: Tensor, down: Tensor, bias: Tensor | None, index: Tensor, router: Tensor,
                *rest: Any) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        found: tuple[Tensor, Tensor, Tensor] = _steps(do).hidden_bwd(
            do, h, down, bias, index, router, Routing(*rest[:4]), Activation(*rest[4:9]), rest[9]
        )
        return found

    @staticmethod
    def fake(do: Tensor, h: Tensor, down: Tensor, bias: Tensor | None, index: Tensor, router: Tensor,
             *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return torch.empty_like(h), h.new_empty(h.shape[0], down.shape[2]), torch.empty_like(router)


@operator(f"experts_weight_bwd(Tensor dy, Tensor x, Tensor weight, str of_tokens, {_ROUTING}, str precision) -> Tensor")
class _WeightBackward(Operator):
    """Σ dyᵀ · x over the rows of each expert, in the layout of `weight`."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, weight: Tensor, of_tokens: str, *rest: Any) -> Tensor:
        dw = torch.empty_like(weight)
        _steps(x).weight_bwd(dw, dy, x, of_tokens, Routing(*rest[:4]), rest[4])
        return dw

    @staticmethod
    def fake(dy: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(weight)


@operator(f"experts_bias_bwd(Tensor dy, Tensor? router, Tensor bias, {_ROUTING}) -> Tensor")
class _BiasBackward(Operator):
    """Σ dy over the rows of each expert; with `router`, of the weighted rows of the tokens."""

    @staticmethod
    def forward(dy: Tensor, router: Tensor | None, bias: Tensor, *routing: Tensor) -> Tensor:
        db = bias.new_empty(bias.shape)
        _steps(dy).bias_bwd(db, dy, router, Routing(*routing))
        return db

    @staticmethod
    def fake(dy: Tensor, router: Tensor | None, bias: Tensor, *_: Tensor) -> Tensor:
        return bias.new_empty(bias.shape)


@operator(f"experts_x_bwd(Tensor dh, Tensor gate_up, {_ROUTING}, str precision) -> Tensor")
class _XBackward(Operator):
    """dh · gate_up, summed over the slots of each token."""

    @staticmethod
    def forward(dh: Tensor, gate_up: Tensor, *rest: Any) -> Tensor:
        routing, steps = Routing(*rest[:4]), _steps(dh)
        dx: Tensor = steps.token_sums(steps.rows(dh, gate_up.transpose(1, 2), None, routing, rest[4]), None, routing)
        return dx

    @staticmethod
    def fake(dh: Tensor, gate_up: Tensor, positions: Tensor, *_: Any) -> Tensor:
        return dh.new_empty(positions.shape[0], gate_up.shape[2])


@operator("experts_up(Tensor x, Tensor gate_up, Tensor index, Tensor? bias, str precision) "
          "-> (Tensor, Tensor, Tensor, Tensor, Tensor)")  # fmt: skip
class _Up(Operator):
    """h and the routing.

    A node of its own, so that h is released as soon as the gradient of h is there.
    """

    @staticmethod
    def forward(x: Tensor, gate_up: Tensor, index: Tensor, bias: Tensor | None, precision: str) -> tuple[Tensor, ...]:
        steps = _steps(x)
        routing = steps.route(index, gate_up.shape[0], x.dtype)
        return steps.rows(x, gate_up, bias, routing, precision, of_tokens=True), *routing

    @staticmethod
    def fake(x: Tensor, gate_up: Tensor, index: Tensor, *_: Any) -> tuple[Tensor, ...]:
        h = x.new_empty(index.numel(), gate_up.shape[1])
        return h, *kernels.empty_routing(index, gate_up.shape[0], x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, gate_up, _, bias, ctx.precision = inputs
        ctx.save_for_backward(x, gate_up, bias, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dh is None:
            return (None,) * 5
        x, gate_up, bias, *routing = ctx.saved_tensors
        if torch.is_grad_enabled():
            function = partial(reference.rows, routing=Routing(*routing), of_tokens=True)
            dx, d_gate_up, d_bias = plain_gradients(function, (x, gate_up, bias), dh)
            return dx, d_gate_up, None, d_bias, None
        dh, d_bias, dx, d_gate_up = dh.contiguous(), None, None, None
        if ctx.needs_input_grad[3]:
            d_bias = _BiasBackward.apply(dh, None, bias, *routing)
        if ctx.needs_input_grad[0]:
            dx = _XBackward.apply(dh, gate_up, *routing, ctx.precision)
        if ctx.needs_input_grad[1]:
            d_gate_up = _WeightBackward.apply(dh, x, gate_up, "x", *routing, ctx.precision)
        return dx, d_gate_up, None, d_bias, None


@operator(f"experts_down(Tensor h, Tensor down, Tensor index, Tensor router, Tensor? bias, {_ROUTING}, {_BETWEEN}) "
          "-> Tensor")  # fmt: skip
class _Down(Operator):
    """The result of h."""

    @staticmethod
    def forward(h: Tensor, down: Tensor, index: Tensor, router: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        routing, between, steps = Routing(*rest[:4]), Activation(*rest[4:9]), _steps(h)
        y = steps.rows(steps.gate(h, routing, between), down, bias, routing, rest[9])
        out: Tensor = steps.token_sums(y, router, routing)
        return out

    @staticmethod
    def fake(h: Tensor, down: Tensor, index: Tensor, *_: Any) -> Tensor:
        return h.new_empty(index.shape[0], down.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.settings = inputs[9:]
        ctx.save_for_backward(*inputs[:9])

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        h, down, index, router, bias, *routing = ctx.saved_tensors
        none = (None,) * (4 + len(ctx.settings))
        if torch.is_grad_enabled():
            function = partial(reference.down, routing=Routing(*routing), between=Activation(*ctx.settings[:5]))
            dh, d_down, d_router, d_bias = plain_gradients(function, (h, down, router, bias), do)
            return dh, d_down, None, d_router, d_bias, *none
        do, precision = _with_rows(do), ctx.settings[5]
        dh, wa, d_router = _HiddenBackward.apply(do, h, down, bias, index, router, *routing, *ctx.settings)
        d_down = d_bias = None
        if ctx.needs_input_grad[1]:
            d_down = _WeightBackward.apply(do, wa, down, "dy", *routing, precision)
        if ctx.needs_input_grad[4]:
            d_bias = _BiasBackward.apply(do, router, bias, *routing)
        return dh, d_down, None, d_router, d_bias, *none


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Function = "silu",
    gate: Gate = "halves",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """The weighted sum of the experts that each token is routed to, without asking the device for their sizes.

    Equivalent, for a token t:

        h = x[t] @ gate_up[e].T + gate_up_bias[e]
        g, u = h.chunk(2)
        y = (f(g) * u) @ down[e].T + down_bias[e]
        result[t] = sum(weight[t, j] * y for j, e in enumerate(index[t]))

    with f(g) = activation(alpha * g) / alpha. Kept for the backward pass are x and h, [T * K, 2 * I], whatever the
    number of experts; no copy of gathered tokens, of the activation or of y.

    Args:
        x: [T, H], bf16 | fp16 | fp32 | fp64.
        gate_up: [E, 2 * I, H], or [E, I, H] without a gate, in the dtype of x. Any strides: weights that are stored the
            other way around are passed as `weight.transpose(1, 2)`.
        down: [E, H, I], likewise.
        index: [T, K], integers: the experts of each token. Others than 0 to E - 1 stand for no expert.
        weight: [T, K], any floating dtype: what the router gives each of them.
        gate_up_bias: [E, 2 * I] or [E, I], or None.
        down_bias: [E, H], or None.
        activation: of the gate: "silu", "gelu", "gelu_tanh" or "relu2", the squared ReLU.
        gate: "halves" if h is the gate and then what it multiplies, "interleaved" if every other feature is the gate
            (gpt-oss), "none" for an activation of all of h.
        alpha: of the gate before the activation, whose result is divided by it (gpt-oss: 1.702).
        limit: the largest gate, and the largest magnitude of what it multiplies; None for no limit.
        offset: added to what the gate multiplies (gpt-oss: 1).

    Returns:
        [T, H], contiguous, in the dtype of x.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or there is no such activation or gate.

    Example:
        >>> x, index = torch.tensor([[1.0], [2.0]]), torch.tensor([[0], [1]])
        >>> gate_up, down = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
        >>> experts(x, gate_up, down, index, torch.ones(2, 1))
        tensor([[0.7311],
                [3.5232]])
    """
    _check(x, gate_up, down, index, weight, gate_up_bias, down_bias, activation, gate)
    if gate == "none" and (limit is not None or offset or alpha != 1.0):
        raise ValueError(f"alpha, limit and offset are those of a gate, got gate='none' and {alpha}, {limit}, {offset}")
    precision = "tf32" if x.dtype == torch.float32 and _takes_tf32() else "ieee"
    x = _with_rows(x)
    gate_up_bias, down_bias = (None if b is None else _with_rows(b) for b in (gate_up_bias, down_bias))
    between = Activation(gate, activation, float(alpha), inf if limit is None else float(limit), float(offset))
    if is_transformed():
        routing = reference.route(index, gate_up.shape[0], x.dtype)
        h = reference.rows(x, gate_up, gate_up_bias, routing, of_tokens=True)
        return reference.down(h, down, weight, down_bias, routing, between)
    index, weight = index.contiguous(), weight.contiguous()
    h, *routed = _Up.apply(x, gate_up, index, gate_up_bias, precision)
    out: Tensor = _Down.apply(h, down, index, weight, down_bias, *routed, *between, precision)
    return out


def _takes_tf32() -> bool:
    """Whether PyTorch's own products of fp32 are taken in tf32."""
    return torch.get_float32_matmul_precision() != "highest"


# As `torch.compiler.assume_constant_result` does, without importing the compiler.
_takes_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _with_rows(x: Tensor) -> Tensor:
    """x with features that are neighbors in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, gate: str,
) -> None:  # fmt: skip
    for name, value, known in (("activation", activation, Function), ("gate", gate, Gate)):
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
    if x.dim() != 2 or not has_dtype(x):
        raise ValueError(f"x must be {DTYPES} of shape [T, H], got {describe(x)}")
    if index.dim() != 2 or index.is_floating_point() or index.shape[0] != x.shape[0] or index.shape[1] == 0:
        raise ValueError(f"index must hold integers of shape [{x.shape[0]}, K], got {describe(index)}")
    if weight.shape != index.shape or not weight.is_floating_point():
        raise ValueError(f"weight must be floating-point of shape {list(index.shape)}, got {describe(weight)}")
    if gate_up.dim() != 3 or gate_up.shape[2] != x.shape[1] or (gate != "none" and gate_up.shape[1] % 2):
        size = "I" if gate == "none" else "2 * I"
        raise ValueError(f"gate_up must have the shape [E, {size}, {x.shape[1]}], got {describe(gate_up)}")
    experts, width, inner = gate_up.shape[0], gate_up.shape[1], inner_of(gate_up.shape[1], gate)
    shapes = (
        ("down", down, (experts, x.shape[1], inner)),
        ("gate_up_bias", gate_up_bias, (experts, width)),
        ("down_bias", down_bias, (experts, x.shape[1])),
    )
    for name, tensor, shape in shapes:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, got {describe(tensor)}")
    for name, tensor in (("gate_up", gate_up), *((name, tensor) for name, tensor, _ in shapes)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"{name} must have the dtype of x, {x.dtype}, got {describe(tensor)}")
    for name, tensor in (("index", index), ("weight", weight), ("gate_up", gate_up), ("down", down)):
        if tensor.device != x.device:
            raise ValueError(f"x is on {x.device} and {name} on {tensor.device}: move one of them")
