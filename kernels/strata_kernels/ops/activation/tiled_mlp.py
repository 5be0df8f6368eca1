"""A gated feed-forward layer, computed in tiles of rows, so that activation memory does not grow with the rows.

    g = x Wgᵀ          u = x Wuᵀ          h = f(g) u          y = h Wdᵀ
    dh = dy Wd         dg, du = activation backward           dx = dg Wg + du Wu
    dWg = Σ dgᵀ x      dWu = Σ duᵀ x      dWd = Σ dyᵀ h       sums over tiles of rows

Only x and the weights are saved for backward, which recomputes g and u of each tile: 2 of 11 matrix products. Apart
from gradients and results, six tensors [tile, I] are live at a time. Gradients of 16-bit weights are accumulated over
tiles in fp32 and rounded once, so that they depend on the tile size only by the order of summation.

Axes: N rows, H features, I inner features. Source: Snowflake's TiledMLP (arXiv:2506.13996).
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import DTYPES, as_rows, describe, has_dtype
from .._operator import Operator, is_transformed, operator, plain_gradients
from ..head.head_arguments import autocast
from ..head.memory import WeightGradient
from ..head.vocabulary_parallel import is_dtensor
from .activation_operators import ACTIVATIONS
from .activation_reference import forward_reference

Activation = Literal["silu", "gelu", "gelu_tanh"]
# Activation → name of its operator.
_OPERATOR = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}


def tiled_mlp_reference(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """`tiled_mlp` in plain PyTorch, all rows at once."""
    inner = forward_reference(activation, functional.linear(x, gate), functional.linear(x, up), 1.0, 1.0)
    return functional.linear(inner, down)


def _tiles(n_rows: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, n_rows)) for start in range(0, n_rows, tile))


@operator(
    "tiled_mlp_bwd(Tensor dy, Tensor x, Tensor gate, Tensor up, Tensor down, str activation, int tile,"
    " bool want_weights) -> (Tensor, Tensor, Tensor, Tensor)"
)
class _Backward(Operator):
    """dx, and the gradients of the three weights; empty unless `want_weights`."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str, tile: int, want_weights: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, incoming, dx = as_rows(x), as_rows(dy), x.new_empty(x.shape)
        flat, run, weights = dx.view(rows.shape), ACTIVATIONS[_OPERATOR[activation]], (gate, up, down)
        in_fp32 = x.itemsize == 2 and rows.shape[0] > tile
        sums = [WeightGradient(x, w.shape, in_fp32) for w in weights] if want_weights else []
        for part in _tiles(rows.shape[0], tile):
            x_part, dy_part = rows[part], incoming[part]
            dg, du, h = run.backward_and_output(
                dy_part @ down, x_part @ gate.t(), x_part @ up.t(), 1.0, 1.0
            )  # fmt: skip
            torch.mm(dg, gate, out=flat[part])
            flat[part].addmm_(du, up)
            pairs = ((dg, x_part), (du, x_part), (dy_part, h))
            for total, (d_out, given) in zip(sums, pairs, strict=want_weights):
                total.add(d_out, given, 0, first=part.start == 0)
            # Free this tile's tensors before the next tile allocates.
            del dg, du, h, pairs
        if not want_weights:
            return dx, *(x.new_empty(0) for _ in range(3))  # type: ignore[return-value]
        found = [total.result() if rows.shape[0] else total.result().zero_() for total in sums]
        return dx, found[0], found[1], found[2]

    @staticmethod
    def fake(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gate, up, down = (w.new_empty(w.shape if rest[-1] else 0) for w in rest[:3])
        return x.new_empty(x.shape), gate, up, down


@operator("tiled_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, str activation, int tile) -> Tensor")
class _TiledMLP(Operator):
    """y."""

    @staticmethod
    def forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str, tile: int) -> Tensor:
        rows, y = as_rows(x), _TiledMLP.fake(x, gate, up, down)
        flat, run = y.view(rows.shape[0], down.shape[0]), ACTIVATIONS[_OPERATOR[activation]]
        for part in _tiles(rows.shape[0], tile):
            h = run.forward(rows[part] @ gate.t(), rows[part] @ up.t(), 1.0, 1.0)
            torch.mm(h, down.t(), out=flat[part])
            del h
        return y

    @staticmethod
    def fake(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *_: Any) -> Tensor:
        return x.new_empty(*x.shape[:-1], down.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.activation, ctx.tile = inputs[4:]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            plain = partial(tiled_mlp_reference, activation=ctx.activation)
            return *plain_gradients(plain, ctx.saved_tensors, dy), None, None
        wanted = ctx.needs_input_grad[:4]
        found = _Backward.apply(dy, *ctx.saved_tensors, ctx.activation, ctx.tile, any(wanted[1:]))
        return *(g if want else None for g, want in zip(found, wanted, strict=True)), None, None


def tiled_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    activation: Activation = "silu",
    tile: int = 4096,
) -> Tensor:
    """A gated feed-forward layer that computes `tile` rows at a time and saves only x and the weights for backward.

    Equivalent to::

        h = F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)
        y = F.linear(h, down_weight)

    Under `torch.func` transforms, and for second derivatives, it runs in plain PyTorch with all rows at once.

    Args:
        x: [..., H], bf16 | fp16 | fp32 | fp64, any strides.
        gate_weight, up_weight: [I, H], of x's dtype. Autocast casts x and the weights. No DTensors.
        down_weight: [H', I], of x's dtype.
        activation: "silu" (Llama, Qwen), "gelu", or "gelu_tanh" (Gemma).
        tile: rows per tile. Smaller tiles need less memory, but small matrix products underuse a GPU.

    Returns:
        [..., H'] in x's dtype, contiguous.

    Raises:
        ValueError: a wrong shape, dtype, device or option.

    Example:
        >>> gate, up, down = torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16)
        >>> tiled_mlp(torch.randn(2, 100, 8), gate, up, down, tile=64).shape
        torch.Size([2, 100, 8])
    """
    weights = (gate_weight, up_weight, down_weight)
    if any(map(is_dtensor, (x, *weights))):
        raise ValueError("x and the weights must be plain tensors: pass DTensors as full_tensor()")
    inner = gate_weight.shape[0] if gate_weight.dim() else 0
    shapes = {(inner, *x.shape[-1:])} == {w.shape for w in weights[:2]} and down_weight.shape[1:] == (inner,)
    if not shapes or x.dim() == 0 or 0 in (inner, *x.shape[-1:], *down_weight.shape):
        raise ValueError(
            f"x {describe(x)}, gate_weight {describe(gate_weight)}, up_weight {describe(up_weight)} and down_weight "
            f"{describe(down_weight)} must be [..., H], [I, H], [I, H] and [H', I]"
        )
    if any(w.device != x.device for w in weights):
        raise ValueError(
            f"x and the weights must be on one device, not {', '.join(str(t.device) for t in (x, *weights))}"
        )
    if activation not in get_args(Activation):
        raise ValueError(f"activation must be one of {', '.join(get_args(Activation))}, got {activation!r}")
    if tile < 1:
        raise ValueError(f"tile {tile} must be at least one row")
    down_weight = autocast(x, down_weight, None)[1]
    x, gate_weight, up_weight = autocast(x, gate_weight, up_weight)  # type: ignore[assignment]
    if not has_dtype(x) or any(w.dtype != x.dtype for w in (gate_weight, up_weight, down_weight)):
        raise ValueError(f"x and weights must share one dtype of {DTYPES}, not {x.dtype} and {down_weight.dtype}")
    if is_transformed():
        return tiled_mlp_reference(x, gate_weight, up_weight, down_weight, activation)
    y: Tensor = _TiledMLP.apply(x, gate_weight, up_weight, down_weight, activation, tile)
    return y
