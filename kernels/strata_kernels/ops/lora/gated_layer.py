"""A gated feed-forward layer whose three linear layers have LoRA adapters, as one autograd node.

    out = down(f(gate(x)) · up(x))

gate and up are computed as in `lora_linear`, except that the activation's kernels (`gated_kernels.py`) add the products
of their adapters; the backward kernel likewise adds the adapter's term of down's input gradient. Saved are x, the
frozen products of gate and up, and tensors of width R; the activation is recomputed.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .._launch import launch, takes_kernel
from .._operator import refuse_double_backward
from ..activation.activation_reference import backward_reference, forward_reference
from ..experts.experts_arguments import Function
from ..float8.largest import PARTS, note_largest
from .frozen_weight import rows_of
from .gated_kernels import adapted_gate_bwd_kernel, adapted_gate_fwd_kernel
from .lora_linear import AdaptedLayer, Call, by_turns, require_factors
from .low_rank import LARGEST, SMALLEST, Launch, add_low_rank

# More columns need more registers: lower occupancy, fewer loads in flight.
_FORWARD = Launch(rows=32, columns=64, warps=4)
_BACKWARD = Launch(rows=16, columns=64, warps=4)
# Programs per column block of the backward kernel: more of them store more partial sums.
_PROGRAMS = 8

# An adapter's product: h [T, R], b [R, F], scale.
_Product = tuple[Tensor, Tensor, float]


def lora_gated_layer(
    x: Tensor,
    gate: AdaptedLayer,
    up: AdaptedLayer,
    down: AdaptedLayer,
    function: Function,
    *,
    in_fp8: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear(f(linear(x, gate)) * linear(x, up), down)`, each with its adapter; differentiable in x and the adapters.

    Args:
        x: [..., K], bf16 | fp16 | fp32 | fp64.
        gate, up: layers K → F.
        down: layer F → N.
        function: f, "silu", "gelu", "gelu_tanh" or "relu2".
        in_fp8: whether to compute max |x| of the operands of the next products, for their casts to FP8.
        residual: added to the result; same shape and dtype.

    Returns:
        [..., N], in the dtype of x.

    Raises:
        ValueError: a wrong shape or dtype of an adapter's factors.
    """
    for width, layer in ((x.shape[-1], gate), (x.shape[-1], up), (gate.frozen.outputs, down)):
        require_factors(width, x.dtype, layer)
    factors = [factor for layer in (gate, up, down) for factor in (layer.a, layer.b)]
    call = _Layer(Call((gate, up)), Call((down,)), function, in_fp8)
    out: Tensor = _LoraGatedLayer.apply(call, x, residual, *factors)
    with torch.no_grad():
        call.down.fill(call.take_y(), (out,), residual)
    return out


def takes_gated_layer(x: Tensor, *layers: AdaptedLayer) -> bool:
    """Whether to use `lora_gated_layer` for x: its kernels are for 16-bit dtypes and small ranks. True without a GPU,
    where it runs in plain PyTorch.
    """
    return not takes_kernel(x) or (x.element_size() == 2 and all(layer.a.shape[0] <= LARGEST for layer in layers))


class _Layer:
    """The layers of one call, and the activation's result y until `take_y`."""

    def __init__(self, gate_up: Call, down: Call, function: Function, in_fp8: bool) -> None:
        self.gate_up, self.down, self.function, self.in_fp8 = gate_up, down, function, in_fp8
        self.y: Tensor | None = None

    def take_y(self) -> Tensor:
        """y; drops the reference to it."""
        y, self.y = self.y, None
        assert y is not None
        return y

    def products(self, h: Tensor, b: Sequence[Tensor]) -> list[_Product]:
        """The products of the adapters of gate and up."""
        layers = zip(self.gate_up.parts(h), b, self.gate_up.layers, strict=True)
        return [(own, factor.t(), layer.scale) for own, factor, layer in layers]


class _LoraGatedLayer(torch.autograd.Function):
    """Returns an uninitialized result, which the caller fills after the node is created."""

    @staticmethod
    def forward(ctx: Any, call: _Layer, x: Tensor, residual: Tensor | None, *factors: Tensor) -> Tensor:
        *of_gate_up, a, _ = factors
        h = call.gate_up.reduce(rows_of(x), of_gate_up[::2])
        frozen = []
        for layer in call.gate_up.layers:
            frozen.append(x.new_empty(h.shape[0], layer.frozen.outputs))
            layer.frozen.multiply(x, layer.bias, frozen[-1])
        y = _activate(call, frozen[0], frozen[1], call.products(h, of_gate_up[1::2]))
        reduced = call.down.reduce(y, [a])
        call.down.h, call.y = (reduced,), y
        # A copy without computed tensors: the node outlives the call.
        ctx.call = _Layer(Call(call.gate_up.layers), Call(call.down.layers), call.function, call.in_fp8)
        ctx.save_for_backward(x, h, *frozen, reduced, *factors)
        return x.new_empty(*x.shape[:-1], call.down.layers[0].frozen.outputs)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("lora_gated_layer")
        call: _Layer = ctx.call
        x, h, gate, up, reduced, *of_gate_up, a, b = ctx.saved_tensors
        e = call.down.reduce_gradients(reduced, [b], [d_out])
        (d_b,) = call.down.gradients_of_b(reduced, [d_out])
        (dy,) = call.down.frozen_input_gradients([d_out])
        d_gate, d_up, of_b, d_a = _differentiate(call, dy, gate, up, h, call.products(h, of_gate_up[1::2]), (e, a, 1.0))
        del dy
        e = call.gate_up.reduce_gradients(h, of_gate_up[1::2], [d_gate, d_up])
        dx = None
        if ctx.needs_input_grad[1]:
            products = call.gate_up.frozen_input_gradients([d_gate, d_up])
            dx = call.gate_up.input_gradient(e, of_gate_up[::2], products).view(x.shape)
        of_a = call.gate_up.gradients_of_a(rows_of(x), e)
        return None, dx, d_out if ctx.needs_input_grad[2] else None, *by_turns(of_a, of_b), d_a, d_b


def _activate(call: _Layer, gate: Tensor, up: Tensor, products: Sequence[_Product]) -> Tensor:
    """y, [T, F]."""
    y = torch.empty_like(gate)
    amax = gate.new_zeros(PARTS, dtype=torch.int32) if call.in_fp8 else None
    if not _takes_kernel(gate, products):
        adapted = [add_low_rank(x.clone(), *product) for x, product in zip((gate, up), products, strict=True)]
        return forward_reference(call.function, adapted[0], adapted[1], 1.0, 1.0)
    (h_g, b_g, scale_g), (h_u, b_u, scale_u) = products
    n_rows, n_cols = gate.shape
    launch(
        adapted_gate_fwd_kernel, (-(-n_cols // _FORWARD.columns), -(-n_rows // _FORWARD.rows)),
        gate, up, y, amax, h_g, h_u, b_g, b_u, n_rows, n_cols,
        h_g.stride(0), h_u.stride(0), *b_g.stride(), *b_u.stride(), h_g.shape[1], h_u.shape[1],
        float(scale_g), float(scale_u), ACTIVATION=call.function, R=_rank(products),
        BT=_FORWARD.rows, BN=_FORWARD.columns, PARTS=PARTS, num_warps=_FORWARD.warps,
    )  # fmt: skip
    return y if amax is None else note_largest(y, amax)


def _differentiate(
    call: _Layer, dy: Tensor, gate: Tensor, up: Tensor, h: Tensor, products: Sequence[_Product], of_down: _Product
) -> tuple[Tensor, Tensor, list[Tensor | None], Tensor]:
    """(d_gate, d_up [T, F], dB of their adapters, dA of down's adapter). May overwrite dy."""
    e, a, _ = of_down
    if not _takes_kernel(gate, [*products, of_down]):
        adapted = [add_low_rank(x.clone(), *product) for x, product in zip((gate, up), products, strict=True)]
        y = forward_reference(call.function, adapted[0], adapted[1], 1.0, 1.0)
        dy = add_low_rank(dy, *of_down)
        d_gate, d_up = backward_reference(call.function, dy, adapted[0], adapted[1], 1.0, 1.0)
        assert d_up is not None
        return d_gate, d_up, call.gate_up.gradients_of_b(h, [d_gate, d_up]), e.t() @ y
    (h_g, b_g, scale_g), (h_u, b_u, scale_u) = products
    # In place: the kernel loads a tile of dy before it stores one of d_gate.
    d_gate, d_up = dy, torch.empty_like(up)
    amax = up.new_zeros(2, PARTS, dtype=torch.int32).unbind() if call.in_fp8 else None
    n_rows, n_cols = gate.shape
    rank, share = _rank([*products, of_down]), _share(n_rows)
    sums = gate.new_empty(-(-n_rows // share), 3, rank, n_cols, dtype=torch.float32)
    launch(
        adapted_gate_bwd_kernel, (-(-n_cols // _BACKWARD.columns), sums.shape[0]),
        dy, gate, up, d_gate, d_up, sums, *(amax or (None, None)), h_g, h_u, e, b_g, b_u, a, n_rows, n_cols,
        h_g.stride(0), h_u.stride(0), e.stride(0), *b_g.stride(), *b_u.stride(), *a.stride(),
        h_g.shape[1], h_u.shape[1], e.shape[1], float(scale_g), float(scale_u), share,
        ACTIVATION=call.function, R=rank,
        BT=_BACKWARD.rows, BN=_BACKWARD.columns, PARTS=PARTS, num_warps=_BACKWARD.warps,
        # No software pipelining: occupancy is a better use of the registers.
        num_stages=1,
    )  # fmt: skip
    for gradient, found in zip((d_gate, d_up), amax or (), strict=False):
        note_largest(gradient, found)
    of_g, of_u, of_a = sums.sum(0).to(gate.dtype)
    of_b: list[Tensor | None] = [of_g[: h_g.shape[1]].t().contiguous(), of_u[: h_u.shape[1]].t().contiguous()]
    return d_gate, d_up, of_b, of_a[: e.shape[1]]


def _share(n_rows: int) -> int:
    """Rows per program of the backward kernel, a multiple of the tile."""
    return _BACKWARD.rows * max(1, -(-n_rows // (_BACKWARD.rows * _PROGRAMS)))


def _takes_kernel(x: Tensor, products: Sequence[_Product]) -> bool:
    most = max(h.shape[1] for h, _, _ in products)
    return takes_kernel(x) and x.element_size() == 2 and most <= LARGEST and x.numel() > 0


def _rank(products: Sequence[_Product]) -> int:
    rank: int = triton.next_power_of_2(max(h.shape[1] for h, _, _ in products))
    return max(SMALLEST, rank)
