"""Mixture of experts: each token goes through the K feed-forward layers that its router selects.

Formulas and matrix products: `product_kernels.py`. Sorting: `routing_kernels.py`. Launches: `experts_launch.py`.

Source: Shazeer et al., "Outrageously Large Neural Networks", 2017 (arXiv:1701.06538); Guo et al., "SonicMoE", 2025
(arXiv:2512.14080), for the choice of saved and recomputed tensors.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from .._launch import takes_kernel
from .._operator import Operator, is_transformed, operator, plain_gradients
from . import experts_launch as kernels
from . import experts_reference as reference
from .experts_arguments import Function, Gate, LowRank, check, check_adapters
from .experts_launch import Activation, Routing

_BETWEEN = "str gate, str activation, float alpha, float limit, float offset, str precision"
_ROUTING = "Tensor positions, Tensor rows, Tensor starts, Tensor tiles"
_LOW_RANK = "Tensor? low_a, Tensor? low_b, float scale"


def _steps(x: Tensor) -> Any:
    """The module that implements the steps for x: `experts_launch` or `experts_reference`, with equal functions."""
    return kernels if takes_kernel(x) else reference


@operator(f"experts_hidden_bwd(Tensor do, Tensor h, Tensor down, Tensor? down_bias, Tensor index, Tensor router, "
          f"Tensor? dv, Tensor? low_a, {_ROUTING}, {_BETWEEN}) -> (Tensor, Tensor, Tensor)")  # fmt: skip
class _HiddenBackward(Operator):
    """(dh, router · a, gradient of the router weights); dv is scale · do · low_b."""

    @staticmethod
    def forward(do: Tensor, h: Tensor, down: Tensor, bias: Tensor | None, index: Tensor, router: Tensor,
                dv: Tensor | None, low_a: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        found: tuple[Tensor, Tensor, Tensor] = _steps(do).hidden_bwd(
            do, h, down, bias, index, router, Routing(*rest[:4]), Activation(*rest[4:9]), rest[9], _beside(dv, low_a)
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
    """Σ dy over the rows of each expert; with `router`, dy has rows of tokens, weighted by it."""

    @staticmethod
    def forward(dy: Tensor, router: Tensor | None, bias: Tensor, *routing: Tensor) -> Tensor:
        db = bias.new_empty(bias.shape)
        _steps(dy).bias_bwd(db, dy, router, Routing(*routing))
        return db

    @staticmethod
    def fake(dy: Tensor, router: Tensor | None, bias: Tensor, *_: Tensor) -> Tensor:
        return bias.new_empty(bias.shape)


@operator(f"experts_x_bwd(Tensor dh, Tensor gate_up, Tensor? du, Tensor? low_a, {_ROUTING}, str precision) -> Tensor")
class _XBackward(Operator):
    """dh · gate_up + du · low_a, summed over the slots of each token."""

    @staticmethod
    def forward(dh: Tensor, gate_up: Tensor, du: Tensor | None, low_a: Tensor | None, *rest: Any) -> Tensor:
        routing, steps = Routing(*rest[:4]), _steps(dh)
        y = steps.rows(dh, gate_up.transpose(1, 2), None, routing, rest[4], beside=_beside(du, low_a))
        dx: Tensor = steps.token_sums(y, None, routing)
        return dx

    @staticmethod
    def fake(dh: Tensor, gate_up: Tensor, du: Tensor | None, low_a: Tensor | None, positions: Tensor,
             *_: Any) -> Tensor:  # fmt: skip
        return dh.new_empty(positions.shape[0], gate_up.shape[2])


@operator(f"experts_rank(Tensor x, Tensor factor, bool of_tokens, float scale, {_ROUTING}, str precision) -> Tensor")
class _Rank(Operator):
    """scale · x · factorᵀ, [S, R]: the low-rank intermediate of an adapter."""

    @staticmethod
    def forward(x: Tensor, factor: Tensor, of_tokens: bool, scale: float, *rest: Any) -> Tensor:
        u: Tensor = _steps(x).rows(
            x, factor, None, Routing(*rest[:4]), rest[4], of_tokens=of_tokens, scale=scale
        )  # fmt: skip
        return u

    @staticmethod
    def fake(x: Tensor, factor: Tensor, of_tokens: bool, scale: float, positions: Tensor, rows: Tensor,
             *_: Any) -> Tensor:  # fmt: skip
        return x.new_empty(rows.shape[0], factor.shape[1])


@operator(f"experts_factor_bwd(Tensor x, Tensor u, str of_tokens, {_ROUTING}, str precision) -> Tensor")
class _FactorBackward(Operator):
    """Σ xᵀ · u over the rows of each expert, [E, N, R]."""

    @staticmethod
    def forward(x: Tensor, u: Tensor, of_tokens: str, *rest: Any) -> Tensor:
        routing = Routing(*rest[:4])
        factor = x.new_empty(routing.starts.shape[0] - 1, x.shape[1], u.shape[1])
        _steps(x).weight_bwd(factor, x, u, of_tokens, routing, rest[4])
        return factor

    @staticmethod
    def fake(x: Tensor, u: Tensor, of_tokens: str, positions: Tensor, rows: Tensor, starts: Tensor,
             *_: Any) -> Tensor:  # fmt: skip
        return x.new_empty(starts.shape[0] - 1, x.shape[1], u.shape[1])


def _beside(u: Tensor | None, factor: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The argument `beside` of `rows`, which adds u · factor."""
    return None if u is None or factor is None else (u, factor.transpose(1, 2))


def _adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, low_a: Tensor | None, low_b: Tensor | None, scale: float,
    routing: Routing, precision: str, *, of_tokens: bool = False,
) -> Tensor:  # fmt: skip
    """x · (weight + scale · low_b · low_a)ᵀ + bias."""
    steps, beside = _steps(x), None
    if low_a is not None and low_b is not None:
        beside = steps.rows(x, low_a, None, routing, precision, of_tokens=of_tokens, scale=scale), low_b
    y: Tensor = steps.rows(x, weight, bias, routing, precision, of_tokens=of_tokens, beside=beside)
    return y


@operator(f"experts_up(Tensor x, Tensor gate_up, Tensor index, Tensor? bias, {_LOW_RANK}, str precision, "
          "int? max_slots) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")  # fmt: skip
class _Up(Operator):
    """(h, the four tensors of the routing).

    A separate autograd node, so that h is freed as soon as its gradient is computed.
    """

    @staticmethod
    def forward(x: Tensor, gate_up: Tensor, index: Tensor, bias: Tensor | None, low_a: Tensor | None,
                low_b: Tensor | None, scale: float, precision: str,
                max_slots: int | None) -> tuple[Tensor, ...]:  # fmt: skip
        routing = _steps(x).route(index, gate_up.shape[0], x.dtype, max_slots)
        h = _adapted(x, gate_up, bias, low_a, low_b, scale, routing, precision, of_tokens=True)
        return h, *routing

    @staticmethod
    def fake(x: Tensor, gate_up: Tensor, index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        routing = kernels.empty_routing(index, gate_up.shape[0], x.dtype, rest[-1])
        return x.new_empty(routing.rows.shape[0], gate_up.shape[1]), *routing

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, gate_up, _, bias, low_a, low_b, ctx.scale, ctx.precision, _ = inputs
        ctx.save_for_backward(x, gate_up, bias, low_a, low_b, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dh is None:
            return (None,) * 9
        x, gate_up, bias, low_a, low_b, *routing = ctx.saved_tensors
        if torch.is_grad_enabled():
            function = partial(reference.adapted_rows, scale=ctx.scale, routing=Routing(*routing), of_tokens=True)
            dx, d_gate_up, *others = plain_gradients(function, (x, gate_up, bias, low_a, low_b), dh)
            return dx, d_gate_up, None, *others, None, None, None
        dh, d_bias, dx, d_gate_up, du, da, db = dh.contiguous(), *(None,) * 6
        if low_a is not None:
            du = _Rank.apply(dh, low_b.transpose(1, 2), False, ctx.scale, *routing, ctx.precision)
        if ctx.needs_input_grad[3]:
            d_bias = _BiasBackward.apply(dh, None, bias, *routing)
        if ctx.needs_input_grad[5]:
            u = _Rank.apply(x, low_a, True, ctx.scale, *routing, ctx.precision)
            db = _FactorBackward.apply(dh, u, "", *routing, ctx.precision)
        if ctx.needs_input_grad[0]:
            dx = _XBackward.apply(dh, gate_up, du, low_a, *routing, ctx.precision)
        if ctx.needs_input_grad[1]:
            d_gate_up = _WeightBackward.apply(dh, x, gate_up, "x", *routing, ctx.precision)
        if ctx.needs_input_grad[4]:
            da = _FactorBackward.apply(x, du, "dy", *routing, ctx.precision).transpose(1, 2)
        return dx, d_gate_up, None, d_bias, da, db, None, None, None


@operator(f"experts_down_inputs(Tensor h, Tensor down, Tensor index, Tensor router, Tensor? bias, {_LOW_RANK}, "
          f"{_ROUTING}, {_BETWEEN}) -> Tensor")  # fmt: skip
class _DownInputs(Operator):
    """Saves the inputs of `_Down`'s gradient; returns a placeholder: one element, expanded to the result's shape.

    A separate autograd node: activation checkpointing stops recomputation at the last saved tensor, which so comes
    before the product of `_Down`.
    """

    @staticmethod
    def forward(h: Tensor, down: Tensor, index: Tensor, *_: Any) -> Tensor:
        return h.new_empty(1).expand(index.shape[0], down.shape[1])

    @staticmethod
    def fake(h: Tensor, down: Tensor, index: Tensor, *_: Any) -> Tensor:
        return h.new_empty(1).expand(index.shape[0], down.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.scale, ctx.settings = inputs[7], inputs[12:]
        ctx.save_for_backward(*inputs[:7], *inputs[8:12])

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        h, down, index, router, bias, low_a, low_b, *routing = ctx.saved_tensors
        none = (None,) * (5 + len(ctx.settings))
        if torch.is_grad_enabled():
            between = Activation(*ctx.settings[:5])
            function = partial(reference.down, scale=ctx.scale, routing=Routing(*routing), between=between)
            dh, d_down, *others = plain_gradients(function, (h, down, router, bias, low_a, low_b), do)
            return dh, d_down, None, *others, *none
        do, precision = _with_rows(do), ctx.settings[5]
        d_down = d_bias = dv = da = db = None
        if low_a is not None:
            dv = _Rank.apply(do, low_b.transpose(1, 2), True, ctx.scale, *routing, precision)
        dh, wa, d_router = _HiddenBackward.apply(
            do, h, down, bias, index, router, dv, low_a, *routing, *ctx.settings
        )  # fmt: skip
        if ctx.needs_input_grad[1]:
            d_down = _WeightBackward.apply(do, wa, down, "dy", *routing, precision)
        if ctx.needs_input_grad[4]:
            d_bias = _BiasBackward.apply(do, router, bias, *routing)
        if ctx.needs_input_grad[5]:
            da = _FactorBackward.apply(wa, dv, "", *routing, precision).transpose(1, 2)
        if ctx.needs_input_grad[6]:
            v = _Rank.apply(wa, low_a, False, ctx.scale, *routing, precision)
            db = _FactorBackward.apply(do, v, "dy", *routing, precision)
        return dh, d_down, None, d_router, d_bias, da, db, *none


@operator(f"experts_down(Tensor place, Tensor h, Tensor down, Tensor index, Tensor router, Tensor? bias, {_LOW_RANK}, "
          f"{_ROUTING}, {_BETWEEN}) -> Tensor")  # fmt: skip
class _Down(Operator):
    """The result of the layer, from h. Its gradient is passed to `place`, the result of `_DownInputs`."""

    @staticmethod
    def forward(place: Tensor, h: Tensor, down: Tensor, index: Tensor, router: Tensor, bias: Tensor | None,
                low_a: Tensor | None, low_b: Tensor | None, scale: float, *rest: Any) -> Tensor:  # fmt: skip
        routing, between, steps = Routing(*rest[:4]), Activation(*rest[4:9]), _steps(h)
        y = _adapted(steps.gate(h, routing, between), down, bias, low_a, low_b, scale, routing, rest[9])
        out: Tensor = steps.token_sums(y, router, routing)
        return out

    @staticmethod
    def fake(place: Tensor, h: Tensor, down: Tensor, index: Tensor, *_: Any) -> Tensor:
        return h.new_empty(index.shape[0], down.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.others = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        return do, *(None,) * ctx.others


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_adapter: LowRank | None = None,
    down_adapter: LowRank | None = None,
    activation: Function = "silu",
    gate: Gate = "halves",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    max_slots: int | None = None,
) -> Tensor:
    """Weighted sum of the outputs of each token's experts, by grouped matrix products without host synchronization.

    Equivalent, for a token t:

        h = x[t] @ gate_up[e].T + gate_up_bias[e]
        g, u = h.chunk(2)
        y = (f(g) * u) @ down[e].T + down_bias[e]
        result[t] = sum(weight[t, j] * y for j, e in enumerate(index[t]))

    with f(g) = activation(alpha * g) / alpha. With an adapter, the weights are `gate_up[e] + scale * b[e] @ a[e]`, and
    likewise for `down`; these sums are not materialized. Saved for backward are x and h [T * K, 2 * I], but not
    gathered tokens, activations or y.

    Args:
        x: [T, H], bf16 | fp16 | fp32 | fp64.
        gate_up: [E, 2 * I, H], or [E, I, H] without a gate, x's dtype, any strides: pass transposed weights as
            `weight.transpose(1, 2)`.
        down: [E, H, I], x's dtype, any strides.
        index: [T, K], integers: the experts of each token. Values outside [0, E) select none.
        weight: [T, K], any floating dtype: router weights of the experts.
        gate_up_bias: [E, 2 * I] or [E, I], or None.
        down_bias: [E, H], or None.
        gate_up_adapter: LoRA adapter of `gate_up`, or None. Gradients are computed only for tensors that require them.
        down_adapter: LoRA adapter of `down`, or None.
        activation: "silu", "gelu", "gelu_tanh" or "relu2" (squared ReLU), of the gate.
        gate: layout of h: "halves" for g, then u; "interleaved" for alternating g and u (gpt-oss); "none" for no gate:
            the activation of all of h.
        alpha: see above (gpt-oss: 1.702).
        limit: g is clamped to at most `limit`, u to [-limit, limit]; None for no limit.
        offset: added to u (gpt-oss: 1).
        max_slots: number of rows of h, for a rank that holds some of the experts: an upper bound of the entries of
            `index` that are experts. If there are more, entries of the last experts are dropped. None: T * K.

    Returns:
        [T, H] in the dtype of x, contiguous.

    Raises:
        ValueError: a wrong shape, dtype or device; an unknown activation or gate.

    Example:
        >>> x, index = torch.tensor([[1.0], [2.0]]), torch.tensor([[0], [1]])
        >>> gate_up, down = torch.ones(2, 2, 1), torch.ones(2, 1, 1)
        >>> experts(x, gate_up, down, index, torch.ones(2, 1))
        tensor([[0.7311],
                [3.5232]])
    """
    check(x, gate_up, down, index, weight, gate_up_bias, down_bias, activation, gate)
    check_adapters(x, ("gate_up", gate_up, gate_up_adapter), ("down", down, down_adapter))
    if gate == "none" and (limit is not None or offset or alpha != 1.0):
        raise ValueError(f"alpha, limit and offset need a gate, got gate='none' and {alpha}, {limit}, {offset}")
    if max_slots is not None and max_slots < 1:
        raise ValueError(f"max_slots must be at least 1, got {max_slots}")
    precision = "tf32" if x.dtype == torch.float32 and _takes_tf32() else "ieee"
    x = _with_rows(x)
    gate_up_bias, down_bias = (None if b is None else _with_rows(b) for b in (gate_up_bias, down_bias))
    between = Activation(gate, activation, float(alpha), inf if limit is None else float(limit), float(offset))
    of_up, of_down = (adapter or (None, None, 1.0) for adapter in (gate_up_adapter, down_adapter))
    if is_transformed():
        routing = reference.route(index, gate_up.shape[0], x.dtype, max_slots)
        h = reference.adapted_rows(
            x, gate_up, gate_up_bias, *of_up[:2], scale=of_up[2], routing=routing, of_tokens=True
        )  # fmt: skip
        return reference.down(
            h, down, weight, down_bias, *of_down[:2], scale=of_down[2], routing=routing, between=between
        )  # fmt: skip
    index, weight = index.contiguous(), weight.contiguous()
    h, *routed = _Up.apply(x, gate_up, index, gate_up_bias, *of_up, precision, max_slots)
    inputs = (h, down, index, weight, down_bias, *of_down, *routed, *between, precision)
    out: Tensor = _Down.apply(_DownInputs.apply(*inputs), *inputs)
    return out


def _takes_tf32() -> bool:
    """Whether PyTorch computes fp32 matrix products in tf32."""
    return torch.get_float32_matmul_precision() != "highest"


# As `torch.compiler.assume_constant_result`, without importing the compiler.
_takes_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _with_rows(x: Tensor) -> Tensor:
    """x, or a contiguous copy if its feature stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()
