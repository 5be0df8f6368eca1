"""Experts in plain PyTorch: a loop over the experts, with the same steps as the kernels."""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from ..activation.activation_reference import FUNCTIONS
from .experts_launch import Activation, Routing, empty_routing


def route(index: Tensor, experts: int, dtype: torch.dtype, max_slots: int | None = None) -> Routing:
    """Sort the slots of `index` [T, K] by expert and keep the first `max_slots`; tiles stay uninitialized."""
    empty = empty_routing(index, experts, dtype, max_slots)
    kept = empty.rows.shape[0]
    flat = index.flatten()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    rows = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).clamp(max=kept)
    positions = torch.empty_like(rows)
    positions[rows] = torch.arange(rows.numel(), device=rows.device)
    positions = torch.where((flat < experts) & (positions < kept), positions, -1).view(index.shape)
    return Routing(positions.int(), rows[:kept].int(), starts.int(), torch.full_like(empty.tiles, -1))


def gate(h: Tensor, routing: Routing, between: Activation) -> Tensor:
    """a = gate(h), in the dtype of h."""
    del routing
    function, _ = FUNCTIONS[between.activation]
    g, u = _gate_and_up(h, between)
    if u is None:
        return function(g).to(h.dtype)
    g, u = g.clamp(max=between.limit), u.clamp(-between.limit, between.limit)
    return (function(between.alpha * g) / between.alpha * (u + between.offset)).to(h.dtype)


def gate_bwd(da: Tensor, h: Tensor, between: Activation) -> Tensor:
    """dh, computed in and returned in the dtype of da."""
    function, pull = FUNCTIONS[between.activation]
    g, u = _gate_and_up(h, between)
    if u is None:
        return pull(da, g)
    x = between.alpha * g.clamp(max=between.limit)
    dg = pull(da * (u.clamp(-between.limit, between.limit) + between.offset), x)
    du = da * function(x) / between.alpha
    dg, du = torch.where(g > between.limit, 0.0, dg), torch.where(u.abs() > between.limit, 0.0, du)
    return torch.stack((dg, du), -1).flatten(-2) if between.gate == "interleaved" else torch.cat((dg, du), -1)


def _gate_and_up(h: Tensor, between: Activation) -> tuple[Tensor, Tensor | None]:
    x = h.to(accumulator(h.dtype))
    if between.gate == "none":
        return x, None
    g, u = (x[..., ::2], x[..., 1::2]) if between.gate == "interleaved" else x.chunk(2, dim=-1)
    return g, u


def of_experts(routing: Routing) -> Iterator[tuple[int, slice]]:
    """(expert, slice of its rows) of each expert."""
    starts = routing.starts.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        if start != end:
            yield expert, slice(start, end)


def tokens_of(routing: Routing) -> Tensor:
    """The token of each row."""
    return routing.rows.long() // routing.positions.shape[1]


def rows(
    a: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, precision: str = "", *, of_tokens: bool = False,
    scale: float = 1.0, beside: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """scale · a · weightᵀ + bias + u · vᵀ, [S, N], for weight [E, N, K]; a is [T, K] if of_tokens."""
    del precision
    a = a[tokens_of(routing)] if of_tokens else a
    parts = []
    for e, part in of_experts(routing):
        y = functional.linear(a[part], weight[e], None if bias is None else bias[e])
        y = y if scale == 1.0 else scale * y
        parts.append(y if beside is None else torch.addmm(y, beside[0][part], beside[1][e].t()))
    found = sum(part.shape[0] for part in parts)
    return torch.cat((*parts, a.new_zeros(a.shape[0] - found, weight.shape[1])))


def adapted_rows(
    a: Tensor, weight: Tensor, bias: Tensor | None, low_a: Tensor | None, low_b: Tensor | None, *, scale: float,
    routing: Routing, of_tokens: bool = False,
) -> Tensor:  # fmt: skip
    """a · (weight + scale · low_b · low_a)ᵀ + bias, [S, N], differentiable any number of times."""
    beside = None
    if low_a is not None and low_b is not None:
        beside = rows(a, low_a, None, routing, of_tokens=of_tokens, scale=scale), low_b
    return rows(a, weight, bias, routing, of_tokens=of_tokens, beside=beside)


def token_sums(y: Tensor, router: Tensor | None, routing: Routing) -> Tensor:
    """Σ router · y over the slots of each token."""
    exact = accumulator(y.dtype)
    # Slots without an expert have position -1: the last row, which is 0 here.
    slots = y.to(exact)[routing.positions.long()]
    slots = torch.where(routing.positions[..., None] >= 0, slots, 0.0)
    return (slots if router is None else slots * router.to(exact)[..., None]).sum(1).to(y.dtype)


def down(
    h: Tensor, weight: Tensor, router: Tensor, bias: Tensor | None, low_a: Tensor | None, low_b: Tensor | None, *,
    scale: float, routing: Routing, between: Activation,
) -> Tensor:  # fmt: skip
    """The result of the layer, from h; differentiable any number of times."""
    y = adapted_rows(gate(h, routing, between), weight, bias, low_a, low_b, scale=scale, routing=routing)
    return token_sums(y, router, routing)


def hidden_bwd(
    do: Tensor, h: Tensor, down: Tensor, bias: Tensor | None, index: Tensor, router: Tensor, routing: Routing,
    between: Activation, precision: str, beside: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dh, router · a, gradient of the router weights); beside: added to do · down, as in `rows`."""
    del index, precision
    exact, do = accumulator(h.dtype), do[tokens_of(routing)]
    da = rows(do, down.transpose(1, 2), None, routing, beside=beside).to(exact)
    weights = router.flatten()[routing.rows.long()].to(exact)[:, None]
    dh, a = gate_bwd(da * weights, h, between), gate(h, routing, between).to(exact)
    dot = (da * a).sum(1)
    if bias is not None:
        for e, part in of_experts(routing):
            dot[part] += do[part].to(exact) @ bias[e].to(exact)
    d_router = torch.where(routing.positions >= 0, dot[routing.positions.long()], 0.0)
    return dh.to(h.dtype), (a * weights).to(h.dtype), d_router.to(router.dtype)


def weight_bwd(dw: Tensor, dy: Tensor, x: Tensor, of_tokens: str, routing: Routing, precision: str) -> None:
    """dw [E, N, K] = Σ dyᵀ · x over the rows of each expert."""
    del precision
    tokens = tokens_of(routing)
    dy, x = dy[tokens] if of_tokens == "dy" else dy, x[tokens] if of_tokens == "x" else x
    dw.zero_()
    for e, part in of_experts(routing):
        dw[e] = dy[part].t() @ x[part]


def bias_bwd(db: Tensor, dy: Tensor, router: Tensor | None, routing: Routing) -> None:
    """db [E, N] = Σ dy over the rows of each expert; with `router`, dy is [T, N], weighted by it."""
    exact = accumulator(dy.dtype)
    if router is not None:
        dy = dy[tokens_of(routing)].to(exact) * router.flatten()[routing.rows.long()].to(exact)[:, None]
    db.zero_()
    for e, part in of_experts(routing):
        db[e] = dy[part].to(exact).sum(0)
